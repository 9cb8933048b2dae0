"""stats(): what was handed out, and where the time went, each second in one row."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, GpuTransfer, Mixture
from hpstore.loaders.batching import gather_copy
from hpstore.loaders.batching.gather_copy import LARGE_BYTES
from hpstore.loaders.batching.page_memory import PageMemory
from hpstore.loaders.dataset import page_compression
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.gpu.direct_reader import DirectAccess
from hpstore.runtime.stopwatch import Stopwatch
from hpstore.testing.fake_gpu import FakeGpu
from hpstore.units import KIB
from tests.fault.common import poll
from tests.integration.direct_cases import write_direct
from tests.integration.loader_cases import COUNT, MODES, PLAIN, write

PAUSE = 0.02  # what is slow in these tests: work that takes time, never a wait for something
ROWS = (
    "device_seconds",
    "decode_seconds",
    "page_wait_seconds",
    "assemble_seconds",
    "transform_seconds",
    "host_to_device_seconds",
)


def slowed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, pause: float = PAUSE
) -> list[float]:
    """A pause before each call of it; the list grows by one each time."""
    plain: Callable[..., Any] = getattr(owner, name)
    calls = list[float]()

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(pause)
        time.sleep(pause)
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    return calls


class Clocks(threading.local):
    """perf_counter() by thread: only what is told to takes time. A busy machine changes nothing."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


def slowed_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, pause: float = PAUSE
) -> list[float]:
    """As slowed(), and nothing else takes any time."""
    plain: Callable[..., Any] = getattr(owner, name)
    calls, clocks = list[float](), Clocks()

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(pause)
        clocks.now += pause
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    monkeypatch.setattr(time, "perf_counter", clocks)
    return calls


def run(data: Any, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """stats() after an epoch, when the loader is closed too, and its batches."""
    with_all: dict[str, Any] = {"batch_size": 10, "shuffle": True, "prefetch_factor": 1, **options}
    loader = DataLoader(data, **with_all)
    batches = list(loader)
    poll(60, lambda: loader.stats()["pages_in_memory"] == loader.stats()["pages_to_keep"])
    loader.close()
    return loader.stats(), batches


@pytest.mark.parametrize("mode", MODES)
def test_samples_and_bytes_are_those_that_were_handed_out(pool: hpstore.Pool, mode: str) -> None:
    """The smaller last batch too; the next epoch's, made ahead, do not count."""
    began = time.perf_counter()
    stats, batches = run(write(pool, "d", PLAIN, COUNT), **MODES[mode])
    seconds = time.perf_counter() - began
    assert (stats["batches"], stats["samples"]) == (len(batches), COUNT)
    assert stats["bytes"] == sum(value.nbytes for one in batches for value in one.values())
    assert stats["samples_per_second"] >= COUNT / seconds
    assert all(stats[row] >= 0 for row in ROWS)


def test_ragged_values_and_their_offsets_count(pool: hpstore.Pool) -> None:
    with DatasetWriter(pool, "d", {"x": Field("uint8", (None,)), "t": Field("str")}) as writer:
        for number in range(1, 6):
            writer.write({"x": torch.zeros(number, dtype=torch.uint8), "t": "ab"})
    stats, _ = run(Dataset(pool, "d"))
    assert stats["bytes"] == 1 + 2 + 3 + 4 + 5 + 6 * 8 + 5 * 2


@pytest.mark.parametrize(
    ("mode", "owner", "name", "row"),
    [
        ("records", StoredData, "read_rows", "device_seconds"),
        ("window", PageMemory, "read", "device_seconds"),
        ("resident", PageMemory, "read", "device_seconds"),
        ("resident", PageMemory, "gather", "assemble_seconds"),
    ],
)
def test_time_is_in_the_row_of_what_took_it(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, mode: str, owner: Any, name: str, row: str
) -> None:
    """And in no other one; what waits for it is another thread's."""
    data = write(pool, "d", PLAIN, COUNT)
    calls = slowed_by_the_clock(monkeypatch, owner, name)
    stats, _ = run(data, **MODES[mode])
    assert calls
    assert {other: stats[other] for other in ROWS if stats[other]} == {
        row: pytest.approx(sum(calls))
    }


def test_waiting_for_pages_is_told_from_work(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose pages come late is not being assembled all that time."""
    data = write(pool, "d", PLAIN, COUNT)
    slowed(monkeypatch, PageMemory, "read", 10 * PAUSE)
    stats, _ = run(data, **MODES["window"])
    assert stats["page_wait_seconds"] >= 5 * PAUSE
    assert stats["assemble_seconds"] < stats["page_wait_seconds"]


@pytest.mark.parametrize("mode", ["records", "resident"])
def test_pages_that_are_decompressed_are_not_the_devices_time(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    data = write(pool, "d", PLAIN, COUNT, compression="lz4")
    calls = slowed_by_the_clock(monkeypatch, page_compression, "decode")
    stats, _ = run(data, **MODES[mode])
    assert stats["decode_seconds"] == pytest.approx(sum(calls))
    assert calls
    assert stats["device_seconds"] == pytest.approx(0, abs=1e-9)


def test_a_second_loader_begins_at_nothing(pool: hpstore.Pool) -> None:
    data = write(pool, "d", PLAIN, COUNT, compression="lz4")
    first, _ = run(data, cache=0)
    assert first["decode_seconds"] > 0
    second = DataLoader(data, batch_size=10, cache=0)
    second.engine()
    assert second.stats()["decode_seconds"] == 0
    second.close()


def test_who_waits_for_whom(pool: hpstore.Pool) -> None:
    """A slow transform: the trainer waits. A slow trainer: batches that are ready do."""
    data = write(pool, "d", PLAIN, COUNT)

    def slow(batch: Any) -> Any:
        time.sleep(PAUSE)
        return batch

    loader = DataLoader(data, batch_size=10, batch_transform=slow, num_workers=1)
    count = len(list(loader))
    stats = loader.stats()
    loader.close()
    assert stats["transform_seconds"] >= count * PAUSE
    assert stats["wait_seconds"] >= 0.7 * count * PAUSE
    assert stats["trainer_seconds"] < stats["wait_seconds"]
    loader = DataLoader(data, batch_size=10)
    began = time.perf_counter()
    for _ in loader:
        time.sleep(PAUSE)
    seconds = time.perf_counter() - began
    stats = loader.stats()
    loader.close()
    # all but the batch at which it stopped
    assert 0.7 * (count - 1) * PAUSE <= stats["trainer_seconds"] <= seconds
    assert stats["samples_per_second"] <= COUNT / ((count - 1) * PAUSE)


def test_a_batch_waits_for_the_trainer_from_when_it_is_ready(pool: hpstore.Pool) -> None:
    """Not while it is made: half of each step here."""
    data = write(pool, "d", PLAIN, COUNT)

    def slow(batch: Any) -> Any:
        time.sleep(3 * PAUSE)
        return batch

    loader = DataLoader(data, 10, batch_transform=slow, num_workers=1, prefetch_factor=1)
    began = time.perf_counter()
    for _ in loader:
        time.sleep(6 * PAUSE)
    seconds = time.perf_counter() - began
    stats = loader.stats()
    loader.close()
    assert 0.2 * seconds < stats["trainer_seconds"] < 0.7 * seconds


def test_reads_that_had_to_decode_are_counted_from_the_loaders_start(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Of one loader, not what came before it; in a mixture of one pool each once."""
    for name in "de":  # so many shards that some have data on these devices, wherever they lie
        write(pool, name, PLAIN, COUNT, shard_bytes=48 * KIB, unit_bytes=16 * KIB)
    for device in ("d0", "d1"):
        (tmp_path / device).rename(tmp_path / f"gone {device}")
    with hpstore.open(tmp_path / "pool.toml") as lacking:
        both = [Dataset(lacking, name) for name in "de"]
        stats, _ = run(both[0], cache=0)
        first = lacking.metrics.value("read_degraded_total")
        assert 0 < stats["degraded_reads"] <= first
        before = first
        mixed, _ = run(Mixture(both, [1, 1]), cache=0)
        assert 0 < mixed["degraded_reads"] <= lacking.metrics.value("read_degraded_total") - before
        assert mixed["damaged_reads"] == mixed["repaired_objects"] == 0


def test_what_numpy_had_to_join_is_counted(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch's OpenMP is not to be found."""
    with DatasetWriter(pool, "d", {"x": Field("uint8", (None,))}) as writer:
        for number in range(8):
            writer.write({"x": torch.full((2 * LARGE_BYTES + number,), number).to(torch.uint8)})
    stats, _ = run(Dataset(pool, "d"), batch_size=4, cache=1 << 30)
    assert stats["joined_by_numpy"] == 0
    monkeypatch.setattr(gather_copy, "_set_threads", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    stats, _ = run(Dataset(pool, "d"), batch_size=4, cache=1 << 30)
    assert stats["joined_by_numpy"] >= 2


def test_copies_to_a_gpu_have_a_row(pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the GPU was seen to be through with."""
    calls = slowed(monkeypatch, torch.Tensor, "copy_")
    data = write(pool, "d", PLAIN, COUNT)
    calls.clear()
    loader = DataLoader(
        data, batch_size=10, device=FakeGpu(), gpu=GpuTransfer(direct="off"), cache=1 << 30
    )
    for _ in loader:
        pass
    stats = loader.stats()
    loader.close()
    assert stats["host_to_device_seconds"] >= PAUSE


@pytest.mark.parametrize("way", ["direct", "host"])
def test_reads_straight_to_a_gpu_are_the_devices_time_and_count_once(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """By way of the host too, where that is inside of what reads directly."""
    data = write_direct(pool, "records")
    if way == "direct":
        calls, gpu = slowed_by_the_clock(monkeypatch, DirectAccess, "batch"), FakeGpu()
    else:
        gpu = FakeGpu(obstacles={"": "no cuFile"})
        calls = slowed_by_the_clock(monkeypatch, StoredData, "read_rows")
    loader = DataLoader(data, 10, device=gpu, gpu=GpuTransfer(direct="always"), cache=0)
    list(loader)
    loader.close()
    stats = loader.stats()
    assert calls
    assert stats["device_seconds"] == pytest.approx(sum(calls))
    assert stats["assemble_seconds"] == pytest.approx(0, abs=1e-9)


def test_a_copy_of_a_loader_begins_at_nothing(pool: hpstore.Pool) -> None:
    """As its counts do; clocks of another process say nothing."""
    loader = DataLoader(write(pool, "d", PLAIN, COUNT), 10)
    list(loader)
    loader.close()
    copy = pickle.loads(pickle.dumps(loader))
    assert not any(copy.stats().values())
    assert loader.stats()["samples"] == COUNT


class Slow(torch.utils.data.Dataset[int]):
    """Somebody else's, of twelve samples."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        time.sleep(PAUSE)
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_workers_are_waited_for_too(workers: int) -> None:
    """Data sets of others: batches, samples and how long next() took."""
    loader = DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=workers)
    assert len(list(loader)) == 3
    stats = loader.stats()
    assert (stats["batches"], stats["samples"]) == (3, 12)
    assert stats["wait_seconds"] >= 4 * PAUSE
    assert 0 < stats["samples_per_second"] <= 12 / (4 * PAUSE)


def test_a_stopwatch_counts_what_makes_an_item_alone() -> None:
    """Not what is done with it; a block that raises counts."""

    def items() -> Any:
        for number in range(3):
            time.sleep(PAUSE)
            yield number

    watch, began = Stopwatch(), time.perf_counter()
    for _ in watch.timed(items()):
        time.sleep(3 * PAUSE)
    assert 3 * PAUSE <= watch.seconds <= time.perf_counter() - began - 9 * PAUSE

    def fail() -> None:
        with watch.running():
            time.sleep(PAUSE)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert watch.seconds >= 4 * PAUSE
