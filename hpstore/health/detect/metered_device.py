"""A device whose calls are noted: operation, bytes, calls in flight, service time, outcome.

What is timed is the device call alone: no queue, no checksum, no codec. A late call is timed as any
other, when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hpstore.codec.galois import Bytes
from hpstore.devices.base import BLAMELESS, READABLE, Device, DirectoryEntry, ReadHandle
from hpstore.devices.host_disks import HostDisk, host_disk, read_ahead
from hpstore.devices.wrappers import DeviceWrapper, WrappedReader
from hpstore.errors import DeviceMissing, ReadAbandoned
from hpstore.health.detect.io_recorder import OPERATIONS, IoOutcome, IoRecorder, Operation
from hpstore.runtime.split_calls import Sent, Unfinished

T = TypeVar("T")
_HARMLESS = (FileNotFoundError, *READABLE)  # say nothing of a device's strength
_UNJUDGED = (Unfinished, *BLAMELESS)  # the device was not asked, or has not answered yet
_READ, _META = int(Operation.READ), int(Operation.META)
_ERROR, _CHECKSUM, _CUT = int(IoOutcome.ERROR), int(IoOutcome.CHECKSUM), int(IoOutcome.CUT)


class DeviceMeter:
    """The recorder of one device, with the clock, and what wakes whoever drains it.

    For any thread. It is an `objects.routing.Meter`.
    """

    def __init__(
        self, recorder: IoRecorder, now: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        self.recorder, self.now, self._wake = recorder, now, wake
        self.blameless: tuple[type[Exception], ...] = _UNJUDGED
        self.asleep = True  # until whoever drains has been woken, in each process

    def begin(self, now_seconds: float) -> int:
        """A call starts; returns its ticket."""
        if self.asleep:
            self._wake()
        return self.recorder.begin(now_seconds)

    def leave(self, ticket: int) -> None:
        """A batch is over."""
        self.recorder.leave(ticket)

    def note_batch(
        self, *, count: int, nbytes: float, in_flight: int, seconds: float, usual: float = 0.0
    ) -> None:
        """So many reads of a batch are done: their mean bytes and seconds, and what such reads of
        its other devices took, 0 where those are too few."""
        self.recorder.record(_READ, nbytes, in_flight, seconds, count=count, usual=usual)

    def note_errors(self, count: int) -> None:
        """So many reads of a batch failed."""
        self.recorder.record(_READ, 0, 1, 0.0, _ERROR, count)

    def note_damage(self) -> None:
        """A read brought other bytes than were written; the read itself was noted as it ended."""
        self.recorder.record(_META, 0, 1, 0.0, _CHECKSUM)

    def call(self, operation: int, nbytes: int, act: Callable[[], T]) -> T:
        """Make a call and note it."""
        return self._noted(self.begin(self.now()), operation, nbytes, act)

    def sent(
        self, operation: int, nbytes: int, begin: Callable[[], Sent[T] | None]
    ) -> Sent[T] | None:
        """Begin a call in two halves, and note it when it has ended."""
        ticket = self.begin(self.now())
        try:
            sent = begin()
        except BaseException:
            self.leave(ticket)
            raise
        if sent is None:
            self.leave(ticket)
            return None

        def drop() -> None:
            self.leave(ticket)
            sent.drop()

        finish = partial(self._noted, ticket, operation, nbytes, sent.finish)
        return Sent(sent.fileno, sent.arrived, finish, drop, partial(self.leave, ticket))

    def _noted(self, ticket: int, operation: int, nbytes: int, act: Callable[[], T]) -> T:
        recorder, outcome = self.recorder, _ERROR
        try:
            result = act()
            outcome = 0
        except ReadAbandoned:  # no quick read; but that it took long counts
            outcome = _CUT
            raise
        except self.blameless:  # neither an error nor a quick read
            recorder.leave(ticket)
            raise
        except _HARMLESS:
            outcome = 0
            raise
        finally:
            recorder.end(ticket, operation, nbytes, self.now(), outcome)
        return result


class MeteredDevice(DeviceWrapper):
    """Passes everything on, and notes it. Reads of open files can still be made in batches."""

    def __init__(self, inner: Device, meter: DeviceMeter) -> None:
        super().__init__(inner)
        self.meter = meter
        # a host or a store that is away says nothing of its disks
        if host_disk(inner) is not None or inner.mode == "remote":
            meter.blameless = (DeviceMissing, *_UNJUDGED)

    @property
    def host_disk(self) -> HostDisk | None:
        """The disk of another host that is measured here, if it is one: looks at several of a host
        are not."""
        return host_disk(self.inner)

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        return self.meter.call(OPERATIONS.get(operation, _META), nbytes, call)

    def around_sent(
        self, operation: str, nbytes: int, begin: Callable[[], Sent[T] | None]
    ) -> Sent[T] | None:
        return self.meter.sent(OPERATIONS.get(operation, _META), nbytes, begin)

    def wrapped(self, handle: ReadHandle) -> ReadHandle:
        return _Reader(self, handle)

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        return self.around("list", 0, lambda: self.inner.listings(paths))


class _Reader(WrappedReader):
    _device: MeteredDevice

    def read_into(self, offset: int, target: Bytes) -> None:
        inner = self.inner
        ahead = read_ahead(inner)
        if ahead is not None and ahead.holds(offset, len(target)):
            inner.read_into(offset, target)  # no read of the device: it came when that was opened
            return
        self._device.meter.call(_READ, len(target), lambda: inner.read_into(offset, target))

    @property
    def descriptor(self) -> int:  # type: ignore[override]  # a constant in the parent
        return self.inner.descriptor
