"""One hostile device: what it makes is no delete and no newer object, and goes to quarantine (t1).

It knows the formats, the pool's id and all that it holds; not the pool's key.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpstore.devices.memory import MemoryDevice
from hpstore.errors import ObjectNotFound, PoolKeyError, TooFewDevices, TooManyErasures
from hpstore.format.checksum import digest128
from hpstore.format.column_header import (
    HEADER_BYTES,
    ColumnHeader,
    decode_header,
    encode_header,
    encode_table,
)
from hpstore.format.keys import ColumnName, Kind, NameTags, parse_column_name
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import IDENTITY_FILE, POOL_FILE, PoolRecord, seal
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.testing.simulation.forgeries import forged_copy

SMALL, BIG = b"genuine" * 100, bytes(range(256)) * 4096
EVIL = PoolKey(b"e" * 32)
LOST = PoolKey(b"")


@pytest.fixture
def made(tmp_path: Path) -> Harness:
    """4+2 on six devices, with a small and a striped object."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())
    with harness.open() as pool:
        pool.put("small", SMALL)
        pool.put("big", BIG)
        pool.put("other", SMALL)
        pool.delete("other")
    return harness


def named(harness: Harness, key: str, url: str = "") -> list[tuple[str, str, ColumnName]]:
    """URL, path and name of an object's files, of one device or all."""
    found = []
    for where, path in harness.columns(key):
        name = parse_column_name(path.rpartition("/")[2])
        assert name is not None
        if url in ("", where):
            found.append((where, path, name))
    return found


def content(harness: Harness, url: str, path: str) -> bytes:
    return bytes(harness.devices[url].files[path].bytes)


def header_of(harness: Harness, key: str) -> ColumnHeader:
    url, path, _ = named(harness, key)[0]
    page = content(harness, url, path)[:HEADER_BYTES]
    keyed = harness.config.key is not None
    return decode_header(page, where=path, pool_key=LOST if keyed else None)


def newer(name: ColumnName, **changes: object) -> ColumnName:
    """A name of a higher version, without its tag."""
    version = name.version._replace(counter=name.version.counter + 1)
    return name._replace(version=version, tag="", **changes)  # type: ignore[arg-type]


def empty_tombstone(harness: Harness, hostile: MemoryDevice) -> None:
    """A file of no bytes, for both objects."""
    for key in ("small", "big"):
        name = newer(named(harness, key)[0][2], kind=Kind.TOMBSTONE, column=0, data=1)
        hostile.write_small(f"objects/{key}/{name}", b"")


def tombstone_of_another_key(harness: Harness, hostile: MemoryDevice) -> None:
    """Whole, tagged and sealed, by a key that is not the pool's."""
    for key in ("small", "big"):
        name = newer(named(harness, key)[0][2], kind=Kind.TOMBSTONE, column=0, data=1)
        gone = header_of(harness, "other")
        gone = replace(gone, key=key, version=name.version, column=0)
        page = encode_header(gone, EVIL)
        tail = encode_table(gone, gone.checks(EVIL).digests(0, memoryview(b"")), gone.checks(EVIL))
        tagged = NameTags(EVIL, gone.pool_id, key).tagged(name)
        hostile.write_small(f"objects/{key}/{tagged}", page + tail)


def tombstone_of_another_object(harness: Harness, hostile: MemoryDevice) -> None:
    """A genuine one, replayed under other objects: its version is higher than theirs."""
    url, path, name = named(harness, "other")[0]
    assert name.kind is Kind.TOMBSTONE
    for key in ("small", "big"):
        hostile.write_small(f"objects/{key}/{name}", content(harness, url, path))


def newer_copy(harness: Harness, hostile: MemoryDevice) -> None:
    """The reproducer's: all public checksums right."""
    header = header_of(harness, "small")
    for key in ("small", "big"):
        name = newer(named(harness, key)[0][2], kind=Kind.COPY, column=0, data=1)
        data = forged_copy(header.pool_id, key, name.version, 2)
        hostile.write_small(f"objects/{key}/{name}", data)
        tagged = name._replace(tag="0" * 24)
        hostile.write_small(f"objects/{key}/{tagged}", data)


def genuine_name_of_another_column(harness: Harness, hostile: MemoryDevice) -> None:
    """The tag of one's own column on a name of a higher version, and on one of another kind."""
    for key in ("small", "big"):
        for _, path, name in named(harness, key, hostile.url):
            data = content(harness, hostile.url, path)
            for forged in (newer(name), name._replace(kind=Kind.TOMBSTONE, data=1, column=0)):
                hostile.write_small(f"objects/{key}/{forged._replace(tag=name.tag)}", data)


FORGERIES: list[Callable[[Harness, MemoryDevice], None]] = [
    empty_tombstone,
    tombstone_of_another_key,
    tombstone_of_another_object,
    newer_copy,
    genuine_name_of_another_column,
]


def all_is_well(pool: Pool) -> None:
    assert pool.get("small") == SMALL
    assert pool.get("big") == BIG
    assert [pool.exists(key) for key in ("small", "big", "other")] == [True, True, False]
    assert pool.list() == ["big", "small"]
    assert [row.current for row in pool.versions("small")] == [True]


@pytest.mark.parametrize("heal", ["scrub", "rebuild"])
@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_what_a_hostile_device_makes_counts_for_nothing(
    made: Harness, forge: Callable[[Harness, MemoryDevice], None], heal: str
) -> None:
    """t1: reads, lists, conditions and deletes are as before; a scrub or rebuild removes it, and
    says so; the bytes are in quarantine/. Devices are changed under an open pool."""
    hostile = made.devices["memory://d0"]
    before = {path for path in hostile.files if path.startswith("objects/")}
    with made.open() as pool:
        forge(made, hostile)
        forged = {path for path in hostile.files if path.startswith("objects/")} - before
        assert len(forged) >= 2
        all_is_well(pool)
        report = pool.scrub() if heal == "scrub" else pool.rebuild()
        assert report.set_aside == len(forged)
        assert not report.clean
        assert (report.damaged_columns, report.unreadable, report.failed) == (0, {}, {})
        assert not forged & hostile.files.keys()
        assert sum(path.startswith("quarantine/") for path in hostile.files) == len(forged)
        all_is_well(pool)
        again = pool.scrub() if heal == "scrub" else pool.rebuild()
        assert again.clean


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_writers_do_not_heed_it_either(
    made: Harness, forge: Callable[[Harness, MemoryDevice], None]
) -> None:
    """A conditional put sees the genuine version, a new version is above it, a delete deletes."""
    with made.open() as pool:
        stored = pool.stat("small")
        forge(made, made.devices["memory://d0"])
        assert pool.stat("small").version == stored.version
        pool.put("small", b"second", if_version=stored.version)
        assert pool.get("small") == b"second"
        pool.delete("big")
        with pytest.raises(ObjectNotFound):
            pool.get("big")
        pool.put("big", BIG, if_absent=True)
        assert pool.get("big") == BIG


def test_a_forged_version_on_m_devices_is_none(made: Harness) -> None:
    """Two hostile devices hold a newer stripe of two columns, and tombstones, together."""
    header = header_of(made, "big")
    with made.open() as pool:
        for column, url in enumerate(("memory://d0", "memory://d1")):
            name = newer(named(made, "big")[0][2], column=column)
            forged = replace(header, version=name.version, column=column)
            body = bytes(forged.geometry.column_bytes)
            table = encode_table(forged, forged.checks().digests(0, memoryview(body)))
            made.devices[url].write_small(
                f"objects/big/{name}", encode_header(forged) + body + table
            )
            gone = newer(name, kind=Kind.TOMBSTONE, data=1)
            made.devices[url].write_small(f"objects/big/{gone}", b"")
        assert pool.get("big") == BIG
        assert pool.scrub().set_aside == 4


def forge_body(data: bytes, *, public: bool) -> bytes:
    """A file with another body, its table and root made anew as far as that can be done."""
    header = decode_header(data[:HEADER_BYTES], where="x", pool_key=LOST)
    body = bytearray(data[HEADER_BYTES : header.table_offset])
    body[:5] = b"EVIL!"
    checks = header.checks() if public else header.checks(EVIL)
    page = encode_header(header) if public else data[:HEADER_BYTES]
    table = encode_table(header, checks.digests(0, memoryview(bytes(body))), checks)
    return page + bytes(body) + table


def forge_header(data: bytes) -> bytes:
    """Other metadata in its header, the public checksum made to fit, all else genuine."""
    header = decode_header(data[:HEADER_BYTES], where="x", pool_key=LOST)
    page = encode_header(replace(header, metadata={"evil": 1}), EVIL)
    page = page[:4064] + data[4064:4080]
    return page + digest128(page) + data[HEADER_BYTES:]


@pytest.mark.parametrize("key", ["small", "big"])
def test_a_header_that_its_device_changed_is_damage(made: Harness, key: str) -> None:
    """Metadata alone: nobody is told what the device says, and the column is made again."""
    for url, path, name in named(made, key):
        if name.column == 0:
            made.devices[url].write_small(path, forge_header(content(made, url, path)))
    with made.open() as pool:
        assert pool.stat(key).metadata == {}
        report = pool.scrub()
        assert (report.damaged_columns, report.columns_written) == (1, 1)
        assert pool.stat(key).metadata == {}


@pytest.mark.parametrize("public", [True, False])
@pytest.mark.parametrize("key", ["small", "big"])
def test_a_column_that_its_device_changed_is_damage(made: Harness, key: str, public: bool) -> None:
    """Its genuine name with other bytes: as a file of a pool without a key, and with the genuine
    header before a table of another key. It is decoded or read from others, found and made again.
    """
    for url, path, name in named(made, key):
        if name.column == 0:
            made.devices[url].write_small(path, forge_body(content(made, url, path), public=public))
    with made.open() as pool:
        assert pool.get(key) == (SMALL if key == "small" else BIG)
        report = pool.scrub()
        assert (report.damaged_columns, report.columns_written) == (1, 1)
        assert pool.scrub().clean


def test_the_last_copy_of_an_acknowledged_object_is_believed(made: Harness) -> None:
    """m devices are gone: one genuine file decides, as before; one forged file does not."""
    holders = [url for url, _, _ in named(made, "small")]
    made.lose(holders[1:])
    with made.open() as pool:
        assert pool.get("small") == SMALL
    made.bring_back()
    made.lose(holders[:2])
    newer_copy(made, made.devices[holders[2]])
    with made.open() as pool:
        assert pool.get("small") == SMALL


def test_an_older_version_that_comes_back_loses_to_the_newer(made: Harness) -> None:
    """A replay of what was valid: a column and a tombstone of versions that were superseded."""
    saved = [
        (url, path, content(made, url, path))
        for key in ("small", "other")
        for url, path, _ in named(made, key)
    ]
    with made.open() as pool:
        pool.put("small", b"second")
        pool.put("other", b"there again")
        for url, path, data in saved:
            made.devices[url].write_small(path, data)
        assert pool.get("small") == b"second"
        assert pool.get("other") == b"there again"
        pool.rebuild()
        assert pool.get("other") == b"there again"
        left = {path for _, path, _ in saved} & {
            path for key in ("small", "other") for _, path, _ in named(made, key)
        }
        assert not left


# --- tombstones without their content, in pools with and without a key -------------------------


def emptied(harness: Harness, key: str, count: int, data: bytes = b"") -> list[str]:
    """Some tombstones of a key lose their content, their names are genuine; where they are."""
    found = [(url, path) for url, path, name in named(harness, key) if name.kind is Kind.TOMBSTONE]
    for url, path in found[:count]:
        harness.devices[url].write_small(path, data)
    return [url for url, _ in found[:count]]


@pytest.fixture(params=[True, False], ids=["keyed", "of-before"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """A pool with a key, and one without."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock(), keyed=request.param)
    with harness.open() as pool:
        pool.put("small", SMALL)
        pool.put("gone", SMALL)
        pool.delete("gone")
    return harness


@pytest.mark.parametrize("data", [b"", b"\0" * 8192, SMALL * 20], ids=["empty", "zeros", "noise"])
def test_a_name_alone_is_no_delete(
    either: Harness, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """One file that is called a tombstone, as a damaged filesystem or a killed writer of other
    software may leave it: the object stays, a rebuild puts the file aside."""
    pool_id, key = header_of(either, "small").pool_id, either.config.key
    url, _, first = named(either, "small")[0]
    name = newer(first, kind=Kind.TOMBSTONE, column=0, data=1)
    name = NameTags(key, pool_id, "small").tagged(name)
    either.devices[url].write_small(f"objects/small/{name}", data)
    with either.open() as pool, caplog.at_level(logging.WARNING):
        assert pool.get("small") == SMALL
        assert pool.list() == ["small"]
        assert "without its content" in caplog.text
        assert pool.metrics.value("tombstone_blank_total") >= 1
        assert pool.rebuild().set_aside == 1
        assert pool.get("small") == SMALL
        assert pool.rebuild().clean


def test_an_acknowledged_delete_stays_when_m_tombstones_lose_their_content(
    either: Harness,
) -> None:
    """The third one speaks; a scrub finds the others, and makes them again."""
    emptied(either, "gone", 2)
    with either.open() as pool:
        assert not pool.exists("gone")
        report = pool.scrub()
        assert report.set_aside == 2
        whole = [url for url, path, _ in named(either, "gone") if content(either, url, path)]
        assert len(set(whole)) == 3
        assert not pool.exists("gone")
        assert pool.scrub().clean


def test_nothing_is_decided_where_only_damaged_tombstones_are_left(either: Harness) -> None:
    """Damage beyond m: whether there was a delete cannot be told, so nothing is served or lost."""
    holders = [url for url, _, _ in named(either, "gone")]
    emptied(either, "gone", 1)
    either.lose(holders[1:])
    with either.open() as pool:
        with pytest.raises(TooManyErasures):
            pool.get("gone")
        with pytest.raises((TooManyErasures, TooFewDevices)):
            pool.delete("gone")
        pool.rebuild()
        assert content(either, holders[0], named(either, "gone", holders[0])[0][1]) == b""
    either.bring_back()
    with either.open() as pool:
        assert not pool.exists("gone")


def test_the_usual_delete_costs_no_read(either: Harness) -> None:
    """A tombstone on m + 1 devices is believed by its name: a look at it reads nothing."""
    opened: list[str] = []

    for device in either.devices.values():
        inner = device.open

        def counted(path: str, inner: Callable[[str], object] = inner) -> object:
            opened.append(path)
            return inner(path)

        device.open = counted  # type: ignore[assignment, method-assign]
    with either.open() as pool:
        assert not pool.exists("gone")
        assert pool.list() == ["small"]
        pool.put("gone", SMALL)
    assert opened == []


# --- the membership ----------------------------------------------------------------------------


def forged_record(harness: Harness, url: str, **changes: object) -> bytes:
    """A membership of a higher generation, sealed as anybody can, with the MAC of before."""
    data = content(harness, url, POOL_FILE)
    body = json.loads(data)
    del body["digest"]
    return seal({**body, "generation": body["generation"] + 1, **changes})


@pytest.mark.parametrize("downgrade", [False, True])
@pytest.mark.parametrize("opened", [True, False], ids=["under-an-open-pool", "before-it-opens"])
def test_a_forged_membership_is_none(made: Harness, downgrade: bool, opened: bool) -> None:
    """One that makes its device the only member, with the old MAC, or as a pool without a key: the
    device is out of date, and is brought up to date."""
    hostile = made.devices["memory://d0"]
    whole = PoolRecord.decode(content(made, hostile.url, POOL_FILE), where="x", pool_key=LOST)
    only = json.loads(content(made, hostile.url, POOL_FILE))["members"][:1]
    data = forged_record(made, hostile.url, members=only)
    if downgrade:
        lone = replace(whole, key_id="", generation=9, members=whole.members[:1], parity=1, data=1)
        data = lone.encode()
    if not opened:
        hostile.write_small(POOL_FILE, data)
    with made.open() as pool:
        if opened:
            hostile.write_small(POOL_FILE, data)
        all_is_well(pool)
        pool.put("other", SMALL)
        pool.delete("other")
        pool.admin.refresh()
        assert len(pool.admin.record.members) == 6
        assert pool.admin.record.generation == whole.generation
    with made.open() as pool:
        all_is_well(pool)
        held = content(made, hostile.url, POOL_FILE)
        assert PoolRecord.decode(held, where="x", pool_key=made.config.key) == whole


@pytest.mark.parametrize("alone", [False, True])
def test_a_forged_membership_opens_no_pool_whose_key_is_missing(made: Harness, alone: bool) -> None:
    """pool.toml without its key, and a device that says there is none: as many devices have the
    pool's as not. Refused, and nothing changes; all of the pool's files would be strangers."""
    hostile = made.devices["memory://d0"]
    whole = PoolRecord.decode(content(made, hostile.url, POOL_FILE), where="x", pool_key=LOST)
    members = whole.members[:1] if alone else whole.members
    hostile.write_small(
        POOL_FILE, replace(whole, key_id="", generation=9, members=members).encode()
    )
    good, before = made.config, {u: dict(d.files) for u, d in made.devices.items()}
    made.config = replace(good, key=None)
    for read_only in (True, False):
        with pytest.raises(PoolKeyError, match="it has no key"):
            made.open(read_only=read_only)
    assert {u: dict(d.files) for u, d in made.devices.items()} == before
    made.config = good
    with made.open() as pool:
        all_is_well(pool)


@pytest.mark.parametrize("mac", ["\u00e9" * 32, 7, None, [], "0" * 32])
def test_whatever_stands_for_a_mac_is_one_device_that_is_behind(made: Harness, mac: object) -> None:
    """Text that is not ASCII stopped every process with a TypeError."""
    hostile = made.devices["memory://d0"]
    data = forged_record(made, hostile.url, mac=mac)
    hostile.write_small(POOL_FILE, data)
    with made.open() as pool:
        all_is_well(pool)
        hostile.write_small(POOL_FILE, data)
        pool.put("other", SMALL)
        pool.delete("other")
        pool.admin.refresh()
        all_is_well(pool)


def test_a_device_that_poses_as_another_takes_nobodys_place(made: Harness) -> None:
    """By the identity of another one, which everybody can read, a device shut that one out: two
    devices lost by one. Who is where the membership has it is who it says."""
    hostile, other = made.devices["memory://d0"], made.devices["memory://d1"]
    hostile.write_small(IDENTITY_FILE, content(made, other.url, IDENTITY_FILE))
    with made.open() as pool:
        assert [d.url for d in pool.status().devices] == made.urls  # its own place is missing
        all_is_well(pool)


def test_a_device_that_returns_is_judged_without_its_forgeries(made: Harness) -> None:
    """They go to quarantine/; its own columns stay."""
    hostile = made.devices["memory://d0"]
    with made.open() as pool:
        pool.add_device("memory://spare")
        pool.evict(hostile.url)
        newer_copy(made, hostile)
        tombstone_of_another_object(made, hostile)
        found = pool.readmit(hostile.url)
        assert found is not None
        assert found.quarantined >= 6
        all_is_well(pool)
        pool.rebuild()
        all_is_well(pool)
