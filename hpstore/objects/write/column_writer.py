"""Columns of one object being written side by side: errors, stragglers, publishing (PROTOCOL 4).

Used by puts, which write all k + m columns, and by repairs, which write some.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Device, WriteHandle
from hpstore.devices.horizon_guard import HorizonGuard, HorizonPassed, RecordReplaced
from hpstore.devices.host_disks import begin_file, begin_publish, host_disk, make_file, seal_file
from hpstore.errors import DeviceError, DeviceTimeout, HpstoreError
from hpstore.format.column_header import HEADER_BYTES, ColumnHeader, encode_header, encode_table
from hpstore.format.keys import Kind, NameTags, Version
from hpstore.format.pool_key import PoolKey
from hpstore.objects.context import PoolContext
from hpstore.objects.shared_looks import SharedLook, look_at_devices
from hpstore.objects.survey import ColumnFile, path_on
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.deadline_wait import QUICK_SECONDS, Patience, wait_awake
from hpstore.runtime.split_calls import Sent, SplitCall, Unfinished

_log = logging.getLogger(__name__)
_RECORD_TRIES = 16  # of a name, while the record of membership is replaced


class Lanes(Protocol):
    """Where calls on devices are made."""

    def submit(self, device: str, call: Callable[[], None]) -> Future[None]:
        """Run `call` on the lane of a device."""


class MembershipMoved(HpstoreError):
    """The pool's membership changed during a write: it must be planned again."""


class ColumnWriter:
    """One column on its way to one device."""

    def __init__(
        self, device_id: str, device: Device, header: ColumnHeader, pool_key: PoolKey | None
    ) -> None:
        self.device_id, self.device, self.header = device_id, device, header
        self._pool_key, self.checks = pool_key, header.checks(pool_key)
        self.name = NameTags(pool_key, header.pool_id, header.key).tagged(header.name)
        self.table = np.zeros(header.geometry.block_count, np.uint64)
        self.failed: Exception | None = None
        self.begun = False  # it may have its name: publish() was called, however that ended
        self.published = False
        self.flying: list[Future[None]] = []  # calls that may still use the handle
        self._handle: WriteHandle | None = None
        self.sealed = False  # all its bytes are durable

    @property
    def recycled(self) -> bool:
        """It overwrites a kept file."""
        return self._handle is not None and self._handle.recycled

    @property
    def path(self) -> str:
        """Where it will be."""
        return path_on(self.device, self.header.key, self.name)

    def create(self) -> None:
        """Reserve the space."""
        vital = self.header.kind is Kind.TOMBSTONE
        self._handle = self.device.create(self.header.file_bytes, vital=vital)

    def write(self, column_offset: int, buffers: Sequence[Bytes]) -> None:
        """Write column bytes; does nothing once the column was given up."""
        if self.failed is None:
            assert self._handle is not None
            self._handle.write(HEADER_BYTES + column_offset, buffers)

    def write_whole(self, buffers: Sequence[Bytes]) -> None:
        """Make the file with all its bytes, durable; it has no name yet. `table` is complete."""
        if self.failed is None:
            self._make(buffers, sync=True)
            self.sealed = True

    def writing_whole(self, buffers: Sequence[Bytes]) -> Callable[[], None]:
        """write_whole as a call, in two halves where the device has them."""
        whole = partial(self.write_whole, buffers)
        if host_disk(self.device) is None:
            return whole
        return SplitCall(partial(self._begin_whole, buffers), whole)

    def _begin_whole(self, buffers: Sequence[Bytes]) -> Sent[None] | None:
        if self.failed is not None:
            return None
        page, tail = self._ends()
        sent = begin_file(
            self.device,
            self.header.file_bytes,
            [page, *buffers, tail],
            vital=self.header.kind is Kind.TOMBSTONE,
            sync=True,
        )
        return None if sent is None else sent.then(self._made_whole)

    def _made_whole(self, handle: WriteHandle) -> None:
        self._handle, self.sealed = handle, True

    def fill(self, buffers: Sequence[Bytes]) -> None:
        """As write_whole; sync() makes the bytes durable."""
        if self.failed is None:
            self._make(buffers, sync=False)

    def _make(self, buffers: Sequence[Bytes], *, sync: bool) -> None:
        page, tail = self._ends()
        self._handle = make_file(
            self.device,
            self.header.file_bytes,
            [page, *buffers, tail],
            vital=self.header.kind is Kind.TOMBSTONE,
            sync=sync,
        )

    def sync(self) -> None:
        """Make all bytes durable that fill() has written."""
        if self.failed is not None:
            return
        assert self._handle is not None
        self._handle.sync()
        self.sealed = True

    def seal(self) -> None:
        """Write header and table; make the bytes durable."""
        if self.failed is not None:
            raise self.failed
        if self.sealed:
            return
        assert self._handle is not None
        page, tail = self._ends()
        seal_file(self.device, self._handle, page, self.header.table_offset, tail)

    def _ends(self) -> tuple[Bytes, Bytes]:
        """Header and table, as they are written."""
        page, tail = aligned_array(HEADER_BYTES), aligned_array(self.header.table_bytes)
        page[:] = np.frombuffer(encode_header(self.header, self._pool_key), np.uint8)
        tail[:] = np.frombuffer(encode_table(self.header, self.table, self.checks), np.uint8)
        return page, tail

    def give_name(self, guard: HorizonGuard) -> None:
        """Give the file its name. Raises HorizonPassed, without a name."""
        assert self._handle is not None
        self._handle.publish(self.path, guard)

    def begin_publish(self, guard: HorizonGuard) -> Sent[None] | None:
        """publish in two halves; None where the device has none."""
        assert self._handle is not None
        sent = begin_publish(self.device, self._handle, self.path, guard)
        return None if sent is None else sent.then(self._published)

    def _published(self, _: None) -> None:
        self.published = True

    def publish(self, guard: HorizonGuard) -> None:
        """Give the file its name; durable on return. Raises HorizonPassed, without a name."""
        self.give_name(guard)
        self.sync_name()

    def sync_name(self) -> None:
        """Make the name durable."""
        self.device.sync_directory(self.path)
        self.published = True

    def abort(self) -> None:
        """Drop the file unless it was published, once no call can be using its descriptor."""
        late = [future for future in self.flying if not future.done()]
        if late:
            late[0].add_done_callback(lambda _: self.abort())
        elif self._handle is not None and not self.published:
            self._handle.abort()


class ColumnSet:
    """The columns of one write. `floor` is the fewest that make it worth going on.

    `horizons`: of a repair, whose counters are old: the devices' horizons before it looked
    (PROTOCOL 12). A new version has none, and must be above them.
    """

    def __init__(
        self,
        store: PoolContext,
        headers: Mapping[str, ColumnHeader],
        *,
        floor: int,
        generation: int,
        horizons: Mapping[str, int] | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        """`lanes`: where calls on devices are made, the scheduler's unless given."""
        self._horizons = horizons
        self._lanes = lanes or store.scheduler
        devices = store.view.devices
        self.columns = {
            header.column: ColumnWriter(device_id, devices[device_id], header, store.pool_key)
            for device_id, header in headers.items()
        }
        self._store, self._floor, self._generation = store, floor, generation
        self.superseded: list[ColumnFile] = []  # files of attempts before this one
        self._decided = False
        self._lock = threading.Lock()  # guards _decided, every column's failed, begun and flying

    def alive(self) -> list[ColumnWriter]:
        """Columns that have not failed."""
        return [column for column in self.columns.values() if column.failed is None]

    def failures(self) -> dict[str, Exception]:
        """What went wrong, by device id."""
        return {c.device_id: c.failed for c in self.columns.values() if c.failed is not None}

    def submit(
        self,
        call: Callable[[ColumnWriter], Callable[[], None]],
        only: Collection[int] | None = None,
    ) -> dict[int, Future[None]]:
        """Start `call(column)` on the lane of every column that is alive, `only` of these."""
        futures = {}
        for column in self.alive():
            if only is not None and column.header.column not in only:
                continue
            future = self._lanes.submit(column.device_id, call(column))
            with self._lock:  # several threads start writes of one column
                column.flying = [f for f in column.flying if not f.done()] + [future]
            futures[column.header.column] = future
        return futures

    def begin(
        self, call: Callable[[ColumnWriter], Callable[[], None]], brief: str
    ) -> dict[int, Future[None]]:
        """As submit, on the scheduler's lanes; `brief` as its gather has it."""
        columns = {column.device_id: column for column in self.alive()}
        begun: dict[str, Future[None]] = {}
        try:
            self._store.scheduler.start(
                {device: call(column) for device, column in columns.items()},
                brief=brief,
                into=begun,
            )
        finally:  # abort() waits for those that were begun
            with self._lock:
                for device, future in begun.items():
                    column = columns[device]
                    column.flying = [f for f in column.flying if not f.done()] + [future]
        return {columns[device].header.column: future for device, future in begun.items()}

    def flying(self) -> list[Future[None]]:
        """Calls that may not have answered."""
        with self._lock:
            return [future for column in self.columns.values() for future in column.flying]

    def settle(self, futures: Mapping[int, Future[None]], *, waited: float | None = None) -> None:
        """Wait for calls; note failures, drop the straggler that its peers leave far behind.
        `waited`: for so many seconds they were waited for already, and are no longer."""
        elapsed = self._wait(futures) if waited is None else waited
        for number, future in futures.items():
            self._note(number, future, elapsed)

    def _wait(self, futures: Mapping[int, Future[None]]) -> float:
        settings = self._store.settings
        patience = settings.device_deadline_seconds
        elapsed = wait_awake(futures.values(), min(QUICK_SECONDS, patience))
        while True:
            pending = [f for c, f in futures.items() if not f.done() and self._counts(c)]
            if not pending or elapsed >= patience:
                break
            if len(self.alive()) - len(pending) >= self._floor:
                patience = min(patience, max(settings.straggler_seconds, 8 * elapsed) + elapsed)
                elapsed += wait_awake(pending, patience - elapsed)
                break
            elapsed += wait_awake(pending, patience - elapsed, first=True)
        return elapsed

    def _counts(self, number: int) -> bool:
        return self.columns[number].failed is None

    def _note(self, number: int, future: Future[None], seconds: float) -> None:
        column = self.columns[number]
        if not future.done():
            future.cancel()
            self.fail(
                column,
                DeviceTimeout(
                    f"device {column.device.url} is {seconds:.1f} s behind its peers in a write of "
                    f"{column.header.key!r}; the column is left out",
                    device=column.device_id,
                ),
            )
            return
        if future.cancelled():
            return
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        if isinstance(error, (MembershipMoved, HorizonPassed)):
            raise error
        if error is not None:
            self.fail(column, error)

    def fail(self, column: ColumnWriter, error: Exception) -> None:
        """Give a column up."""
        with self._lock:
            first, column.failed = column.failed is None, error
        if first:
            self._store.note_write(column.device_id, column.device.url, error)
            self._store.metrics.count("column_write_error_total")
            _log.warning(
                "write of %r: column %d lost: %s", column.header.key, column.header.column, error
            )

    def create(self) -> None:
        """Reserve space for all columns, side by side."""
        self.settle(self.submit(lambda column: column.create))
        recycled = sum(column.recycled for column in self.alive())
        self._store.metrics.count("column_recycled_total", recycled)

    def finish(self) -> None:
        """Seal and publish every column that is alive. Raises MembershipMoved, HorizonPassed."""
        sealed = all(column.sealed for column in self.alive())
        self.settle(self.begin(self._finishing, "name" if sealed else ""))
        with self._lock:
            self._decided = True

    def _finishing(self, column: ColumnWriter) -> Callable[[], None]:
        whole = partial(self._finish_one, column)
        if not column.sealed or host_disk(column.device) is None:
            return whole
        return SplitCall(partial(self._begin_name, column), whole)

    def _finish_one(self, column: ColumnWriter) -> None:
        column.seal()
        self.name_one(column, column.publish)

    def _begin_name(self, column: ColumnWriter) -> Sent[None] | None:
        """name_one by `publish` in two halves, where the device compares the membership itself."""
        guard = self._compared_there(column)
        if guard is None or not self._may_begin(column):
            return None
        sent = column.begin_publish(guard)
        if sent is None:
            self._has_no_name(column)
            return None

        def finish() -> None:
            try:
                sent.finish()
            except (HorizonPassed, RecordReplaced, Unfinished) as error:
                self._has_no_name(column)
                if isinstance(error, RecordReplaced):
                    raise Unfinished from error
                raise

        return sent.with_finish(finish)

    def _may_begin(self, column: ColumnWriter) -> bool:
        """Whether a column that is about to get its name does not come too late for it."""
        with self._lock:
            column.begun = not self._decided and column.failed is None
            return column.begun

    def _has_no_name(self, column: ColumnWriter) -> None:
        with self._lock:
            column.begun = False

    def name_one(self, column: ColumnWriter, name: Callable[[HorizonGuard], None]) -> None:
        """Give a sealed column its name by `name`, on the lane of its device. Not when it comes too
        late: then abandon() drops the file. Raises MembershipMoved, HorizonPassed."""
        for turn in range(_RECORD_TRIES):
            if self._late(column):
                return
            guard = None if turn else self._compared_there(column)
            if guard is None:
                self.check_generation(column)
                guard = self._guard(column)
            if not self._may_begin(column):
                return
            try:
                name(guard)
            except (HorizonPassed, RecordReplaced) as error:
                self._has_no_name(column)
                if isinstance(error, HorizonPassed):
                    raise
            else:
                return
        raise DeviceError(
            f"the record of membership of device {column.device.url} is replaced all the time",
            device=column.device_id,
        )

    def _compared_there(self, column: ColumnWriter) -> HorizonGuard | None:
        """What a device behind a service compares in one step with the rename, the membership that
        was seen included: a look before would be a round trip more and say no more (PROTOCOL 4).
        None where it has to be looked at: other devices, and a membership that was not seen."""
        guard = self._guard(column) if host_disk(column.device) is not None else None
        return guard if guard is not None and guard.record is not None else None

    def _guard(self, column: ColumnWriter) -> HorizonGuard:
        """What a device compares before the file has its name."""
        horizons = self._horizons
        return HorizonGuard(
            counter=column.header.version.counter,
            seen=None if horizons is None else horizons.get(column.device_id, -1),
            pool_key=self._store.pool_key,
            record=self._store.record_stamp(column.device_id, self._generation),
        )

    def _late(self, column: ColumnWriter) -> bool:
        with self._lock:
            return self._decided or column.failed is not None

    def check_generation(self, column: ColumnWriter) -> None:
        """PROTOCOL 4: a device that knows a newer membership stops the write."""
        self._require_generation(self._store.generation_on(column.device_id, column.device))

    def _require_generation(self, found: int) -> None:
        if found > self._generation:
            raise MembershipMoved(f"membership moved from {self._generation} to {found}")

    def check_generations(self) -> None:
        """The same on all published columns, before the acknowledgement."""
        columns = {column.device_id: column for column in self.published()}
        settings = self._store.settings
        spare = Patience(
            settings.straggler_seconds, lambda silent: len(columns) - len(silent) >= self._floor
        )
        answers = look_at_devices(
            self._store,
            {d: column.device for d, column in columns.items()},
            SharedLook(
                alone=lambda d, _: self.check_generation(columns[d]),
                seen=lambda d, device, look: self._require_generation(
                    self._store.generation_of(d, device, look.stamp)
                ),
                paths=lambda _: (),
            ),
            patience=spare,
            brief="generation",
            ask_late=True,
        )
        for device, answer in answers.items():
            if isinstance(answer, MembershipMoved):
                raise answer
            if isinstance(answer, Exception):
                self.fail(columns[device], answer)

    def published(self) -> list[ColumnWriter]:
        """Columns that are durable under their name."""
        return [c for c in self.columns.values() if c.published and c.failed is None]

    def begun(self) -> list[ColumnWriter]:
        """Columns that may be under their name: published, unanswered, or failed in between."""
        return [c for c in self.columns.values() if c.begun]

    def files(self) -> list[ColumnFile]:
        """The files of columns that may be under their name."""
        return [ColumnFile(c.device_id, c.name) for c in self.begun()]

    @property
    def version(self) -> Version:
        """What is written."""
        return next(iter(self.columns.values())).header.version

    def visible(self) -> bool:
        """Whether so many columns may have their name that a reader could use them, and a repair
        in another process complete them: then this version is settled forward (PROTOCOL 8)."""
        return len(self.begun()) >= next(iter(self.columns.values())).header.geometry.data

    def abandon(self, *, take_back: bool) -> None:
        """Drop unpublished files; with `take_back` also the published ones of a put that failed.

        Not once the version may be visible: a repair may have completed it by now, and have
        removed the version before it.
        """
        with self._lock:
            self._decided = True  # from here on no further column begins
        for column in self.columns.values():
            column.abort()
        if not take_back or self.visible():
            return

        def remove(column: ColumnWriter) -> Callable[[], None]:
            return lambda: column.device.delete(column.path)

        futures = [self._store.scheduler.submit(c.device_id, remove(c)) for c in self.begun()]
        wait_awake(futures, self._store.settings.device_deadline_seconds)
