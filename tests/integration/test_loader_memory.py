"""Memory of batches is used again, and never under somebody who holds a piece of it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory, Ragged
from hpstore.loaders.batching.batch_buffers import BatchSlot, Slots
from hpstore.loaders.batching.native_iterator import HELD, LEAST_AHEAD, THREADS
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB
from tests.fault.common import poll
from tests.integration.data_sets import make_pool
from tests.integration.loader_cases import MODES

COUNT, BATCH = 64, 8
FIELDS = {
    "a": Field("uint8", (3000,)),
    "half": Field("bfloat16", (700,)),
    "sound": Field("float32", (None, 5)),
    "raw": Field("bytes"),
    "label": Field("int64"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with make_pool(Path(tmp_path_factory.mktemp("pool"))) as made:
        yield made


def pattern(number: int) -> dict[str, Any]:
    """Every value of a sample tells its number."""
    return {
        "a": np.full(3000, number, np.uint8),
        "half": torch.full((700,), float(number), dtype=torch.bfloat16),
        "sound": np.full((number % 7 + 1, 5), number, np.float32),
        "raw": bytes([number]) * (number * 10 + 1),
        "label": number,
    }


@pytest.fixture(scope="module", params=["rows", "columns", "fixed"])
def data(request: pytest.FixtureRequest, pool: Pool) -> Dataset:
    fields = {n: f for n, f in FIELDS.items() if request.param != "fixed" or n in ("a", "label")}
    with DatasetWriter(
        pool,
        request.param,
        fields,
        unit_bytes=64 * KIB,
        shard_bytes=200 * KIB,
        layout="columns" if request.param == "columns" else "rows",
    ) as writer:
        for number in range(COUNT):
            writer.write({n: v for n, v in pattern(number).items() if n in fields})
    return Dataset(pool, request.param)


def tensors(batch: Any) -> list[tuple[list[int], torch.Tensor]]:
    """(label of each value, values) of each tensor, ragged ones as well."""
    marks = batch["label"].tolist()
    found = []
    for value in batch.values():
        if isinstance(value, Ragged):
            sizes = value.offsets.diff().tolist()
            each = [mark for mark, size in zip(marks, sizes, strict=True) for _ in range(size)]
            found.append((each, value.values))
        else:
            found.append((marks, value))
    return found


def still(marks: list[int], value: Any) -> bool:
    """Whether rows of a kept value are what they were."""
    own = np.array(value) if isinstance(value, np.ndarray) else value  # some are read-only
    rows = torch.as_tensor(own).reshape(len(marks), -1).to(torch.int64)
    return bool((rows == torch.tensor(marks)[:, None]).all())


KEEP: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensors": lambda tensor: tensor,
    "views": lambda tensor: tensor[:],
    "reshaped": lambda tensor: tensor.reshape(-1),
    "storages": lambda tensor: tensor.as_strided(tensor.shape, tensor.stride()).detach(),
    "arrays": lambda tensor: (
        tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    ),
    "dlpack": lambda tensor: np.from_dlpack(tensor) if tensor.dtype is torch.uint8 else tensor,
}


def loader_within(data: Dataset, prefetch: str, mode: str, **options: Any) -> DataLoader:
    """A loader whose batches have so much memory."""
    memory = replace(MODES[mode].get("memory", LoaderMemory()), prefetch_bytes=prefetch)
    given = {"shuffle": True, **MODES[mode], **options, "memory": memory}
    return DataLoader(data, BATCH, **given)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_of_a_batch_is_never_overwritten(data: Dataset, mode: str) -> None:
    """Four slots; of every third batch one field is kept in one of many ways."""
    loader = loader_within(data, "4MiB", mode, num_workers=2)
    kept: list[tuple[list[int], Any]] = []
    ways = list(KEEP.values())
    for epoch in range(8):
        for step, batch in enumerate(loader):
            choice = tensors(batch)
            if (epoch + step) % 3 == 0:
                marks, value = choice[len(kept) % len(choice)]
                kept.append((marks, ways[len(kept) // len(choice) % len(ways)](value)))
            del batch, choice
        gc.collect()
    assert len(kept) > len(ways)
    assert loader.stats()["batch_memory_bytes"] > 0
    for marks, value in kept:
        if isinstance(value, np.ndarray) and value.dtype == np.int16:
            value = torch.from_numpy(value).view(torch.bfloat16)
        assert still(marks, value)
    loader.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_list_of_the_loader_and_a_replay_buffer_of_all_epochs(
    data: Dataset, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every batch of many epochs is held: next() never waits for one, and says so once."""
    with caplog.at_level(logging.WARNING, "hpstore.loaders.batching.batch_buffers"):
        loader = loader_within(data, "2MiB", mode)
        replay = [batch for _ in range(5) for batch in list(loader)]
    assert len(replay) == 5 * COUNT // BATCH
    assert all(still(marks, value) for batch in replay for marks, value in tensors(batch))
    assert loader.stats()["batches_in_ordinary_memory"] > 0
    # more than these 2 MiB: what a user who keeps nothing needs
    ahead = THREADS[mode] if mode == "records" else LEAST_AHEAD
    assert loader.stats()["batch_memory_bytes"] == (ahead + HELD + 1) * len(data.streams) * MIB
    assert len([r for r in caplog.records if "held by the user" in r.message]) == 1
    loader.close()


def test_a_user_who_keeps_no_batch_never_hears_that_he_holds_memory(data: Dataset) -> None:
    """Batches that are larger than all of prefetch_bytes: each is made in a slot, none in vain."""
    loader = DataLoader(
        data, 3 * BATCH, shuffle=True, cache=0, memory=LoaderMemory(prefetch_bytes="64KiB")
    )
    for _ in range(3):
        for batch in loader:
            assert batch
    assert loader.stats()["batches_in_ordinary_memory"] == 0
    loader.close()


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("mode", MODES)
def test_memory_stays_flat_over_many_epochs(data: Dataset, mode: str) -> None:
    """Of what 50 epochs hand out, at most a half may be left, beside the slots there are."""
    loader = loader_within(data, "8MiB", mode)

    def left_after(epochs: int) -> int:
        for _ in range(epochs):
            for _ in loader:
                pass
        gc.collect()
        return resident_bytes() - int(loader.stats()["batch_memory_bytes"])

    before = left_after(5)
    handed = 50 * sum(int(stream.payload_bytes.sum()) for stream in data.streams)
    assert left_after(50) - before < handed // 2
    loader.close()


def loader_threads() -> list[threading.Thread]:
    names = ("hpstore-loader", "hpstore-fill")
    return [t for t in threading.enumerate() if t.name.startswith(names)]


@pytest.mark.parametrize("mode", MODES)
def test_threads_end_with_their_loader(data: Dataset, mode: str) -> None:
    """Closed; dropped after an epoch, in mid-epoch, before its iterator."""
    poll(60, lambda: not loader_threads())
    for end in ("closed", "after an epoch", "in mid-epoch", "before its iterator"):
        loader = DataLoader(data, BATCH, **{"shuffle": True, **MODES[mode]})
        run = iter(loader)
        next(run)
        if end in ("closed", "after an epoch"):
            list(run)
        if end == "closed":
            loader.close()
            loader.close()
            assert not loader_threads()
        if end == "before its iterator":
            del loader
            next(run)
            loader = DataLoader(data)
        del loader, run
        poll(60, lambda: not loader_threads())


def test_slots_come_back_when_the_last_array_over_them_goes() -> None:
    """Unit: limit, ordinary memory beyond it, sizes that change, release, lost ones."""
    ring = Slots(2 * MIB)
    first, second = ring.take(MIB // 2), ring.take(MIB // 2)
    spare = ring.take(10)
    assert (ring.made_bytes, ring.ordinary_total, len(spare.memory)) == (2 * MIB, 1, 10)
    one, two = first.memory[:100].copy(), first.memory[100:]
    del one
    parts = [first.memory[:100], first.memory[100:]]
    first.hand_out(parts)
    second.release()
    assert ring.take(MIB // 2) is second
    view = parts[0]
    parts.clear()
    assert ring.take(5).memory is not first.memory
    del view, two
    assert ring.take(MIB // 2) is first
    second.release()
    larger = ring.take(3 * MIB // 2)  # there is room once the free one has gone, not for both
    assert ring.ordinary_total == 3
    larger.release()  # ordinary: nothing comes back
    first.lose()
    assert ring.made_bytes == 0
    assert len(ring.take(MIB // 2).memory) == MIB
    assert ring.ordinary_total == 3


def test_of_equal_slots_the_last_to_come_back_is_taken_first() -> None:
    """The processor's cache may still hold it; a smaller one that fits goes before larger ones."""
    ring = Slots(8 * MIB)
    large, first, second = ring.take(3 * MIB), ring.take(MIB // 2), ring.take(MIB // 2)
    for slot in (first, second, large):
        slot.release()
    assert [ring.take(MIB // 2) for _ in range(3)] == [second, first, large]


def test_memory_for_a_steady_run_is_made_at_its_start() -> None:
    """Each take makes a slot until there are so many, within the limit; then one is used again."""
    for limit, expected in ((8 * MIB, 3), (2 * MIB, 2)):
        ring, taken = Slots(limit), list[BatchSlot]()
        ring.steady = ring.least = 3
        for _ in range(5):
            taken.append(ring.take(MIB // 2))
            taken[-1].release()
        assert len(set(taken)) == ring.made_bytes // MIB == expected
        assert ring.ordinary_total == 0


def test_the_garbage_collector_takes_no_slot_of_a_batch_that_is_out() -> None:
    """It comes back when the array goes, however often cycles were collected meanwhile."""
    ring = Slots(2 * MIB)
    for _ in range(5):
        slot = ring.take(MIB // 2)
        array = slot.memory[:100]
        slot.hand_out([array])
        del slot
        gc.collect()
        del array
    assert (ring.made_bytes, ring.ordinary_total) == (MIB, 0)
