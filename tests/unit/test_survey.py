"""PROTOCOL 7 as a table: what a version's files say about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from hpstore.devices.memory import MemoryDevice
from hpstore.format.keys import ColumnName, Kind, Version
from hpstore.format.records import DeviceState, Member, PoolRecord
from hpstore.objects.context import View
from hpstore.objects.survey import (
    ColumnFile,
    Layout,
    Survey,
    VersionVerdict,
    judge,
    newest_by_name,
    unknown_devices,
)

OLD, NEW = Version(1, 1), Version(2, 1)
SERVES, UNCLEAR, TORN = VersionVerdict.SERVES, VersionVerdict.UNCLEAR, VersionVerdict.TORN


def files(
    version: Version, columns: Iterable[int], *, kind: Kind = Kind.COLUMN, data: int = 4
) -> tuple[ColumnFile, ...]:
    """Column i on device "i", of data + 2."""
    return tuple(
        ColumnFile(str(i), ColumnName(version=version, kind=kind, column=i, data=data, parity=2))
        for i in columns
    )


def layout(kind: Kind = Kind.COLUMN, data: int = 4, parity: int = 2) -> Layout:
    return Layout(version=NEW, kind=kind, data=data, parity=parity, files=())


def view(members: int = 6, evicted: Iterable[str] = (), answering: int = 6) -> View:
    record = PoolRecord(
        pool_id="p",
        generation=1,
        nonce="",
        parent="",
        data=4,
        parity=2,
        unit_bytes=4096,
        members=tuple(Member(device_id=str(i), url="", domain=str(i)) for i in range(members)),
        evicted=tuple(Member(device_id=d, url="", domain=d) for d in evicted),
    )
    return View(record=record, devices={str(i): MemoryDevice() for i in range(answering)})


def survey(*found: tuple[ColumnFile, ...], unknown: Iterable[str] = ()) -> Survey:
    return Survey(
        key="a", files=tuple(f for some in found for f in some), unknown=frozenset(unknown)
    )


# 4+2: k' = 4, floor = max(5, 3) = 5
@pytest.mark.parametrize(
    ("valid", "corrupt", "unknown", "verdict"),
    [
        (6, 0, 0, SERVES),
        (4, 0, 0, SERVES),
        (4, 2, 9, SERVES),
        (3, 0, 2, UNCLEAR),
        (3, 2, 0, UNCLEAR),  # corrupt columns were there: acknowledged data may be lost
        (3, 1, 1, UNCLEAR),
        (3, 0, 1, TORN),  # four columns at most: below the floor of five
        (3, 1, 0, TORN),
        (0, 0, 6, UNCLEAR),
        (0, 0, 5, UNCLEAR),
        (0, 0, 4, TORN),
        (0, 5, 0, UNCLEAR),
        (0, 0, 0, TORN),
        (3, 3, 9, UNCLEAR),
        (1, 0, 9, UNCLEAR),
    ],
)
def test_protocol_7_for_columns(
    valid: int, corrupt: int, unknown: int, verdict: VersionVerdict
) -> None:
    """c >= k' serves; else c + u >= floor may have been acknowledged; else it is torn."""
    assert judge(layout(), valid=valid, corrupt=corrupt, unknown_devices=unknown) is verdict


# copies and tombstones with m = 2: k' = 1, floor = 3
@pytest.mark.parametrize("kind", [Kind.COPY, Kind.TOMBSTONE])
@pytest.mark.parametrize(
    ("valid", "corrupt", "unknown", "verdict"),
    [
        (1, 0, 0, SERVES),
        (3, 0, 0, SERVES),
        (0, 1, 2, UNCLEAR),
        (0, 3, 0, UNCLEAR),
        (0, 0, 3, UNCLEAR),
        (0, 0, 2, TORN),
        (0, 1, 1, TORN),
    ],
)
def test_protocol_7_for_copies(
    kind: Kind, valid: int, corrupt: int, unknown: int, verdict: VersionVerdict
) -> None:
    """One whole copy serves; all three must be possible for it to have been acknowledged."""
    found = judge(layout(kind, 1), valid=valid, corrupt=corrupt, unknown_devices=unknown)
    assert found is verdict


@pytest.mark.parametrize("data", [1, 2, 4, 10])
@pytest.mark.parametrize("parity", [1, 2, 4])
def test_an_acknowledged_version_is_never_torn(data: int, parity: int) -> None:
    """From every acknowledged set, lose up to all devices: serves or unclear, never passed over."""
    shape = layout(data=data, parity=parity)
    for acknowledged in range(shape.floor, shape.width + 1):
        for lost in range(acknowledged + 1):
            for corrupt in range(lost + 1):
                verdict = judge(
                    shape,
                    valid=acknowledged - lost,
                    corrupt=corrupt,
                    unknown_devices=lost - corrupt,
                )
                assert verdict is not TORN
                assert (verdict is SERVES) == (acknowledged - lost >= data)


def test_a_put_below_the_floor_is_torn_when_all_answered() -> None:
    """Short of k' columns, nobody silent: it was never acknowledged."""
    for valid in range(4):
        assert judge(layout(), valid=valid, corrupt=0, unknown_devices=0) is TORN


def test_more_silent_devices_than_columns_do_not_count() -> None:
    """At most the missing columns can hide: 20 silent devices make no 7th column."""
    assert judge(layout(data=2), valid=1, corrupt=0, unknown_devices=20) is UNCLEAR
    assert judge(layout(data=2), valid=0, corrupt=4, unknown_devices=20) is UNCLEAR


def test_floor_and_width_of_a_layout() -> None:
    """PROTOCOL 5: max(k' + 1, m + 1) columns, or all m + 1 copies."""
    assert (layout().floor, layout().width) == (5, 6)
    assert layout(data=1, parity=4).floor == 5
    assert layout(Kind.COPY, 1).floor == layout(Kind.TOMBSTONE, 1).floor == 3


def test_silent_members_may_hide_a_column() -> None:
    """Each one once, also when it is silent and was evicted."""
    assert unknown_devices(view(), survey()) == 0
    assert unknown_devices(view(), survey(unknown=["1", "2"])) == 2
    assert unknown_devices(view(evicted=["x"]), survey(unknown=["x"])) == 1


def test_devices_that_left_may_have_held_a_column() -> None:
    """Every evicted one, until a whole rebuild has made up for it."""
    seen = view(evicted=["x", "y"])
    assert unknown_devices(seen, survey()) == 2
    healed = [replace(m, state=DeviceState.HEALED) for m in seen.record.evicted]
    after = replace(seen, record=replace(seen.record, evicted=tuple(healed)))
    assert unknown_devices(after, survey()) == 0


def test_layouts_are_newest_first_and_tombstones_before_data() -> None:
    """Of one version the tombstone, then the fuller layout."""
    found = survey(
        files(OLD, range(6)),
        files(NEW, range(2)),
        files(NEW, range(3), data=3),
        files(NEW, [5], kind=Kind.TOMBSTONE, data=1),
    ).layouts()
    assert [(x.version, x.kind, x.data) for x in found] == [
        (NEW, Kind.TOMBSTONE, 1),
        (NEW, Kind.COLUMN, 3),
        (NEW, Kind.COLUMN, 4),
        (OLD, Kind.COLUMN, 4),
    ]
    assert sum(len(x.files) for x in found) == 12


def test_columns_of_different_layouts_never_mix() -> None:
    """Three of 4+2 and three of 3+2 of one version are two layouts, not one of six columns."""
    found = survey(files(NEW, range(3)), files(NEW, range(3, 6), data=3)).layouts()
    assert [len(x.columns) for x in found] == [3, 3]


def newest(found: Survey, seen: View | None = None) -> Version | None:
    chosen = newest_by_name(seen or view(), found)
    return None if chosen is None else chosen.version


def test_the_newest_whole_version_is_chosen() -> None:
    """Never an older one, also not a fuller one."""
    assert newest(survey(files(OLD, range(6)), files(NEW, range(4)))) == NEW
    assert newest(survey(files(OLD, range(6)))) == OLD
    assert newest(survey()) is None


def test_a_torn_put_is_passed_over() -> None:
    """Three columns of five, everybody answered: the older version still counts."""
    assert newest(survey(files(OLD, range(6)), files(NEW, range(3)))) == OLD
    assert newest(survey(files(NEW, range(3)))) is None


def test_a_version_that_may_be_acknowledged_is_not_passed_over() -> None:
    """Two silent devices may hold what is missing: no silent fall back to the older version."""
    found = survey(files(OLD, range(6)), files(NEW, range(3)), unknown=["4", "5"])
    assert newest(found, view(answering=4)) == NEW


def test_an_evicted_device_may_hold_what_is_missing() -> None:
    """Eviction makes columns unknown, not absent."""
    found = survey(files(OLD, range(6)), files(NEW, range(3)))
    assert newest(found, view(evicted=["x", "y"])) == NEW


def test_one_tombstone_hides_what_is_older() -> None:
    """One seen means finish it (PROTOCOL 12); a newer put wins over it."""
    tombstone = files(NEW, [0], kind=Kind.TOMBSTONE, data=1)
    chosen = newest_by_name(view(), survey(files(OLD, range(6)), tombstone))
    assert chosen is not None
    assert chosen.kind is Kind.TOMBSTONE
    newer = files(Version(3, 1), range(6))
    assert newest(survey(newer, tombstone, files(OLD, range(6)))) == Version(3, 1)


def test_a_column_on_two_devices_counts_once() -> None:
    """Columns 0, 1, 2 and 2 again are three columns."""
    double = ColumnFile("5", ColumnName(version=NEW, kind=Kind.COLUMN, column=2, data=4, parity=2))
    assert newest(survey(files(OLD, range(6)), files(NEW, range(3)), (double,))) == OLD


def test_a_torn_revision_leaves_the_one_before() -> None:
    """A re-layout that was cut short: the same content in its old layout is served."""
    again = Version(NEW.counter, NEW.nonce, 1)
    chosen = newest_by_name(view(), survey(files(NEW, range(6)), files(again, range(2), data=3)))
    assert chosen is not None
    assert chosen.version == NEW
