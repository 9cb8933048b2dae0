"""A column's header and table: what was written is read, what was touched is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from hpstore.errors import ConfigError, FormatTooNew, IntegrityError
from hpstore.format.checksum import digest128
from hpstore.format.column_header import (
    FORMAT,
    HEADER_BYTES,
    KEYED_FORMAT,
    MAX_METADATA_BYTES,
    ColumnHeader,
    decode_header,
    decode_table,
    encode_header,
    encode_metadata,
    encode_table,
)
from hpstore.format.geometry import Code, Geometry
from hpstore.format.keys import Kind, Version
from hpstore.units import MIB

HEADER = ColumnHeader(
    pool_id="0123456789abcdef" * 2,
    key="runs/gpt/ä-1",
    version=Version(1_700_000_000_000, 0xDEADBEEF, 1),
    kind=Kind.COLUMN,
    column=5,
    geometry=Geometry(data=4, parity=2, unit_bytes=MIB, size=50_000_000),
    devices=tuple(f"{i:032x}" for i in range(6)),
    generation=3,
    created_ms=1_700_000_000_001,
    metadata={"step": 100, "note": "ü", "nested": {"a": [1, 2.5, None, True]}},
)
PAGE = encode_header(HEADER)
JSON_AT = 16


def redigest(page: bytes) -> bytes:
    """A page with a right digest, whatever else is wrong with it."""
    return page[:4080] + digest128(page[:4080])


def with_body(**changes: object) -> bytes:
    """HEADER's page with fields of its JSON changed or removed (None), digest and length right."""
    (length,) = struct.unpack_from("<I", PAGE, 12)
    body = json.loads(PAGE[JSON_AT : JSON_AT + length])
    for name, value in changes.items():
        if value is None:
            del body[name]
        else:
            body[name] = value
    text = json.dumps(body).encode()
    page = struct.pack("<8sII", b"HPSTCOL1", FORMAT, len(text)) + text
    return redigest(page.ljust(4080, b"\0") + bytes(16))


def test_a_header_is_one_page_and_reads_back() -> None:
    """Every field, with Unicode and nested metadata."""
    assert len(PAGE) == HEADER_BYTES
    assert decode_header(PAGE, where="x") == HEADER
    assert decode_header(memoryview(PAGE + b"units"), where="x") == HEADER


def test_a_copy_and_a_tombstone_read_back() -> None:
    """Objects of size 0 and of one data column."""
    empty = Geometry(data=1, parity=2, unit_bytes=4096, size=0, code=Code.COPIES)
    for kind in (Kind.COPY, Kind.TOMBSTONE):
        header = replace(HEADER, kind=kind, geometry=empty, column=2, devices=(), metadata={})
        assert decode_header(encode_header(header), where="x") == header
        assert header.file_bytes == 2 * 4096


def test_header_says_where_the_table_is() -> None:
    """Units follow the page, the table follows the units; all borders are multiples of 4 KiB."""
    geometry = HEADER.geometry
    assert HEADER.table_offset == HEADER_BYTES + geometry.column_bytes
    assert HEADER.table_bytes >= geometry.block_count * 8 + 16
    assert HEADER.table_bytes % 4096 == HEADER.file_bytes % 4096 == 0
    assert HEADER.name.column == 5
    assert (HEADER.name.data, HEADER.name.parity) == (4, 2)


@pytest.mark.parametrize("length", [0, 1, 8, 15, 16, 100, 4080, 4095])
def test_a_truncated_header_is_refused(length: int) -> None:
    """IntegrityError, with the place in the message."""
    with pytest.raises(IntegrityError, match=r"here: .*truncated"):
        decode_header(PAGE[:length], where="here")


def test_every_flipped_bit_of_a_header_is_found() -> None:
    """All 32,768 bits of the page, one after the other; none passes and none is another error."""
    page = bytearray(PAGE)
    for bit in range(8 * HEADER_BYTES):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            decode_header(bytes(page), where="x")
        page[bit // 8] ^= 1 << bit % 8
    assert decode_header(bytes(page), where="x") == HEADER


@pytest.mark.parametrize("page", [bytes(4096), b"\xff" * 4096, b"HPSTCOL2" + PAGE[8:]])
def test_what_is_no_column_is_refused(page: bytes) -> None:
    """Zeros (recycled), noise, another magic with a right digest."""
    with pytest.raises(IntegrityError, match="not a column file"):
        decode_header(redigest(page), where="x")


def test_a_newer_format_says_so() -> None:
    """Not as damage: the operator must upgrade, not repair."""
    page = redigest(PAGE[:8] + struct.pack("<I", KEYED_FORMAT + 1) + PAGE[12:])
    with pytest.raises(FormatTooNew, match=f"format {KEYED_FORMAT + 1}"):
        decode_header(page, where="x")


def test_a_damaged_page_is_damage_even_when_its_format_looks_newer() -> None:
    """A flipped bit in the version field must not tell anybody to upgrade."""
    page = PAGE[:8] + struct.pack("<I", KEYED_FORMAT + 1) + PAGE[12:]
    with pytest.raises(IntegrityError):
        decode_header(page, where="x")


@pytest.mark.parametrize(
    "changes",
    [
        {"column": 6},
        {"column": -1},
        {"column": "1"},
        {"column": 1.0},
        {"size": -1},
        {"data": 0},
        {"parity": 0},
        {"data": 40},
        {"unit": 5000},
        {"unit": 0},
        {"code": "x"},
        {"kind": "z"},
        {"version": "1"},
        {"key": "../x"},
        {"key": ""},
        {"devices": "abc"},
        {"metadata": []},
        {"pool": None},
        {"key": None},
        {"devices": None},
        {"generation": None},
        {"code": "copies"},
        {"key": "\ud800"},
    ],
)
def test_a_malformed_header_is_refused(changes: dict[str, object]) -> None:
    """Right digest, impossible facts: IntegrityError, never another exception."""
    with pytest.raises(IntegrityError, match="malformed"):
        decode_header(with_body(**changes), where="x")


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b"{", b"\xff\xfe", b"", b"[" * 4000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    """Right digest over JSON of another form, or over no JSON."""
    page = struct.pack("<8sII", b"HPSTCOL1", FORMAT, len(body)) + body
    with pytest.raises(IntegrityError):
        decode_header(redigest(page.ljust(4080, b"\0")), where="x")


def test_a_length_beyond_the_page_is_refused() -> None:
    """The length field is not trusted."""
    for length in (4065, 4096, 2**32 - 1):
        page = redigest(PAGE[:12] + struct.pack("<I", length) + PAGE[16:])
        with pytest.raises(IntegrityError):
            decode_header(page, where="x")


def test_metadata_up_to_the_limit_is_kept_and_above_is_refused() -> None:
    """The limit counts encoded bytes."""
    fits = {"m": "x" * (MAX_METADATA_BYTES - len('{"m": ""}'))}
    assert len(encode_metadata(fits)) == MAX_METADATA_BYTES
    assert decode_header(encode_header(replace(HEADER, metadata=fits)), where="x").metadata == fits
    with pytest.raises(ConfigError, match="at most 1024"):
        encode_metadata({"m": fits["m"] + "x"})
    with pytest.raises(ConfigError, match="at most 1024"):
        encode_header(replace(HEADER, metadata={"m": "ä" * 600}))


@pytest.mark.parametrize(
    "metadata", [{"a": {1, 2}}, {"a": b"x"}, {"a": float("nan")}, {"a": object()}, {"a": "\ud800"}]
)
def test_metadata_that_is_not_json_is_refused(metadata: dict[str, object]) -> None:
    """Before anything is written."""
    with pytest.raises(ConfigError, match="JSON"):
        encode_metadata(metadata)


def test_metadata_that_holds_itself_is_refused() -> None:
    """ConfigError, not RecursionError."""
    loop: dict[str, object] = {}
    loop["self"] = loop
    with pytest.raises(ConfigError):
        encode_metadata(loop)


def test_the_longest_plain_key_fits_with_full_width_and_metadata() -> None:
    """1,024 bytes of key, 1 KiB of metadata, 32 devices: the limits together fit the page."""
    header = replace(
        HEADER,
        key="/".join(["k" * 203] * 5) + "/abcd",
        geometry=Geometry(data=24, parity=8, unit_bytes=MIB, size=10**15),
        devices=tuple(f"{i:032x}" for i in range(32)),
        metadata={"m": "x" * (MAX_METADATA_BYTES - len('{"m": ""}'))},
    )
    assert len(header.key) == 1024
    assert decode_header(encode_header(header), where="x") == header


def test_a_header_too_large_for_its_page_is_refused() -> None:
    """A key that JSON escapes doubles; ConfigError instead of an overwritten digest."""
    header = replace(
        HEADER,
        key="/".join(['"' * 203] * 5),
        geometry=Geometry(data=24, parity=8, unit_bytes=MIB, size=1),
        devices=tuple(f"{i:032x}" for i in range(32)),
        metadata={"m": "x" * 1000},
    )
    with pytest.raises(ConfigError, match="4 KiB"):
        encode_header(header)


def table_of(header: ColumnHeader) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(header.geometry.block_count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def test_a_table_reads_back() -> None:
    """For no block, one block and many."""
    for size in (0, 1, 4096, 50_000_000):
        header = replace(HEADER, geometry=replace(HEADER.geometry, size=size))
        data = encode_table(header, table_of(header))
        assert len(data) == header.table_bytes
        assert np.array_equal(decode_table(header, data, where="x"), table_of(header))


def test_every_flipped_byte_of_a_table_is_found() -> None:
    """In the digests and in the root; the padding holds nothing."""
    header = replace(HEADER, geometry=replace(HEADER.geometry, size=3_000_000))
    data = bytearray(encode_table(header, table_of(header)))
    used = header.geometry.block_count * 8 + 16
    for at in range(used):
        data[at] ^= 0x40
        with pytest.raises(IntegrityError, match="root"):
            decode_table(header, bytes(data), where="x")
        data[at] ^= 0x40
    with pytest.raises(IntegrityError, match="truncated"):
        decode_table(header, bytes(data[: used - 1]), where="x")


@pytest.mark.parametrize(
    "change",
    [
        {"pool_id": "other"},
        {"key": "other"},
        {"version": Version(1, 2, 3)},
        {"column": 4},
        {"kind": Kind.COPY},
        {"geometry": replace(HEADER.geometry, data=3, parity=3)},
        {"version": HEADER.version._replace(revision=2)},
    ],
)
def test_the_table_of_another_column_is_refused(change: dict[str, object]) -> None:
    """Pool, key, version with revision, kind, layout and column are all in the seed."""
    other = replace(HEADER, **change)  # type: ignore[arg-type]  # fields by name
    assert other.seed != HEADER.seed
    data = encode_table(HEADER, table_of(HEADER)).ljust(other.table_bytes, b"\0")
    if other.geometry.block_count == HEADER.geometry.block_count:
        with pytest.raises(IntegrityError):
            decode_table(other, data, where="x")


def test_devices_of_the_put_do_not_change_the_seed() -> None:
    """They are a hint: a rebuilt column keeps its checksums on its new device."""
    assert replace(HEADER, devices=(), generation=9, metadata={}).seed == HEADER.seed
