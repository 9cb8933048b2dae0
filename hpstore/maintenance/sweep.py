"""Sweeps: what is past its time and stands for nothing more goes from all devices (PROTOCOL 12).

That is tombstones, and puts that were certainly never acknowledged. The plan is pure. No clock
keeps it safe: before anything is removed the horizon of every member is above it, so that no writer
and no repair that began before can bring back what it stood for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from hpstore.errors import HpstoreError
from hpstore.format.keys import Kind
from hpstore.objects.context import PoolContext, View
from hpstore.objects.horizon import raise_horizons
from hpstore.objects.key_listing import walk
from hpstore.objects.survey import (
    ColumnFile,
    Layout,
    Survey,
    VersionVerdict,
    judge_by_names,
    survey_keys,
    unknown_devices,
)
from hpstore.objects.write.delete_files import remove_files

_log = logging.getLogger(__name__)
BATCH_KEYS = 256  # looked up together, for one raise of the horizon
DUE_DELETES = 64  # so many are worth a raise of the horizon


def may_be_swept(view: View, survey: Survey, before: int) -> bool:
    """Whether a sweep should look at a key once it has been repaired. Pure.

    `before`: the first counter that is too young.
    """
    layouts = survey.layouts()
    if not layouts:
        return False
    deleted = layouts[0].kind is Kind.TOMBSTONE and layouts[0].version.counter < before
    return deleted or bool(torn_layouts(view, survey, before))


def sweepable(view: View, survey: Survey, before: int) -> list[ColumnFile]:
    """Files of a key that a sweep may remove. Pure.

    Only with every member answering. A tombstone stays while anything that it stands for is there,
    and while a device was evicted within its time: one that returns is then judged by it.
    """
    layouts = survey.layouts()
    if survey.unknown or not layouts:
        return []
    newest = layouts[0]
    if newest.kind is Kind.TOMBSTONE and newest.version.counter < before:
        if len(layouts) > 1 or any(gone.since_ms >= before for gone in view.record.evicted):
            return []
        return list(newest.files)
    return [file for layout in torn_layouts(view, survey, before) for file in layout.files]


def torn_layouts(view: View, survey: Survey, before: int) -> list[Layout]:
    """Layouts that were certainly never acknowledged and are old enough. Pure."""
    unknown = unknown_devices(view, survey)
    return [
        layout
        for layout in survey.layouts()
        if layout.version.counter < before
        and judge_by_names(layout, unknown) is VersionVerdict.TORN
    ]


def young_counter(store: PoolContext) -> int:
    """The first counter that is too young to be swept: puts that are under way are left alone."""
    return store.clock.wall_ms() - int(store.settings.tombstone_seconds * 1000)


def sweep_all(store: PoolContext, go_on: Callable[[], bool]) -> int:
    """Sweep the whole pool, a batch of keys at a time while `go_on`; how many files went."""
    surveys, before, swept = walk(store).surveys, young_counter(store), 0
    keys = sorted(
        key for key, survey in surveys.items() if may_be_swept(store.view, survey, before)
    )
    while keys and go_on():
        swept += sweep_keys(store, keys[:BATCH_KEYS])
        keys = keys[BATCH_KEYS:]
    return swept


def sweep_surveyed(store: PoolContext, surveys: Mapping[str, Survey]) -> int:
    """Sweep those of these keys that may have something to be swept; how many files went.

    What fails is counted, and met again by the next sweep.
    """
    before = young_counter(store)
    keys = sorted(
        key for key, survey in surveys.items() if may_be_swept(store.view, survey, before)
    )
    return sweep_keys(store, keys)


def sweep_keys(store: PoolContext, keys: Iterable[str]) -> int:
    """Sweep keys, a batch at a time; how many files went."""
    rest, swept = list(keys), 0
    while rest:
        batch, rest = rest[:BATCH_KEYS], rest[BATCH_KEYS:]
        try:
            swept += _sweep_batch(store, batch)
        except (HpstoreError, OSError) as error:
            if store.metrics.count("sweep_error_total") == 1:
                _log.warning("a sweep failed, the next one tries again: %s", error)
    return swept


def _sweep_batch(store: PoolContext, keys: list[str]) -> int:
    before = young_counter(store)
    first = survey_keys(store, keys)
    record = store.view.record
    found = {key: files for key in keys if (files := sweepable(store.view, first[key], before))}
    if not found:
        return 0
    highest = max(file.name.version.counter for files in found.values() for file in files)
    if not raise_horizons(store, highest):
        return 0
    again = survey_keys(store, list(found))
    if store.view.record.order != record.order:
        return 0  # a new member's horizon was not raised
    # what the tombstones stand for may have been removed a moment ago: not to come back with a
    # power cut when they are gone
    synced = store.each(store.view.devices, lambda _, device: device.sync_removals())
    for answer in synced.values():
        if isinstance(answer, Exception):
            raise answer
    swept = 0
    for key in found:
        if set(again[key].files) == set(first[key].files):  # a listing is no snapshot, two are
            swept += remove_files(store, key, sweepable(store.view, again[key], before))
    return swept


def sweep_deleted(store: PoolContext) -> int:
    """Sweep what this process has deleted, once enough of it is past its time; how many files went.

    So that tombstones do not pile up where no scrub or rebuild runs. A failure is none of what was
    deleted just now: it is counted and logged, and a scrub sweeps what stays.
    """
    before, deleted = young_counter(store), store.deleted
    if len(deleted) < DUE_DELETES or deleted[DUE_DELETES - 1][0] >= before:
        return 0
    if store.owing():
        return 0  # a sweep needs them all
    keys: dict[str, None] = {}
    while len(keys) < BATCH_KEYS:
        try:
            counter, key = deleted.popleft()
        except IndexError:  # another thread takes some, too
            break
        if counter >= before:
            deleted.appendleft((counter, key))
            break
        keys[key] = None
    try:
        return sweep_keys(store, keys)
    except (HpstoreError, OSError) as error:
        store.metrics.count("cleanup_postponed_total")
        _log.warning("old deletions are swept later: %s", error)
        return 0
