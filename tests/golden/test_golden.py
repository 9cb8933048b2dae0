"""Bytes of released formats: still read, still written the same. Added to, never regenerated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from hpstore.codec import BACKENDS, ErasureCode, open_backend
from hpstore.codec.galois import Bytes
from hpstore.format.checksum import bad_blocks, block_digests
from hpstore.format.column_header import (
    HEADER_BYTES,
    ColumnHeader,
    decode_header,
    decode_table,
    encode_header,
    encode_table,
)
from hpstore.format.geometry import BLOCK_BYTES, Code, Geometry
from hpstore.format.keys import Kind, NameTags, Version, object_directory, parse_column_name
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import Debt, DeviceState, Identity, Member, PoolRecord

HERE = Path(__file__).parent
FORMAT_V1 = HERE / "format-v1"


class Vector(TypedDict):
    """One geometry: the parity of rows given by `row_of`, in hex."""

    data: int
    parity: int
    row_bytes: int
    parity_rows: list[str]


def row_of(index: int, length: int) -> Bytes:
    """Data row `index` of the vectors: byte j is (31 i + 7 j + i j + j // 11) mod 256."""
    j = np.arange(length, dtype=np.int64)
    row: Bytes = ((31 * index + 7 * j + index * j + j // 11) % 256).astype(np.uint8)
    return row


VECTORS: list[Vector] = json.loads((HERE / "rs_cauchy_v1.json").read_text())["vectors"]


def test_the_vectors_cover_what_they_should() -> None:
    """Narrow, usual, wide and the widest stripe."""
    found = {(v["data"], v["parity"]) for v in VECTORS}
    assert found == {(1, 2), (4, 2), (8, 3), (16, 4), (24, 8)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['data']}+{v['parity']}")
def test_every_back_end_gives_the_golden_parity(name: str, vector: Vector) -> None:
    """Parity written by any hpstore is parity for every other one."""
    try:
        code = ErasureCode(open_backend(name))
    except (OSError, ImportError) as error:
        pytest.skip(f"{name} is not on this machine: {error}")
    rows = [row_of(i, vector["row_bytes"]) for i in range(vector["data"])]
    made = [np.zeros(vector["row_bytes"], np.uint8) for _ in range(vector["parity"])]
    code.encode(Code.RS_CAUCHY, vector["parity"], rows, made)
    assert [row.tobytes().hex() for row in made] == vector["parity_rows"]


HEADER = ColumnHeader(
    pool_id="6f1c0e6d2a3b4c5d8e9f00112233aabb",
    key="runs/gpt/Ä 100%/@step-1",
    version=Version(1_763_726_400_123, 0xFEEDFACECAFEBEEF, 2),
    kind=Kind.COLUMN,
    column=5,
    geometry=Geometry(data=4, parity=2, unit_bytes=65536, size=1_000_003),
    devices=tuple(f"{0x1111 * (i + 1):032x}" for i in range(6)),
    generation=42,
    created_ms=1_763_726_400_124,
    metadata={"step": 1, "note": "ü", "loss": 0.5, "tags": ["a", None, True]},
)


def column_bytes() -> Bytes:
    """Column 5 of an object whose data columns are `row_of`: what the golden table is over."""
    length = HEADER.geometry.column_bytes
    rows = [row_of(i, length) for i in range(4)]
    made = [np.zeros(length, np.uint8) for _ in range(2)]
    ErasureCode(open_backend("numpy")).encode(Code.RS_CAUCHY, 2, rows, made)
    return made[1]


def test_a_golden_header_is_still_read() -> None:
    """Every field of format version 1."""
    page = (FORMAT_V1 / "header.bin").read_bytes()
    assert len(page) == HEADER_BYTES
    assert decode_header(page, where="golden") == HEADER


def test_a_golden_header_is_still_written() -> None:
    """The same 4,096 bytes."""
    assert encode_header(HEADER) == (FORMAT_V1 / "header.bin").read_bytes()


def test_a_golden_table_is_still_read_and_still_fits_its_column() -> None:
    """Its digests are those of the column, block by block; its bytes are written the same."""
    raw = (FORMAT_V1 / "table.bin").read_bytes()
    table = decode_table(HEADER, raw, where="golden")
    data = column_bytes()
    assert len(table) == HEADER.geometry.block_count == 4
    assert len(data) % BLOCK_BYTES  # the last block is short
    assert not bad_blocks(HEADER.seed, 0, data.data, table)
    assert np.array_equal(block_digests(HEADER.seed, 0, data.data), table)
    assert encode_table(HEADER, table) == raw


def test_a_golden_path_is_still_found() -> None:
    """Directory and file name of the column."""
    path = (FORMAT_V1 / "path.txt").read_text().rstrip("\n")
    assert f"{object_directory(HEADER.key)}/{HEADER.name}" == path
    assert parse_column_name(path.rsplit("/", 1)[-1]) == HEADER.name
    folded = (FORMAT_V1 / "path_folding.txt").read_text().rstrip("\n")
    assert f"{object_directory(HEADER.key, folding=True)}/{HEADER.name}" == folded


KEY = PoolKey(bytes(range(32)))
COPY = ColumnHeader(
    pool_id=HEADER.pool_id,
    key="runs/gpt/manifest",
    version=Version(1_763_726_400_123, 0xCAFE),
    kind=Kind.COPY,
    column=2,
    geometry=Geometry(data=1, parity=2, unit_bytes=65536, size=70_000, code=Code.COPIES),
    devices=HEADER.devices[:3],
    generation=42,
    created_ms=1_763_726_400_124,
)
KEYED = HERE / "keyed-v2"


def keyed_file(header: ColumnHeader, column: Bytes) -> bytes:
    """A column file of a pool with a key, without its column."""
    checks = header.checks(KEY)
    table = checks.digests(0, column.data)
    return encode_header(header, KEY) + encode_table(header, table, checks)


@pytest.mark.parametrize(("name", "header"), [("column", HEADER), ("copy", COPY)])
def test_a_golden_file_of_a_pool_with_a_key_is_still_read_and_written(
    name: str, header: ColumnHeader
) -> None:
    """Header format 2 and the table with its MACs, of a stripe's column and of a whole copy; and
    the tag of the name."""
    column = column_bytes() if header is HEADER else row_of(0, COPY.geometry.column_bytes)
    raw = (KEYED / f"{name}.bin").read_bytes()
    assert keyed_file(header, column) == raw
    assert decode_header(raw[:HEADER_BYTES], where="golden", pool_key=KEY) == header
    checks = header.checks(KEY)
    table = decode_table(header, raw[HEADER_BYTES:], where="golden", checks=checks)
    assert not checks.bad_blocks(0, column.data, table)
    text = (KEYED / f"{name}.txt").read_text().rstrip("\n")
    found = parse_column_name(text)
    assert found is not None
    assert NameTags(KEY, header.pool_id, header.key).tagged(header.name) == found
    assert str(found) == text


def test_a_golden_membership_of_a_pool_with_a_key_is_still_read_and_written() -> None:
    """Record format 3."""
    record = replace(POOL, key_id=KEY.fingerprint(POOL.pool_id))
    data = (KEYED / "pool.json").read_bytes()
    assert PoolRecord.decode(data, where="golden", pool_key=KEY) == record
    assert record.encode(KEY) == data


IDENTITY = Identity(pool_id=HEADER.pool_id, device_id="d" * 32, domain="rack-ä", weight=1.5)
POOL = PoolRecord(
    pool_id=HEADER.pool_id,
    generation=42,
    nonce="00ff",
    parent="ab" * 16,
    data=4,
    parity=2,
    unit_bytes=65536,
    members=(
        Member(device_id="d" * 32, url="/mnt/ä", domain="rack-ä", weight=1.5),
        Member(device_id="e" * 32, url="s3://b/c", domain="r2", state=DeviceState.DRAINING),
    ),
    evicted=(Member(device_id="f" * 32, url="/z", domain="r3", state=DeviceState.EVICTED),),
)
DEBT = Debt(key=HEADER.key, version=HEADER.version, missing=(0, 5))


@pytest.mark.parametrize(
    ("name", "record"), [("hpstore.json", IDENTITY), ("pool.json", POOL), ("debt.json", DEBT)]
)
def test_golden_records_are_still_read_and_written(
    name: str, record: Identity | PoolRecord | Debt
) -> None:
    """Identity, membership and debt of format version 1."""
    data = (FORMAT_V1 / name).read_bytes()
    assert type(record).decode(data, where="golden") == record
    assert record.encode() == data
