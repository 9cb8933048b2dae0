"""Data sets seen through zarr, and zarr arrays seen as data sets."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.storage import LocalStore, MemoryStore

import hpstore
from hpstore.errors import ConfigError, IntegrityError, ObjectNotFound, VersionConflict
from hpstore.interop.zarr import PoolStore
from hpstore.loaders import DatasetWriter
from hpstore.loaders.zarr_views.array_dataset import ZarrDataset
from hpstore.loaders.zarr_views.dataset_store import DatasetStore
from hpstore.testing.memory_pool import Harness
from tests.interop.zarr_cases import (
    FIELDS,
    ROWS,
    batch_of,
    check_equal,
    make_chunks_small,
    write_data_set,
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("ragged", [False, True])
def test_zarr_reads_what_the_data_set_holds_byte_for_byte(
    pool: hpstore.Pool, layout: str, ragged: bool, compression: str | None
) -> None:
    """All dtypes, several shards, records of one size and of many, compressed and not; through the
    data set's own store and the pool's, with the fields of fixed size and no more."""
    fields = {name: f for name, f in FIELDS.items() if ragged or not f.is_ragged}
    data = write_data_set(pool, "train", fields, layout=layout, compression=compression)
    check_equal(DatasetStore(pool, "train"), data)
    check_equal(PoolStore(pool, "data/train"), data)


def test_zarr_reads_the_same_with_m_devices_missing(harness: Harness, pool: hpstore.Pool) -> None:
    """Records are decoded below it."""
    data = write_data_set(pool, "train", FIELDS)
    harness.lose(harness.urls[:1])
    check_equal(DatasetStore(pool, "train"), data)


def test_a_data_set_is_a_read_only_group_with_its_facts(pool: hpstore.Pool) -> None:
    """Name, fingerprint and metadata are attributes; nothing can be set or deleted."""
    data = write_data_set(pool, "train", FIELDS, metadata={"source": "here"})
    store = DatasetStore(pool, "train")
    root = zarr.open(store)
    assert isinstance(root, zarr.Group)
    assert root.attrs["hpstore"] == {
        "name": "train",
        "fingerprint": data.fingerprint,
        "metadata": {"source": "here"},
    }
    assert root["half"].attrs["hpstore_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="read-only"):
        root.create_array("more", shape=(1,), dtype="u1")
    with pytest.raises(ConfigError, match="DatasetWriter"):
        store.with_read_only(False)
    before = pool.list()
    for call in (store.delete("label/c/0"), store.delete_dir("label")):
        with pytest.raises((ValueError, NotImplementedError)):
            asyncio.run(call)
    assert pool.list() == before


def test_keys_that_mean_no_chunk_are_absent(pool: hpstore.Pool) -> None:
    """Listed keys exist with the size that a read gives; others do not."""
    write_data_set(pool, "train", {name: FIELDS[name] for name in ("wide", "label")})
    store = DatasetStore(pool, "train")

    async def main() -> None:
        keys = [key async for key in store.list()]
        assert "wide/c/3/0" in keys
        assert "label/c/2" in keys
        assert [name async for name in store.list_dir("")] == ["label", "wide", "zarr.json"]
        prototype = zarr.core.buffer.default_buffer_prototype()
        for key in keys:
            found = await store.get(key, prototype)
            assert found is not None
            assert len(found) == await store.getsize(key)
        for key in ("wide/c/4/0", "wide/c/0", "wide/c/00/0", "wide/c/-1/0", "x/zarr.json", "wide"):
            assert await store.get(key, prototype) is None
            assert not await store.exists(key)

    asyncio.run(main())


def test_a_data_set_of_no_samples_is_an_empty_array(pool: hpstore.Pool) -> None:
    """Shapes are there, rows are not."""
    fields = {name: FIELDS[name] for name in ("wide", "label")}
    with DatasetWriter(pool, "none", fields):
        pass
    root = zarr.open_group(DatasetStore(pool, "none"), mode="r")
    assert {name: a.shape for name, a in root.arrays()} == {"wide": (0, 5000), "label": (0,)}
    assert np.asarray(root["wide"][:]).shape == (0, 5000)  # type: ignore[index]


def test_a_data_set_that_is_replaced_is_an_error_not_fill_values(pool: hpstore.Pool) -> None:
    """zarr takes FileNotFoundError for a chunk that was never written: this is another one."""
    write_data_set(pool, "train", {"wide": FIELDS["wide"]})
    store = DatasetStore(pool, "train")
    array = zarr.open_array(store, path="wide", mode="r")
    copy = pickle.dumps(store)
    old = [key for key in pool.list("data/train/") if "/stream-" in key]
    with DatasetWriter(pool, "train", {"wide": FIELDS["wide"]}, overwrite=True) as writer:
        writer.write({"wide": np.zeros(5000, np.float32)})
    for key in old:
        with contextlib.suppress(ObjectNotFound):  # publishing has removed it
            pool.delete(key)
    with pytest.raises(VersionConflict, match="replaced or deleted"):
        array[:]
    with pytest.raises(ConfigError, match="was replaced"):
        zarr.open_group(pickle.loads(copy), mode="r")


def test_a_record_that_does_not_match_its_checksum_is_an_error(
    pool: hpstore.Pool,
) -> None:
    """zarr's own checks stop at the index: the view checks rows."""
    data = write_data_set(pool, "train", {"wide": FIELDS["wide"]})
    key = data.shard_key(data.streams[0], 0)
    raw = bytearray(pool.get(key))
    raw[100] ^= 1
    pool.put(key, bytes(raw))
    array = zarr.open_array(DatasetStore(pool, "train"), path="wide", mode="r")
    with pytest.raises(IntegrityError, match="sample 0 "):
        array[0]


# --- arrays of others -----------------------------------------------------------------------


@pytest.fixture
def group(pool: hpstore.Pool) -> zarr.Group:
    """Arrays as others write them, in a pool: sharded, compressed, big-endian."""
    batch = batch_of(ROWS)
    root = zarr.create_group(PoolStore(pool, "foreign"))
    root.create_array("image", data=batch["image"], chunks=(4, 3, 40), shards=(16, 3, 40))
    root.create_array("label", data=batch["label"].astype(">i4"), chunks=(10,))
    return root


def test_plain_arrays_are_a_data_set(group: zarr.Group) -> None:
    """Sample i is row i of each; in any order, with repeats, from the end, through a loader."""
    data, batch = ZarrDataset(group), batch_of(ROWS)
    assert (len(data), data.fields) == (ROWS, ("image", "label"))
    wanted = [5, 52, 5, -1, 0, 17]
    for index, sample in zip(wanted, data.__getitems__(wanted), strict=True):
        assert list(sample) == ["image", "label"]
        np.testing.assert_array_equal(np.asarray(sample["image"]), batch["image"][index])
        assert sample["label"] == batch["label"][index]
    assert data[52]["label"].dtype is torch.int32
    loader = torch.utils.data.DataLoader(data, batch_size=10)
    labels = torch.cat([found["label"] for found in loader])
    np.testing.assert_array_equal(labels.numpy(), batch["label"])


def test_a_batch_is_one_selection_of_each_array(
    group: zarr.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that holds several of the samples is read once a batch."""
    data = ZarrDataset(group, fields=["label"])
    read: list[str] = []
    store = type(data.arrays["label"].store)
    get = store.get

    async def note(self: Any, key: str, *rest: Any, **named: Any) -> Any:
        read.append(key)
        return await get(self, key, *rest, **named)

    monkeypatch.setattr(store, "get", note)
    data.__getitems__([9, 3, 21, 0, 25, 3])
    assert sorted(read) == ["label/c/0", "label/c/2"]


def test_plain_arrays_travel_to_other_processes(pool: hpstore.Pool, group: zarr.Group) -> None:
    """The copy reads the same and has the same fingerprint; other shapes have another."""
    data = ZarrDataset(group)
    copy = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(np.asarray(copy[7]["image"]), np.asarray(data[7]["image"]))
    assert copy.fingerprint == data.fingerprint != ZarrDataset(group, fields=["label"]).fingerprint


def test_numbers_of_the_other_byte_order_are_turned() -> None:
    """zarr 2 arrays come in the order that they were written in, which torch does not take."""
    made = zarr.create_array(MemoryStore(), data=np.arange(5, dtype=">i4"), zarr_format=2)
    assert [int(sample["n"]) for sample in ZarrDataset({"n": made}).__getitems__(range(5))] == [
        0,
        1,
        2,
        3,
        4,
    ]


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_text_rows_are_str(tmp_path: Path) -> None:
    """Of any width and of fixed width, from a store that is no pool."""
    root = zarr.create_group(LocalStore(tmp_path / "a"))
    words = ["", "one", "zwölf"]
    for name, dtype in (("any", "str"), ("fixed", "U5")):
        root.create_array(name, shape=(3,), dtype=dtype, chunks=(2,))[:] = np.array(words)
    data = ZarrDataset(root)
    assert [sample["any"] for sample in data.__getitems__(range(3))] == words
    assert [sample["fixed"] for sample in data.__getitems__(range(3))] == words


def test_arrays_that_cannot_be_samples_are_refused(group: zarr.Group) -> None:
    """By name, before anything is read."""
    memory = MemoryStore()
    short = zarr.create_array(memory, name="short", shape=(3,), dtype="u1")
    point = zarr.create_array(memory, name="point", shape=(), dtype="u1")
    days = zarr.create_array(memory, name="days", shape=(3,), dtype="u1")
    image = group["image"]
    assert isinstance(image, zarr.Array)
    with pytest.raises(ConfigError, match=r"differ in their first axis.*'b': 3"):
        ZarrDataset({"a": image, "b": short})
    with pytest.raises(ConfigError, match="'point' has no axis"):
        ZarrDataset({"point": point})
    with pytest.raises(ConfigError, match="no zarr array 'no'"):
        ZarrDataset({"days": days}, fields=["no"])
    with pytest.raises(ConfigError, match="not a zarr array"):
        ZarrDataset({"n": np.zeros(3)})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="at least one"):
        ZarrDataset({})
    with pytest.raises(IndexError, match="sample 53 "):
        ZarrDataset(group)[ROWS]
