"""Headers and records: any value survives its bytes, any damage is refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpstore.errors import IntegrityError
from hpstore.format.column_header import ColumnHeader, decode_header, encode_header
from hpstore.format.geometry import ALIGNMENT_BYTES, Code, Geometry
from hpstore.format.keys import Kind, Version
from hpstore.format.records import Debt, DeviceState, Identity, Member, PoolRecord, unseal

numbers = st.integers(0, 2**63)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
ids = st.text("0123456789abcdef", min_size=32, max_size=32)
keys = st.lists(
    st.text(
        st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc"), exclude_characters="/"),
        min_size=1,
        max_size=10,
    ).filter(lambda part: part not in (".", "..")),
    min_size=1,
    max_size=4,
).map("/".join)
versions = st.builds(
    Version, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | texts
    | st.floats(allow_nan=False, allow_infinity=False)
)
metadata = st.dictionaries(
    texts,
    st.recursive(
        leaves,
        lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


@st.composite
def headers(draw: st.DrawFn) -> ColumnHeader:
    """Any column, copy or tombstone."""
    kind = draw(st.sampled_from(Kind))
    data = draw(st.integers(1, 24)) if kind is Kind.COLUMN else 1
    parity = draw(st.integers(1, 8))
    geometry = Geometry(
        data=data,
        parity=parity,
        unit_bytes=draw(st.integers(1, 16384)) * ALIGNMENT_BYTES,
        size=draw(numbers),
        code=Code.RS_CAUCHY if kind is Kind.COLUMN else Code.COPIES,
    )
    return ColumnHeader(
        pool_id=draw(ids),
        key=draw(keys),
        version=draw(versions),
        kind=kind,
        column=draw(st.integers(0, data + parity - 1)),
        geometry=geometry,
        devices=tuple(draw(st.lists(ids, max_size=32))),
        generation=draw(numbers),
        created_ms=draw(numbers),
        metadata=draw(metadata),
    )


@given(headers())
def test_a_header_survives_its_page(header: ColumnHeader) -> None:
    """decode is the inverse of encode; encoding again gives the same page."""
    page = encode_header(header)
    again = decode_header(page, where="x")
    assert again == header
    assert again.seed == header.seed
    assert encode_header(again) == page


@given(headers(), st.integers(0, 4095), st.integers(1, 255))
def test_a_changed_byte_of_a_header_is_refused(header: ColumnHeader, at: int, change: int) -> None:
    """Any byte of the page, to any other value."""
    page = bytearray(encode_header(header))
    page[at] ^= change
    try:
        decode_header(bytes(page), where="x")
    except IntegrityError:
        return
    raise AssertionError(f"byte {at} was changed by {change:#x} and nobody noticed")


@given(st.binary(max_size=5000))
def test_noise_is_no_header(noise: bytes) -> None:
    """IntegrityError, whatever the bytes."""
    for page in (noise, b"HPSTCOL1" + noise, noise.ljust(4096, b"\0")):
        try:
            decode_header(page, where="x")
        except IntegrityError:
            continue
        raise AssertionError("noise was taken for a header")


members = st.lists(
    st.builds(
        Member,
        device_id=ids,
        url=texts,
        domain=texts,
        weight=st.floats(0, 1e6),
        state=st.sampled_from(DeviceState),
    ),
    max_size=5,
    unique_by=lambda member: member.device_id,
).map(tuple)
pools = st.builds(
    PoolRecord,
    pool_id=ids,
    generation=numbers,
    nonce=ids,
    parent=texts,
    data=st.integers(1, 24),
    parity=st.integers(1, 8),
    unit_bytes=st.integers(1, 16384).map(lambda n: n * ALIGNMENT_BYTES),
    members=members.filter(bool),
    evicted=members,
)
identities = st.builds(Identity, pool_id=ids, device_id=ids, domain=texts, weight=st.floats(0, 1e6))
debts = st.builds(Debt, key=keys, version=versions, missing=st.lists(st.integers(0, 31)).map(tuple))


@given(pools | identities | debts)
def test_a_record_survives_its_bytes(record: PoolRecord | Identity | Debt) -> None:
    """decode is the inverse of encode; encoding again gives the same bytes."""
    data = record.encode()
    assert type(record).decode(data, where="x") == record
    assert type(record).decode(data, where="x").encode() == data


@given(pools | identities | debts, st.data())
def test_a_changed_byte_of_a_record_changes_nothing_or_is_refused(
    record: PoolRecord | Identity | Debt, data: st.DataObject
) -> None:
    """White space may change; a fact may not, and there is no other exception."""
    sealed = bytearray(record.encode())
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    try:
        found = type(record).decode(bytes(sealed), where="x")
    except IntegrityError:
        return
    assert found == record


@given(
    st.binary(max_size=100)
    | st.text(max_size=40).map(lambda t: f'{{"a": "{t}"}}'.encode(errors="surrogatepass"))
)
def test_noise_is_no_record(noise: bytes) -> None:
    """IntegrityError, whatever the bytes."""
    try:
        unseal(noise, where="x")
    except IntegrityError:
        return
    raise AssertionError("noise was taken for a record")
