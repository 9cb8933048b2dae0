"""A shard object as it lies in the pool is one shard of a zarr v3 array, read by zarr-python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from hpstore.loaders import Dataset, DatasetWriter, Field
from hpstore.loaders.dataset.record_stream import Stream
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.integration.data_sets import make_pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def zarr_metadata(rows: int, field: Field) -> bytes:
    """zarr.json of an array whose only chunk is the shard."""
    inner: dict[str, object] = {"name": "bytes", "configuration": {"endian": "little"}}
    return json.dumps(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [rows, *field.inner_shape],
            "data_type": field.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [rows, *field.inner_shape]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [1, *field.inner_shape],
                        "codecs": [inner],
                        "index_codecs": [inner, {"name": "crc32c"}],
                        "index_location": "end",
                    },
                }
            ],
        }
    ).encode()


def as_zarr(pool: Pool, data: Dataset, stream: Stream, shard: int, name: str) -> zarr.Array[Any]:
    """The object's bytes, unchanged, under the key of the array's only chunk."""
    rows, field = int(stream.rows[shard]), data.fields[name]
    chunk = "/".join(["c", *(["0"] * (1 + len(field.inner_shape)))])
    store = MemoryStore()
    to_buffer = default_buffer_prototype().buffer.from_bytes

    async def fill() -> None:
        await store.set("zarr.json", to_buffer(zarr_metadata(rows, field)))
        await store.set(chunk, to_buffer(pool.get(data.shard_key(stream, shard))))

    asyncio.run(fill())
    return zarr.open_array(store, mode="r")


@pytest.mark.parametrize(
    "field", [Field("uint8", (3, 20, 20)), Field("float32", (4500,)), Field("int16", (17, 3))]
)
def test_every_shard_of_a_fixed_field_is_a_zarr_shard(pool: Pool, field: Field) -> None:
    """Packed, page-padded and 4 KiB-aligned records, the last shard too, byte for byte."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (90, *field.inner_shape)).astype(field.storage)
    with DatasetWriter(
        pool, "a", {"x": field, "y": Field("int8")}, unit_bytes=64 * KIB, shard_bytes=400 * KIB
    ) as writer:
        writer.write_batch({"x": values, "y": np.zeros(90, np.int8)})
    data = Dataset(pool, "a")
    stream = data.streams[0]
    for shard in range(stream.shard_count):
        first, last = stream.row_starts[shard : shard + 2]
        array = as_zarr(pool, data, stream, shard, "x")
        assert np.array_equal(array[:], values[first:last])
        assert np.array_equal(array[int(last - first) - 1], values[last - 1])


@pytest.mark.parametrize("ragged", [False, True])
def test_the_last_fixed_field_of_several_is_one_too(pool: Pool, ragged: bool) -> None:
    """Rows of two fixed fields, with and without a ragged one between them."""
    fields = {"a": Field("uint8", (300,)), "b": Field("float64", (50,))}
    batch: dict[str, Any] = {
        "a": np.full((200, 300), 7, np.uint8),
        "b": np.arange(10_000.0).reshape(200, 50),
    }
    if ragged:
        fields["r"] = Field("bytes")
        batch["r"] = [b"x" * (n % 50) for n in range(200)]
    with DatasetWriter(pool, "a", fields, unit_bytes=16 * KIB, shard_bytes=50 * KIB) as writer:
        writer.write_batch(batch)
    data = Dataset(pool, "a")
    stream = data.streams[0]
    assert stream.shard_count > 1
    found = [as_zarr(pool, data, stream, shard, "b")[:] for shard in range(stream.shard_count)]
    assert np.array_equal(np.concatenate(found), batch["b"])
