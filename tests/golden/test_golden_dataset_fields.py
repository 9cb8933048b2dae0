"""Bytes of dataset format 2, with fields of values: still read, still written the same."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.errors import FormatTooNew, IntegrityError
from hpstore.format.records import seal, unseal
from hpstore.loaders import Dataset, DatasetWriter, Field, verify_dataset
from hpstore.loaders.dataset.dataset_manifest import DatasetManifest
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB

FILE = Path(__file__).parent / "dataset-v2" / "values.objects"
FIELDS = {
    "age": Field("int16", optional=True),
    "box": Field("float32", (20,), optional=True),
    "meta": Field("json", optional=True),
    "chat": Field("chat"),
    "tags": Field("str", (None,)),
    "note": Field("str", optional=True),
    "image": Field("image"),
    "sound": Field("audio", optional=True, media_type="audio/flac"),
    "film": Field("video"),
}


def sample(number: int) -> dict[str, Any]:
    """By its number: of five in a row each optional field has two that are None."""

    def some(value: object, place: int) -> Any:
        return None if (number + place) % 5 < 2 else value

    return {
        "age": some(np.int16(3 * number - 5), 0),
        "box": some(np.arange(20, dtype=np.float32) + number, 1),
        "meta": some({"né": [number, -0.0, 2**70, None], "": {}}, 2),
        "chat": [
            {"role": "user", "content": "ä" * number},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        ],
        "tags": ["a", "", "é\n"][: number % 4],
        "note": some("x" * number, 3),
        "image": b"GIF89a" + bytes(number),
        "sound": some(b"fLaC" + bytes(number), 4),
        "film": b"\0\0\0\x20ftypisom" + bytes(3 * number),
    }


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Nonces are counted."""
    numbers = count(1)
    real = secrets.token_hex
    with Harness(tmp_path, data=2, parity=1, devices=3).open() as made:
        monkeypatch.setattr(
            secrets, "token_hex", lambda n=32: f"{next(numbers):016x}" if n == 8 else real(n)
        )
        yield made


def objects(pool: Pool) -> dict[str, bytes]:
    return {key: pool.get(key) for key in pool.list("data/values/")}


def golden() -> dict[str, bytes]:
    """As those of format 1: a line of JSON with keys and sizes, then their bytes."""
    head, _, rest = FILE.read_bytes().partition(b"\n")
    found, at = {}, 0
    for key, size in json.loads(head):
        found[key] = rest[at : at + size]
        at += size
    assert at == len(rest)
    return found


def test_golden_values_are_still_written(pool: Pool) -> None:
    """The same objects, byte by byte."""
    sizes: dict[str, Any] = {"unit_bytes": 4 * KIB, "shard_bytes": 16 * KIB}
    metadata = {"classes": {"age": ["no", "yes"]}}
    with DatasetWriter(pool, "values", FIELDS, layout="rows", metadata=metadata, **sizes) as writer:
        for number in range(40):
            writer.write(sample(number))
    assert objects(pool) == golden()


def test_golden_values_are_still_read(pool: Pool) -> None:
    """Every sample; verify finds all checksums right."""
    for key, value in golden().items():
        pool.put(key, value)
    assert verify_dataset(pool, "values").clean
    data = Dataset(pool, "values")
    assert dict(data.fields) == FIELDS
    assert data.classes == {"age": ["no", "yes"]}
    for number, found in enumerate(data.__getitems__(range(40))):
        for name, value in sample(number).items():
            got = found[name]
            if isinstance(got, torch.Tensor):
                assert np.array_equal(got.numpy(), value)
            else:
                assert repr(got) == repr(value)


def test_an_older_hpstore_says_that_the_format_is_too_new() -> None:
    """It reads up to 1; a manifest with such fields says 2, others say 1 as ever."""
    manifest = golden()["data/values/manifest"]
    with pytest.raises(FormatTooNew, match="format 2, this hpstore reads up to 1"):
        unseal(manifest, where="x")
    body = unseal(manifest, where="x", newest=2)
    assert DatasetManifest.decode(seal(body), where="x").format == 2
    with pytest.raises(IntegrityError, match="format 1 has no such fields"):
        DatasetManifest.decode(seal({**body, "format": 1}), where="x")
    with pytest.raises(FormatTooNew):
        DatasetManifest.decode(seal({**body, "format": 3}), where="x")


@pytest.mark.parametrize(
    "field",
    [
        ["age", "int16", [], {"optional": 1}],
        ["age", "int16", [], {"size": 3}],
        ["age", "int16", [], {"media_type": "audio/flac"}],
        ["age", "int16", [], []],
        ["age", "int16", [], {"optional": True}, 3],
        ["age", "list", []],
        ["age", "json", [None]],
        ["age", "str", [3]],
    ],
)
def test_hostile_fields_are_malformed(field: list[Any]) -> None:
    body = unseal(golden()["data/values/manifest"], where="x", newest=2)
    fields: Any = body["fields"]
    with pytest.raises(IntegrityError, match="malformed"):
        DatasetManifest.decode(seal({**body, "fields": [field, *fields[1:]]}), where="x")


def test_a_mask_may_not_be_a_field_s_name() -> None:
    body = unseal(golden()["data/values/manifest"], where="x", newest=2)
    fields: Any = body["fields"]
    with pytest.raises(IntegrityError, match="has the name of the mask"):
        DatasetManifest.decode(
            seal({**body, "fields": [*fields, ["age_mask", "bool", []]]}), where="x"
        )
