"""Small objects whose columns are read whole when they are opened (docs/decisions/0032)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DeviceError
from hpstore.format.column_header import HEADER_BYTES
from hpstore.format.geometry import ALIGNMENT_BYTES, SMALL_OBJECT_BYTES
from hpstore.loaders.dataset.coalesce import ObjectRanges
from hpstore.objects.read.column_reader import WHOLE_OBJECT_BYTES
from hpstore.objects.read.open_many import MOST_KEYS, open_objects
from hpstore.objects.read.pooled_reader import PooledReader, Readers
from hpstore.objects.write.put_plan import plan_columns
from hpstore.objects.write.stripe_writer import ONE_CALL_BYTES
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.fault.common import Bench
from tests.integration.data_sets import write_samples

T = TypeVar("T")


class Noting(DeviceWrapper):
    """Notes the bytes of every read of an open file."""

    def __init__(self, inner: Device, reads: list[int]) -> None:
        super().__init__(inner)
        self._reads = reads

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "read":
            self._reads.append(nbytes)
        return super().around(operation, nbytes, call)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path, data=4, parity=2, devices=6)


def payload(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def get_whole(pool: Pool, size: int) -> bytes:
    """The object "k", opened beside another one."""
    found = pool.open_many(["k", "other"], preload=True)
    body = bytearray(size)
    for key, reader in found.items():
        assert isinstance(reader, PooledReader)
        with reader:
            if key == "k":
                assert reader.read_into(body) == size
    return bytes(body)


@pytest.mark.parametrize(
    ("size", "columns"),
    [(0, 1), (1, 1), (100_000, 1), (128 * KIB, 1), (128 * KIB + 1, 4), (WHOLE_OBJECT_BYTES, 4)],
)
@pytest.mark.parametrize("threads", [False, True])
def test_a_small_object_takes_one_read_of_each_column(
    harness: Harness, size: int, columns: int, threads: bool
) -> None:
    reads: list[int] = []
    with harness.open(lambda _, device: Noting(device, reads), threads=threads) as pool:
        pool.put("k", payload(size))
        pool.put("other", b"")
        reads.clear()
        assert get_whole(pool, size) == payload(size)
        assert len(reads) == columns + 1  # one of the other


def test_of_a_larger_object_headers_alone_are_read_when_it_is_opened(harness: Harness) -> None:
    """Not what nobody may ask for."""
    reads: list[int] = []
    size = WHOLE_OBJECT_BYTES + 1
    with harness.open(lambda _, device: Noting(device, reads)) as pool:
        pool.put("k", payload(size))
        pool.put("other", payload(size))
        reads.clear()
        for reader in pool.open_many(["k", "other"], preload=True).values():
            assert isinstance(reader, PooledReader)
            reader.close()
        assert reads == [HEADER_BYTES] * 8
        assert get_whole(pool, size) == payload(size)


def test_who_does_not_ask_for_it_reads_headers_alone(harness: Harness) -> None:
    """Repairs open what they may not need; readers that are held follow what devices do."""
    reads: list[int] = []
    with harness.open(lambda _, device: Noting(device, reads)) as pool:
        for key in ("k", "other"):
            pool.put(key, payload(100_000))
        reads.clear()
        pool.stat("k")
        pool.open("k").close()
        for reader in pool.open_many(["k", "other"]).values():
            assert isinstance(reader, PooledReader)
            reader.close()
        assert reads == [HEADER_BYTES] * 4  # a copy is enough, each time


@pytest.mark.parametrize("size", [100_000, 200_000])
@pytest.mark.parametrize("where", ["header", "first byte", "last block", "table", "cut short"])
def test_damage_anywhere_in_a_column_is_found_and_made_up_for(
    harness: Harness, size: int, where: str
) -> None:
    """PROTOCOL 7: what is read whole is verified like what is read in parts."""
    with harness.open() as pool:
        pool.put("k", payload(size))
        pool.put("other", b"")
    first = ".r00." if size <= SMALL_OBJECT_BYTES else ".c00."
    url, path = next(found for found in harness.columns("k") if first in found[1])
    content = harness.devices[url].files[path].bytes
    at = {
        "header": 100,
        "first byte": HEADER_BYTES,
        "last block": HEADER_BYTES + (size - 1 if size <= SMALL_OBJECT_BYTES else size // 8),
        "table": len(content) - ALIGNMENT_BYTES,
    }
    if where == "cut short":
        del content[-ALIGNMENT_BYTES:]
    else:
        content[at[where]] ^= 1
    with harness.open() as pool:
        assert get_whole(pool, size) == payload(size)
        assert pool.metrics.value("column_mismatch_total") == 1


@pytest.mark.parametrize("change", [-100, 100])
def test_a_file_whose_size_is_no_multiple_of_a_sector(tmp_path: Path, change: int) -> None:
    """Cut short is damage, to be repaired, and no fault of the device; more than its header says is
    nothing. A direct read of all of it would be refused."""
    bench, size = Bench(tmp_path), 200_000
    with bench.create(6, data=4, parity=2) as pool:
        pool.put("k", payload(size))
        pool.put("other", b"")
    file = next(f for f in tmp_path.rglob("@*") if f.parent.name == "k" and ".c00." in f.name)
    os.truncate(file, file.stat().st_size + change)
    with bench.open() as pool:
        assert get_whole(pool, size) == payload(size)
        damaged = pool.metrics.value("column_mismatch_total")  # a repair may look, too
        assert (damaged > 0) == (change < 0)
        assert pool.metrics.value("column_read_error_total") == 0


def test_an_object_that_is_replaced_is_one_version_or_the_other(tmp_path: Path) -> None:
    """PROTOCOL 10, 11: also where its files are recycled."""
    bench = Bench(tmp_path)
    with bench.create(6, data=4, parity=2) as pool:
        for key in ("k", "other"):
            pool.put(key, payload(200_000))
        found = pool.open_many(["k", "other"], preload=True)
        for _ in range(3):
            pool.put("k", payload(200_001)[:200_000])
        body = bytearray(200_000)
        for reader in found.values():
            assert isinstance(reader, PooledReader)
            with reader:
                assert reader.read_into(body) == 200_000
            assert bytes(body) in (payload(200_000), payload(200_001)[:200_000])


def test_tables_of_many_objects_are_held_a_bounded_number_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(tmp_path).create(6, data=4, parity=2) as pool:
        data, keys = (
            write_samples(pool, "a", range(100)),
            [f"t{i}" for i in range(2 * MOST_KEYS + 1)],
        )
        for key in keys:
            pool.put(key, key.encode() * 100)
        plain, asked = pool.open_many, list[int]()

        def readers(keys: list[str], *, preload: bool = False) -> Readers:
            asked.append(len(keys))
            return plain(keys, preload=preload)

        monkeypatch.setattr(pool, "open_many", readers)
        pieces = [ObjectRanges(key, [(0, 10), (20, 30)], 100 * len(key)) for key in keys]
        found = data._index.get_pieces(pieces)
        wanted = [(key.encode() * 100) for key in keys]
        assert [[p.tobytes() for p in some] for some in found] == [
            [w[:10], w[20:30]] for w in wanted
        ]
        assert asked == [MOST_KEYS, MOST_KEYS, 1]
        data.close()


def test_columns_in_memory_hold_up_no_spare_read_of_others(harness: Harness) -> None:
    """When a spare read is due is the longest patience of a window's columns: theirs is none, where
    an unknown one would be the deadline."""
    with harness.open() as pool:
        pool.put("k", payload(200_000))
        reader = open_objects(pool._store, ["k"], whole=True)["k"]
        flight = reader._launch(reader._plan_window(0, 200_000), block=True)
        assert flight is not None
        assert not flight.late()
        assert flight.patience == dict.fromkeys(range(4), 0.0)
        assert flight.overdue_in(flight.futures, 30.0) <= 0
        flight.drop()
        reader.close()


def test_who_shares_a_small_object_keeps_no_copy_of_it(harness: Harness) -> None:
    """Readers that are shared stay open for long: of thousands the copies would be a cache."""
    reads: list[int] = []
    with harness.open(lambda _, device: Noting(device, reads)) as pool:
        pool.put("k", payload(200_000))
        opened = open_objects(pool._store, ["k"], whole=True)["k"]
        assert all(column.in_memory for column in opened.columns.values())
        shared = opened.share()
        opened.close()
        assert not any(column.in_memory for column in shared.columns.values())
        reads.clear()
        body = np.empty(200_000, np.uint8)
        shared.read_into(0, body)
        shared.close()
        assert body.tobytes() == payload(200_000)
        assert len(reads) == 2 * 4  # table and units of each column


class Logging(DeviceWrapper):
    """Notes the operations of a write; those of a device that is `broken` fail."""

    def __init__(self, inner: Device, log: list[tuple[str, str]], broken: set[str]) -> None:
        super().__init__(inner)
        self._log, self._broken = log, broken

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation in ("create", "write", "sync", "publish", "sync_directory"):
            self._log.append((operation, self.url))
            if f"{operation} {self.url}" in self._broken:
                raise DeviceError(f"{operation} fails", device=self.url)
        return super().around(operation, nbytes, call)


@pytest.mark.parametrize("size", [1, 4096, 300_000, ONE_CALL_BYTES])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("breaks", ["", "create", "write", "sync"])
def test_nothing_of_a_small_object_has_a_name_before_all_of_it_is_durable(
    tmp_path: Path, size: int, threads: bool, breaks: str
) -> None:
    """PROTOCOL 4. One write on each device. When one fails the put moves on, and nothing is left
    of it there under a name."""
    harness = Harness(tmp_path, data=4, parity=2, devices=7)
    log, broken = list[tuple[str, str]](), set[str]()
    wrap = partial(_logging, log, broken)
    with harness.open(wrap, threads=threads) as pool:
        pool.put("warm", b"1")  # raises the mark
        log.clear()
        if breaks:
            first = plan_columns(pool._store, "k", size, exclude=())[1][1]
            broken.add(f"{breaks} {pool._store.view.devices[first].url}")
        info = pool.put("k", payload(size))
        broken.clear()
        names = [operation for operation, _ in log]
        width = 3 if size <= SMALL_OBJECT_BYTES else 6
        assert names.count("write") == width * (2 if breaks else 1) - (breaks == "create")
        at = names.index("publish")
        assert names[:at].count("sync") >= width
        assert not {"create", "write", "sync"} & set(names[at:])
        assert names.count("publish") == names.count("sync_directory") == width
        assert info.losses_tolerated == 2
        assert pool.get("k") == payload(size)
        assert pool.scrub().clean


@pytest.mark.parametrize("size", [300_000, ONE_CALL_BYTES])
def test_a_put_by_one_call_a_device_takes_a_narrower_stripe_rather_than_a_debt(
    tmp_path: Path, size: int
) -> None:
    """PROTOCOL 3, 5: little has moved when a device fails, so the plan is made anew, with full
    parity; the stripe grows again once the device is back."""
    harness = Harness(tmp_path, data=3, parity=2, devices=5)
    with harness.open(partial(_logging, [], {f"write {harness.urls[1]}"})) as pool:
        info = pool.put("k", payload(size))
        assert (info.data, info.losses_tolerated) == (2, 2)
        assert pool.status().debts == 0
        assert pool.get("k") == payload(size)
    with harness.open() as pool:
        pool.rebuild()
        assert (pool.stat("k").data, pool.stat("k").losses_tolerated) == (3, 2)
        assert pool.get("k") == payload(size)
        assert pool.scrub().clean


def _logging(log: list[tuple[str, str]], broken: set[str], _: str, device: Device) -> Device:
    return Logging(device, log, broken)
