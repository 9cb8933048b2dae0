"""Read one version of an object: open k columns, verify, decode what is lost (PROTOCOL 7)."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future

from hpstore.codec.galois import Bytes
from hpstore.errors import BlocksDamaged, BudgetExceeded, IntegrityError, TooManyErasures
from hpstore.format.column_header import ColumnHeader
from hpstore.objects.context import PoolContext
from hpstore.objects.read.column_reader import ColumnReader, open_column
from hpstore.objects.read.erasures import Erasures, rows_of, split_window
from hpstore.objects.read.hedge import overtake, probe_avoided
from hpstore.objects.read.open_columns import open_files
from hpstore.objects.read.read_plan import WindowPlan, plan_rebuild, plan_window, run_bytes, windows
from hpstore.objects.read.window_reads import RebuiltRun, WindowReads, begin_reads, close_opened
from hpstore.objects.read_routing import well_placed
from hpstore.objects.survey import ColumnFile, Layout, staying_first
from hpstore.objects.survey_limits import unreadable
from hpstore.runtime.deadline_wait import wait_awake
from hpstore.runtime.scheduler import outcome

_log = logging.getLogger(__name__)
WINDOWS_IN_FLIGHT = 4
Deliver = Callable[[int, Bytes], None]  # (object offset, bytes)


class Changed(Exception):
    """The object was replaced or deleted under the reader: resolve the key again."""


class ObjectReader:
    """One version of an object, open for reading. One thread at a time; close() when done."""

    def __init__(
        self,
        store: PoolContext,
        layout: Layout,
        key: str,
        *,
        unknown: frozenset[str] = frozenset(),
        whole: bool = False,
        patient: bool = True,
    ) -> None:
        """`whole`: as open_column has it, for who reads it now and closes it then. `patient`: a
        device is waited for to its deadline where its column is not needed, too."""
        self.store, self.layout, self.key, self._whole = store, layout, key, whole
        self._patient = patient
        self.judging = True  # damage counts against devices; not what a scrub comes upon
        self._routed = -1  # the version of the routing that open columns are in accord with
        self.unknown = unknown  # members that did not answer when it was looked up
        self.columns: dict[int, ColumnReader] = {}
        self.damaged: dict[int, Exception] = {}  # column that is lost whole -> what is wrong
        self.erasures = Erasures()  # damaged blocks of open columns
        self._untried = {c: staying_first(store.view, x) for c, x in layout.columns.items()}
        self._header: ColumnHeader | None = None

    @property
    def header(self) -> ColumnHeader:
        """What the object says of itself."""
        if self._header is None:
            raise unreadable(f"object {self.key!r}: no readable header", self.key, self.away)
        return self._header

    @property
    def away(self) -> bool:
        """Whether devices that did not answer, or failed, may have what is missing."""
        seen = (IntegrityError, FileNotFoundError)
        return bool(self.unknown) or not all(isinstance(e, seen) for e in self.damaged.values())

    @property
    def impaired(self) -> bool:
        """Whether columns are lost, damaged, or were not found when the object was opened."""
        return bool(self.damaged or self.erasures) or len(self._untried) < self.layout.width

    def share(self) -> ObjectReader:
        """Another reader of the same open columns, for another thread. Call by this one's."""
        made = ObjectReader(
            self.store, self.layout, self.key, unknown=self.unknown, patient=self._patient
        )
        made._routed = self._routed
        made.columns = {column: reader.retain() for column, reader in self.columns.items()}
        made.damaged, made._header = dict(self.damaged), self._header
        made.erasures = self.erasures
        made._untried = {column: deque(files) for column, files in self._untried.items()}
        return made

    def open_columns(self, wanted: Iterable[int]) -> None:
        """Try to open columns that are not open yet; failures land in `damaged`.

        Raises Changed when a file vanished since the survey.
        """
        batch: dict[int, ColumnFile] = {}
        for column in wanted:
            files = self._untried.get(column)
            if column not in self.columns and files:
                batch[column] = files.popleft()
        if not batch:
            return
        changed = False
        spare = None if self._patient else self.enough_without
        opened = open_files(self.store, self.key, batch, whole=self._whole, spare=spare)
        for column, result in opened.items():
            if isinstance(result, FileNotFoundError):
                changed = True
            elif isinstance(result, Exception):
                self._note(column, result)
            else:
                self._accept(column, result)
        if changed:
            raise Changed(self.key)
        self.open_columns([c for c in batch if c not in self.columns and self._untried[c]])

    def enough_without(self, devices: Collection[str]) -> bool:
        """Whether k columns are open, or can be, if nothing on these devices answers."""
        left = self.columns.keys() | {
            column
            for column, files in self.layout.columns.items()
            if column not in self.damaged and any(f.device not in devices for f in files)
        }
        return len(left) >= self.layout.data

    def _accept(self, column: int, reader: ColumnReader) -> None:
        if self._header is None:
            self._header = reader.header
        elif reader.header.geometry != self._header.geometry:
            reader.close()
            self._note(column, IntegrityError(f"{reader.where}: another geometry than its peers"))
            return
        self.columns[column] = reader
        self.damaged.pop(column, None)

    def open_enough(self) -> bool:
        """Open k columns on devices in good standing, data columns first; others only as far as
        these are too few. True when k are open.

        Once more when the routing has changed: then also data columns of devices that are back.
        """
        version, need = self.store.routing.version, self.layout.data
        if self._routed == version and len(self.columns) >= need:
            return True
        back = self.columns and self._routed not in (-1, version)
        away = {*self.store.kept_off(), *self.store.owing()}
        if back:
            self.open_columns([c for c in self._closed(away) if c < need])
        while True:
            sound = sum(reader.device_id not in away for reader in self.columns.values())
            wanted = self._closed(away)[: max(0, need - sound)]
            if not wanted and len(self.columns) < need:
                wanted = self._closed(())[: need - len(self.columns)]
            if not wanted:
                break
            self.open_columns(wanted)
        self._routed = version
        return len(self.columns) >= need

    def _closed(self, away: Iterable[str]) -> list[int]:
        """Columns that can be opened, but for those on devices that are `away`."""
        return [
            column
            for column, files in sorted(self._untried.items())
            if column not in self.columns and files and files[0].device not in away
        ]

    def closed_columns(self) -> dict[int, ColumnFile]:
        """Files of columns that are not open, on devices in good standing; for spare reads."""
        return {column: self._untried[column][0] for column in self._closed(self.store.kept_off())}

    def file_on(self, device: str) -> ColumnFile | None:
        """A file of the object on a device."""
        return next(
            (f for files in self.layout.columns.values() for f in files if f.device == device), None
        )

    def adopt(self, column: int, opened: ColumnReader | Exception) -> None:
        """Take what a spare read has opened, or what went wrong with it. By this one's thread."""
        if column in self.columns or not self._untried.get(column):
            if isinstance(opened, ColumnReader):
                opened.close()
            return
        if isinstance(opened, BlocksDamaged):
            self._note_blocks(column, self._untried[column][0].device, opened)
            return
        self._untried[column].popleft()
        if isinstance(opened, ColumnReader):
            self._accept(column, opened)
        else:
            self._note(column, opened)

    def usable(self) -> Mapping[int, ColumnReader]:
        """Open columns to read from now: without those of avoided devices, as far as k are left.

        What is not among them is decoded from others, as if it were lost.
        """
        avoided = self.store.avoided()
        if not avoided or not any(r.device_id in avoided for r in self.columns.values()):
            return self.columns
        devices = {column: reader.device_id for column, reader in self.columns.items()}
        chosen = well_placed(devices, avoided, self.header.geometry.data)
        if len(chosen) < len(devices):
            self.store.metrics.count("read_avoided_total")
        return {column: self.columns[column] for column in sorted(chosen)}

    def _note(self, column: int, error: Exception) -> None:
        """Remember what is wrong with a column; count it, and queue a repair for damage."""
        self.damaged[column] = error
        if isinstance(error, IntegrityError):
            self.store.metrics.count("column_mismatch_total")
            self.store.damage(self.key)
            _log.warning("%s", error)
        else:
            self.store.metrics.count("column_read_error_total")

    def _note_blocks(self, column: int, device: str, error: BlocksDamaged) -> None:
        """Blocks of a column are damaged: its other blocks are read on. Counted once a block."""
        known = column in self.erasures.columns
        fresh = self.erasures.mark_blocks(column, error.blocks, error)
        if not fresh:
            return
        self.store.metrics.count("column_mismatch_total")
        self.store.metrics.count("block_mismatch_total", fresh)
        self.store.damage(self.key)
        if self.judging:
            self.store.note_damage(device)
        if not known:  # one line a column, not one a block
            _log.warning("%s", error)

    def read_into(self, start: int, out: Bytes) -> None:
        """Fill `out` with verified object bytes from `start`; decodes where columns are lost.

        `out` is written by the calling thread alone. Raises TooManyErasures, Changed.
        """

        def copy(offset: int, found: Bytes) -> None:
            out[offset - start : offset - start + len(found)] = found

        self.read_ranges([(start, start + len(out))], copy)

    def read_ranges(self, ranges: Iterable[tuple[int, int]], deliver: Deliver) -> None:
        """Hand verified object bytes of all ranges to `deliver`, piece by piece, in order.

        `deliver(offset, bytes)` is called by the calling thread; the bytes are good until it
        returns. Windows of all ranges are read ahead alike. Raises TooManyErasures, Changed.
        """
        geometry = self.header.geometry
        run = run_bytes(geometry.width, self.store.buffers.budget.limit_bytes)
        whole = itertools.chain.from_iterable(windows(geometry, a, b, run) for a, b in ranges)
        cut = itertools.chain.from_iterable(
            split_window(geometry, a, b, self.erasures) for a, b in whole
        )
        flying: deque[tuple[tuple[int, int], WindowReads]] = deque()
        window = next(cut, None)
        try:
            while window or flying:
                while window and len(flying) < WINDOWS_IN_FLIGHT:
                    flight = self._launch(self._plan_window(*window), block=not flying)
                    if flight is None:
                        break
                    flying.append((window, flight))
                    window = next(cut, None)
                landing, flight = flying.popleft()
                self._land(landing, flight, deliver)
        finally:
            for _, flight in flying:
                flight.drop()

    def _plan_window(self, start: int, end: int) -> WindowPlan:
        geometry, bad = self.header.geometry, _none
        if self.erasures:
            bad = self._bad_columns(*rows_of(geometry, list(geometry.pieces(start, end))))
        return self._plan(
            lambda usable: plan_window(geometry, start, end, usable - bad()),
            f"bytes [{start}, {end})",
        )

    def _bad_columns(self, low: int, high: int) -> Callable[[], frozenset[int]]:
        """Asked at each plan: columns that cannot be used for column bytes [low, high)."""
        return lambda: self.erasures.columns_in(low, high)

    def _plan(self, plan: Callable[[frozenset[int]], WindowPlan | None], what: str) -> WindowPlan:
        """Plan with the columns that are open, opening spare ones when they are too few."""
        if self._routed != self.store.routing.version:
            self.open_enough()
        while True:
            opened = frozenset(self.columns)
            found = plan(frozenset(self.usable())) or plan(opened)
            if found is not None:
                if self.store.routing.avoided and found.reads:
                    probe_avoided(self, *next(iter(found.reads.values())))
                return found
            self._routed = -1
            self.open_enough()
            if self.erasures:  # columns with damaged blocks are no full ones
                self.open_columns(self._closed(()))
            if frozenset(self.columns) == opened:
                raise self._unreadable(what)

    def _unreadable(self, what: str) -> TooManyErasures:
        reasons = [str(error) for error in self.damaged.values()] + self.erasures.reasons()
        return unreadable(
            f"{what} of object {self.key!r} version {self.layout.version} cannot be read: fewer "
            f"than the {self.header.geometry.data} units needed are readable there "
            f"({len(self.columns)} columns are open): {'; '.join(reasons)}. Nothing was deleted; "
            "other bytes of the object may be readable.",
            self.key,
            self.away,
        )

    def rebuild_run(self, low: int, high: int, wanted: tuple[int, ...]) -> RebuiltRun:
        """Column bytes [low, high) of columns `wanted`, from k others; release() it when done."""
        while True:
            cuts = self.erasures.edges_in(low, high) if self.erasures else []
            if cuts:
                return self._rebuild_parts([low, *cuts, high], wanted)
            plan = self._plan_rebuild(low, high, wanted)
            flight = self._launch(plan, block=True)
            assert flight is not None  # it waited
            try:
                if self._arrived(flight):
                    self._decode(flight)
                    return RebuiltRun({c: flight.arrays[c] for c in wanted}, flight.drop)
            except BaseException:
                flight.drop()
                raise
            flight.drop()

    def _plan_rebuild(self, low: int, high: int, wanted: tuple[int, ...]) -> WindowPlan:
        geometry, bad = self.header.geometry, self._bad_columns(low, high)
        return self._plan(
            lambda usable: plan_rebuild(geometry, low, high, usable - bad(), wanted),
            f"column bytes [{low}, {high})",
        )

    def _rebuild_parts(self, edges: list[int], wanted: tuple[int, ...]) -> RebuiltRun:
        """As rebuild_run, from parts in each of which the same columns are damaged."""
        size = edges[-1] - edges[0]
        patience = self.store.settings.device_deadline_seconds
        lease = self.store.buffers.lease(len(wanted) * size, patience)
        rows = {c: lease.array[i * size : (i + 1) * size] for i, c in enumerate(wanted)}
        try:
            for low, high in itertools.pairwise(edges):
                part = self.rebuild_run(low, high, wanted)
                for column, row in rows.items():
                    row[low - edges[0] : high - edges[0]] = part.rows[column]
                part.release()
        except BaseException:
            lease.release()
            raise
        return RebuiltRun(rows, lease.release)

    def verify_column(self, column: int, throttle: Callable[[int], None]) -> None:
        """Read all of a column: damaged blocks land in `erasures`, a lost column in `damaged`."""
        run = run_bytes(1, self.store.buffers.budget.limit_bytes)
        total = self.header.geometry.column_bytes
        for low in range(0, max(total, 1), run):
            span = (low, min(low + run, total))
            throttle(span[1] - span[0])
            plan = WindowPlan(pieces=(), reads={column: span}, lost={}, have=())
            flight = self._launch(plan, block=True)
            assert flight is not None  # it waited
            try:
                if not self._arrived(flight) and column not in self.columns:
                    return
            finally:
                flight.drop()

    def _launch(self, plan: WindowPlan, *, block: bool) -> WindowReads | None:
        """Start the reads of a window; None when memory is short and we shall not wait for it."""
        patience = self.store.settings.device_deadline_seconds
        try:
            lease = self.store.buffers.lease(plan.bytes, patience if block else 0.0)
        except BudgetExceeded:
            if block:
                raise
            return None
        flight = WindowReads(plan, lease)
        begin_reads(self.store, self.columns, flight)
        return flight

    def _land(self, window: tuple[int, int], flight: WindowReads, deliver: Deliver) -> None:
        """Wait for a window, replace what failed, decode, hand out."""
        while True:
            try:
                flight = overtake(self, window, flight)
                if self._arrived(flight):
                    self._decode(flight)
                    for piece in flight.plan.pieces:
                        at = piece.column_offset - flight.starts[piece.column]
                        found = flight.arrays[piece.column][at : at + piece.length]
                        deliver(piece.object_offset, found)
                    return
            finally:
                flight.drop()
            parts = split_window(self.header.geometry, *window, self.erasures)
            for part in parts:
                again = self._launch(self._plan_window(*part), block=True)
                assert again is not None  # it waited
                if len(parts) == 1:
                    flight = again
                else:
                    self._land(part, again, deliver)
            if len(parts) > 1:
                return

    def _arrived(self, flight: WindowReads) -> bool:
        """True when all reads arrived; columns that failed are given up and noted."""
        deadline = self.store.settings.device_deadline_seconds
        wait_awake(flight.futures.values(), deadline - flight.waited)
        good = True
        for column, future in flight.futures.items():
            reader = self.columns.get(column)
            result = outcome(future, reader.device_id if reader else "", deadline)
            if isinstance(result, Exception):
                good = False
                self.give_up(column, future, result)
        return good

    def give_up(self, column: int, future: Future[ColumnReader | None], error: Exception) -> None:
        """Note what a read of a column met, and use it no more. By this one's thread.

        Raises Changed when the object was replaced under it.
        """
        reader = self.columns.get(column)
        if reader is None:
            return  # an earlier window already gave this column up
        if isinstance(error, IntegrityError):
            if self._replaced(reader):
                raise Changed(self.key)
            if isinstance(error, BlocksDamaged):
                self._note_blocks(column, reader.device_id, error)
                return
            if self.judging:
                self.store.note_damage(reader.device_id)
        self._note(column, error)
        del self.columns[column]
        if self.store.routing.version:
            self._routed = -1  # another one may be wanted in its place
        future.add_done_callback(lambda _: reader.close())

    def _replaced(self, reader: ColumnReader) -> bool:
        """PROTOCOL 10: after a mismatch, is the file still the object that we opened?"""
        device, name = self.store.view.devices.get(reader.device_id), reader.name
        if device is None:
            return False
        future = self.store.scheduler.submit(
            reader.device_id,
            lambda: open_column(self.store, reader.device_id, device, self.key, name),
        )
        deadline = self.store.settings.device_deadline_seconds
        wait_awake([future], deadline)
        found = outcome(future, reader.device_id, deadline)
        future.add_done_callback(close_opened)
        return isinstance(found, FileNotFoundError)

    def _decode(self, flight: WindowReads) -> None:
        """Decode the lost columns of a window."""
        plan, geometry = flight.plan, self.header.geometry
        if not plan.lost:
            return
        self.store.metrics.count("read_degraded_total")
        low, high = next(iter(plan.lost.values()))
        starts = flight.starts
        sources = [flight.arrays[c][low - starts[c] : high - starts[c]] for c in plan.have]
        self.store.code.reconstruct(
            geometry.code,
            geometry.data,
            geometry.parity,
            plan.have,
            tuple(plan.lost),
            sources,
            [flight.arrays[column] for column in plan.lost],
        )

    def close(self) -> None:
        """Release all files."""
        for reader in self.columns.values():
            reader.close()
        self.columns = {}


def _none() -> frozenset[int]:
    """No column is damaged."""
    return frozenset()
