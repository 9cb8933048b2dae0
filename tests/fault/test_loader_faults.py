"""The loader under faults: the same batches bit for bit, or an error that names the sample."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.errors import IntegrityError, ObjectNotFound, TooManyErasures
from hpstore.loaders import DataLoader, Dataset, DatasetWriter
from hpstore.loaders.batching.batch_buffers import BatchSlot, Slots
from hpstore.loaders.dataset import large_records
from hpstore.runtime.buffers import Lease
from tests.fault.common import Bench, Hangs, column_number, flip, poll, within
from tests.integration.data_sets import SMALL, sample
from tests.integration.loader_cases import (
    COUNT,
    KINDS,
    MODES,
    PLAIN,
    check,
    flat,
    labels,
    same,
    write,
)

pytestmark = pytest.mark.fault
LIMIT = 30.0
FEW = ["rows", "ragged columns", "compressed", "larger than a unit"]


def settings(mode: str) -> dict[str, Any]:
    return {"batch_size": 10, "seed": 3, "shuffle": True, "num_workers": 2, **MODES[mode]}


def epoch(data: Any, mode: str, **options: Any) -> list[Any]:
    loader = DataLoader(data, **{**settings(mode), **options})
    found = within(LIMIT, lambda: list(loader))
    loader.close()
    return found


def filled(bench: Bench, kinds: list[str], **settings: Any) -> Bench:
    """A 3+2 pool of five directories with data sets of these kinds."""
    with bench.create(5, data=3, parity=2, **settings) as pool:
        for kind in kinds:
            fields, options = KINDS[kind]
            write(pool, kind.replace(" ", "-"), fields, COUNT, **options)
    return bench


@pytest.fixture
def made(bench: Bench, request: pytest.FixtureRequest) -> Bench:
    """With patience: a busy machine is no fault. Only what the test is about is written."""
    case = getattr(request.node, "callspec", None)
    return filled(bench, [case.params.get("kind", "rows") if case is not None else "rows"])


@pytest.fixture
def impatient(bench: Bench) -> Bench:
    """For devices that hang."""
    return filled(bench, ["rows"], device_deadline_seconds=2.0, straggler_seconds=2.0)


@pytest.mark.parametrize("kind", FEW)
def test_batches_are_the_same_with_devices_missing(made: Bench, kind: str) -> None:
    """0, 1 and m devices are missing when the pool is opened: bit for bit, in every mode."""
    name = kind.replace(" ", "-")
    with made.open() as pool:
        data = Dataset(pool, name)
        healthy = {mode: epoch(data, mode) for mode in MODES}
        columns = sorted(made.files(data.shard_key(data.streams[0], 0)), key=column_number)
    for column in columns[:2]:  # data, not parity
        path = next(path for path in made.paths if column.is_relative_to(path))
        os.rename(path, f"{path}-gone")
        with made.open() as pool:
            for mode in MODES:
                assert same(epoch(Dataset(pool, name), mode), healthy[mode])
            if kind == "rows":
                assert pool.metrics.value("read_degraded_total") > 0


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("mode", MODES)
def test_batches_are_the_same_when_devices_die_in_mid_epoch(
    made: Bench, kind: str, mode: str
) -> None:
    """m devices answer every call with an I/O error from the third batch on."""
    hangs = Hangs(made)
    name = kind.replace(" ", "-")
    with made.open(wrap=hangs.wrap) as pool:
        healthy = epoch(Dataset(pool, name), mode)
        loader = DataLoader(Dataset(pool, name), **settings(mode), prefetch_factor=1)
        run = iter(loader)
        found = [next(run), next(run)]
        for path in made.paths[:2]:
            hangs.hang(path, "E*")
        found += within(LIMIT, lambda: list(run))
        assert same(found, healthy)
        loader.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_hung_device_in_mid_epoch_delays_and_changes_nothing(
    impatient: Bench, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21: the run goes on in time, and memory that a late read may fill is not used again.

    The device is released when the epoch is over: its late reads then land somewhere that no
    batch is in.
    """
    lost: list[BatchSlot] = []
    plain = Slots.forget

    def forget(ring: Slots, slot: BatchSlot) -> None:
        lost.append(slot)
        plain(ring, slot)

    monkeypatch.setattr(Slots, "forget", forget)
    hangs = Hangs(impatient)
    with impatient.open(wrap=hangs.wrap) as pool:
        data = Dataset(pool, "rows")
        healthy = epoch(data, mode)
        loader = DataLoader(data, **settings(mode), prefetch_factor=1)
        run = iter(loader)
        found = [next(run), next(run)]
        held, _ = record_columns(impatient, data, 0)[0]  # a data column of the first shard
        hangs.hang(next(path for path in impatient.paths if str(held).startswith(path)))
        try:
            found += within(LIMIT, lambda: list(run))
            if mode == "records":
                assert lost
                assert pool.metrics.value("records_abandoned_total") > 0
            again = within(LIMIT, lambda: list(loader))
            handed = [b["image"].data_ptr() for b in found + again]
            for slot in lost:
                start, end = slot.memory.ctypes.data, slot.memory.ctypes.data + len(slot.memory)
                assert not any(start <= pointer < end for pointer in handed)
        finally:
            hangs.release()
        for batch in found + again:
            check(batch, PLAIN)
        assert same(found, healthy)
        assert sorted(flat(again)) == list(range(COUNT))
        within(LIMIT, loader.close)
        within(LIMIT, pool.close)
        for batch in found + again:
            check(batch, PLAIN)  # after the late reads


def test_memory_under_reads_of_large_records_that_hang_is_used_when_they_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 21: it stays charged until the device answers after all, and comes back then; a
    device that is silent for a while now and then takes no memory for good. Batches are right."""
    kind = "ragged rows"
    filled(bench, [kind], device_deadline_seconds=2.0, straggler_seconds=2.0)
    taken: list[Lease] = []
    abandoned: list[Lease] = []
    mine = threading.local()  # what this thread reads into
    take, read = large_records._memory, Dataset.read_rows

    def spy(pool: Any, nbytes: int) -> tuple[Lease | None, Any]:
        lease, memory = take(pool, nbytes)
        assert lease is not None
        assert not any(np.shares_memory(memory, one.array) for one in held())
        taken.append(lease)
        mine.lease = lease
        return lease, memory

    def reading(data: Dataset, *args: Any, **kwargs: Any) -> bool:
        good = read(data, *args, **kwargs)
        if not good:
            abandoned.append(mine.lease)
        return good

    def held() -> list[Lease]:
        return [one for one in taken if one._pool is not None]

    monkeypatch.setattr(large_records, "_memory", spy)
    monkeypatch.setattr(Dataset, "read_rows", reading)
    hangs = Hangs(bench)
    with bench.open(wrap=hangs.wrap) as pool:
        data = Dataset(pool, kind.replace(" ", "-"))
        healthy = epoch(data, "records", num_workers=1)
        loader = DataLoader(data, **{**settings("records"), "num_workers": 1}, prefetch_factor=1)
        run = iter(loader)
        found = [next(run), next(run)]
        column, _ = record_columns(bench, data, 0)[0]
        hangs.hang(next(path for path in bench.paths if str(column).startswith(path)))
        try:
            found += within(LIMIT, lambda: list(run))
            assert abandoned
            assert pool.metrics.value("records_abandoned_total") > 0
            assert {id(one) for one in held()} >= {id(one) for one in abandoned}
            charged = pool._store.buffers.budget.used_bytes
            assert charged >= sum(one.nbytes for one in abandoned)
        finally:
            hangs.release()
        again = within(LIMIT, lambda: list(loader))
        assert same(found, healthy)
        assert sorted(flat(again)) == list(range(COUNT))
        within(LIMIT, loader.close)
        poll(LIMIT, lambda: pool._store.buffers.budget.used_bytes == 0)
        assert not held()
    for batch in found + again:
        check(batch, KINDS[kind][0])  # after the late reads


def record_columns(bench: Bench, data: Dataset, index: int) -> list[tuple[Path, int]]:
    """(column file, offset in it) of the units of a record's stripe, data first."""
    stream = data.streams[0]
    places = data.locate(stream, np.array([index], np.int64))
    key = data.shard_key(stream, int(places.shard[0]))
    unit = stream.unit_bytes
    offset = int(places.start[0]) // (unit * 3) * unit + int(places.start[0]) % unit
    return [(file, 4096 + offset) for file in sorted(bench.files(key), key=column_number)]


def damage(bench: Bench, data: Dataset, index: int, columns: int) -> None:
    """One bit in the same place of so many columns: the record and what it is decoded from."""
    for file, offset in record_columns(bench, data, index)[:columns]:
        flip(file, offset + 10)


@pytest.mark.parametrize("mode", MODES)
def test_corrupt_records_are_repaired_and_counted(made: Bench, mode: str) -> None:
    """One bit of m columns of each of three stripes: right batches, mismatches counted."""
    with made.open() as pool:
        data = Dataset(pool, "rows")
        healthy = epoch(data, mode)
        for index in (0, 40, 96):
            damage(made, data, index, 2)
        data.close()
        found = epoch(Dataset(pool, "rows"), mode)
        assert same(found, healthy)
        assert pool.metrics.value("column_mismatch_total") > 0


def test_a_loader_says_what_was_damaged_and_repaired(made: Bench) -> None:
    """Since it began: nothing before, then the columns that did not match and the object."""
    with made.open() as pool:
        data = Dataset(pool, "rows")
        damage(made, data, 40, 1)
        loader = DataLoader(data, batch_size=10, cache=0)
        found = list(loader)
        poll(20, lambda: loader.stats()["repaired_objects"] == 1)
        stats = loader.stats()
        assert stats["damaged_reads"] > 0
        assert stats["degraded_reads"] > 0
        loader.close()
        after = DataLoader(data, batch_size=10, cache=0)
        assert same(list(after), found)
        for name in ("damaged_reads", "degraded_reads", "repaired_objects"):
            assert after.stats()[name] == 0
        after.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["rows", "ragged columns", "compressed"])
def test_a_record_beyond_repair_is_named_or_skipped(made: Bench, mode: str, kind: str) -> None:
    """m + 1 columns of a stripe are damaged: an error with the sample's number, at that batch.

    on_error="skip" leaves out what cannot be read, counts it, and gives all the rest.
    """
    name = kind.replace(" ", "-")
    with made.open() as pool:
        first = Dataset(pool, name)
        whole = epoch(first, mode)
        damage(made, first, 40, 5)
        first.close()
        data = Dataset(pool, name)
        loader = DataLoader(data, **settings(mode))
        run = iter(loader)
        good: list[Any] = []
        with pytest.raises((IntegrityError, TooManyErasures)) as caught:
            within(LIMIT, lambda: good.extend(run))
        found = re.search(r"sample (\d+) \(position (\d+) of epoch 0\)", str(caught.value))
        assert found is not None, str(caught.value)
        order = [label for batch in whole for label in labels(batch)]
        assert order[int(found[2])] == int(found[1])
        assert same(good, whole[: len(good)])
        assert loader.state_dict()["samples"] == 10 * len(good)
        loader.close()
        skipping = DataLoader(data, **settings(mode), on_error="skip")
        rest = within(LIMIT, lambda: list(skipping))
        lost = skipping.stats()["skipped_samples"]
        assert 0 < lost < COUNT
        missing = set(range(COUNT)) - set(flat(rest))
        assert len(missing) == lost
        assert 40 in missing
        assert int(found[1]) in missing
        assert [label for label in order if label not in missing] == flat(rest)
        for batch in rest:
            check(batch, KINDS[kind][0])
        assert skipping.state_dict()["epoch"] == 1
        skipping.close()


def test_a_batch_of_which_nothing_is_left_is_left_out(made: Bench) -> None:
    """Batches of one: the skipped ones do not come as empty batches, and the run is complete."""
    with made.open() as pool:
        data = Dataset(pool, "rows")
        damage(made, data, 40, 5)
        loader = DataLoader(Dataset(pool, "rows"), 1, cache=0, on_error="skip")
        found = flat(loader)
        assert len(found) + loader.stats()["skipped_samples"] == COUNT
        assert 40 not in found
        loader.close()


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_of_the_rest_do_not_depend_on_what_was_skipped(
    made: Bench, mode: str
) -> None:
    """A transform's generator is keyed by the position in the epoch."""
    options = {"transform": drawn, "on_error": "skip"}
    with made.open() as pool:
        data = Dataset(pool, "rows")
        wanted = numbers(epoch(data, mode, **options))
        damage(made, data, 40, 5)
        data.close()
        found = numbers(epoch(Dataset(pool, "rows"), mode, **options))
        assert len(found) < COUNT
        assert set(found) < set(wanted)


def drawn(one: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {"label": one["label"], "drawn": torch.tensor(int(rng.integers(1 << 40)))}


def numbers(batches: list[Any]) -> list[tuple[int, int]]:
    """(label, what was drawn for it)."""
    return [pair for b in batches for pair in zip(labels(b), b["drawn"].tolist(), strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_a_data_set_replaced_under_a_running_loader_is_an_error(made: Bench, mode: str) -> None:
    """Never a mixture: what comes is of the data set that was opened, then ObjectNotFound."""
    with made.open() as pool:
        loader = DataLoader(Dataset(pool, "rows"), **settings(mode), prefetch_factor=1)
        run = iter(loader)
        found = [next(run), next(run)]
        with DatasetWriter(pool, "rows", PLAIN, overwrite=True, **SMALL) as writer:
            for number in range(COUNT):
                one = sample(number)
                writer.write({"image": 255 - one["image"], "label": number})
        with suppress(ObjectNotFound):  # what is open or in memory may still be given out
            within(LIMIT, lambda: found.extend(run))
        for batch in found:
            check(batch, PLAIN)
        loader.close()
        anew = DataLoader(loader.dataset, **settings(mode))
        with pytest.raises(ObjectNotFound, match="replaced or deleted"):
            within(LIMIT, lambda: list(anew))
        anew.close()
