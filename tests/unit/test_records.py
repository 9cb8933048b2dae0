"""Records that an operator can read: whole, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from hpstore.errors import FormatTooNew, IntegrityError
from hpstore.format import records
from hpstore.format.checksum import digest128
from hpstore.format.keys import Version
from hpstore.format.records import (
    FORMAT,
    NEWEST_FORMAT,
    Debt,
    DeviceState,
    Identity,
    Member,
    PoolRecord,
    seal,
    unseal,
)

MEMBERS = tuple(
    Member(device_id=f"{i:032x}", url=f"/mnt/ä{i}", domain=f"d{i}", weight=i + 0.5, state=state)
    for i, state in enumerate([DeviceState.ONLINE, DeviceState.DRAINING, DeviceState.ONLINE])
)
GONE = Member(device_id="f" * 32, url="/mnt/z", domain="dz", state=DeviceState.EVICTED)
IDENTITY = Identity(pool_id="p" * 32, device_id="d" * 32, domain="rack 1", weight=2.0)
POOL = PoolRecord(
    pool_id="p" * 32,
    generation=7,
    nonce="ab",
    parent="cd",
    data=4,
    parity=2,
    unit_bytes=1 << 20,
    members=MEMBERS,
    evicted=(GONE,),
)
DEBT = Debt(key="a/힣", version=Version(1, 2, 3), missing=(0, 5))

Record = Identity | PoolRecord | Debt
RECORDS: list[tuple[Record, Callable[[bytes], Record]]] = [
    (IDENTITY, lambda data: Identity.decode(data, where="x")),
    (POOL, lambda data: PoolRecord.decode(data, where="x")),
    (DEBT, lambda data: Debt.decode(data, where="x")),
]
every_record = pytest.mark.parametrize(
    ("record", "decode"), RECORDS, ids=["identity", "membership", "debt"]
)


@every_record
def test_a_record_reads_back(record: Record, decode: Callable[[bytes], Record]) -> None:
    """Every field, as JSON that `cat` shows."""
    data = record.encode()
    assert decode(data) == record
    assert json.loads(data)["format"] == FORMAT
    assert data.count(b"\n") > 3


@every_record
def test_every_flipped_bit_is_damage(record: Record, decode: Callable[[bytes], Record]) -> None:
    """IntegrityError for each bit: not another exception, and not "upgrade hpstore"."""
    data = bytearray(record.encode())
    wrong = []
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        try:
            if decode(bytes(data)) != record:
                wrong.append((bit // 8, bit % 8, "passed"))
        except IntegrityError:
            pass
        except Exception as error:  # noqa: BLE001 (collected and shown below)
            wrong.append((bit // 8, bit % 8, f"{type(error).__name__}: {error}"))
        data[bit // 8] ^= 1 << bit % 8
    assert wrong == []


@every_record
def test_every_truncation_is_damage(record: Record, decode: Callable[[bytes], Record]) -> None:
    """A file that was cut anywhere is refused."""
    data = record.encode()
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            decode(data[:length])


@every_record
def test_a_newer_format_says_so(record: Record, decode: Callable[[bytes], Record]) -> None:
    """A record that a later hpstore sealed asks for an upgrade."""
    body = unseal(record.encode(), where="x")
    with pytest.raises(FormatTooNew, match=f"format {NEWEST_FORMAT + 1}"):
        decode(seal({**body, "format": NEWEST_FORMAT + 1}))


@every_record
def test_a_missing_field_is_damage(record: Record, decode: Callable[[bytes], Record]) -> None:
    """Sealed rightly, but one field short."""
    body = unseal(record.encode(), where="x")
    for name in set(body) - {"format"}:
        with pytest.raises(IntegrityError, match="malformed"):
            decode(seal({k: v for k, v in body.items() if k != name}))


@pytest.mark.parametrize(
    "change",
    [
        {"members": 3},
        {"members": [3]},
        {"members": [{}]},
        {"generation": "x"},
        {"generation": None},
        {"data": [1]},
        {"spread": 0},
        {"spread": 99},
        {"spread": "x"},
        {"members": [{"device": 1}]},
        {"evicted": None},
        {"members": [{"device": "a", "url": "b", "domain": "c", "weight": 1, "state": "lost"}]},
        {"members": [{"device": "a", "url": "b", "domain": "c", "weight": "x", "state": "online"}]},
        {"members": []},
        {"unit_bytes": 0},
        {"unit_bytes": 4097},
        {"unit_bytes": 1 << 40},
        {"data": 0},
        {"data": -4, "parity": 100},
        {"parity": 0},
        {"data": 1 << 20},
        {"generation": -1},
        {"pool": "../../home"},
        {"pool": "/etc"},
        {"pool": ""},
        {"pool": "a\nb"},
        {"pool": "x" * 65},
        {"pool": "."},
        {
            "members": [
                {"device": "../x", "url": "b", "domain": "c", "weight": 1, "state": "online"}
            ]
        },
        {"members": [{"device": "", "url": "b", "domain": "c", "weight": 1, "state": "online"}]},
        {
            "members": 2
            * [{"device": "a", "url": "b", "domain": "c", "weight": 1, "state": "online"}]
        },
        {"members": [{"device": "a", "url": "b", "domain": "c", "weight": -1, "state": "online"}]},
    ],
)
def test_a_malformed_membership_is_damage(change: dict[str, object]) -> None:
    """Right digest, wrong types, or a pool that cannot be. (Case t6_onebad.)"""
    body = unseal(POOL.encode(), where="x")
    with pytest.raises(IntegrityError, match="malformed"):
        PoolRecord.decode(seal({**body, **change}), where="x")


@pytest.mark.parametrize("name", ["pool", "device"])
@pytest.mark.parametrize("text", ["../../home", "/etc", "", "a b", "é", "x" * 65, 7.5])
def test_an_identity_that_would_be_a_path_is_damage(name: str, text: object) -> None:
    """t2_poolid: ids are parts of paths on this host; locks and states went wherever one led."""
    body = unseal(IDENTITY.encode(), where="x")
    with pytest.raises(IntegrityError, match="is not an id"):
        Identity.decode(seal({**body, name: text}), where="x")


@pytest.mark.parametrize(
    "number", ["Infinity", "-Infinity", "NaN", "1e400", "1" * 30, "-" + "9" * 5000]
)
def test_a_number_that_no_record_has_is_damage(number: str) -> None:
    """Right digest, and what arithmetic would fail on later, far from here. (Cases t6, t20.)"""
    text = seal({"format": 1, "n": [0]}).decode()
    body = json.loads(text) | {"n": ["NUMBER"]}
    del body["digest"]
    plain = json.dumps(body, sort_keys=True).replace('"NUMBER"', number)
    digest = digest128(plain.encode()).hex()
    data = f'{plain[:-1]}, "digest": "{digest}"}}'.encode()
    with pytest.raises(IntegrityError, match=r"not a record: .*(finite|64 bits)"):
        unseal(data, where="x")
    assert unseal(seal({"format": 1, "n": [(1 << 64) - 1, 1.5, -3]}), where="x")["n"]


@pytest.mark.parametrize(
    "change",
    [
        {"key": "../x"},
        {"key": ""},
        {"version": "1"},
        {"missing": "12"},
        {"missing": [None]},
        {"missing": ["x"]},
    ],
)
def test_a_malformed_debt_is_damage(change: dict[str, object]) -> None:
    """A key that could lead out of objects/ is never followed."""
    body = unseal(DEBT.encode(), where="x")
    with pytest.raises(IntegrityError, match="malformed"):
        Debt.decode(seal({**body, **change}), where="x")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff", b"[" * 100_000, b"{}"]
)
def test_what_is_no_record_is_damage(data: bytes) -> None:
    """Never another exception, whatever the bytes."""
    with pytest.raises(IntegrityError, match="here"):
        unseal(data, where="here")


@pytest.mark.parametrize("text", [b'{"key": "\\ud800"}', b'{"key": "\xed\xbe\xa3"}'])
def test_half_a_surrogate_is_damage(text: bytes) -> None:
    """JSON can hold what UTF-8 cannot; such a record is refused, not a UnicodeEncodeError."""
    with pytest.raises(IntegrityError):
        unseal(text, where="x")


def test_the_digest_does_not_depend_on_layout() -> None:
    """An operator who reformats a record without changing it does not break it."""
    data = json.dumps(json.loads(POOL.encode()), indent=4).encode()
    assert PoolRecord.decode(data, where="x") == POOL


def test_a_successor_names_its_parent() -> None:
    """The next generation holds the digest of the record before it."""
    after = POOL.successor(members=MEMBERS[:2], evicted=[GONE, MEMBERS[2]], nonce="ef")
    assert after.generation == POOL.generation + 1
    assert after.parent == digest128(POOL.encode()).hex()
    assert after.members == MEMBERS[:2]
    assert (after.pool_id, after.data, after.parity) == (POOL.pool_id, POOL.data, POOL.parity)
    assert after.order > POOL.order


def test_order_is_by_generation_then_nonce() -> None:
    """Two records of one generation have one winner everywhere."""
    one = POOL.successor(members=MEMBERS, evicted=(), nonce="a")
    two = POOL.successor(members=MEMBERS, evicted=(), nonce="b")
    assert POOL.order < one.order < two.order


@pytest.mark.parametrize(
    ("members", "parity", "quorum"),
    [(1, 2, 1), (3, 2, 3), (4, 2, 3), (6, 2, 4), (7, 2, 4), (20, 2, 11), (6, 4, 5), (1, 1, 1)],
)
def test_quorum_is_a_majority_and_more_than_m(members: int, parity: int, quorum: int) -> None:
    """max(m + 1, majority), at most all (PROTOCOL 14)."""
    record = PoolRecord(
        pool_id="p",
        generation=1,
        nonce="",
        parent="",
        data=1,
        parity=parity,
        unit_bytes=4096,
        members=tuple(Member(device_id=str(i), url="u", domain="d") for i in range(members)),
    )
    assert record.quorum() == quorum


def test_members_are_found_by_id() -> None:
    """Evicted devices are no members."""
    assert POOL.member(MEMBERS[1].device_id) == MEMBERS[1]
    assert POOL.member(GONE.device_id) is None


def test_the_file_name_of_a_debt_is_its_own() -> None:
    """Unique for key and version; a repair of another revision is another debt."""
    names = {
        Debt(key=key, version=version, missing=(1,)).name
        for key in ("a", "b")
        for version in (Version(1, 1, 0), Version(1, 1, 1), Version(2, 1, 0))
    }
    assert len(names) == 6
    assert all("/" not in name and len(name) < 200 for name in names)


def test_a_membership_that_many_devices_hold_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All hold the same bytes. What cannot be decoded names each place that it was found at."""
    looked_at: list[str] = []

    def counted(data: bytes, *, where: str, newest: int) -> records.Json:
        looked_at.append(where)
        return unseal(data, where=where, newest=newest)

    monkeypatch.setattr(records, "unseal", counted)
    record = replace(POOL, nonce="of this test alone")
    found = [PoolRecord.decode(record.encode(), where=f"d{i}") for i in range(6)]
    assert found == [record] * 6
    assert len(looked_at) == 1
    for place in ("d0", "d1", "d0"):
        with pytest.raises(IntegrityError, match=f"{place}: record does not match its digest"):
            PoolRecord.decode(record.encode().replace(b"alone", b"above"), where=place)
