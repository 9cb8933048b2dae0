"""Many small objects written or deleted together: a few calls on each device for all of them.

Each is a write of its own, by the rules of write.py: its own version, its own look at the
membership and the horizon before each name, all its columns durable before it counts. Together are
the calls on devices, and the syncs: a filesystem makes durable with one commit what was written
before it. What does not go through at once in full is left to write.py, object by object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from hpstore.codec.galois import Bytes
from hpstore.devices.horizon_guard import HorizonPassed
from hpstore.errors import HpstoreError, ObjectNotFound
from hpstore.format.column_header import Metadata
from hpstore.format.geometry import Geometry
from hpstore.format.keys import Kind
from hpstore.objects.context import PATIENCE, PoolContext
from hpstore.objects.object_info import ObjectInfo, object_info
from hpstore.objects.survey import Survey, newest_by_name, survey_keys, unknown_devices
from hpstore.objects.write.column_writer import ColumnSet, ColumnWriter, MembershipMoved
from hpstore.objects.write.delete_files import remove_all
from hpstore.objects.write.put import (
    MAYBE_DELETED,
    MAYBE_STORED,
    delete_object,
    put_object,
    say_maybe,
)
from hpstore.objects.write.put_plan import PutContent, make_headers, plan_columns
from hpstore.objects.write.put_source import MemorySource, PutSource
from hpstore.objects.write.stripe_writer import StripeWriter
from hpstore.runtime.buffers import release_after
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.runtime.scheduler import Scheduler
from hpstore.units import KIB

MOST_KEYS = 64  # of one call on a device: it must end within the deadline for a call
SMALL_BYTES = 256 * KIB  # larger objects keep the devices busy by themselves


class Calls:
    """Calls on devices that are collected, and then made by one call on each device."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: defaultdict[str, list[tuple[Future[None], Callable[[], None]]]]
        self._waiting = defaultdict(list)

    def submit(self, device: str, call: Callable[[], None]) -> Future[None]:
        """Collect a call. It can be cancelled until it is made."""
        future: Future[None] = Future()
        self._waiting[device].append((future, call))
        return future

    def begin(self, step: str) -> list[Future[None]]:
        """Make them, in their order on each device. Returns one future per device.

        `step`: what they do, a kind of calls of which it is known which way is quicker.
        """
        waiting, self._waiting = self._waiting, defaultdict(list)
        count = max(map(len, waiting.values()), default=0)
        began: dict[str, Future[None]] = {}
        try:
            self._scheduler.start(
                {device: partial(_make, calls) for device, calls in waiting.items()},
                brief=f"{step} {count.bit_length()}",
                into=began,
            )
        finally:
            for device, calls in waiting.items():
                if device in began:
                    began[device].add_done_callback(partial(_refused, calls))
                else:  # interrupted before
                    for future, _ in calls:
                        future.cancel()
        return list(began.values())


def _make(calls: Sequence[tuple[Future[None], Callable[[], None]]]) -> None:
    for future, call in calls:
        if not future.set_running_or_notify_cancel():
            continue
        try:
            call()
        except Exception as error:  # noqa: BLE001 (the future carries it)
            future.set_exception(error)
        else:
            future.set_result(None)


def _refused(calls: Sequence[tuple[Future[None], Callable[[], None]]], whole: Future[None]) -> None:
    """The device took no call, or a crash ended it: so no answer is to come."""
    error = None if whole.cancelled() else whole.exception()
    for future, _ in calls:
        if error is not None and not future.done() and not future.cancel():
            future.set_exception(error)  # the call that crashed


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPut:
    """A small object that is to be stored."""

    source: PutSource
    metadata: Metadata


@dataclass(slots=True, kw_only=True)
class _Write:
    """One object on its way."""

    survey: Survey
    wanted: SmallPut
    geometry: Geometry
    columns: ColumnSet
    alive: bool = True  # nothing has failed
    done: bool = False  # all columns are durable


def delete_objects(store: PoolContext, keys: Sequence[str]) -> dict[str, Exception | None]:
    """Delete up to MOST_KEYS objects, each as delete_object does; None or its error for each."""
    surveys = survey_keys(store, keys, patience=PATIENCE, offers=True)
    nothing = SmallPut(source=MemorySource(b""), metadata={})
    plain = {key: nothing for key in keys if is_plain(store, surveys[key], absent=False)}
    writes = _write_together(store, plain, surveys, Kind.TOMBSTONE)
    results: dict[str, Exception | None] = {}
    for key in keys:
        write = writes.get(key)
        if write is not None and write.done:
            store.deleted.append((write.columns.version.counter, key))
            results[key] = None
            continue
        seen = write is not None and write.columns.visible()
        try:
            delete_object(store, key)
            results[key] = None
        except ObjectNotFound as error:  # where this call has begun it, that was finished
            results[key] = None if seen else error
        except (HpstoreError, OSError) as error:
            results[key] = _told(error, MAYBE_DELETED, seen=seen)
    return results


def tombstones_together(
    store: PoolContext, surveys: Mapping[str, Survey], next_counter: Callable[[int], int]
) -> set[str]:
    """Delete up to MOST_KEYS objects that is_plain has found to be there, with counters of a claim
    that the caller has; those that are durably gone."""
    nothing = dict.fromkeys(surveys, SmallPut(source=MemorySource(b""), metadata={}))
    writes = _write_together(store, nothing, surveys, Kind.TOMBSTONE, next_counter)
    done = {key: write.columns.version.counter for key, write in writes.items() if write.done}
    store.deleted += [(counter, key) for key, counter in done.items()]
    return set(done)


def put_objects(
    store: PoolContext, objects: Mapping[str, SmallPut]
) -> dict[str, ObjectInfo | Exception]:
    """Store up to MOST_KEYS objects of up to SMALL_BYTES, each as put_object does; its facts or
    error for each. Sources belong to this call until it returns."""
    surveys = survey_keys(store, list(objects), patience=PATIENCE, offers=True)
    plain = {
        key: wanted for key, wanted in objects.items() if is_plain(store, surveys[key], absent=True)
    }
    writes = _write_together(store, plain, surveys, Kind.COLUMN)
    results: dict[str, ObjectInfo | Exception] = {}
    for key, wanted in objects.items():
        write = writes.get(key)
        if write is not None and write.done:
            header = write.columns.published()[0].header
            may_leave = store.view.may_leave(write.survey.unknown)
            results[key] = object_info(header, header.geometry.width, may_leave=may_leave)
            continue
        seen = write is not None and write.columns.visible()
        try:
            results[key] = put_object(store, key, wanted.source, metadata=wanted.metadata)
        except (HpstoreError, OSError) as error:
            results[key] = _told(error, MAYBE_STORED, seen=seen)
    return results


def _told(error: Exception, text: str, *, seen: bool) -> Exception:
    """The error, which must not deny what the first attempt has left where readers may see it."""
    if seen and not getattr(error, "maybe_visible", False):
        say_maybe(error, text)
    return error


def is_plain(store: PoolContext, survey: Survey, *, absent: bool) -> bool:
    """Whether one look is enough to write a version of a key: no second one, and no error. Pure.

    With `absent` of a key that is not there, too.
    """
    if unknown_devices(store.view, survey) > store.view.record.parity:
        return False
    newest = newest_by_name(store.view, survey)
    if newest is None:
        return absent and not survey.files
    return absent or newest.kind is not Kind.TOMBSTONE


def _write_together(
    store: PoolContext,
    wanted: Mapping[str, SmallPut],
    surveys: Mapping[str, Survey],
    kind: Kind,
    next_counter: Callable[[int], int] | None = None,
) -> dict[str, _Write]:
    """Write a version of each, and remove what those that are done supersede."""
    now, calls = store.pinned(), Calls(store.scheduler)
    writes: dict[str, _Write] = {}
    for key, put in wanted.items():
        try:
            writes[key] = _planned(now, key, put, surveys[key], kind, next_counter, calls)
        except HpstoreError:
            continue  # the single call says so
    needed = sum(map(_memory, writes.values()))
    lease = now.buffers.lease(needed, now.settings.put_deadline_seconds)
    fills: list[Future[None]] = []
    try:
        _fill(now, writes.values(), calls, lease.array, fills)
        _step(now, writes.values(), calls, "sync", lambda column: column.sync)
        _step(now, writes.values(), calls, "names", _naming(writes))
        _step(now, writes.values(), calls, "sync names", lambda column: column.sync_name)
        _acknowledge(now, writes.values())
    finally:
        for fill in fills:
            fill.cancel()  # what has not begun, where something else has gone wrong
        for write in writes.values():
            write.columns.abandon(take_back=not write.done)
        release_after(lease, fills)
    done = {key: write for key, write in writes.items() if write.done}
    remove_all(
        store,
        {
            key: [f for f in write.survey.files if f.name.version < write.columns.version]
            for key, write in done.items()
        },
    )
    store.metrics.count("written_together_total", len(done))
    store.metrics.count("written_together_again_total", len(wanted) - len(done))
    return writes


def _planned(
    store: PoolContext,
    key: str,
    put: SmallPut,
    survey: Survey,
    kind: Kind,
    next_counter: Callable[[int], int] | None,
    calls: Calls,
) -> _Write:
    """Where a version goes. `store` is pinned."""
    geometry, devices = plan_columns(
        store, key, put.source.size, exclude=(), kind=kind, offered=survey.offered
    )
    content = PutContent(
        key=key,
        version=store.new_version(survey.versions(), next_counter=next_counter),
        kind=kind,
        created_ms=store.clock.wall_ms(),
        metadata=put.metadata,
    )
    headers = make_headers(store, content, geometry, devices)
    columns = ColumnSet(
        store,
        headers,
        floor=geometry.fewest_to_acknowledge(),
        generation=store.view.record.generation,
        lanes=calls,
    )
    return _Write(survey=survey, wanted=put, geometry=geometry, columns=columns)


def _memory(write: _Write) -> int:
    """Bytes of the columns that are made in memory."""
    return write.geometry.width * write.geometry.column_bytes if write.geometry.size else 0


def _fill(
    store: PoolContext,
    writes: Iterable[_Write],
    calls: Calls,
    memory: Bytes,
    fills: list[Future[None]],
) -> None:
    """Make all files with all their bytes, in `memory`; `fills` are the calls that read it."""
    started, at = [], 0
    for write in writes:
        if write.geometry.size:
            end = at + _memory(write)
            writer = StripeWriter(
                store,
                write.columns,
                write.geometry,
                write.geometry.fewest_to_acknowledge(),
                write.geometry.column_bytes,
            )
            try:
                futures = writer.fill(write.wanted.source, memory[at:end])
            except (HpstoreError, OSError):
                write.alive = False  # its source cannot be read: the single call says so
                continue
            at = end
        else:
            futures = write.columns.submit(lambda column: partial(column.fill, ()))
        started.append((write, futures))
        fills += futures.values()
    _settle(store, started, calls, "fill")


def _step(
    store: PoolContext,
    writes: Iterable[_Write],
    calls: Calls,
    step: str,
    call: Callable[[ColumnWriter], Callable[[], None]],
) -> None:
    """Make a call for each column of those of which nothing has failed."""
    started = [(write, write.columns.submit(call)) for write in writes if write.alive]
    _settle(store, started, calls, step)


def _naming(writes: Mapping[str, _Write]) -> Callable[[ColumnWriter], Callable[[], None]]:
    def naming(column: ColumnWriter) -> Callable[[], None]:
        return partial(writes[column.header.key].columns.name_one, column, column.give_name)

    return naming


def _settle(
    store: PoolContext,
    started: Sequence[tuple[_Write, Mapping[int, Future[None]]]],
    calls: Calls,
    step: str,
) -> None:
    """Make the calls and wait for them; note what has failed."""
    waited = _wait(store, calls.begin(step))
    for write, futures in started:
        try:
            write.columns.settle(futures, waited=waited)
        except (MembershipMoved, HorizonPassed):  # planned again, by the single call
            write.alive = False
        write.alive = write.alive and not write.columns.failures()


def _wait(store: PoolContext, began: Collection[Future[None]]) -> float:
    """Wait for devices under their deadline; for the last m no longer than for a straggler."""
    settings = store.settings
    limit, waited = settings.device_deadline_seconds, 0.0
    while waited < limit and (pending := [call for call in began if not call.done()]):
        if len(pending) <= store.view.record.parity:
            limit = min(limit, waited + max(settings.straggler_seconds, 8 * waited))
            return waited + wait_awake(pending, limit - waited)
        waited += wait_awake(pending, limit - waited, first=True)
    return waited


def _acknowledge(store: PoolContext, writes: Iterable[_Write]) -> None:
    """PROTOCOL 4: the devices' generations are looked at once more, after the last name."""
    alive = [write for write in writes if write.alive]
    devices = {c.device_id for write in alive for c in write.columns.published()}
    answers = store.each(
        devices, store.generation_on, patience=store.settings.straggler_seconds, brief="generation"
    )
    known = store.view.record.generation
    if any(isinstance(answer, int) and answer > known for answer in answers.values()):
        return  # the membership has moved: the single calls plan on the new one
    same = {device for device, answer in answers.items() if isinstance(answer, int)}
    for write in alive:
        named = write.columns.published()
        whole = len(named) == write.geometry.width
        write.done = whole and all(column.device_id in same for column in named)
