"""A zarr store over a pool: what it reads and writes, what failing devices and cancels do to it."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import cpu, default_buffer_prototype

import hpstore
from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, SomeFailed, TooFewDevices, TooManyErasures
from hpstore.format.geometry import BLOCK_BYTES
from hpstore.interop.filesystem import open_pools as mounts_module
from hpstore.interop.parallel_calls import MERGED_BYTES, Span, merge_parts, read_slice
from hpstore.interop.zarr import PoolStore
from hpstore.interop.zarr.base_store import byte_span
from hpstore.testing.memory_pool import Harness

ROOT = Path(__file__).resolve().parents[2]
PROTOTYPE = default_buffer_prototype()
DATA = np.arange(40 * 6 * 5, dtype=np.int32).reshape(40, 6, 5)


def _fill(store: PoolStore) -> None:
    """A group with a sharded array, a compressed one in a subgroup, and attributes."""
    root = zarr.create_group(store, attributes={"made": "here"})
    root.create_array("sharded", data=DATA, chunks=(1, 6, 5), shards=(16, 6, 5), compressors=None)
    root.create_array("deep/small", data=DATA[:, 0, 0].astype("f8"), chunks=(7,))


def _check(store: PoolStore) -> None:
    root = zarr.open_group(store, mode="r")
    assert root.attrs["made"] == "here"
    assert sorted(name for name, _ in root.members(max_depth=None)) == [
        "deep",
        "deep/small",
        "sharded",
    ]
    sharded = root["sharded"]
    assert isinstance(sharded, zarr.Array)
    np.testing.assert_array_equal(sharded[:], DATA)
    np.testing.assert_array_equal(sharded.oindex[np.array([3, 17, 39])], DATA[[3, 17, 39]])
    np.testing.assert_array_equal(sharded[21, 2:4], DATA[21, 2:4])
    small = zarr.open_array(store, path="deep/small", mode="r")
    np.testing.assert_array_equal(small[5:20], DATA[5:20, 0, 0])


# --- plans ----------------------------------------------------------------------------------


@given(size=st.integers(0, 50), a=st.integers(0, 60), b=st.integers(0, 60))
def test_a_request_means_what_a_slice_means(size: int, a: int, b: int) -> None:
    """Cut where the value ends; a suffix longer than the value is all of it."""
    value = bytes(range(size))
    for request, expected in (
        (None, value),
        (RangeByteRequest(a, b), value[a:b]),
        (OffsetByteRequest(a), value[a:]),
        (SuffixByteRequest(a), value[-a:] if a else b""),
    ):
        low, high = byte_span(request, size)
        assert 0 <= low <= high <= size
        assert value[low:high] == expected


@pytest.mark.parametrize(
    "request_", [RangeByteRequest(-1, 2), OffsetByteRequest(-3), SuffixByteRequest(-1), (0, 2)]
)
def test_a_request_that_means_nothing_is_refused(request_: object) -> None:
    """Negative bounds, and what is no request at all."""
    with pytest.raises(ValueError, match="Unexpected byte_range"):
        byte_span(request_, 10)  # type: ignore[arg-type]


_PARTS = st.lists(
    st.tuples(st.integers(0, 3 * MERGED_BYTES), st.integers(0, MERGED_BYTES)).map(
        lambda part: (part[0], part[0] + part[1])
    ),
    max_size=12,
)


@given(_PARTS)
def test_merged_reads_hold_every_part_and_nothing_twice(spans: list[Span]) -> None:
    """Runs are sorted and disjoint, and no gap of a block or more is read."""
    runs, run_of = merge_parts(spans)
    assert runs == sorted(runs)
    assert all(before[1] <= after[0] for before, after in pairwise(runs))
    for (low, high), run in zip(spans, run_of, strict=True):
        assert runs[run][0] <= low <= high <= runs[run][1]
    for number, (low, high) in enumerate(runs):
        inside = sorted(span for span, run in zip(spans, run_of, strict=True) if run == number)
        end = low
        for first, last in inside:
            assert first - end < BLOCK_BYTES
            end = max(end, last)
        assert end == high


def test_neighbours_are_read_at_once() -> None:
    """Parts of one block, in any order, are one run; one far away is another."""
    runs, run_of = merge_parts([(100, 200), (0, 50), (10**6, 10**6 + 1)])
    assert runs == [(0, 200), (10**6, 10**6 + 1)]
    assert run_of == [0, 0, 1]


class _Replaced:
    """A reader whose object is replaced by a longer one during the first read."""

    def __init__(self) -> None:
        self.data, self.version = b"old", "1"

    @property
    def size(self) -> int:
        return len(self.data)

    def read_ranges(self, ranges: list[Span], deliver: Callable[[int, Bytes], None]) -> None:
        self.data, self.version = b"something new", "2"
        for low, high in ranges:
            deliver(low, np.frombuffer(self.data[low:high], np.uint8))


def test_a_value_that_is_replaced_while_it_is_read_is_not_cut_to_its_old_size() -> None:
    """The size is that of the version that the bytes are of."""
    assert read_slice(_Replaced(), None, None) == b"something new"  # type: ignore[arg-type]
    assert read_slice(_Replaced(), -3, None) == b"new"  # type: ignore[arg-type]


# --- arrays ---------------------------------------------------------------------------------


def test_arrays_read_the_same_with_m_devices_missing(harness: Harness, pool: hpstore.Pool) -> None:
    """Groups, a sharded array, a compressed one: whole, and degraded after losing any device."""
    store = PoolStore(pool, "runs/arrays")
    _fill(store)
    _check(store)
    for url in harness.urls:
        harness.lose([url])
        _check(store)
        harness.bring_back()


def test_a_chunk_that_cannot_be_read_is_no_chunk_of_fill_values(
    harness: Harness, pool: hpstore.Pool
) -> None:
    """Beyond m devices, zarr must not take unclear for absent: reads and listings raise."""
    store = PoolStore(pool, "arrays")
    _fill(store)
    array = zarr.open_array(store, path="sharded", mode="r")
    harness.lose(harness.urls)
    with pytest.raises(TooManyErasures):
        array[0]
    with pytest.raises(TooManyErasures):
        asyncio.run(store.exists("sharded/c/0/0/0"))
    with pytest.raises(TooFewDevices):
        asyncio.run(store.is_empty(""))
    with pytest.raises(TooFewDevices):
        asyncio.run(store.delete_dir(""))
    harness.bring_back()
    _check(store)


def test_another_process_reads_and_writes_the_same_arrays(disk_pool: hpstore.Pool) -> None:
    """By URL; what it writes is seen here without opening anything again."""
    store = PoolStore(disk_pool, "shared")
    _fill(store)
    before = zarr.open_array(store, path="sharded", mode="r")
    assert before[16, 0, 0] == DATA[16, 0, 0]
    code = (
        "import zarr\n"
        "from hpstore.interop.zarr import PoolStore\n"
        "array = zarr.open_array(PoolStore.from_url('hpstore://disk/shared'), path='sharded')\n"
        "assert array[39, 5, 4] == 1199\n"
        "array[16:32] = -1\n"
    )
    _run(code)
    np.testing.assert_array_equal(before[16:32], np.full_like(DATA[16:32], -1))
    np.testing.assert_array_equal(before[:16], DATA[:16])


def test_of_two_processes_that_set_if_not_exists_one_wins(disk_pool: hpstore.Pool) -> None:
    """Of forty keys, each has one value, the first: who looks early and who looks late agree."""
    code = (
        "import asyncio, os, sys\n"
        "from zarr.core.buffer import default_buffer_prototype as prototype\n"
        "from hpstore.interop.zarr import PoolStore\n"
        "store = PoolStore.from_url('hpstore://disk/race')\n"
        "async def main():\n"
        "    await store.exists('x')\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    value = prototype().buffer.from_bytes(os.getpid().to_bytes(8, 'little'))\n"
        "    for key in map(str, range(40)):\n"
        "        await store.set_if_not_exists(key, value)\n"
        "        found = await store.get(key, prototype())\n"
        "        print(int.from_bytes(found.to_bytes(), 'little'), end=' ')\n"
        "asyncio.run(main())\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    one, other = (child.communicate(timeout=120)[0].split() for child in children)
    assert one == other
    assert len(one) == 40
    assert set(one) <= {str(child.pid) for child in children}


def _run(code: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)


# --- deleting -------------------------------------------------------------------------------


def test_a_delete_that_stops_half_way_leaves_no_array_of_fill_values(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents go before chunks: with a chunk left or not, the array is not there any more."""
    store = PoolStore(pool, "arrays")
    _fill(store)
    delete_many = pool.delete_many

    def fail(keys: list[str], *, missing_ok: bool) -> None:
        left = "arrays/sharded/c/1/0/0"
        delete_many([key for key in keys if key != left], missing_ok=missing_ok)
        if left in keys:
            raise SomeFailed("a device is full")

    monkeypatch.setattr(pool, "delete_many", fail)
    with pytest.raises(SomeFailed):
        asyncio.run(store.delete_dir("sharded"))
    with pytest.raises(FileNotFoundError):
        zarr.open_array(store, path="sharded", mode="r")
    assert pool.exists("arrays/sharded/c/1/0/0")
    np.testing.assert_array_equal(
        zarr.open_array(store, path="deep/small", mode="r")[:], DATA[:, 0, 0]
    )


def test_documents_are_gone_before_any_chunk_is_deleted(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all arrays and groups below, also when many are deleted at a time."""
    store = PoolStore(pool, "arrays")
    _fill(store)
    order: list[list[str]] = []
    delete_many = pool.delete_many

    def note(keys: list[str], *, missing_ok: bool) -> None:
        order.append(keys)
        delete_many(keys, missing_ok=missing_ok)

    monkeypatch.setattr(pool, "delete_many", note)
    asyncio.run(store.clear())
    documents, chunks = order  # each call is durable on its return
    assert [key.endswith("zarr.json") for key in documents] == [True] * 4
    assert chunks
    assert not any(key.endswith("zarr.json") for key in chunks)
    assert pool.list() == []


# --- cancelled waits ------------------------------------------------------------------------


def test_a_cancelled_set_ends_before_its_value_is_given_back(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put reads the caller's memory (PROTOCOL 21): the wait goes on until it has ended."""
    store = PoolStore(pool, "arrays")
    began, go = threading.Event(), threading.Event()
    put = pool.put

    def slow(key: str, data: object, **options: object) -> object:
        began.set()
        go.wait(60)
        return put(key, data, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "put", slow)
    value = np.full(100, 7, np.uint8)

    async def main() -> None:
        task = asyncio.create_task(store.set("k", cpu.Buffer.from_array_like(value)))
        await asyncio.to_thread(began.wait, 60)
        for _ in range(3):  # an impatient caller
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        value[:] = 0  # the caller's again

    asyncio.run(main())
    assert pool.get("arrays/k") == bytes([7]) * 100


def test_a_cancelled_get_takes_nothing_from_the_next_one(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that nobody waits for goes on into memory of its own."""
    store = PoolStore(pool, "arrays")
    pool.put("arrays/k", b"a" * 1000)
    began, go = threading.Event(), threading.Event()
    read = pool.open

    def slow(key: str) -> object:
        if not began.is_set():
            began.set()
            go.wait(60)
        return read(key)

    monkeypatch.setattr(pool, "open", slow)

    async def main() -> None:
        task = asyncio.create_task(store.get("k", PROTOTYPE))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await store.get("k", PROTOTYPE)
        go.set()
        assert found is not None
        assert found.to_bytes() == b"a" * 1000

    asyncio.run(main())


# --- look-ups -------------------------------------------------------------------------------


def test_parts_of_one_value_are_one_look_up(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many ranges of two keys, one of them absent: each key is opened once."""
    store = PoolStore(pool, "arrays")
    value = np.random.default_rng(0).bytes(300_000)
    pool.put("arrays/k", value)
    opened: list[str] = []
    read = pool.open

    def note(key: str) -> object:
        opened.append(key)
        return read(key)

    monkeypatch.setattr(pool, "open", note)
    wanted = [("k", RangeByteRequest(i * 1000, i * 1000 + 10)) for i in range(299, 0, -1)]
    found = asyncio.run(
        store.get_partial_values(PROTOTYPE, [*wanted, ("none", None), ("k", SuffixByteRequest(5))])
    )
    expected = [value[r.start : r.end] for _, r in wanted]
    assert [None if b is None else b.to_bytes() for b in found] == [*expected, None, value[-5:]]
    assert sorted(opened) == ["arrays/k", "arrays/none"]


def test_ranges_of_a_value_that_is_not_there_raise_as_zarr_expects(pool: hpstore.Pool) -> None:
    """zarr 3.2 and later reads shards by get_ranges, and takes this group for an absent shard."""
    store = PoolStore(pool, "arrays")
    pool.put("arrays/k", b"abcdef")
    requests: list[ByteRequest | None] = [RangeByteRequest(0, 2), SuffixByteRequest(2), None]

    async def ranges(key: str) -> dict[int, bytes]:
        return {
            index: part.to_bytes()
            async for batch in store.get_ranges(key, requests, prototype=PROTOTYPE, max_gap_bytes=1)
            for index, part in batch
            if part is not None
        }

    assert asyncio.run(ranges("k")) == {0: b"ab", 1: b"ef", 2: b"abcdef"}
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(ranges("none"))
    assert isinstance(caught.value.exceptions[0], FileNotFoundError)


# --- places ---------------------------------------------------------------------------------


def test_a_store_over_a_whole_pool_cannot_be_written(pool: hpstore.Pool) -> None:
    """zarr's mode "w" would delete every checkpoint; reading is another matter."""
    with pytest.raises(ConfigError, match="needs a prefix"):
        PoolStore(pool)
    pool.put("a/b", b"1")
    store = PoolStore(pool, read_only=True)
    with pytest.raises(ConfigError, match="needs a prefix"):
        store.with_read_only(False)
    assert _list(store) == ["a/b"]


def _list(store: PoolStore) -> list[str]:
    async def keys() -> list[str]:
        return [key async for key in store.list()]

    return asyncio.run(keys())


@pytest.mark.parametrize("url", ["hpstore:///a", "hpstore://", "main/a", "file:///a"])
def test_a_url_that_names_no_pool_is_refused(url: str, home: Path) -> None:
    """Before anything is opened."""
    with pytest.raises(ConfigError):
        PoolStore.from_url(url)


def test_a_store_for_reading_needs_no_second_pool(
    disk_pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zarr asks for a read-only copy for mode "r"; pickles of it share the pool too."""
    opened = []

    def count(path: str, *, read_only: bool) -> hpstore.Pool:
        opened.append(read_only)
        return hpstore.open(path, read_only=read_only)

    monkeypatch.setattr(mounts_module, "open_pool", count)
    store = PoolStore("disk", "arrays")
    _fill(store)
    _check(store)
    assert pickle.loads(pickle.dumps(store)) == store != store.with_read_only(True)
    assert opened == [False]
    _check(PoolStore("disk", "arrays", read_only=True))
    assert opened == [False, True]


def test_a_pool_opened_read_only_makes_stores_that_are(disk_pool: hpstore.Pool) -> None:
    """zarr is told before it tries, and a writable copy is refused."""
    _fill(PoolStore(disk_pool, "arrays"))
    with hpstore.open(disk_pool.config.path, read_only=True) as pool:
        store = PoolStore(pool, "arrays")
        assert store.read_only
        _check(store)
        with pytest.raises(ConfigError, match="opened read-only"):
            store.with_read_only(False)
        with pytest.raises(ValueError, match="read-only"):
            zarr.create_group(store, path="new")


def test_a_value_that_is_no_buffer_is_refused(pool: hpstore.Pool) -> None:
    """As zarr's own stores do."""
    store = PoolStore(pool, "arrays")
    with pytest.raises(TypeError, match="Buffer"):
        asyncio.run(store.set("k", b"abc"))  # type: ignore[arg-type]
    assert pool.list() == []
