"""Reads that do not wait: a spare for a read that is late, and probes of devices that are spared.

When reads of a window are later than peers would be, the same bytes are read from other columns and
decoded; whichever is there first is used (Dean and Barroso, The Tail at Scale). At most two late
columns of a window, within a budget of extra bytes. Reads that a device was asked for before the
monitor began to spare it are overtaken, too: that is planning round it, and has no budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from hpstore.codec.galois import Bytes
from hpstore.errors import BudgetExceeded, IntegrityError
from hpstore.format.column_header import ColumnHeader
from hpstore.objects.context import PoolContext
from hpstore.objects.read.column_reader import ColumnReader, open_column
from hpstore.objects.read.erasures import Erasures, rows_of
from hpstore.objects.read.open_columns import member
from hpstore.objects.read.read_plan import WindowPlan, plan_window
from hpstore.objects.read.window_reads import WindowReads, read_held, spare_bytes
from hpstore.objects.read_routing import HEDGE_COLUMNS, well_placed
from hpstore.objects.survey import ColumnFile
from hpstore.runtime.buffers import Lease
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.runtime.scheduler import at_once

_LOOK_SECONDS = 0.25  # how often is looked whether a late device is spared by now


class Hedged(Protocol):
    """What a reader of one object shows of itself, to who reads beside it."""

    store: PoolContext
    key: str
    columns: dict[int, ColumnReader]
    erasures: Erasures

    @property
    def header(self) -> ColumnHeader: ...

    def closed_columns(self) -> dict[int, ColumnFile]: ...

    def file_on(self, device: str) -> ColumnFile | None: ...

    def adopt(self, column: int, opened: ColumnReader | Exception) -> None: ...

    def give_up(
        self, column: int, future: Future[ColumnReader | None], error: Exception
    ) -> None: ...


def overtake(reader: Hedged, window: tuple[int, int], flight: WindowReads) -> WindowReads:
    """The flight, or one that landed before its late reads. Drop what is returned.

    Waits until reads have ended, failed, or the device deadline is over. By the reader's thread.
    """
    if not flight.late():
        return flight
    deadline = reader.store.settings.device_deadline_seconds
    patience = min(deadline, max(0.0, flight.overdue_in(flight.futures, deadline)))
    flight.waited += wait_awake(flight.futures.values(), min(patience, _LOOK_SECONDS))
    race = _Race(reader, window, flight)
    try:
        return race.run(deadline)
    finally:
        race.stop()


class _Race:
    """A flight with late reads, and at most one spare flight at a time."""

    def __init__(self, reader: Hedged, window: tuple[int, int], flight: WindowReads) -> None:
        self._reader, self._window, self._flight = reader, window, flight
        self._store = reader.store
        self._spare: WindowReads | None = None
        self._tries = {"hedged", "rerouted"}  # each once
        self._spent = 0  # bytes of the budget

    def run(self, deadline_seconds: float) -> WindowReads:
        """Wait for either, so long at most since the flight began to be waited for."""
        flight = self._flight
        while (late := flight.late()) and not flight.failed():
            left = deadline_seconds - flight.waited
            if left <= 0:
                break
            if self._spare is not None and not self._spare.late():
                if self._landed(self._spare):
                    self._won(late)
                    spare, self._spare = self._spare, None
                    return spare
                self.stop()
            if self._spare is None and (kind := self._due(late)):
                self._tries.discard(kind)
                self._spare = self._begin(late, kind)
            self._wait(late, left)
        return flight

    def stop(self) -> None:
        """The spare flight is not needed."""
        spare, self._spare = self._spare, None
        if spare is not None:
            if self._spent:
                self._store.routing.budget.in_vain()
            self._spent = 0
            spare.abandon()

    def _won(self, late: list[int]) -> None:
        """The spare flight was first: later reads of these devices need not wait as long."""
        routing = self._store.routing
        self._store.metrics.count("read_hedge_won_total")
        if self._spent:
            routing.budget.won(self._spent)
        for column in late:
            held = self._reader.columns.get(column)
            if held is not None:
                routing.lost(held.device_id, self._flight.futures[column])

    def _due(self, late: list[int]) -> str:
        """What to try now; "" for nothing yet."""
        away = self._store.kept_off()
        held = [self._reader.columns.get(column) for column in late]
        if "rerouted" in self._tries and all(r is not None and r.device_id in away for r in held):
            return "rerouted"
        known = len(late) <= HEDGE_COLUMNS and all(c in self._flight.patience for c in late)
        if "hedged" in self._tries and known and self._flight.overdue_in(late, 0.0) <= 0:
            return "hedged"
        return ""

    def _wait(self, late: list[int], left: float) -> None:
        spare = self._spare
        pause = min(left, _LOOK_SECONDS)
        if spare is None and "hedged" in self._tries:
            pause = min(pause, max(0.001, self._flight.overdue_in(late, left)))
        futures = [self._flight.futures[column] for column in late]
        if spare is not None:
            futures += [future for future in spare.futures.values() if not future.done()]
        self._flight.waited += wait_awake(futures, pause, first=True)

    def _begin(self, late: list[int], kind: str) -> WindowReads | None:
        """Start reading what replaces the late columns; None when that is not possible now."""
        reader, store = self._reader, self._store
        closed = reader.closed_columns()
        plan = self._plan(late, closed)
        if plan is None:
            return None
        nbytes, memory = spare_bytes(plan, self._flight)
        if kind == "hedged" and not store.routing.budget.spend(nbytes):
            store.metrics.count("read_hedge_refused_total")
            return None
        lease = store.scratch(memory, "read_hedge", keep=False)
        if lease is None:
            return None
        self._spent = nbytes if kind == "hedged" else 0
        store.metrics.count(f"read_{kind}_total")
        spare, submit = WindowReads(plan, lease, self._flight), store.scheduler.submit
        try:
            for column, (low, _) in plan.reads.items():
                if column in spare.shared:
                    continue
                held, array = reader.columns.get(column), spare.arrays[column]
                device = closed[column].device if held is None else held.device_id
                call = partial(_read, reader, held, closed.get(column), low, array)
                begin = at_once if held is not None and held.in_memory else partial(submit, device)
                spare.futures[column] = begin(call)
        except BaseException:  # a lane that could not be started: no more threads
            spare.drop()
            raise
        return spare

    def _plan(self, late: list[int], closed: Mapping[int, ColumnFile]) -> WindowPlan | None:
        """The window as if the late columns were lost; from open columns where there are k."""
        reader, store = self._reader, self._store
        devices = {c: held.device_id for c, held in reader.columns.items() if c not in late}
        geometry = reader.header.geometry
        sound = [c for c, device in devices.items() if device not in store.kept_off()]
        for column, found in closed.items():
            if len(sound) >= geometry.data:
                break
            if column not in late and store.scheduler.answers(found.device):
                devices[column] = found.device
                sound.append(column)
        if reader.erasures:
            rows = rows_of(geometry, list(geometry.pieces(*self._window)))
            damaged = reader.erasures.columns_in(*rows)
            devices = {c: device for c, device in devices.items() if c not in damaged}
        available = well_placed(devices, store.kept_off(), geometry.data)
        return plan_window(geometry, *self._window, available)

    def _landed(self, spare: WindowReads) -> bool:
        """Whether all of it is right. Its files are the reader's from now on."""
        good = True
        for column, future in spare.futures.items():
            error = future.exception()
            good &= error is None
            opened = future.result() if error is None else None
            if opened is not None:
                self._reader.adopt(column, opened)
            elif column not in self._reader.columns and isinstance(error, Exception):
                self._reader.adopt(column, error)
            elif isinstance(error, IntegrityError):
                self._reader.give_up(column, future, error)
        spare.adopted()
        return good


def _read(
    reader: Hedged, held: ColumnReader | None, found: ColumnFile | None, low: int, array: Bytes
) -> ColumnReader | None:
    """Read verified bytes of a column; returns it when it was opened for that. On a lane."""
    if held is not None:
        return read_held(held, low, array)
    assert found is not None
    opened = _open(reader, found)
    try:
        opened.read_into(low, array)
    except BaseException:
        opened.close()
        raise
    return opened


def _open(reader: Hedged, found: ColumnFile) -> ColumnReader:
    device = member(reader.store, found.device)
    return open_column(reader.store, found.device, device, reader.key, found.name)


def probe_avoided(reader: Hedged, low: int, high: int) -> None:
    """Read column bytes [low, high) from devices that reads keep off, if a probe of them is due.

    Nobody waits for it and nothing uses it: it shows the monitor how such a read fares now. On the
    device's lane, after all that somebody waits for.
    """
    store = reader.store
    for device, share in store.routing.avoided.items():
        if share or device not in store.view.devices:
            continue
        found = reader.file_on(device)  # first: an object that is not there uses up no turn
        if found is None or not store.routing.probe(device):
            continue
        try:
            lease = store.buffers.lease(high - low, 0.0, keep=False)
        except BudgetExceeded:
            store.routing.probed(device, False)
            continue
        store.metrics.count("read_probe_total")
        probe = partial(_probe, reader, found, low, lease.array[: high - low])
        try:
            future = store.scheduler.submit(device, probe, bulk=True)
        except BaseException:  # as above
            lease.release()
            raise
        future.add_done_callback(partial(_probed, store, device, lease))


def _probe(reader: Hedged, found: ColumnFile, low: int, array: Bytes) -> None:
    opened = _open(reader, found)
    try:
        opened.read_raw(low, array)
    finally:
        opened.close()


def _probed(store: PoolContext, device: str, lease: Lease, future: Future[None]) -> None:
    lease.release()
    well = future.exception() is None
    store.routing.probed(device, well)
    if not well:
        store.metrics.count("read_probe_error_total")
