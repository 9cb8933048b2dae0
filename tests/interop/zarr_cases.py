"""Data sets of every kind of field, written to be read through zarr, and the comparison."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from zarr.abc.store import Store

import hpstore
from hpstore.loaders import Dataset, DatasetWriter, Field
from hpstore.loaders.zarr_views import dataset_store
from hpstore.units import KIB

ROOT = Path(__file__).resolve().parents[2]

ROWS = 53
FIELDS = {
    "image": Field("uint8", (3, 40)),
    "wide": Field("float32", (5000,)),
    "half": Field("bfloat16", (33,)),
    "wave": Field("complex64", (9,)),
    "label": Field("int64"),
    "box": Field("float16", (4,)),
    "ok": Field("bool"),
    "text": Field("str"),
    "points": Field("float64", (None, 2)),
}


def make_chunks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of each array, and records read a few at a time."""
    monkeypatch.setattr(dataset_store, "SHARD_ROWS", 16)
    monkeypatch.setattr(dataset_store, "SCALAR_ROWS", 20)
    monkeypatch.setattr(dataset_store, "BATCH_BYTES", 64 * KIB)


def batch_of(rows: int, seed: int = 0) -> dict[str, Any]:
    """Values of all FIELDS."""
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (rows, 3, 40), np.uint8),
        "wide": rng.standard_normal((rows, 5000), np.float32),
        "half": torch.from_numpy(rng.standard_normal((rows, 33))).to(torch.bfloat16),
        "wave": rng.standard_normal((rows, 18), np.float32).view(np.complex64),
        "label": np.arange(rows) * 3 - 7,
        "box": rng.standard_normal((rows, 4)).astype(np.float16),
        "ok": rng.integers(0, 2, rows).astype(bool),
        "text": [f"row {i}" * (i % 5) for i in range(rows)],
        "points": [rng.standard_normal((i % 4, 2)) for i in range(rows)],
    }


def write_data_set(
    pool: hpstore.Pool, name: str, fields: Mapping[str, Field], **options: Any
) -> Dataset:
    """A published data set of ROWS samples in several shards."""
    batch = batch_of(ROWS)
    options = {"shard_bytes": 64 * KIB, "unit_bytes": 64 * KIB, **options}
    with DatasetWriter(pool, name, fields, **options) as writer:
        writer.write_batch({field: batch[field] for field in fields})
    return Dataset(pool, name)


def raw_bytes(tensor: Any) -> bytes:
    """Of a tensor; bfloat16 as it is in memory."""
    plain = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return bytes(np.ascontiguousarray(plain.numpy()).tobytes())


def check_equal(store: Store, data: Dataset, path: str = "") -> None:
    """Every field of fixed size: all at once, one by one, in any order, as Dataset[i]."""
    root = zarr.open_group(store, path=path, mode="r")
    fixed = [name for name, field in data.fields.items() if not field.is_ragged]
    assert sorted(root.array_keys()) == sorted(fixed)
    samples = data.__getitems__(range(len(data)))
    order = np.random.default_rng(1).permutation(len(data))[:9]
    for name in fixed:
        array = root[name]
        assert isinstance(array, zarr.Array)
        assert array.shape == (len(data), *data.fields[name].inner_shape)
        expected = [raw_bytes(sample[name]) for sample in samples]
        assert np.asarray(array[:]).tobytes() == b"".join(expected)
        picked = np.asarray(array.oindex[np.sort(order)])
        assert [row.tobytes() for row in picked] == [expected[i] for i in np.sort(order)]
        assert np.asarray(array[int(order[0])]).tobytes() == expected[order[0]]


def run_python(code: str) -> None:
    """A program in a process of its own; it must succeed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)
