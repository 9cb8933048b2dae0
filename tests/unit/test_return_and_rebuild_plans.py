"""Two pure decisions: what a returning device keeps, and what a rebuild works on first."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from hpstore.devices.memory import MemoryDevice
from hpstore.format.keys import ColumnName, Kind, Version
from hpstore.format.records import DeviceState, Member, PoolRecord
from hpstore.maintenance.dependents import lost_without
from hpstore.maintenance.rebuild import needs_work, plan_rebuild
from hpstore.membership import returning_files
from hpstore.objects.context import View
from hpstore.objects.key_listing import Catalog
from hpstore.objects.survey import ColumnFile, Layout, Survey, spare_losses

judge_return = partial(
    returning_files.judge_return, fellows=(), recent=False, silent=0, unhealed=0
)  # all members answer, and it left long ago

OLD, NEW, NEWER = Version(1, 1), Version(2, 1), Version(3, 1)


def file(
    version: Version, column: int, *, device: str = "", kind: Kind = Kind.COLUMN, data: int = 4
) -> ColumnFile:
    """A column of data + 2, on the device of its own number."""
    name = ColumnName(version=version, kind=kind, column=column, data=data, parity=2)
    return ColumnFile(device or str(column), name)


def layout(
    version: Version, columns: Iterable[int], *, kind: Kind = Kind.COLUMN, data: int = 4
) -> Layout:
    found = tuple(file(version, c, kind=kind, data=data) for c in columns)
    return Layout(version=version, kind=kind, data=data, parity=2, files=found)


def view(members: int = 6, draining: Iterable[str] = (), answering: int | None = None) -> View:
    states = dict.fromkeys(draining, DeviceState.DRAINING)
    record = PoolRecord(
        pool_id="p",
        generation=1,
        nonce="",
        parent="",
        data=4,
        parity=2,
        unit_bytes=4096,
        members=tuple(
            Member(
                device_id=str(i),
                url="",
                domain=str(i),
                state=states.get(str(i), DeviceState.ONLINE),
            )
            for i in range(members)
        ),
    )
    there = members if answering is None else answering
    return View(record=record, devices={str(i): MemoryDevice() for i in range(there)})


# --- judge_return: PROTOCOL 12 and 8 -------------------------------------------------------------


def test_a_column_that_is_still_missing_elsewhere_is_kept() -> None:
    """The version is the newest and lives elsewhere: the device serves its column again."""
    assert judge_return(file(NEW, 5), layout(NEW, range(5))) == "keep"


def test_a_column_that_was_rebuilt_meanwhile_is_removed() -> None:
    """Another device holds it now; two would only confuse."""
    assert judge_return(file(NEW, 5), layout(NEW, range(6))) == "remove"


def test_a_superseded_column_is_removed_only_when_the_newer_version_is_whole() -> None:
    """PROTOCOL 8: an older version goes when the newer is settled, else it is set aside."""
    assert judge_return(file(OLD, 5), layout(NEW, range(6))) == "remove"
    assert judge_return(file(OLD, 5), layout(NEW, range(5))) == "quarantine"


def test_a_deleted_object_does_not_come_back() -> None:
    """A full tombstone removes the column; a thin one sets it aside."""
    whole = layout(NEW, range(3), kind=Kind.TOMBSTONE, data=1)
    thin = layout(NEW, range(2), kind=Kind.TOMBSTONE, data=1)
    assert judge_return(file(OLD, 5), whole) == "remove"
    assert judge_return(file(OLD, 5), thin) == "quarantine"


def test_what_nobody_else_knows_is_quarantined() -> None:
    """Deleted and swept, or never acknowledged: not served, not deleted."""
    assert judge_return(file(NEW, 5), None) == "quarantine"
    assert judge_return(file(NEW, 5, kind=Kind.TOMBSTONE, data=1), None) == "quarantine"


def test_a_version_newer_than_all_others_is_quarantined() -> None:
    """It does not live elsewhere, so it is not served."""
    assert judge_return(file(NEWER, 5), layout(NEW, range(6))) == "quarantine"


@pytest.mark.parametrize(
    "mine",
    [
        file(NEW, 5, data=3),
        file(NEW, 5, kind=Kind.COPY, data=1),
        file(Version(NEW.counter, NEW.nonce, 1), 5),
        file(Version(NEW.counter, NEW.nonce + 1), 5),
    ],
)
def test_another_layout_never_joins(mine: ColumnFile) -> None:
    """Columns of another shape, revision or writer do not fill a gap in this one."""
    assert judge_return(mine, layout(NEW, range(5))) == "quarantine"


def test_an_older_revision_is_removed_once_the_newer_is_whole() -> None:
    """The object was re-laid while the device was away."""
    again = Version(NEW.counter, NEW.nonce, 1)
    assert judge_return(file(NEW, 5), layout(again, range(5), data=3)) == "remove"
    assert judge_return(file(NEW, 5), layout(again, range(4), data=3)) == "quarantine"


def test_a_column_kept_twice_does_not_make_the_newer_version_whole() -> None:
    """Six files, but only five columns: the older version is not removed."""
    double = Layout(
        version=NEW,
        kind=Kind.COLUMN,
        data=4,
        parity=2,
        files=(*layout(NEW, range(5)).files, file(NEW, 4, device="5")),
    )
    assert judge_return(file(OLD, 5), double) == "quarantine"


# --- lost_without --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "leaving", "answering", "lost"),
    [
        (range(6), "0", 6, False),
        (range(4), "0", 6, True),
        (range(4), "5", 6, False),
        (range(5), "0", 6, False),
        (range(6), "0", 4, True),  # two more do not answer
        (range(6), "5", 5, False),
    ],
)
def test_an_eviction_that_would_lose_an_object_is_seen(
    columns: Iterable[int], leaving: str, answering: int, lost: bool
) -> None:
    """Only columns on devices that answer and stay are counted."""
    found = lost_without(view(answering=answering), layout(NEW, columns), {leaving})
    assert found is lost


# --- needs_work, plan_rebuild --------------------------------------------------------------------


def survey(*files: ColumnFile, key: str = "a") -> Survey:
    return Survey(key=key, files=files, unknown=frozenset())


def whole(version: Version = NEW, **shape: object) -> tuple[ColumnFile, ...]:
    return layout(version, range(6), **shape).files  # type: ignore[arg-type]  # kind, data by name


def test_a_whole_object_in_its_place_is_passed_over() -> None:
    """All columns, once each, on online devices, at full width."""
    assert not needs_work(view(), survey(*whole()), usable=6)
    copies = layout(NEW, range(3), kind=Kind.COPY, data=1).files
    assert not needs_work(view(), survey(*copies), usable=6)
    tombstone = layout(NEW, range(3), kind=Kind.TOMBSTONE, data=1).files
    assert not needs_work(view(), survey(*tombstone), usable=6)


@pytest.mark.parametrize("missing", range(6))
def test_a_missing_column_needs_work(missing: int) -> None:
    """Whichever it is."""
    left = [f for f in whole() if f.name.column != missing]
    assert needs_work(view(), survey(*left), usable=6)


def test_a_column_on_two_devices_does_not_stand_for_a_missing_one() -> None:
    """Six files of which two are column 4: column 5 is lost and must be rebuilt."""
    left = [f for f in whole() if f.name.column != 5]
    assert needs_work(view(), survey(*left, file(NEW, 4, device="5")), usable=6)


def test_a_column_kept_twice_needs_work() -> None:
    """A move that was cut short leaves one file too many."""
    assert needs_work(view(7), survey(*whole(), file(NEW, 4, device="6")), usable=7)


def test_a_column_on_a_leaving_or_silent_device_needs_work() -> None:
    """It must move before the device goes; on a silent one it may be lost."""
    assert needs_work(view(draining=["3"]), survey(*whole()), usable=5)
    assert needs_work(view(answering=5), survey(*whole()), usable=5)


def test_a_narrow_object_widens_when_devices_allow() -> None:
    """k' below min(k, usable - m) needs work; wider than that does not."""
    narrow = layout(NEW, range(5), data=3).files
    assert needs_work(view(), survey(*narrow), usable=6)
    assert not needs_work(view(), survey(*narrow), usable=5)
    assert not needs_work(view(), survey(*whole()), usable=5)


def test_two_versions_need_work() -> None:
    """The older one is to be removed, or the newer one passed over."""
    assert needs_work(view(), survey(*whole(OLD), *whole(NEW)), usable=6)
    assert needs_work(view(), survey(), usable=6)


def test_a_thin_tombstone_needs_work() -> None:
    """m + 1 copies on online devices."""
    thin = layout(NEW, range(2), kind=Kind.TOMBSTONE, data=1).files
    assert needs_work(view(), survey(*thin), usable=6)
    three = layout(NEW, range(3), kind=Kind.TOMBSTONE, data=1).files
    assert needs_work(view(draining=["0"]), survey(*three), usable=5)


@pytest.mark.parametrize(
    ("columns", "kind", "data", "spare"),
    [
        (range(6), Kind.COLUMN, 4, 2),
        (range(4), Kind.COLUMN, 4, 0),
        (range(3), Kind.COLUMN, 4, -1),
        (range(3), Kind.COPY, 1, 2),
        (range(1), Kind.COPY, 1, 0),
    ],
)
def test_spare_losses(columns: Iterable[int], kind: Kind, data: int, spare: int) -> None:
    """How many more devices may fail before bytes are lost."""
    assert spare_losses(view(), layout(NEW, columns, kind=kind, data=data)) == spare


def test_a_draining_device_is_no_safety() -> None:
    """Its columns are about to go."""
    assert spare_losses(view(draining=["0", "1"]), layout(NEW, range(6))) == 0


def test_the_most_endangered_object_comes_first() -> None:
    """By further losses survived, then by name; whole ones are not in the plan."""
    surveys = {
        "whole": survey(*whole()),
        "b one lost": survey(*whole()[:5]),
        "a one lost": survey(*whole()[1:]),
        "two lost": survey(*whole()[2:]),
        "torn": survey(*whole()[:2]),
    }
    plan = plan_rebuild(view(), Catalog(surveys=surveys, unknown=frozenset()), usable=6)
    assert plan == ["torn", "two lost", "a one lost", "b one lost"]


def test_what_left_lately_is_kept_though_nobody_else_knows_it() -> None:
    """Within the horizon a delete would still have its tombstone: these may be the last copies."""
    assert judge_return(file(NEW, 5), None, recent=True) == "keep"
    assert judge_return(file(NEW, 5), None) == "quarantine"


def test_what_left_lately_and_is_newer_than_all_is_kept() -> None:
    """PROTOCOL 7: it may have been acknowledged on devices that left with it. Set aside, its
    fellows could never be whole again, and an older version would be served instead."""
    assert judge_return(file(NEWER, 5), layout(NEW, range(6)), recent=True) == "keep"
    thin = layout(NEW, range(5))
    assert judge_return(file(OLD, 5), thin, recent=True) == "keep"
    assert judge_return(file(OLD, 5), layout(NEW, range(6)), recent=True) == "remove"


def test_a_column_of_a_version_that_lives_beside_an_unfinished_newer_one_is_kept() -> None:
    """PROTOCOL 8, 12: the newer one is not settled, so the older one is still needed. A re-layout
    that was cut short has not replaced what it was made from."""
    fellows = layout(OLD, range(5)).files
    assert judge_return(file(OLD, 5), layout(NEW, range(5)), fellows=fellows) == "keep"
    again = Version(OLD.counter, OLD.nonce, 1)
    relaid = layout(again, range(1), data=3)
    assert judge_return(file(OLD, 5), relaid, fellows=fellows) == "keep"


def test_the_rest_of_a_torn_put_is_no_version_that_lives() -> None:
    """Two columns of six were certainly never acknowledged: set aside, not served."""
    fellows = layout(NEWER, range(1)).files
    assert judge_return(file(NEWER, 5), layout(NEW, range(6)), fellows=fellows) == "quarantine"


@pytest.mark.parametrize(
    ("data", "silent", "found"),
    [
        (4, 0, "quarantine"),
        (4, 3, "quarantine"),  # 1 + 3 columns of an acknowledged one's 5: another would be seen
        (4, 4, "unclear"),
        (2, 1, "quarantine"),
        (2, 2, "unclear"),  # as many as parity: the other columns may all be there
    ],
)
def test_what_members_that_do_not_answer_may_know_is_not_decided(
    data: int, silent: int, found: str
) -> None:
    """PROTOCOL 7, 12. Neither served nor set aside: deleted and swept, or needed, nobody can say.
    Evicted devices that were not made up for decide nothing: they may never answer."""
    mine = file(NEW, 5 if data == 4 else 3, data=data)
    assert judge_return(mine, None, silent=silent) == found
    assert judge_return(mine, None, unhealed=silent) == "quarantine"
    assert judge_return(mine, None, silent=silent, recent=True) == "keep"
