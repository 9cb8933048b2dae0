"""A pool's key: what carries its MACs is read, and nothing else is, field by field (t1)."""

from __future__ import annotations

import json
import pickle
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import ConfigError, HpstoreError, IntegrityError, NotAuthentic
from hpstore.format.checksum import digest128
from hpstore.format.column_header import (
    ColumnHeader,
    decode_header,
    decode_table,
    encode_header,
    encode_table,
)
from hpstore.format.geometry import BLOCK_BYTES, Code, Geometry
from hpstore.format.keys import ColumnName, Kind, NameTags, Version, parse_column_name
from hpstore.format.pool_key import PoolKey, Use, new_pool_key, parse_pool_key
from hpstore.format.records import Member, PoolRecord, RegisterPlace, seal

KEY, OTHER, LOST = PoolKey(b"k" * 32), PoolKey(b"o" * 32), PoolKey(b"")
keys = st.text("abcdé/", min_size=1, max_size=8).filter(lambda key: all(key.split("/")))
versions = st.builds(
    Version, st.integers(0, 2**60), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
)


@st.composite
def headers(draw: st.DrawFn) -> ColumnHeader:
    """Any column, copy or tombstone that has at most a few blocks."""
    kind = draw(st.sampled_from(Kind))
    data = draw(st.integers(1, 8)) if kind is Kind.COLUMN else 1
    parity = draw(st.integers(1, 4))
    geometry = Geometry(
        data=data,
        parity=parity,
        unit_bytes=65536,
        size=0 if kind is Kind.TOMBSTONE else draw(st.integers(1, 300_000)),
        code=Code.RS_CAUCHY if kind is Kind.COLUMN else Code.COPIES,
    )
    return ColumnHeader(
        pool_id="p" * 32,
        key=draw(keys),
        version=draw(versions),
        kind=kind,
        column=draw(st.integers(0, data + parity - 1)),
        geometry=geometry,
        devices=tuple(f"d{i}" for i in range(data + parity)),
        generation=draw(st.integers(0, 99)),
        created_ms=draw(st.integers(0, 2**50)),
        metadata=draw(st.dictionaries(st.text("abc", max_size=3), st.integers(0, 9), max_size=2)),
    )


def redigest(page: bytes) -> bytes:
    """With the public checksum that fits, as anybody can compute it."""
    return page[:4080] + digest128(page[:4080])


@given(headers())
def test_a_header_survives_its_page(header: ColumnHeader) -> None:
    """With the key it is read; with another one, without one, or from a pool without, it is not."""
    page = encode_header(header, KEY)
    assert decode_header(page, where="x", pool_key=KEY) == header
    assert decode_header(page, where="x", pool_key=LOST) == header
    assert encode_header(header, KEY) == page
    for wrong in (OTHER, None):
        with pytest.raises(NotAuthentic):
            decode_header(page, where="x", pool_key=wrong)
    with pytest.raises(NotAuthentic, match="has no MAC"):
        decode_header(encode_header(header), where="x", pool_key=KEY)


FORGERIES: dict[str, object] = {
    "pool": "q" * 32,
    "key": "elsewhere",
    "version": "00000000000000ff-00000000000000ff-00000001",
    "kind": "t",
    "column": 0,
    "data": 1,
    "parity": 1,
    "unit": 131072,
    "size": 77,
    "code": "copies",
    "devices": ["evil"],
    "generation": 1000,
    "created_ms": 5,
    "metadata": {"evil": 1},
}


def test_every_field_of_the_json_is_in_the_table_of_forgeries() -> None:
    """So that a new one is forged, too."""
    header = example(Kind.COLUMN, 100_000)
    (length,) = struct.unpack_from("<I", encode_header(header, KEY), 12)
    assert json.loads(encode_header(header, KEY)[16 : 16 + length]).keys() == FORGERIES.keys()


@pytest.mark.parametrize("field", FORGERIES)
@given(header=headers())
def test_no_field_can_be_forged(field: str, header: ColumnHeader) -> None:
    """Another value, with length and public checksum right, and the old MAC."""
    page = encode_header(header, KEY)
    (length,) = struct.unpack_from("<I", page, 12)
    body = json.loads(page[16 : 16 + length])
    if body[field] == FORGERIES[field]:
        return
    text = json.dumps({**body, field: FORGERIES[field]}, ensure_ascii=False).encode()
    forged = struct.pack("<8sII", b"HPSTCOL1", 2, len(text)) + text
    with pytest.raises(NotAuthentic):
        decode_header(
            redigest(forged.ljust(4064, b"\0") + page[4064:4080]), where="x", pool_key=KEY
        )


@given(headers(), st.integers(0, 4079), st.integers(1, 255))
def test_no_byte_that_is_read_can_be_forged(header: ColumnHeader, at: int, change: int) -> None:
    """Any byte before the checksum, which is made to fit: refused, or of no account (zeros)."""
    page = bytearray(encode_header(header, KEY))
    (length,) = struct.unpack_from("<I", page, 12)
    page[at] ^= change
    try:
        found = decode_header(redigest(bytes(page)), where="x", pool_key=KEY)
    except HpstoreError:
        return
    assert 16 + length <= at < 4064
    assert found == header


def example(kind: Kind, size: int, key: str = "a/b") -> ColumnHeader:
    """A column with blocks."""
    copies = kind is not Kind.COLUMN
    geometry = Geometry(
        data=1 if copies else 2,
        parity=2,
        unit_bytes=65536,
        size=size,
        code=Code.COPIES if copies else Code.RS_CAUCHY,
    )
    return ColumnHeader(
        pool_id="p" * 32,
        key=key,
        version=Version(5, 6),
        kind=kind,
        column=1,
        geometry=geometry,
        devices=("d",) * geometry.width,
        generation=1,
        created_ms=1,
    )


@pytest.mark.parametrize("kind", [Kind.COLUMN, Kind.COPY])
def test_a_table_is_bound_to_the_key_and_to_its_column(kind: Kind) -> None:
    """One of another key, of a pool without, of another object or copy, or with one digest changed
    and the root of before, is damage."""
    header = example(kind, 200_000)
    checks = header.checks(KEY)
    data = np.arange(header.geometry.column_bytes, dtype=np.uint64).astype(np.uint8)
    table = checks.digests(0, data.data)
    raw = encode_table(header, table, checks)
    assert (decode_table(header, raw, where="x", checks=checks) == table).all()
    assert checks.bad_blocks(0, data.data, table) == ()
    assert not (table == header.checks().digests(0, data.data)).any()
    wrong = [
        header.checks(OTHER),
        header.checks(),
        replace(header, key="c").checks(KEY),
        replace(header, column=0).checks(KEY),
    ]
    for other in wrong:
        with pytest.raises(IntegrityError):
            decode_table(header, raw, where="x", checks=other)
        alike = (other.pool_key, other.layout) == (KEY, checks.layout)
        same = other.macs and alike  # blocks of all copies are
        assert len(other.bad_blocks(0, data.data, table)) == (0 if same else len(table))
    with pytest.raises(IntegrityError):
        decode_table(header, bytes([raw[0] ^ 1]) + raw[1:], where="x", checks=checks)
    data[BLOCK_BYTES] ^= 1
    assert checks.bad_blocks(0, data.data, table) == (1,)


def test_blocks_of_copies_have_macs_and_those_of_stripes_a_secret_seed() -> None:
    """A file that decides alone hangs on BLAKE2b, at any place of a block in it."""
    copy, column = example(Kind.COPY, 100_000).checks(KEY), example(Kind.COLUMN, 10).checks(KEY)
    assert (copy.macs, column.macs) == (True, False)
    assert column.seed != example(Kind.COLUMN, 10).checks().seed
    same = np.zeros(2 * BLOCK_BYTES, np.uint8)
    first, second = copy.digests(0, same.data)
    assert first != second
    assert copy.digests(1, same[:BLOCK_BYTES].data)[0] == second


@given(keys, versions, st.sampled_from(Kind), st.integers(0, 2))
def test_a_name_is_good_for_its_pool_key_and_object_alone(
    key: str, version: Version, kind: Kind, column: int
) -> None:
    """A tag fits no other object, kind, column, version, pool or key. A name survives its text."""
    plain = ColumnName(version, kind, column, 1, 2)
    name = NameTags(KEY, "p", key).tagged(plain)
    assert parse_column_name(str(name)) == name
    assert NameTags(KEY, "p", key).admits(name)
    assert name.plain == str(plain)
    others = [
        (name, OTHER, "p", key),
        (name, KEY, "q", key),
        (name, KEY, "p", f"{key}x"),
        (name, None, "p", key),
        (plain, KEY, "p", key),
        (plain, LOST, "p", key),
        (name._replace(column=column + 1), KEY, "p", key),
        (name._replace(version=version._replace(counter=version.counter + 1)), KEY, "p", key),
        (
            name._replace(kind=Kind.COPY if kind is Kind.TOMBSTONE else Kind.TOMBSTONE),
            KEY,
            "p",
            key,
        ),
        (name._replace(data=2), KEY, "p", key),
    ]
    assert not [row for row in others if NameTags(*row[1:]).admits(row[0])]
    assert NameTags(None, "p", key).admits(plain)
    assert NameTags(LOST, "p", key).admits(name)


RECORD = PoolRecord(
    pool_id="p" * 8,
    generation=3,
    nonce="0f",
    parent="",
    data=2,
    parity=1,
    unit_bytes=65536,
    members=tuple(Member(device_id=f"d{i}", url=f"/d{i}", domain=f"h{i}") for i in range(3)),
    key_id=KEY.fingerprint("p" * 8),
)


def test_a_membership_is_read_with_its_key_alone() -> None:
    """Round trip; another key, none, one in a pool without, and a lost one."""
    data = RECORD.encode(KEY)
    assert PoolRecord.decode(data, where="x", pool_key=KEY) == RECORD
    assert PoolRecord.decode(data, where="x", pool_key=LOST) == RECORD
    for wrong, text in ((OTHER, "another key"), (None, "pool.toml does not have it")):
        with pytest.raises(NotAuthentic, match=text):
            PoolRecord.decode(data, where="x", pool_key=wrong)
    with pytest.raises(NotAuthentic, match="without one"):
        PoolRecord.decode(replace(RECORD, key_id="").encode(), where="x", pool_key=KEY)


@pytest.mark.parametrize("field", [f.name for f in fields(PoolRecord) if f.name != "key_id"])
def test_no_field_of_a_membership_can_be_forged(field: str) -> None:
    """Another value, the public digest right, the MAC of before."""
    values: dict[str, object] = {
        "pool_id": "q" * 8,
        "generation": 9,
        "nonce": "ff",
        "parent": "ab",
        "data": 1,
        "parity": 2,
        "unit_bytes": 131072,
        "members": RECORD.members[:2],
        "evicted": RECORD.members[:1],
        "spread": 1,
        "registers": RegisterPlace(url="etcd://b:2379", epoch="e" * 16),
    }
    mac = json.loads(RECORD.encode(KEY))["mac"]
    forged = json.loads(replace(RECORD, **{field: values[field]}).encode())  # type: ignore[arg-type]
    del forged["digest"]
    with pytest.raises(NotAuthentic):
        PoolRecord.decode(seal({**forged, "mac": mac}), where="x", pool_key=KEY)


def test_a_key_is_shown_nowhere_and_survives_pickling() -> None:
    """repr, errors about it; a pool's settings travel to other processes with it."""
    made = new_pool_key()
    assert made != new_pool_key()
    assert made.text not in repr(made)
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert again.mac(Use.NAME, b"x") == made.mac(Use.NAME, b"x")
    assert parse_pool_key(made.text, where="x") == made
    assert parse_pool_key("lost", where="x").lost
    for wrong in (made.text[:-1], made.text[:-2], "", 7, "zz" * 32):
        with pytest.raises(ConfigError) as told:
            parse_pool_key(wrong, where="pool.toml")
        assert "64 hexadecimal digits" in str(told.value)
        assert made.text[:20] not in str(told.value)


def test_each_use_has_macs_of_its_own() -> None:
    """What one use gives away is nothing for another."""
    macs = {use: KEY.mac(use, b"same")[:8] for use in Use}
    assert len(set(macs.values())) == len(Use)
