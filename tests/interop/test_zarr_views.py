"""PoolStore where data sets are: it shows them as groups, and neither writes nor deletes there."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import cpu, default_buffer_prototype

import hpstore
from hpstore.errors import ConfigError, IntegrityError, VersionConflict
from hpstore.interop.zarr import PoolStore
from hpstore.loaders import Dataset, DatasetStore, DatasetWriter, delete_dataset, verify_dataset
from hpstore.loaders.dataset.dataset import reopen_dataset
from hpstore.loaders.zarr_views import dataset_store
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.interop.zarr_cases import (
    FIELDS,
    batch_of,
    check_equal,
    make_chunks_small,
    run_python,
    write_data_set,
)
from tests.thorough import LONG

PROTOTYPE = default_buffer_prototype()
VALUE = cpu.Buffer.from_bytes(b"new")
WIDE = {"wide": FIELDS["wide"]}
PLAIN = np.arange(30, dtype=np.int32).reshape(10, 3)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


def _list(store: Store, prefix: str = "") -> list[str]:
    async def found() -> list[str]:
        return [key async for key in store.list_prefix(prefix)]

    return asyncio.run(found())


def _names(store: Store, prefix: str) -> list[str]:
    async def found() -> list[str]:
        return [name async for name in store.list_dir(prefix)]

    return asyncio.run(found())


def _replace(pool: hpstore.Pool, name: str) -> None:
    """Another data set of that name; the objects of the one before are gone."""
    with DatasetWriter(pool, name, WIDE, overwrite=True, unit_bytes=64 * KIB) as writer:
        writer.write_batch({"wide": np.ones((53, 5000), np.float32)})


# --- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train", "vision/2024/train", "runs/17", "c/3"])
def test_every_store_that_holds_a_data_set_shows_it(
    harness: Harness, pool: hpstore.Pool, name: str
) -> None:
    """Over the whole pool, over all data sets, over one, over one of its arrays; by Pool and by
    name. Names of several components, and such as chunks have."""
    data = write_data_set(pool, name, FIELDS)
    for where in (pool, harness.config.name, harness.config.path):
        check_equal(PoolStore(where, read_only=True), data, f"data/{name}")
        check_equal(PoolStore(where, "data"), data, name)
        check_equal(PoolStore(where, f"data/{name}"), data)
    array = zarr.open(PoolStore(pool, read_only=True), path=f"data/{name}/image", mode="r")
    assert isinstance(array, zarr.Array)
    image = batch_of(53)["image"]
    np.testing.assert_array_equal(array[17], image[17])
    array = zarr.open_array(PoolStore(pool, f"data/{name}/image"), mode="r")
    np.testing.assert_array_equal(array[:], image)


def test_a_data_set_reads_the_same_with_m_devices_missing(
    harness: Harness, pool: hpstore.Pool
) -> None:
    """Its manifest is found and its records are decoded; beyond m, it is not taken for absent."""
    write_data_set(pool, "train", FIELDS)
    for url in harness.urls:
        harness.lose([url])
        check_equal(PoolStore(pool, "data"), Dataset(pool, "train"), "train")
        harness.bring_back()
    harness.lose(harness.urls)
    with pytest.raises(hpstore.errors.TooManyErasures):
        zarr.open_group(PoolStore(pool, "data/train"), mode="r")


def test_parts_of_values_are_those_of_the_whole(pool: hpstore.Pool) -> None:
    """Each key that is listed: its size, ranges of it by every call that reads ranges, exists."""
    write_data_set(pool, "train", {name: FIELDS[name] for name in ("wide", "label")})
    store = PoolStore(pool, "data")
    requests: list[ByteRequest | None] = [
        RangeByteRequest(5, 33_000),
        OffsetByteRequest(40),
        SuffixByteRequest(70),
        None,
    ]

    async def main() -> None:
        for key in _list_of:
            whole = await store.get(key, PROTOTYPE)
            assert whole is not None
            value = whole.to_bytes()
            assert len(value) == await store.getsize(key)
            assert await store.exists(key)
            wanted = [value[5:33_000], value[40:], value[-70:], value]
            found = await store.get_partial_values(PROTOTYPE, [(key, r) for r in requests])
            assert [part.to_bytes() for part in found if part is not None] == wanted
            ranges = store.get_ranges_sync(key, requests, prototype=PROTOTYPE)
            assert [part.to_bytes() for _, part in ranges if part is not None] == wanted
            one = await store.get(key, PROTOTYPE, requests[0])
            assert one is not None
            assert one.to_bytes() == wanted[0]

    _list_of = _list(store, "train/")
    assert len(_list_of) == 2 + 4 + 1 + 3
    asyncio.run(main())


def test_objects_of_a_data_set_do_not_show(pool: hpstore.Pool) -> None:
    """No listing has them, and none of their keys has a value; others beside them do."""
    write_data_set(pool, "train", FIELDS)
    pool.put("data/else", b"1")
    pool.put("runs/x", b"1")
    store = PoolStore(pool, read_only=True)
    for key in pool.list("data/train/"):
        assert not asyncio.run(PoolStore(pool, "data").exists(key.removeprefix("data/")))
        assert asyncio.run(store.get(key, PROTOTYPE)) is None
    made = [f"data/train/{key}" for key in _list(DatasetStore(pool, "train"))]
    assert _list(store) == ["data/else", *made, "runs/x"]
    assert _list(store, "data/tr") == made
    assert _list(store, "data/train/im") == [key for key in made if "/image/" in key]
    assert _list(store, "data/train/manifest") == []
    assert _list(PoolStore(pool, "data/train/ok")) == ["c/0", "c/1", "c/2", "zarr.json"]


def test_a_walk_over_all_groups_meets_the_data_sets(pool: hpstore.Pool) -> None:
    """A group made round them, with a plain array beside; names next below open nothing."""
    write_data_set(pool, "train", {"label": FIELDS["label"], "text": FIELDS["text"]})
    write_data_set(pool, "test", WIDE)
    store = PoolStore(pool, "data")
    assert _names(store, "") == ["test", "train"]
    assert _names(PoolStore(pool, read_only=True), "") == ["data"]
    assert store._views.seen() == {}
    assert not asyncio.run(store.is_empty("train"))
    root = zarr.open_group(store)
    root.create_array("mean", data=PLAIN)
    assert sorted(name for name, _ in root.members(max_depth=None)) == [
        "mean",
        "test",
        "test/wide",
        "train",
        "train/label",
    ]
    assert _names(store, "train") == ["label", "zarr.json"]


def test_a_name_under_another_is_read_by_its_own(pool: hpstore.Pool) -> None:
    """`a/b` beside `a`: a field `b` of `a` would come first; listings show `a`."""
    outer = write_data_set(pool, "a", {"label": FIELDS["label"]})
    inner = write_data_set(pool, "a/b", {"ok": FIELDS["ok"]})
    store = PoolStore(pool, "data")
    check_equal(store, outer, "a")
    check_equal(store, inner, "a/b")
    check_equal(PoolStore(pool, "data/a/b"), inner)
    assert {key.split("/")[1] for key in _list(store)} == {"label", "zarr.json"}
    write_data_set(pool, "a/label", {"ok": FIELDS["ok"]})
    assert zarr.open_array(PoolStore(pool, "data"), path="a/label", mode="r").shape == (53,)


# --- what is replaced -----------------------------------------------------------------------


def test_a_data_set_that_is_replaced_or_deleted_is_no_fill_values(pool: hpstore.Pool) -> None:
    """In the store that had it open, in its copies, and after close(); a new store sees the new."""
    write_data_set(pool, "train", WIDE)
    store = PoolStore(pool, "data", read_only=True)
    array = zarr.open_array(store, path="train/wide", mode="r")
    before, copy = array[3], pickle.dumps(array)
    np.testing.assert_array_equal(pickle.loads(copy)[3], before)
    _replace(pool, "train")
    with pytest.raises(VersionConflict, match="replaced or deleted"):
        array[:]
    with pytest.raises(ConfigError, match="was replaced"):
        pickle.loads(copy)[3]
    store.close()
    with pytest.raises(ConfigError, match="was replaced"):
        array[3]
    assert zarr.open_array(PoolStore(pool, "data"), path="train/wide", mode="r")[3, 0] == 1
    delete_dataset(pool, "train")
    with pytest.raises(VersionConflict, match="was deleted"):
        pickle.loads(copy)[3]
    with pytest.raises(FileNotFoundError):
        zarr.open_array(PoolStore(pool, "data"), path="train/wide", mode="r")


def test_close_closes_the_data_sets_and_the_next_use_opens_them(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool, which is the caller's, stays open."""
    data = write_data_set(pool, "train", WIDE)
    opened: list[Dataset] = []

    def note(where: hpstore.Pool, name: str) -> Dataset:
        opened.append(Dataset(where, name))
        return opened[-1]

    def note_again(where: hpstore.Pool, name: str, *which: Any) -> Dataset:
        opened.append(reopen_dataset(where, name, *which))
        return opened[-1]

    monkeypatch.setattr(dataset_store, "Dataset", note)
    monkeypatch.setattr(dataset_store, "reopen_dataset", note_again)
    with PoolStore(pool, "data/train", read_only=True) as store:
        check_equal(store, data)
        assert not all(made._closed for made in opened)
    assert all(made._closed for made in opened)
    before = len(opened)
    check_equal(store, data)
    assert len(opened) > before


def test_a_child_and_another_process_read_the_same(disk_pool: hpstore.Pool) -> None:
    """A fork of one that had it open, and a pickle."""
    data = write_data_set(disk_pool, "train", WIDE)
    array = zarr.open_array(PoolStore("disk", "data/train"), path="wide", mode="r")
    expected = np.asarray(array[20])
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: queue.put(PoolStore.get_sync(array.store, "wide/c/1/0").to_bytes())  # type: ignore[arg-type, union-attr]
    )
    child.start()
    assert expected.tobytes() in queue.get()
    child.join(60)
    assert child.exitcode == 0
    copy = pickle.loads(pickle.dumps(array.store))
    assert copy == array.store
    check_equal(copy, data)
    path = disk_pool.config.path.with_name("store.pickle")
    path.write_bytes(pickle.dumps(array.store))
    run_python(
        "import pathlib, pickle, zarr\n"
        f"store = pickle.loads(pathlib.Path({str(path)!r}).read_bytes())\n"
        "array = zarr.open_array(store, path='wide', mode='r')\n"
        f"assert array[20].tobytes() == {expected.tobytes()!r}\n"
    )


# --- writing and deleting -------------------------------------------------------------------

_CALLS: dict[str, Callable[[PoolStore, str], Coroutine[Any, Any, None]]] = {
    "set": lambda store, key: store.set(key, VALUE),
    "set_sync": lambda store, key: asyncio.to_thread(store.set_sync, key, VALUE),
    "set_if_not_exists": lambda store, key: store.set_if_not_exists(key, VALUE),
    "set_many": lambda store, key: store._set_many([(key, VALUE)]),
    "delete": lambda store, key: store.delete(key),
    "delete_sync": lambda store, key: asyncio.to_thread(store.delete_sync, key),
    "delete_dir": lambda store, key: store.delete_dir(key),
}


@pytest.mark.parametrize("name", ["vision/train", *(["train"] if LONG else [])])
@pytest.mark.parametrize("call", _CALLS)
def test_nothing_is_written_or_deleted_in_a_data_set(
    pool: hpstore.Pool, call: str, name: str
) -> None:
    """By no call, for keys of the view, of the objects and of neither; from stores that have it
    open and that have not, and above it."""
    data = write_data_set(pool, name, FIELDS)
    before = {key: pool.get(key) for key in pool.list()}
    keys = ["zarr.json", "wide/zarr.json", "wide/c/1/0", "new/c/0", ".zattrs", "x", "x/0.0"]
    keys += [key.removeprefix(f"data/{name}/") for key in before]
    for store, start in ((PoolStore(pool, f"data/{name}"), ""), (PoolStore(pool, "data"), name)):
        for key in keys:
            with pytest.raises(ConfigError, match=r"nothing was changed.*hpstore dataset rm") as e:
                asyncio.run(_CALLS[call](store, f"{start}/{key}".strip("/")))
            assert repr(name) in str(e.value)
        check_equal(store, data, start)
    assert {key: pool.get(key) for key in pool.list()} == before
    assert verify_dataset(pool, name).clean


@pytest.mark.parametrize(
    "place", ["data", "data/vision", "data/vision/train", "data/vision/train/ok"]
)
def test_no_mode_of_zarr_deletes_a_data_set(pool: hpstore.Pool, place: str) -> None:
    """Mode "w", overwrite, clear, del, over it, over its parents, over a field: refused before
    anything is deleted."""
    write_data_set(pool, "vision/train", FIELDS)
    pool.put("data/vision/beside", b"1")
    before = {key: pool.get(key) for key in pool.list()}
    store = PoolStore(pool, place)
    for attempt in (
        lambda: zarr.open_group(store, mode="w"),
        lambda: zarr.create_group(store, overwrite=True),
        lambda: zarr.create_array(store, shape=(1,), dtype="u1", overwrite=True),
        lambda: zarr.open(store, mode="w", shape=(1,), dtype="u1"),
        lambda: asyncio.run(store.clear()),
        lambda: asyncio.run(store.delete_dir("")),
    ):
        with pytest.raises(ConfigError, match="'vision/train', which zarr reads and does not"):
            attempt()
    assert {key: pool.get(key) for key in pool.list()} == before
    group = zarr.open_group(PoolStore(pool, "data/vision/train"))
    label = zarr.open_array(group.store, path="label")
    for attempt in (
        lambda: group.create_array("more", shape=(1,), dtype="u1"),
        lambda: group.update_attributes({"a": 1}),
        lambda: group.__delitem__("ok"),
        lambda: label.__setitem__(0, 1),
        lambda: label.resize((1,)),
    ):
        with pytest.raises(ConfigError, match="nothing was changed"):
            attempt()
    assert {key: pool.get(key) for key in pool.list()} == before


def test_a_data_set_that_is_being_written_is_not_deleted_under_its_writer(
    pool: hpstore.Pool,
) -> None:
    """Its objects are there, its manifest is not; nor are parts that wait to be published."""
    store = PoolStore(pool, "data")
    with DatasetWriter(pool, "train", WIDE, shard_bytes=64 * KIB, unit_bytes=64 * KIB) as writer:
        writer.write_batch({"wide": batch_of(53)["wide"]})
        key = pool.list("data/train/")[0]
        for attempt in (store.clear(), store.delete_dir("train")):
            with pytest.raises(ConfigError, match="'train', which is being written"):
                asyncio.run(attempt)
        with pytest.raises(ConfigError, match="'train', which is being written"):
            asyncio.run(store.set(key.removeprefix("data/"), VALUE))
        with pytest.raises(ConfigError, match="'train', which is being written"):
            zarr.open_group(PoolStore(pool, "data/train"), mode="w")
    assert verify_dataset(pool, "train").clean


# --- what is no data set --------------------------------------------------------------------


def _use_plain(store: PoolStore) -> None:
    """Make, write, read, replace and delete arrays."""
    root = zarr.open_group(store, mode="w", attributes={"made": "here"})
    root.create_array("deep/table", data=PLAIN, chunks=(4, 3))
    table = zarr.open_array(store, path="deep/table", mode="r+")
    table[2:5] = -1
    expected = PLAIN.copy()
    expected[2:5] = -1
    np.testing.assert_array_equal(table[:], expected)
    assert sorted(name for name, _ in root.members(max_depth=None)) == ["deep", "deep/table"]
    assert _names(store, "deep") == ["table", "zarr.json"]
    assert zarr.open_group(store, mode="r").attrs["made"] == "here"
    del root["deep"]
    assert "deep" not in root
    root = zarr.open_group(store, mode="w", zarr_format=2)
    assert _list(store) == [".zattrs", ".zgroup"]
    old = root.create_array("old", data=PLAIN, chunks=(5, 3))
    np.testing.assert_array_equal(old[:], PLAIN)
    assert sorted(root.array_keys()) == ["old"]


@pytest.mark.parametrize("place", ["data/plain", "data/plain/two", "data", "elsewhere"])
def test_plain_arrays_are_used_as_before_where_data_sets_could_be(
    pool: hpstore.Pool, place: str
) -> None:
    """v3 and v2, beside data sets that were there and are not any more."""
    if place != "data":
        write_data_set(pool, "train", WIDE)
    _use_plain(PoolStore(pool, place))


def test_chunks_of_plain_arrays_cost_no_further_look_ups(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `data/`, of an array that was opened; of any array elsewhere nothing costs one."""
    asked: list[str] = []
    get = pool.get

    def note(key: str, *rest: Any) -> bytes:
        asked.append(key)
        return get(key, *rest)

    monkeypatch.setattr(pool, "get", note)
    store = PoolStore(pool, "data/a")
    array = zarr.create_array(store, name="b", shape=(6, 6, 6), chunks=(2, 3, 2), dtype="u1")
    array[0, 0, 0] = 1
    asked.clear()
    array[:] = np.arange(216, dtype=np.uint8).reshape(6, 6, 6)
    assert np.asarray(array[:]).sum() == sum(range(216))
    assert asked == []
    zarr.open_array(store, path="b", mode="r")
    assert sorted(set(asked)) == ["data/a/b/manifest", "data/a/manifest"]
    asked.clear()
    _use_plain(PoolStore(pool, "elsewhere"))
    assert asked == []


def test_a_plain_array_may_follow_a_data_set_and_a_data_set_a_plain_array(
    pool: hpstore.Pool,
) -> None:
    """What is there when a store first looks counts: the store that had the data set open refuses
    to write in its place, as it would not read what it wrote."""
    write_data_set(pool, "train", WIDE)
    old, store = PoolStore(pool, "data"), PoolStore(pool, "data")
    assert "wide" in zarr.open_group(old, path="train")
    delete_dataset(pool, "train")
    for attempt in (old.set("train/zarr.json", VALUE), old.delete_dir("train")):
        with pytest.raises(ConfigError, match=r"'train'.*nothing was changed. Make another store"):
            asyncio.run(attempt)
    zarr.create_array(store, name="train", data=PLAIN, chunks=(5, 3))
    np.testing.assert_array_equal(zarr.open_array(store, path="train")[:], PLAIN)
    asyncio.run(store.delete_dir("train"))
    data = write_data_set(pool, "train", WIDE)
    check_equal(store, data, "train")
    for key in ("train/zarr.json", "train/c/0/0"):
        with pytest.raises(ConfigError, match="nothing was changed"):
            asyncio.run(store.set(key, VALUE))


def test_what_is_called_manifest_and_is_none_makes_no_data_set(pool: hpstore.Pool) -> None:
    """Other JSON, such as a corpus of tokens; damage is an error, not a plain array."""
    store = PoolStore(pool, "data/x")
    pool.put("data/x/manifest", b'{"kind": "other"}')
    _use_plain_beside(store)
    pool.put("data/x/manifest", b'{"kind": "dataset", "format": 1, "da')
    with pytest.raises(IntegrityError, match="data set 'x'"):
        zarr.open_array(store, path="table", mode="r")
    with pytest.raises(IntegrityError, match="data set 'x'"):
        asyncio.run(store.delete_dir(""))
    assert pool.exists("data/x/table/zarr.json")


def _use_plain_beside(store: PoolStore) -> None:
    zarr.create_array(store, name="table", data=PLAIN)
    np.testing.assert_array_equal(zarr.open_array(store, path="table", mode="r")[:], PLAIN)
    assert "manifest" in _list(store)
    asyncio.run(store.delete_dir("table"))
    zarr.create_array(store, name="table", data=PLAIN)
