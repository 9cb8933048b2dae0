"""Put and delete: plan on the membership, write, publish, acknowledge (PROTOCOL 3-6, 12)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpstore.devices.base import Usage
from hpstore.devices.horizon_guard import HorizonPassed
from hpstore.errors import (
    DeviceFull,
    HpstoreError,
    ObjectNotFound,
    PoolFull,
    TooFewDevices,
    VersionConflict,
    without_promise,
)
from hpstore.format.column_header import Metadata
from hpstore.format.geometry import Geometry
from hpstore.format.keys import Kind, Version
from hpstore.format.records import Debt
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.horizon import read_horizons
from hpstore.objects.object_info import ObjectInfo, object_info, version_token
from hpstore.objects.read.read_plan import background_run_bytes, run_bytes
from hpstore.objects.survey import (
    ColumnFile,
    Survey,
    newest_by_name,
    stable_survey,
    unknown_devices,
)
from hpstore.objects.survey_limits import require_known, require_writable
from hpstore.objects.write.column_writer import ColumnSet, MembershipMoved
from hpstore.objects.write.debts import record_debt
from hpstore.objects.write.delete_files import remove_files
from hpstore.objects.write.put_plan import PutContent, make_headers, plan_columns
from hpstore.objects.write.put_source import MemorySource, PutSource
from hpstore.objects.write.stripe_writer import StripeWriter, Throttle, in_one_call

_log = logging.getLogger(__name__)
PUT_TRIES = 6  # plans of one put: membership changes and failing devices in a row


class WriteFailed(TooFewDevices):
    """Too few columns were written; nothing was acknowledged. `devices` says why."""

    devices: dict[str, Exception]


MAYBE_STORED = (
    "The object may have been stored: enough of it has its name on the devices to be read and "
    "completed. Nothing older is lost unless the new bytes are whole. Look with stat(), or put it "
    "again."
)
MAYBE_DELETED = "The object may have been deleted: a tombstone has its name. Delete it again."


def write_failed(text: str, key: str, failures: dict[str, Exception]) -> WriteFailed:
    """The error, with every device's reason in its message."""
    reasons = "; ".join(str(failure) for failure in failures.values())
    error = WriteFailed(f"{text}: {reasons}", key=key)
    error.devices = failures
    return error


def ran_full(error: Exception | None) -> bool:
    """Whether a write failed on devices that had no space left for it, and on no others."""
    return isinstance(error, WriteFailed) and all(
        isinstance(failure, DeviceFull) for failure in error.devices.values()
    )


def write_columns(
    store: PoolContext,
    content: PutContent,
    geometry: Geometry,
    devices: list[str],
    source: PutSource,
    *,
    roll_back: bool,
    throttle: Throttle | None = None,
    background: bool = False,
    left: list[ColumnFile] | None = None,
    horizons: Mapping[str, int] | None = None,
) -> ColumnSet:
    """Write and publish one version. On return at least the floor of rule 5 is durable.

    `background`: in smaller batches, behind which nobody's reads queue up for long.

    `store` is pinned, so that plan and execution see one membership. Raises MembershipMoved or
    WriteFailed; with `roll_back`, which only the caller who chose the version's nonce may ask for,
    after taking back what this call had published. Columns that may be visible already are left,
    and added to `left`. `horizons`: see ColumnSet; HorizonPassed is raised.
    """
    headers = make_headers(store, content, geometry, devices)
    floor = geometry.fewest_to_acknowledge()
    columns = ColumnSet(
        store, headers, floor=floor, generation=store.view.record.generation, horizons=horizons
    )
    limits = run_bytes if not background else background_run_bytes
    batch = limits(geometry.width, store.buffers.budget.limit_bytes)
    whole = in_one_call(geometry, batch)
    done = False
    try:
        if not geometry.size:
            columns.settle(columns.begin(lambda column: column.writing_whole(()), "empty"))
        elif not whole:
            columns.create()
        if not columns.failures():  # else plan again, while no byte has moved
            StripeWriter(store, columns, geometry, floor, batch).run(source, throttle)
            enough = geometry.width if whole else floor  # else plan again: little moved
            if len(columns.alive()) >= enough:
                columns.finish()
        if len(columns.published()) >= floor:
            columns.check_generations()
        done = len(columns.published()) >= floor
    finally:
        columns.abandon(take_back=roll_back and not done)
        if left is not None and not done and columns.visible():
            left += columns.files()
    if not done:
        failures = columns.failures()
        raise write_failed(
            f"put of {content.key!r}: {geometry.width - len(failures)} of {geometry.width} columns "
            f"could be written, {floor} are needed",
            content.key,
            failures,
        )
    return columns


def write_new_version(
    store: PoolContext,
    key: str,
    source: PutSource,
    *,
    metadata: Metadata,
    kind: Kind,
    survey: Survey,
    throttle: Throttle | None = None,
    unit_bytes: int | None = None,
    revise: Version | None = None,
    horizons: Mapping[str, int] | None = None,
    next_counter: Callable[[int], int] | None = None,
) -> ColumnSet:
    """Plan and write a version above all of the survey, again when devices fail or leave.

    A full stripe is preferred: when devices fail, the plan moves to other ones while there are
    enough, and only then goes on with a debt. `revise`: write this one anew, as a later revision
    of it, which beats no put that came meanwhile (PROTOCOL 1), with the `horizons` of before the
    survey: HorizonPassed is raised, for the caller to look again.
    """
    left: list[
        ColumnFile
    ] = []  # of attempts that may be visible: they are superseded, not taken back
    wanted = _NewVersion(
        key=key,
        source=source,
        metadata=metadata,
        kind=kind,
        survey=survey,
        throttle=throttle,
        unit_bytes=unit_bytes,
        horizons=horizons,
        next_counter=next_counter,
    )
    try:
        columns = _write_whole(store, wanted, revise=revise, left=left)
        try:
            settle_or_owe(store, columns)
        except BaseException:
            left += columns.files()
            raise
    except BaseException as error:
        if left:
            say_maybe(error, MAYBE_DELETED if kind is Kind.TOMBSTONE else MAYBE_STORED)
        raise
    columns.superseded = [file for file in left if file.name.version < columns.version]
    return columns


def say_maybe(error: BaseException, text: str) -> None:
    """An attempt of a put was left where readers may see it: its error must not deny that, nor
    promise that nothing was changed.

    `text`: MAYBE_STORED or MAYBE_DELETED.
    """
    if isinstance(error, HpstoreError):
        error.maybe_visible = True
        error.args = (f"{without_promise(error)} {text}", *error.args[1:])
    else:
        error.add_note(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NewVersion:
    """What write_new_version was asked for."""

    key: str
    source: PutSource
    metadata: Metadata
    kind: Kind
    survey: Survey
    throttle: Throttle | None
    unit_bytes: int | None
    horizons: Mapping[str, int] | None
    next_counter: Callable[[int], int] | None

    def content(self, store: PoolContext, version: Version) -> PutContent:
        return PutContent(
            key=self.key,
            version=version,
            kind=self.kind,
            created_ms=store.clock.wall_ms(),
            metadata=self.metadata,
        )


def _write_whole(
    store: PoolContext, wanted: _NewVersion, *, revise: Version | None, left: list[ColumnFile]
) -> ColumnSet:
    """Try plans until one is written to its floor; of others that may be visible, `left` grows."""
    exclude: set[str] = set()
    last: Exception | None = None
    horizon, offered = 0, wanted.survey.offered
    for _ in range(PUT_TRIES):
        now = store.pinned()
        geometry, devices = _plan(now, wanted, exclude=exclude, offered=offered, last=last)
        offered = None  # what devices said before the survey holds for the first plan
        if revise is None:
            version = store.new_version(
                wanted.survey.versions(), above=horizon, next_counter=wanted.next_counter
            )
        else:
            version = revise = revise.revised()
        try:
            return write_columns(
                now,
                wanted.content(store, version),
                geometry,
                devices,
                wanted.source,
                roll_back=revise is None,
                throttle=wanted.throttle,
                left=left,
                horizons=wanted.horizons,
            )
        except HorizonPassed as error:
            if revise is not None:
                raise
            store.metrics.count("put_replanned_total")
            horizon, last = max(horizon, error.horizon), error
        except MembershipMoved as error:
            store.metrics.count("put_replanned_total")
            store.refresh()
            last = error
        except WriteFailed as error:
            store.metrics.count("put_retried_total")
            exclude |= error.devices.keys()
            last = error
    raise (PoolFull if ran_full(last) else TooFewDevices)(
        f"put of {wanted.key!r} failed {PUT_TRIES} times in a row: {last}. It is not acknowledged"
        + ("." if left else "; the version before it is unchanged."),
        key=wanted.key,
    ) from last


def _plan(
    store: PoolContext,
    wanted: _NewVersion,
    *,
    exclude: set[str],
    offered: Mapping[str, Usage | None] | None,
    last: Exception | None,
) -> tuple[Geometry, list[str]]:
    """As plan_columns; without enough devices the error has the `last` failure, too."""
    try:
        return plan_columns(
            store,
            wanted.key,
            wanted.source.size,
            exclude=exclude,
            kind=wanted.kind,
            unit_bytes=wanted.unit_bytes,
            offered=offered,
        )
    except TooFewDevices as error:
        if last is None:
            raise
        full = isinstance(error, PoolFull) or ran_full(last)
        kind, hint = (PoolFull, store.make_room) if full else (TooFewDevices, "")
        raise kind(f"{error} Before that: {last}. {hint}".rstrip(), key=wanted.key) from last


def settle_or_owe(store: PoolContext, columns: ColumnSet) -> None:
    """Before the acknowledgement: a put short of its full stripe records its debt (PROTOCOL 5)."""
    header = next(iter(columns.columns.values())).header
    missing = sorted(set(columns.columns) - {c.header.column for c in columns.published()})
    if not missing:
        return
    record_debt(store, Debt(key=header.key, version=header.version, missing=tuple(missing)))
    store.metrics.count("put_degraded_total")
    store.damage(header.key)


def check_conditions(
    store: PoolContext, survey: Survey, *, if_absent: bool, if_version: str | None
) -> None:
    """PROTOCOL 6. Raises VersionConflict."""
    if not if_absent and if_version is None:
        return
    require_known(store.view, survey)  # else a newer version may be hidden
    newest = newest_by_name(store.view, survey)
    exists = newest is not None and newest.kind is not Kind.TOMBSTONE
    if if_absent and exists:
        raise VersionConflict(f"object {survey.key!r} exists already", key=survey.key)
    if if_version is not None:
        found = version_token(*newest.version.content) if newest is not None and exists else None
        if found != if_version:
            raise VersionConflict(
                f"object {survey.key!r} has version {found}, not {if_version}", key=survey.key
            )


def _survey_to_write(
    store: PoolContext, key: str, *, absent: bool = True, offers: bool = False
) -> Survey:
    """What there is of a key; with members that are back, where too many would be unknown."""
    view = store.view
    survey = stable_survey(store, key, absent=absent, patience=PATIENCE, offers=offers)
    if unknown_devices(view, survey) > view.record.parity and store.look_again(view):
        return stable_survey(store, key, absent=absent, patience=PATIENCE, offers=offers)
    return survey


def put_object(
    store: PoolContext,
    key: str,
    source: PutSource,
    *,
    metadata: Metadata,
    if_absent: bool = False,
    if_version: str | None = None,
    throttle: Throttle | None = None,
    unit_bytes: int | None = None,
    next_counter: Callable[[int], int] | None = None,
    acknowledge: Callable[[Version], None] | None = None,
) -> ObjectInfo:
    """Store an object. Durable on return on k' + m devices, or with the debt recorded.

    With a condition, the caller has a claim of the key: `next_counter` gives the counter of a
    version above one that was seen, `acknowledge` has the last word when all is durable, before
    anything is removed. `throttle` is called with the bytes of each batch before it is written.
    `unit_bytes`: of this object, the pool's unless given.
    """
    absent = if_absent or if_version is not None
    survey = _survey_to_write(store, key, absent=absent, offers=True)
    check_conditions(store, survey, if_absent=if_absent, if_version=if_version)
    require_writable(store.view, survey)
    columns = write_new_version(
        store,
        key,
        source,
        metadata=metadata,
        kind=Kind.COLUMN,
        survey=survey,
        throttle=throttle,
        unit_bytes=unit_bytes,
        next_counter=next_counter,
    )
    published = columns.published()
    header = published[0].header
    if acknowledge is not None:
        acknowledge(header.version)
    if len(published) == header.geometry.width:
        remove_replaced(store, key, survey, columns)
    return object_info(header, len(published), may_leave=store.view.may_leave(survey.unknown))


def remove_replaced(store: PoolContext, key: str, survey: Survey, columns: ColumnSet) -> None:
    """Remove what is older than a version that was written, and what attempts at it have left."""
    older = [f for f in survey.files if f.name.version < columns.version]
    remove_files(store, key, [*older, *columns.superseded])


def write_tombstone(
    store: PoolContext,
    key: str,
    survey: Survey,
    *,
    revise: Version | None = None,
    horizons: Mapping[str, int] | None = None,
    next_counter: Callable[[int], int] | None = None,
) -> ColumnSet:
    """Write a tombstone above all of the survey: see write_new_version."""
    return write_new_version(
        store,
        key,
        MemorySource(b""),
        metadata={},
        kind=Kind.TOMBSTONE,
        survey=survey,
        revise=revise,
        horizons=horizons,
        next_counter=next_counter,
    )


def _finish_half_done(store: PoolContext, key: str) -> None:
    """A tombstone is there already: what it stands for goes once there are m + 1 of it.

    They are made as a later revision of it, which beats no put that has come meanwhile. Raises
    TooFewDevices when sweeps pass every try: what stands there may go with m devices.
    """
    last: HorizonPassed | None = None
    for _ in range(PUT_TRIES):
        horizons = read_horizons(store)
        survey = stable_survey(store, key, patience=PATIENCE)
        newest = newest_by_name(store.view, survey)
        if newest is None or newest.kind is not Kind.TOMBSTONE:
            return
        version = newest.version
        try:
            if len({file.device for file in newest.files}) <= newest.parity:
                version = write_tombstone(
                    store, key, survey, revise=version, horizons=horizons
                ).version
        except HorizonPassed as error:
            last = error
            continue
        remove_files(store, key, [f for f in survey.files if f.name.version < version])
        return
    failed = TooFewDevices(
        f"a delete of {key!r} that was half done could not be finished {PUT_TRIES} times in a row: "
        f"{last}.",
        key=key,
    )
    say_maybe(failed, MAYBE_DELETED)
    raise failed from last


def delete_object(store: PoolContext, key: str) -> None:
    """Delete an object: tombstones on m + 1 devices, then its files.

    Durable on return; a crash before leaves the object, a crash after none. Raises
    ObjectNotFound when there is nothing, after finishing a delete that was seen half done.
    """
    survey = _survey_to_write(store, key)
    newest = newest_by_name(store.view, survey)
    if newest is None:
        require_known(store.view, survey)
        raise ObjectNotFound(f"no object {key!r}", key=key)
    require_writable(store.view, survey)
    if newest.kind is Kind.TOMBSTONE:
        _finish_half_done(store, key)
        raise ObjectNotFound(f"no object {key!r}", key=key)
    columns = write_tombstone(store, key, survey)
    remove_replaced(store, key, survey, columns)
    store.deleted.append((columns.version.counter, key))
