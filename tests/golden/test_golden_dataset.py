"""Bytes of data set format 1: still read, still written the same. Added to, never regenerated."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.loaders import Dataset, DatasetWriter, Field, verify_dataset
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB

HERE = Path(__file__).parent / "dataset-v1"
# name -> options; the codecs' own output is not ours to pin: compressed ones are only read
WRITTEN: dict[str, dict[str, Any]] = {
    "rows": {"layout": "rows"},
    "columns": {"layout": "columns"},
    "shuffled": {"layout": "rows", "shuffle": True, "seed": 1},
}
FIELDS = {
    "image": Field("uint8", (2, 45)),
    "label": Field("int16"),
    "text": Field("str"),
    "sound": Field("float32", (None, 2)),
    "grid": Field("bfloat16", (33,)),
    "name": Field("bytes"),
}


def sample(number: int) -> dict[str, Any]:
    """Byte j of what number i holds is (31 i + 7 j) mod 256, cut to size."""

    def raw(nbytes: int) -> bytes:
        return bytes((31 * number + 7 * j) % 256 for j in range(nbytes))

    return {
        "image": np.frombuffer(raw(90), np.uint8).reshape(2, 45),
        "label": np.int16(3 * number - 5),
        "text": "ä" * (number % 5),
        "sound": np.arange(2 * (number % 4), dtype=np.float32).reshape(-1, 2) + number,
        "grid": np.frombuffer(raw(66), np.uint16),
        "name": raw(100 * (number % 7)),
    }


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Nonces are counted."""
    numbers = count(1)
    real = secrets.token_hex
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as made:
        monkeypatch.setattr(
            secrets, "token_hex", lambda n=32: f"{next(numbers):016x}" if n == 8 else real(n)
        )
        yield made


def write(pool: Pool, name: str) -> None:
    with DatasetWriter(
        pool,
        name,
        FIELDS,
        unit_bytes=4 * KIB,
        shard_bytes=16 * KIB,
        metadata={"note": "ä"},
        **WRITTEN[name],
    ) as writer:
        for number in range(40):
            writer.write(sample(number))


def objects(pool: Pool, name: str) -> dict[str, bytes]:
    return {key: pool.get(key) for key in pool.list(f"data/{name}/")}


def golden(name: str) -> dict[str, bytes]:
    """Objects by key, from one file: a line of JSON with keys and sizes, then their bytes."""
    head, _, rest = (HERE / f"{name}.objects").read_bytes().partition(b"\n")
    found, at = {}, 0
    for key, size in json.loads(head):
        found[key] = rest[at : at + size]
        at += size
    assert at == len(rest)
    return found


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_golden_data_sets_are_still_written(pool: Pool, name: str) -> None:
    """The same objects, byte by byte."""
    write(pool, name)
    found, wanted = objects(pool, name), golden(name)
    assert sorted(found) == sorted(wanted)
    digests = [{k: hashlib.sha256(v).hexdigest() for k, v in o.items()} for o in (found, wanted)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", [*sorted(WRITTEN), "lz4", "zstd", "blosc"])
def test_golden_data_sets_are_still_read(pool: Pool, name: str) -> None:
    """Every sample, in a pool of now; verify finds all checksums right."""
    for key, value in golden(name).items():
        pool.put(key, value)
    assert verify_dataset(pool, name).clean
    data = Dataset(pool, name)
    assert data.metadata == {"note": "ä"}
    order = data.written_as(np.arange(40))
    numbers = range(40) if order is None else order.tolist()
    for number, found in zip(numbers, data.__getitems__(range(40)), strict=True):
        for field, value in sample(number).items():
            got = found[field]
            if isinstance(value, str | bytes):
                assert got == value
            else:
                assert not isinstance(got, str | bytes)
                plain = got.view(torch.uint16) if field == "grid" else got
                assert np.array_equal(plain.numpy(), value)
