"""Which files of a key there are, and which version they amount to (PROTOCOL 7). Mostly pure."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from hpstore.devices.base import DEBTS, Device, Usage
from hpstore.errors import HpstoreError
from hpstore.format.disk_looks import DiskLook
from hpstore.format.geometry import Code, Geometry
from hpstore.format.keys import (
    ColumnName,
    Kind,
    Version,
    column_path,
    object_directory,
    parse_column_name,
)
from hpstore.format.records import Debt
from hpstore.objects.context import PoolContext, View
from hpstore.objects.shared_looks import SharedLook, look_at_devices, note_offer
from hpstore.objects.tombstones import is_blank
from hpstore.runtime.deadline_wait import Patience

BRIEF_KEYS = 4  # are listed on a device in less time than a thread takes to wake up
SURVEY_TRIES = 4  # membership changes in a row while one key is looked up


class ColumnFile(NamedTuple):
    """One file of an object on one device. Made by the hundred thousand: a tuple."""

    device: str
    name: ColumnName


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All files of one version that belong together."""

    version: Version
    kind: Kind
    data: int
    parity: int
    files: tuple[ColumnFile, ...]
    owed: bool = True  # a debt may be recorded for it: it may have been acknowledged short

    @property
    def width(self) -> int:
        return self.data + self.parity

    @property
    def columns(self) -> dict[int, list[ColumnFile]]:
        """Files by column; a column may be on two devices while it moves."""
        found: defaultdict[int, list[ColumnFile]] = defaultdict(list)
        for file in self.files:
            found[file.name.column].append(file)
        return dict(found)

    @property
    def floor(self) -> int:
        """Fewest columns at which this may have been acknowledged (PROTOCOL 5)."""
        if self.kind is not Kind.COLUMN:
            return self.parity + 1
        return max(self.data + 1, self.parity + 1) if self.owed else self.width

    @property
    def code(self) -> Code:
        return Code.RS_CAUCHY if self.kind is Kind.COLUMN else Code.COPIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the answering devices hold of a key, and which devices did not answer.

    `strangers`: files whose name no writer of this pool gave; they count for nothing. `blanks`:
    files that are called tombstones and are none, by their content; what their devices knew of the
    key is `unknown`, as if they had not answered.
    """

    key: str
    files: tuple[ColumnFile, ...]
    unknown: frozenset[str]
    undebted: frozenset[Version] = frozenset()  # for which no debt is recorded, with certainty
    offered: Mapping[str, Usage | None] | None = None  # what Store.offer() said, if it was asked
    strangers: tuple[ColumnFile, ...] = ()
    blanks: tuple[ColumnFile, ...] = ()

    def layouts(self) -> list[Layout]:
        """Layouts, newest version first; of one version the fuller first."""
        groups: defaultdict[tuple[Version, Kind, int, int], list[ColumnFile]] = defaultdict(list)
        for file in self.files:
            groups[file.name.layout].append(file)
        found = [
            Layout(
                version=v,
                kind=kind,
                data=k,
                parity=m,
                files=tuple(files),
                owed=v not in self.undebted,
            )
            for (v, kind, k, m), files in groups.items()
        ]
        found.sort(key=lambda x: (x.version, x.kind is Kind.TOMBSTONE, len(x.files)), reverse=True)
        return found

    @property
    def deleted(self) -> bool:
        """Whether nothing is there, or nothing but what a tombstone stands for."""
        newest = max(self.files, key=lambda file: file.name.version, default=None)
        return newest is None or newest.name.kind is Kind.TOMBSTONE

    def versions(self) -> list[Version]:
        """Every version seen."""
        return [file.name.version for file in self.files]


class VersionVerdict(Enum):
    """What a version's columns say about it."""

    SERVES = "serves"  # enough columns to read
    UNCLEAR = "unclear"  # acknowledged data may be there, but cannot be read now
    TORN = "torn"  # was certainly never acknowledged


def may_be_acknowledged(layout: Layout, *, seen: int, unknown_devices: int) -> bool:
    """Whether a version of which `seen` columns were there may have been acknowledged (PROTOCOL 5).

    A column that was not found may hide on a device that did not answer, at most one on each.
    """
    return seen + min(layout.width - seen, unknown_devices) >= layout.floor


def judge(layout: Layout, *, valid: int, corrupt: int, unknown_devices: int) -> VersionVerdict:
    """PROTOCOL 7 for one layout: c = valid columns, u = columns not definitely absent.

    A corrupt one was there and counts as unknown.
    """
    if valid >= layout.data:
        return VersionVerdict.SERVES
    unclear = may_be_acknowledged(layout, seen=valid + corrupt, unknown_devices=unknown_devices)
    return VersionVerdict.UNCLEAR if unclear else VersionVerdict.TORN


def judge_by_names(layout: Layout, unknown_devices: int) -> VersionVerdict:
    """As judge(), before any column was opened: all that are listed count as valid."""
    valid = len(layout.columns)
    return judge(layout, valid=valid, corrupt=0, unknown_devices=unknown_devices)


def unknown_devices(view: View, survey: Survey) -> int:
    """How many columns may hide on devices that did not answer, and on those that were evicted and
    not made up for by a rebuild since: one on each, as far as `spread` bounds a domain's."""
    return view.record.weight(survey.unknown | view.record.unhealed())


def newest_by_name(view: View, survey: Survey) -> Layout | None:
    """The layout that a read would choose, judged by names alone. A hint for lists and plans."""
    unknown = unknown_devices(view, survey)
    for layout in survey.layouts():
        if layout.kind is Kind.TOMBSTONE:
            return layout
        verdict = judge_by_names(layout, unknown)
        if verdict is not VersionVerdict.TORN:
            return layout
    return None


def spare_losses(view: View, layout: Layout) -> int:
    """Further losses that a layout survives, by names, not counting devices that are leaving."""
    staying = view.staying()
    files = [file for file in layout.files if file.device in staying]
    held = min(len({file.name.column for file in files}), len({file.device for file in files}))
    return held - (1 if layout.kind is not Kind.COLUMN else layout.data)


def staying_first(view: View, files: list[ColumnFile]) -> deque[ColumnFile]:
    """Files of one column; of a column on two devices the one that does not leave comes first.

    Of two that stay the order is that of their ids, in every process: a repair keeps the first that
    it can read, so that two repairs at once do not each remove what the other one keeps.
    """
    if len(files) > 1:
        staying = view.staying()
        files = sorted(files, key=lambda file: (file.device not in staying, file.device))
    return deque(files)


def stable_survey(
    store: PoolContext,
    key: str,
    *,
    absent: bool = True,
    patience: float | None = None,
    offers: bool = False,
) -> Survey:
    """A survey to act on: a listing of several devices is no snapshot. One that amounts to nothing
    is made again until two agree: the old version may have gone from where it was looked for last,
    and the new one come where it was looked for first. Without `absent`, for a caller who does the
    same with a key that is not there, one that shows no file is not. `patience` and `offers` as of
    survey_keys.
    """
    survey = survey_key(store, key, patience=patience, offers=offers)
    for _ in range(SURVEY_TRIES):
        if newest_by_name(store.view, survey) is not None or not (survey.files or absent):
            return survey
        again = survey_key(store, key, patience=patience if survey.deleted else None, offers=offers)
        if set(again.files) == set(survey.files):
            return again
        survey = again
    return survey


def survey_key(
    store: PoolContext, key: str, *, patience: float | None = None, offers: bool = False
) -> Survey:
    """List a key's directory on every member, of the newest membership that any of them knows."""
    return survey_keys(store, [key], patience=patience, offers=offers)[key]


def survey_keys(
    store: PoolContext, keys: Sequence[str], *, patience: float | None = None, offers: bool = False
) -> dict[str, Survey]:
    """As survey_key for many keys, with one call on each device for all of them.

    A device that cannot list one of them counts as silent about all. With a `patience` in seconds,
    devices that weigh at most m are waited for no longer: every acknowledged version shows on
    others (PROTOCOL 7). With `offers`, devices are also asked whether they take new columns.
    """
    for _ in range(SURVEY_TRIES):
        surveys, newest = _survey_once(store, keys, patience, offers)
        if newest <= store.view.record.generation:
            break
        before = store.view.record.generation
        store.refresh()
        if store.view.record.generation == before:
            break  # the newer record could not be read: its device counts as silent
    surveys = with_tombstones(store, surveys, patience=patience)
    return with_debts(store, surveys, patience=patience)


def with_tombstones(
    store: PoolContext,
    surveys: dict[str, Survey],
    *,
    patience: float | None = None,
    every: bool = False,
) -> dict[str, Survey]:
    """The same surveys without files that are called tombstones and are none.

    A tombstone that is on devices that weigh more than m was acknowledged, and is believed by its
    name; the content of others is looked at, with `every` that of all. Where that cannot be read,
    or is none, its device counts as one that did not answer about the key: a delete that was
    acknowledged shows on others, unless more than m are unknown (PROTOCOL 7).
    """
    wanted: defaultdict[str, list[tuple[str, ColumnName]]] = defaultdict(list)
    for key, survey in surveys.items():
        for file in _to_be_looked_at(store.view, survey, every):
            wanted[file.device].append((key, file.name))
    if not wanted:
        return surveys

    def look(device_id: str, device: Device) -> set[ColumnFile]:
        ours = store.view.record.pool_id, store.pool_key
        rows = wanted[device_id]
        return {
            ColumnFile(device_id, name) for key, name in rows if is_blank(device, key, name, *ours)
        }

    answers = store.each(wanted, look, patience=patience)
    silent = {device for device in wanted if not isinstance(answers.get(device), set)}
    blank = {file for found in answers.values() if isinstance(found, set) for file in found}
    if not silent and not blank:
        return surveys
    touched = {key for device in wanted for key, _ in wanted[device]}
    return {
        key: _without_blanks(store, survey, blank, silent) if key in touched else survey
        for key, survey in surveys.items()
    }


def _to_be_looked_at(view: View, survey: Survey, every: bool) -> list[ColumnFile]:
    found = [file for file in survey.files if file.name.kind is Kind.TOMBSTONE]
    if not found or every:
        return found
    held: defaultdict[Version, set[str]] = defaultdict(set)
    for file in found:
        held[file.name.version].add(file.device)
    few = {v for v, devices in held.items() if view.record.weight(devices) <= view.record.parity}
    return [file for file in found if file.name.version in few]


def _without_blanks(
    store: PoolContext, survey: Survey, blank: Set[ColumnFile], silent: Set[str]
) -> Survey:
    """`silent`: devices whose tombstones could not be read."""
    tombstones = {file for file in survey.files if file.name.kind is Kind.TOMBSTONE}
    blanks = sorted(tombstones & blank)
    unread = {file for file in tombstones if file.device in silent}
    if blanks:
        store.note_suspect(
            "tombstone_blank_total",
            len(blanks),
            survey.key,
            f"device {blanks[0].device} has a "
            f"tombstone of {survey.key!r} without its content: damage of this file, not a delete.",
        )
    return replace(
        survey,
        blanks=(*survey.blanks, *blanks),
        files=tuple(file for file in survey.files if file not in unread and file not in blank),
        unknown=survey.unknown | {file.device for file in (*blanks, *unread)},
    )


def with_debts(
    store: PoolContext, surveys: dict[str, Survey], *, patience: float | None = None
) -> dict[str, Survey]:
    """The same surveys, knowing of versions that are in doubt whether a debt is recorded for them.

    PROTOCOL 7: a version was acknowledged with all its columns, or with fewer after its debt was
    durable on m + 1 devices. When devices that weigh at most m cannot be asked and no other one has
    the debt, it was not acknowledged with fewer: what lacks more columns than can hide is torn. The
    debts are looked for after the columns, so one that is recorded meanwhile is not missed.
    """
    if not any(s.unknown for s in surveys.values()) and not store.view.record.unhealed():
        return surveys  # nothing hides: a version that lacks columns is torn
    doubtful = {
        Debt(key=key, version=layout.version, missing=()).name: (key, layout.version)
        for key, survey in surveys.items()
        for layout in survey.layouts()
        if layout.kind is Kind.COLUMN and _in_doubt(store.view, survey, layout)
    }
    if not doubtful:
        return surveys

    def look(_: str, device: Device) -> set[str]:
        return {name for name in doubtful if device.stamp(f"{DEBTS}/{name}") is not None}

    answers = store.each(store.view.devices, look, patience=patience)
    silent = {d for d, answer in answers.items() if isinstance(answer, Exception)}
    if not store.view.record.opens_without(
        silent | store.view.missing | store.view.record.unhealed()
    ):
        return surveys
    owed = {name for answer in answers.values() if isinstance(answer, set) for name in answer}
    undebted: defaultdict[str, set[Version]] = defaultdict(set)
    for name in doubtful.keys() - owed:
        key, version = doubtful[name]
        undebted[key].add(version)
    # one that was paid in between: then the columns have come, and are seen now
    again, _ = _survey_once(store, sorted(undebted), patience)
    settled = {key for key in undebted if set(again[key].files) == set(surveys[key].files)}
    return {
        key: replace(survey, undebted=frozenset(undebted[key])) if key in settled else survey
        for key, survey in surveys.items()
    }


def _in_doubt(view: View, survey: Survey, layout: Layout) -> bool:
    unknown = unknown_devices(view, survey)
    verdict = judge_by_names(layout, unknown)
    return verdict is VersionVerdict.UNCLEAR


def _survey_once(
    store: PoolContext, keys: Sequence[str], patience: float | None, offers: bool = False
) -> tuple[dict[str, Survey], int]:
    offered: dict[str, Usage | None] = {}

    def look(device_id: str, device: Device) -> tuple[int, list[list[ColumnFile]]]:
        # first the generation: a wiped device must not look merely empty
        generation = store.generation_on(device_id, device)
        found = [list_object(device_id, device, key) for key in keys]
        if offers:
            with contextlib.suppress(HpstoreError, OSError):  # it takes none
                offered[device_id] = store.offer(device_id, device)
        return generation, found

    def seen(device_id: str, device: Device, look: DiskLook) -> tuple[int, list[list[ColumnFile]]]:
        generation = store.generation_of(device_id, device, look.stamp)
        if offers:
            with contextlib.suppress(HpstoreError, OSError):
                offered[device_id] = note_offer(store, device_id, device, look)
        return generation, [_column_files(device_id, names) for names in look.listings]

    results = look_at_devices(
        store,
        store.view.devices,
        SharedLook(
            alone=look,
            seen=seen,
            paths=lambda device: [object_directory(k, folding=device.folds_names) for k in keys],
            usage=offers,
        ),
        patience=None if patience is None else Patience(patience, store.shows_without),
        brief="look" if len(keys) <= BRIEF_KEYS else "",
    )
    answers = [r for r in results.values() if not isinstance(r, Exception)]
    silent = {d for d, found in results.items() if isinstance(found, Exception)}
    unknown = frozenset(silent) | store.view.missing
    newest = max((generation for generation, _ in answers), default=0)
    surveys = {
        key: make_survey(
            store,
            key,
            (file for _, found in answers for file in found[number]),
            unknown,
            offered=dict(offered) if offers else None,
        )
        for number, key in enumerate(keys)
    }
    return surveys, newest


def make_survey(
    store: PoolContext,
    key: str,
    found: Iterable[ColumnFile],
    unknown: frozenset[str],
    *,
    offered: Mapping[str, Usage | None] | None = None,
) -> Survey:
    """A survey of what devices list under a key: names that no writer of the pool gave are put
    aside, counted, and queued for a repair, which takes them out of the way."""
    files: list[ColumnFile] = []
    strangers: list[ColumnFile] = []
    tags = store.name_tags(key)
    for file in found:
        (files if tags.admits(file.name) else strangers).append(file)
    if strangers:
        store.note_suspect(
            "stranger_file_total",
            len(strangers),
            key,
            f"device {strangers[0].device} lists "
            f"{strangers[0].name} under {key!r}, a name that no writer of this pool gave. Such "
            "files count for nothing, and go to quarantine/ with the next repair or scrub.",
        )
    return Survey(
        key=key, files=tuple(files), unknown=unknown, offered=offered, strangers=tuple(strangers)
    )


def list_object(device_id: str, device: Device, key: str) -> list[ColumnFile]:
    """Files of a key on one device."""
    directory = object_directory(key, folding=device.folds_names)
    return _column_files(device_id, device.entries(directory))


def _column_files(device_id: str, entries: Iterable[tuple[str, bool]]) -> list[ColumnFile]:
    names = (parse_column_name(name) for name, is_directory in entries if not is_directory)
    return [ColumnFile(device_id, name) for name in names if name is not None]


def path_on(device: Device, key: str, name: ColumnName) -> str:
    """Where a file of an object is on a device."""
    return column_path(key, name, folding=device.folds_names)


def empty_geometry(parity: int) -> Geometry:
    """Shape of a tombstone."""
    return Geometry(data=1, parity=parity, unit_bytes=4096, size=0, code=Code.COPIES)
