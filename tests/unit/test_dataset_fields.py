"""Fields and the values given for them: what is wrong is named, nothing is converted in silence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from hpstore.errors import ConfigError, FormatTooNew, IntegrityError, InvalidKey
from hpstore.format.keys import MAX_KEY_BYTES
from hpstore.format.records import seal
from hpstore.loaders import Field
from hpstore.loaders.dataset.dataset_manifest import (
    DatasetManifest,
    DatasetPart,
    StreamShards,
    check_dataset_name,
    check_new_name,
    column_key,
    journal_key,
    manifest_key,
    nonce_of,
    part_key,
    shard_key,
    side_key,
)
from hpstore.loaders.dataset.fields import (
    FieldKind,
    check_field_name,
    check_fields,
    check_names,
    fixed_rows,
    fixed_value,
    ragged_rows,
    ragged_value,
)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        (Field("int64"), FieldKind.SCALAR),
        (Field("uint8", (64,)), FieldKind.SCALAR),
        (Field("uint8", (65,)), FieldKind.FIXED),
        (Field("bfloat16", (4, 8)), FieldKind.SCALAR),
        (Field("bfloat16", (33,)), FieldKind.FIXED),
        (Field("float32", (None,)), FieldKind.RAGGED),
        (Field("float32", (None, 80)), FieldKind.RAGGED),
        (Field("bytes"), FieldKind.RAGGED),
        (Field("str"), FieldKind.RAGGED),
    ],
)
def test_up_to_64_bytes_are_a_scalar(field: Field, kind: FieldKind) -> None:
    """Larger ones are in the record; bytes, str and a None first dimension are ragged."""
    assert field.kind is kind
    assert Field.from_json(json.loads(json.dumps(field.to_json()))) == field


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        ("flaot32", (), "did you mean 'float32'"),
        ("object", (), "not known"),
        ("bytes", (3,), "no shape"),
        ("uint8", (3, None), "only the first"),
        ("uint8", (0,), "above 0"),
        ("uint8", (-1, 2), "above 0"),
        ("uint8", (True,), "whole numbers"),
        ("uint8", (2.0,), "whole numbers"),
    ],
)
def test_a_wrong_field_says_what_is_wrong(dtype: str, shape: Any, says: str) -> None:
    """At construction."""
    with pytest.raises(ConfigError, match=says):
        Field(dtype, shape)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0", "a\n", "x" * 256, 3, None])
def test_names_that_cannot_be_a_field_are_refused(name: object) -> None:
    """They would make no key, no column name, no zarr array."""
    with pytest.raises(ConfigError, match="cannot name a field"):
        check_field_name(name)


def test_a_data_set_has_fields_and_they_are_fields() -> None:
    """No fields, or a dtype instead of a Field."""
    with pytest.raises(ConfigError, match="at least one"):
        check_fields({})
    with pytest.raises(ConfigError, match=r"'x' is a str, not a Field"):
        check_fields({"x": "uint8"})  # type: ignore[dict-item]  # the mistake


def test_a_missing_and_an_extra_field_are_named() -> None:
    """With the sample they were missed in."""
    fields = {"a": Field("int64"), "b": Field("bytes")}
    with pytest.raises(ConfigError, match=r"sample 7 lacks field 'b'"):
        check_names({"a": 1}, fields, "sample 7")
    with pytest.raises(ConfigError, match=r"'c', which is no field"):
        check_names({"a": 1, "b": b"", "c": 2}, fields, "sample 7")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (Field("uint8", (2, 3)), np.zeros((2, 4), np.uint8), r"shape \(2, 4\), the field has"),
        (Field("uint8", (2, 3)), np.zeros((2, 3), np.int8), "dtype int8, the field has uint8"),
        (Field("float32", (2,)), [1.0, "x"], "is a list of str"),
        (Field("float32", (2,)), np.zeros(2, np.float64), "dtype float64"),
        (Field("float32", (2,)), torch.zeros(2, dtype=torch.bfloat16), "dtype bfloat16"),
        (Field("bfloat16", (2,)), torch.zeros(2), "dtype float32, the field has bfloat16"),
        (Field("uint8", (2,)), torch.zeros(2, dtype=torch.uint8, device="meta"), "on meta"),
        (Field("int64"), 1.5, "is 1.5, the field has int64"),
        (Field("int64"), True, "is True, the field has int64"),
        (Field("bool"), 1, "is 1, the field has bool"),
        (Field("uint8"), 256, "does not fit uint8"),
        (Field("uint8"), -1, "does not fit uint8"),
        (Field("float16"), 70000.0, "is 70000.0, which is infinite as float16"),
        (Field("float32"), -1e39, "infinite as float32"),
        (Field("bfloat16"), 3.4e38, "infinite as bfloat16"),
        (Field("complex64"), 1e39j, "infinite as complex64"),
        (Field("float32"), 10**400, "does not fit float32"),
        (Field("bfloat16"), 10**400, "does not fit bfloat16"),
        (Field("int64"), None, "is a NoneType"),
        (Field("float32"), 1j, "the field has float32"),
        (Field("int64"), np.int32(3), "dtype int32"),
    ],
)
def test_a_wrong_value_is_named(field: Field, value: object, says: str) -> None:
    """Field, sample, what it has and what it should have."""
    with pytest.raises(ConfigError, match=says) as caught:
        fixed_value("x", field, value, "sample 3")
    assert "sample 3: field 'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        (Field("int64"), 3, np.array(3, np.int64)),
        (Field("float32"), 3, np.array(3, np.float32)),
        (Field("float32"), 0.5, np.array(0.5, np.float32)),
        (Field("float16"), -math.inf, np.array(-math.inf, np.float16)),
        (Field("bfloat16"), math.inf, np.array(0x7F80, np.uint16)),
        (Field("complex64"), 0.5, np.array(0.5, np.complex64)),
        (Field("bool"), True, np.array(True)),
        (Field("bfloat16"), 1.5, np.array(0x3FC0, np.uint16)),
        (Field("int16"), torch.tensor(-2, dtype=torch.int16), np.array(-2, np.int16)),
        (
            Field("bfloat16", (2,)),
            torch.tensor([1.5, -1.0], dtype=torch.bfloat16),
            np.array([0x3FC0, 0xBF80], np.uint16),
        ),
        (Field("bfloat16", (1,)), np.array([7], np.uint16), np.array([7], np.uint16)),
        (Field("int32", (2,)), np.array([1, 2], ">i4"), np.array([1, 2], np.int32)),
        (Field("float32", (2,)), torch.ones(2, requires_grad=True), np.ones(2, np.float32)),
    ],
)
def test_good_values_are_taken(field: Field, value: object, wanted: Any) -> None:
    """Python numbers for scalars, tensors, other byte orders."""
    found = fixed_value("x", field, value, "sample 0")
    assert np.array_equal(found, wanted)
    assert found.dtype.newbyteorder("<") == field.storage


def test_a_batch_is_checked_row_by_row_or_as_an_array() -> None:
    """Arrays need the rows in front; lists are taken value by value."""
    field = Field("uint8", (2, 3))
    assert fixed_rows("x", field, np.zeros((5, 2, 3), np.uint8), "b").shape == (5, 2, 3)
    assert fixed_rows("x", field, [np.zeros((2, 3), np.uint8)] * 4, "b").shape == (4, 2, 3)
    assert fixed_rows("x", field, [], "b").shape == (0, 2, 3)
    with pytest.raises(ConfigError, match=r"b: field 'x' has shape \(5, 3\)"):
        fixed_rows("x", field, np.zeros((5, 3), np.uint8), "b")
    with pytest.raises(ConfigError, match=r"b: field 'x' has shape \(\)"):
        fixed_rows("x", Field("int64"), np.array(3), "b")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (Field("str"), b"x", "is a bytes, not a str"),
        (Field("str"), "\ud800", "not valid Unicode"),
        (Field("bytes"), "x", "is a str, not bytes"),
        (Field("bytes"), 7, "is a int, not bytes"),
        (Field("bytes"), np.zeros(3, np.int32), "array of i, not bytes"),
        (Field("bytes"), torch.zeros(3, dtype=torch.uint8), "is a Tensor, not bytes"),
        (Field("float32", (None, 3)), np.zeros((2, 4), np.float32), r"shape \(2, 4\)"),
        (Field("float32", (None, 3)), np.zeros(3, np.float32), r"shape \(3,\)"),
        (Field("float32", (None,)), np.zeros(3), "dtype float64"),
        (Field("float32", (None,)), 3.0, "is a float"),
    ],
)
def test_a_wrong_ragged_value_is_named(field: Field, value: object, says: str) -> None:
    """Field, sample, what is wrong."""
    with pytest.raises(ConfigError, match=says) as caught:
        ragged_value("x", field, value, "sample 3")
    assert "sample 3: field 'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        (Field("str"), "é", "é".encode()),
        (Field("str"), "", b""),
        (Field("bytes"), b"", b""),
        (Field("bytes"), bytearray(b"ab"), b"ab"),
        (Field("bytes"), memoryview(b"abcd")[::2], b"ac"),
        (Field("bytes"), np.array([1, 2], np.uint8), b"\1\2"),
        (Field("uint8", (None, 2)), np.array([[1, 2], [3, 4]], np.uint8).T, b"\1\3\2\4"),
        (Field("int16", (None,)), np.array([1], ">i2"), b"\1\0"),
        (Field("float32", (None, 3)), np.zeros((0, 3), np.float32), b""),
    ],
)
def test_ragged_values_become_their_bytes(field: Field, value: object, wanted: bytes) -> None:
    """Little-endian, contiguous."""
    assert ragged_value("x", field, value, "sample 0").tobytes() == wanted


def test_a_ragged_batch_is_a_sequence() -> None:
    """A list, or an array with one value a row; one value of bytes is a mistake."""
    field = Field("uint8", (None,))
    rows = ragged_rows("x", field, np.array([[1, 2], [3, 4]], np.uint8), "b")
    assert [row.tobytes() for row in rows] == [b"\1\2", b"\3\4"]
    with pytest.raises(ConfigError, match="one value a row"):
        ragged_rows("x", Field("bytes"), b"abc", "b")


@pytest.mark.parametrize("name", ["parts", "a/manifest", "a/0123456789abcdef", "parts/x"])
def test_reserved_names_of_data_sets_are_refused(name: str) -> None:
    """They would be taken for objects of another data set."""
    with pytest.raises(ConfigError, match="reserved"):
        check_dataset_name(name)


def test_a_data_set_name_is_a_key() -> None:
    """The rules of keys hold."""
    with pytest.raises(InvalidKey):
        check_dataset_name("a//b")
    assert check_dataset_name("a/b") == "a/b"


@pytest.mark.parametrize("length", [950, 970, 990, 1007])
def test_a_new_name_leaves_room_for_all_keys_of_the_data_set(length: int) -> None:
    """Else the writer finds out at its first shard, after hours. To be read it need not."""
    name = "/".join(["n" * 100] * (length // 101)) + "/" + "n" * (length % 101 or 1)
    keys = [
        side_key(name, "0" * 16, 12, 123456),
        column_key(name, "0" * 16, "123", 123456),
        part_key(name, (1000, 1000)),
        journal_key(name),
    ]
    assert check_dataset_name(name) == name
    if max(map(len, keys)) > MAX_KEY_BYTES:
        with pytest.raises(InvalidKey, match="at most 1024"):
            check_new_name(name)
    elif length < 960:
        assert check_new_name(name) == name


def test_keys_tell_whose_objects_they_name() -> None:
    """Objects of a nonce, and nothing of a data set below the name."""
    nonce = "00112233445566ff"
    assert nonce_of("a", shard_key("a", nonce, 0, 3)) == nonce
    assert nonce_of("a", manifest_key("a")) is None
    assert nonce_of("a", part_key("a", (0, 2))) is None
    assert nonce_of("a", shard_key("a/b", nonce, 0, 3)) is None


SHARDS = StreamShards(unit_bytes=64 * 1024, rows=(3,), payload=(300,), side=("ee",), pages="dd")
MANIFEST = DatasetManifest(
    fields={"z": Field("int64"), "a": Field("bytes")},
    layout="rows",
    data=2,
    compression="",
    shuffle_seed=None,
    metadata={"k": [1, None]},
    content="00",
    parts=(
        DatasetPart(
            nonce="n", rows=3, streams=(SHARDS,), cuts=(3,), columns={"0": ("ff",)}, content="00"
        ),
    ),
)


def test_a_manifest_survives_its_bytes_with_the_order_of_its_fields() -> None:
    """decode is the inverse of encode."""
    found = DatasetManifest.decode(MANIFEST.encode(), where="x")
    assert found == MANIFEST
    assert list(found.fields) == ["z", "a"]
    assert found.fingerprint == MANIFEST.fingerprint


def test_what_is_no_manifest_is_refused() -> None:
    """Damage, a corpus of tokens, another kind, a newer format, numbers that do not add up."""
    data = MANIFEST.encode()
    with pytest.raises(IntegrityError, match="digest"):
        DatasetManifest.decode(data.replace(b'"rows"', b'"rowz"', 1), where="x")
    with pytest.raises(IntegrityError, match="not a manifest"):
        DatasetManifest.decode(b"\xff", where="x")
    with pytest.raises(ConfigError, match="earlier hpstore"):
        DatasetManifest.decode(b'{"format": 1, "shards": [3]}', where="x")
    with pytest.raises(ConfigError, match="kind 'other'"):
        DatasetManifest.decode(seal({"kind": "other", "format": 1}), where="x")
    with pytest.raises(IntegrityError, match="digest"):
        DatasetManifest.decode(b'{"kind": "dataset"}', where="x")
    with pytest.raises(FormatTooNew):
        DatasetManifest.decode(seal({"kind": "dataset", "format": 3}), where="x")
    body = json.loads(data)
    del body["digest"]
    with pytest.raises(IntegrityError, match="fingerprint"):
        DatasetManifest.decode(seal({**body, "rows": 4}), where="x")
    with pytest.raises(IntegrityError, match="malformed"):
        DatasetManifest.decode(seal({**body, "parts": [3]}), where="x")
