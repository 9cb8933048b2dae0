"""How the objects of a pool are, by the names of their files: one walk over all devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace

import xxhash

from hpstore.format.keys import Kind
from hpstore.maintenance.deferred_repair import read_notes
from hpstore.maintenance.rebuild import needs_work
from hpstore.objects.context import PoolContext, View
from hpstore.objects.key_listing import Catalog, walk
from hpstore.objects.survey import (
    Layout,
    Survey,
    VersionVerdict,
    judge_by_names,
    newest_by_name,
    spare_losses,
    survey_keys,
    unknown_devices,
)

_NAMED = 20  # degraded objects
_LOOKED_AT_AGAIN = 200  # more than that at one time is no writer's doing
_LOOKS = (0.1, 0.4, 0.8, 1.6)  # seconds before each further look
_LOOKS_AT_OLD = 2  # of these at versions that are older than a put may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """An object that is short of its full stripe; `spare` may be lost yet, below 0: unreadable."""

    key: str
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a walk has found.

    `holding`: of how many live objects a device has a column that no other device has. `needed`:
    devices without which some object could not be read. `expiring`: degraded objects that are
    healed last, or left alone, as their owner soon deletes them: why, and how many.
    """

    objects: int
    degraded: int  # readable, but short of their full stripe
    unreadable: int  # need devices that are missing now
    losses_tolerated: int  # further devices that may be lost: the pool opens, all objects read
    spare: int  # further columns that the weakest object may lose; parity when there is none
    todo: int  # keys that a rebuild would look at
    todo_identity: int  # equal for the same keys with the same files, unless by chance
    most_endangered: tuple[Degraded, ...]
    holding: Mapping[str, int]
    needed: frozenset[str]
    silent: frozenset[str]  # devices that did not answer
    expiring: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Short:
    """A key whose newest version, by names, lacks columns: how many it may lose, and its files."""

    spare: int
    serves: bool
    layout: Layout
    explained: bool  # as many columns are missing as may be on devices that are away


def survey_condition(store: PoolContext, silent: Collection[str] = ()) -> Condition:
    """Walk all keys and add up. Nothing is opened but notes on what expires.

    `silent`: devices that are open and known not to answer. They are not asked, and what they hold
    counts as missing: a dead disk's listings may still come out of a cache.

    What is short in the walk is looked at again: a walk is no snapshot, and what a live writer is
    about to complete is no damage.
    """
    store = store.without(silent)
    view, found = store.view, walk(store)
    usable = store.usable()
    objects = todo = identity = 0
    holding: Counter[str] = Counter()
    needed: set[str] = set()
    short: dict[str, _Short] = {}
    for key, survey in found.surveys.items():
        if needs_work(view, survey, usable):
            todo, identity = todo + 1, identity ^ _identity(survey)
        layout = newest_by_name(view, survey)
        if layout is None or layout.kind is Kind.TOMBSTONE:
            continue
        objects += 1
        alone = [files[0].device for files in layout.columns.values() if len(files) == 1]
        holding.update(set(alone))
        needed |= needed_by(layout, {file.device for file in layout.files} - needed)
        looked = _look(view, survey)
        if looked is not None:
            short[key] = looked
    for key in _under_way(store, short):
        del short[key]
    worst = [Degraded(key=key, spare=row.spare) for key, row in short.items()]
    served = {key for key, row in short.items() if row.serves}
    spare = min([view.record.parity, *(max(0, row.spare) for row in short.values())])
    return Condition(
        objects=objects,
        degraded=len(served),
        unreadable=len(short) - len(served),
        losses_tolerated=losses_tolerated(view, spare, found.unknown),
        spare=spare,
        todo=todo,
        todo_identity=identity,
        most_endangered=tuple(_worst(worst)),
        holding=dict(holding),
        needed=frozenset(needed),
        silent=found.unknown,
        expiring=_expiring(store, found, served),
    )


def losses_tolerated(view: View, spare: int, silent: Collection[str]) -> int:
    """Further devices that may be lost with the pool still open and every object readable: the one
    figure that all screens, files and metrics show. Pure.

    `spare`: of the weakest object, by columns on devices that answer. `silent`: devices that do
    not; evicted ones that no rebuild has made up for count as lost, too (PROTOCOL 17).
    """
    return max(0, min(spare, view.may_leave(silent)))


def as_of_now(found: Condition, view: View, silent: Collection[str]) -> Condition:
    """What a walk has found, less what has left or stopped answering since: what is certain until
    the next walk has ended. Pure. `silent`: devices that are open and do not answer."""
    lost = (view.missing.union(silent) | view.record.unhealed()) - found.silent
    holding = [found.holding[device] for device in lost if device in found.holding]
    spare = max(0, found.spare - len(holding))
    return replace(
        found,
        degraded=max([found.degraded, *holding]),
        spare=spare,
        losses_tolerated=losses_tolerated(view, spare, silent),
    )


def _identity(survey: Survey) -> int:
    """A number for a key and the files that it has."""
    files = sorted((file.device, str(file.name)) for file in survey.files)
    return xxhash.xxh3_64_intdigest(repr((survey.key, files)).encode())


def _look(view: View, survey: Survey) -> _Short | None:
    """What a survey says of a key that lacks columns; None for one that is whole or gone."""
    layout = newest_by_name(view, survey)
    if layout is None or layout.kind is Kind.TOMBSTONE:
        return None
    spare = spare_losses(view, layout)
    unknown = unknown_devices(view, survey)
    verdict = judge_by_names(layout, unknown)
    serves = verdict is VersionVerdict.SERVES
    if serves and spare >= layout.parity:
        return None
    explained = layout.width - len(layout.columns) <= unknown
    return _Short(spare, serves, layout, explained)


def _under_way(store: PoolContext, short: Mapping[str, _Short]) -> set[str]:
    """Keys among the weakest that change or become whole while they are looked at again.

    Not those whose missing columns are explained by devices that are away. What shows the same
    files at every look is short. A version that is young, which a writer may be about to complete,
    is looked at for longer.
    """
    strange = [key for key, row in short.items() if not row.explained]
    weakest = sorted(strange, key=lambda key: (short[key].spare, key))[:_LOOKED_AT_AGAIN]
    oldest = store.clock.wall_ms() - store.settings.put_deadline_seconds * 1000
    moving: set[str] = set()
    for turn, seconds in enumerate(_LOOKS):
        still = [key for key in weakest if key not in moving]
        if turn >= _LOOKS_AT_OLD:
            still = [key for key in still if short[key].layout.version.counter > oldest]
        if not still:
            break
        store.clock.wait(seconds)
        for key, survey in survey_keys(store, still).items():
            now = _look(store.view, survey)
            if now is None or set(now.layout.files) != set(short[key].layout.files):
                moving.add(key)
    return moving


def _expiring(store: PoolContext, found: Catalog, short: Set[str]) -> dict[str, int]:
    notes = read_notes(store, found) if short else []
    counts = {note.reason: sum(key in short for key in note.sizes) for note in notes}
    return {reason: count for reason, count in counts.items() if count}


def needed_by(layout: Layout, devices: Set[str]) -> set[str]:
    """Those of `devices` without which a layout could not be read, judged by names. Pure."""
    columns = layout.columns
    needed = set()
    for device in devices:
        left = sum(any(file.device != device for file in files) for files in columns.values())
        if left < layout.data:
            needed.add(device)
    return needed


def _worst(found: list[Degraded]) -> list[Degraded]:
    return sorted(found, key=lambda row: (row.spare, row.key))[:_NAMED]
