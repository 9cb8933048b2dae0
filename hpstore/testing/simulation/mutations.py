"""Rules taken out of the code by name, one at a time, to show that the simulator notices each.

A mutation restores what the code did before the rule was there, or leaves the rule's step out. The
table of which seed finds which is in docs/protocol.md; `--mutation NAME --first` runs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.format.keys import NameTags
from hpstore.format.records import PoolRecord
from hpstore.maintenance import repair_object as repair
from hpstore.maintenance import repair_runner, sweep
from hpstore.membership import changes, members, returning_files
from hpstore.membership.lasting_holds import KeptHold
from hpstore.objects import horizon, survey
from hpstore.objects.context import PoolContext
from hpstore.objects.read import resolve
from hpstore.objects.survey import VersionVerdict
from hpstore.objects.write import conditional_put, delete_files, put
from hpstore.objects.write.column_writer import ColumnSet, ColumnWriter
from hpstore.pool import pool
from hpstore.testing.simulation import machinery
from hpstore.testing.simulation.checkpoint_mutations import CHECKPOINT_MUTATIONS, Exchange
from hpstore.testing.simulation.host_mutations import HOST_MUTATIONS

Mutation = Callable[[Exchange], None]


def _nothing(*_: object, **__: object) -> None:
    """The step is left out."""


def _rolls_back(exchange: Exchange) -> None:
    """r01: a put that failed takes back what another process may have completed."""
    exchange(ColumnSet, "visible", lambda columns: False)


def _no_horizon(exchange: Exchange) -> None:
    """r02: a name is given whatever a sweep has passed meanwhile."""
    exchange(HorizonGuard, "check", _nothing)


def _sweeps_without_raising(exchange: Exchange) -> None:
    """r02: a sweep removes what is old by its clock, and raises the horizon on no device."""
    exchange(sweep, "raise_horizons", lambda store, counter: True)


def _no_mark(exchange: Exchange) -> None:
    """r03: a counter is the machine's idea of now."""
    exchange(PoolContext, "note_mark", _nothing)
    exchange(PoolContext, "_raise_mark", lambda store, limit: [limit])


def _own_clock_only(exchange: Exchange) -> None:
    """Rule 1: a clock that is behind the mark goes by "highest seen + 1" alone."""
    exchange(PoolContext, "_behind", lambda store: 0)


def _returns_unjudged(exchange: Exchange) -> None:
    """r04: a device that returns is not held against the horizon of those that stayed."""
    before = horizon.come_back_at
    exchange(changes, "come_back_below", lambda store, device, ask: 0)
    exchange(
        changes, "come_back_at", lambda store, device, ask, swept: before(store, device, ask, None)
    )


def _no_fence(exchange: Exchange) -> None:
    """r05, pauses: a conditional put is acknowledged though another process took its claim."""
    exchange(conditional_put, "_acknowledge", _nothing)


def _no_holds(exchange: Exchange) -> None:
    """r05, evictions: membership changes exclude no other process, and an eviction is stored on the
    newest membership, whatever it was judged on."""
    exchange(KeptHold, "take", _nothing)
    exchange(KeptHold, "keep", _nothing)
    before = members.commit_record

    def commit_record(store: PoolContext, new: PoolRecord, *rest: Any, **named: Any) -> None:
        known = {gone.device_id for gone in store.view.record.evicted}
        leaving = [gone for gone in new.evicted if gone.device_id not in known]
        store.refresh()
        if leaving:
            gone = {member.device_id for member in leaving}
            new = members.without_members(
                store.view.record, gone, leaving[0].state, leaving[0].since_ms
            )
        before(store, new, *rest, **named)

    exchange(changes, "commit_record", commit_record)


def _no_generation(exchange: Exchange) -> None:
    """Rule 4: a put does not look at the membership before it renames and acknowledges."""
    exchange(ColumnSet, "check_generation", _nothing)


def _no_sync(exchange: Exchange) -> None:
    """Rule 4: what is acknowledged was never synced."""
    exchange(machinery.SimulatedWriter, "sync", _nothing)


def _names_unsynced(exchange: Exchange) -> None:
    """Rule 4: names are not durable when a put is acknowledged."""

    def publish(column: ColumnWriter, guard: HorizonGuard) -> None:
        assert column._handle is not None
        column._handle.publish(column.path, guard)
        column.published = True

    exchange(ColumnWriter, "publish", publish)


def _believes_names(exchange: Exchange) -> None:
    """t1: any file name of the form counts, and an empty file that is called a tombstone is one."""
    exchange(NameTags, "admits", lambda tags, name: True)
    exchange(survey, "is_blank", lambda *args: False)


def _no_debt(exchange: Exchange) -> None:
    """Rule 5: a put short of its full stripe leaves no note, and nothing repairs it."""
    exchange(put, "record_debt", _nothing)


def _falls_back(exchange: Exchange) -> None:
    """Rule 7: a newer version that cannot be read is passed over for an older one."""
    before = survey.judge

    def judge(*args: Any, **named: Any) -> VersionVerdict:
        verdict = before(*args, **named)
        return VersionVerdict.TORN if verdict is VersionVerdict.UNCLEAR else verdict

    for module in (survey, resolve):  # others call survey's judge_by_names
        exchange(module, "judge", judge)


def _absent_unseen(exchange: Exchange) -> None:
    """Rule 7: a key is absent where no device that answers has it."""
    for module in (resolve, put):
        exchange(module, "require_known", _nothing)


def _removes_early(exchange: Exchange) -> None:
    """Rule 8: an older version goes before the newer one is complete."""
    before = ColumnSet.finish

    def finish(columns: ColumnSet) -> None:
        store, header = columns._store, next(iter(columns.columns.values())).header
        found = survey.survey_key(store, header.key)
        older = [f for f in found.files if f.name.version < header.version]
        delete_files.remove_files(store, header.key, older)
        before(columns)

    exchange(ColumnSet, "finish", finish)


def _one_tombstone(exchange: Exchange) -> None:
    """Rule 12: a delete is acknowledged with one tombstone."""
    before = put.delete_object

    def delete_object(store: PoolContext, key: str) -> None:
        before(store, key)
        delete_files.remove_files(store, key, survey.survey_key(store, key).files[1:])

    exchange(pool, "delete_object", delete_object)


def _keeps_all(exchange: Exchange) -> None:
    """Rule 12: a device that returns keeps all that it has."""
    exchange(returning_files, "judge_return", lambda *_, **__: returning_files.Return.KEEP)


def _evicts_blindly(exchange: Exchange) -> None:
    """Rule 16: evict does not look whether an object needs the device."""
    exchange(changes, "endangered", lambda *_, **__: [])


def _repairs_names_only(exchange: Exchange) -> None:
    """A scrub does not read the blocks."""
    before = repair.repair_object

    def repair_object(store: PoolContext, key: str, **named: Any) -> object:
        return before(store, key, **{**named, "verify": False})

    exchange(repair_runner, "repair_object", repair_object)


MUTATIONS: dict[str, Mutation] = {
    "rolls-back": _rolls_back,
    "no-horizon": _no_horizon,
    "sweeps-without-raising": _sweeps_without_raising,
    "no-mark": _no_mark,
    "own-clock-only": _own_clock_only,
    "returns-unjudged": _returns_unjudged,
    "no-fence": _no_fence,
    "no-holds": _no_holds,
    "no-generation": _no_generation,
    "no-sync": _no_sync,
    "names-unsynced": _names_unsynced,
    "no-debt": _no_debt,
    "falls-back": _falls_back,
    "absent-unseen": _absent_unseen,
    "removes-early": _removes_early,
    "one-tombstone": _one_tombstone,
    "keeps-all": _keeps_all,
    "evicts-blindly": _evicts_blindly,
    "scrubs-names-only": _repairs_names_only,
    "believes-names": _believes_names,
    **CHECKPOINT_MUTATIONS,
    **HOST_MUTATIONS,
}


def describe() -> Iterable[tuple[str, str]]:
    """Names and what each takes out."""
    for name, mutation in MUTATIONS.items():
        yield name, " ".join((mutation.__doc__ or "").split())


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code without the rule of that name; as it is for ""."""
    before: list[tuple[Any, str, object]] = []

    def exchange(place: Any, attribute: str, new: object) -> None:
        before.append((place, attribute, getattr(place, attribute)))
        setattr(place, attribute, new)

    if name:
        MUTATIONS[name](exchange)
    try:
        yield
    finally:
        for place, attribute, old in reversed(before):
            setattr(place, attribute, old)
