"""How the objects of a pool are, by the names of their files: one walk over all devices."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from hpstore.expiry import read_notes
from hpstore.keys import Kind
from hpstore.objects.catalog import Catalog, walk
from hpstore.objects.store import Store
from hpstore.objects.survey import (
    Layout,
    Verdict,
    judge,
    newest_by_name,
    spare_losses,
    unknown_devices,
)
from hpstore.rebuild import needs_work

_NAMED = 20  # degraded objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """An object that is short of its full stripe; `spare` may be lost yet, below 0: unreadable."""

    key: str
    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a walk has found.

    `holding`: devices with a column of a live object that no other device has. `needed`: devices
    without which some object could not be read. `expiring`: degraded objects that are healed last,
    or left alone, as their owner soon deletes them: why, and how many.
    """

    objects: int
    degraded: int  # readable, but short of their full stripe
    unreadable: int  # need devices that are missing now
    losses_tolerated: int  # further ones, by the weakest object; parity when there is none
    todo: int  # keys that a rebuild would look at
    most_endangered: tuple[Degraded, ...]
    holding: frozenset[str]
    needed: frozenset[str]
    silent: frozenset[str]  # devices that did not answer
    expiring: dict[str, int]


def survey_condition(store: Store) -> Condition:
    """Walk all keys and add up. Nothing is opened but notes on what expires."""
    view, found = store.view, walk(store)
    usable = store.usable()
    objects = degraded = unreadable = todo = 0
    tolerated = view.record.parity
    worst: list[Degraded] = []
    holding: set[str] = set()
    needed: set[str] = set()
    short_keys: set[str] = set()
    for key, survey in found.surveys.items():
        todo += needs_work(view, survey, usable)
        layout = newest_by_name(view, survey)
        if layout is None or layout.kind is Kind.TOMBSTONE:
            continue
        objects += 1
        holding |= {files[0].device for files in layout.columns.values() if len(files) == 1}
        needed |= needed_by(layout, {file.device for file in layout.files} - needed)
        spare = spare_losses(view, layout)
        short = spare < layout.parity
        tolerated = max(0, min(tolerated, spare))
        unknown = unknown_devices(view, survey)
        verdict = judge(layout, valid=len(layout.columns), corrupt=0, unknown_devices=unknown)
        serves = verdict is Verdict.SERVES
        degraded += serves and short
        unreadable += not serves
        if short and serves:
            short_keys.add(key)
        if short or not serves:
            worst.append(Degraded(key=key, spare=spare))
            if len(worst) > 8 * _NAMED:
                worst = _worst(worst)
    return Condition(
        objects=objects, degraded=degraded, unreadable=unreadable, losses_tolerated=tolerated,
        todo=todo, most_endangered=tuple(_worst(worst)), holding=frozenset(holding),
        needed=frozenset(needed), silent=found.unknown,
        expiring=_expiring(store, found, short_keys),
    )  # fmt: skip


def _expiring(store: Store, found: Catalog, short: Set[str]) -> dict[str, int]:
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


__all__ = ["Condition", "Degraded", "needed_by", "survey_condition"]
