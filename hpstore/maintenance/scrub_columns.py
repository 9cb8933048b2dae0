"""Verify the columns on some devices by what they say themselves: header, table, blocks.

No other device is read, so each host scrubs its own disks and no byte of it crosses the network.
What is damaged is repaired as an object, over all devices. How far each device is read is noted on
the device, so that a pass that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

from hpstore.devices.base import Device
from hpstore.errors import DescriptorsExhausted, DeviceError, HpstoreError, IntegrityError
from hpstore.maintenance.rebuild import Progress, ProgressCallback, WorkPace
from hpstore.maintenance.repair_object import RepairAction, dead_devices, repair_object
from hpstore.maintenance.scrub import CURSOR_SECONDS, MAX_CURSOR_BYTES, decode_cursor, note_position
from hpstore.objects.context import PoolContext
from hpstore.objects.key_listing import walk
from hpstore.objects.read.column_reader import ColumnReader, open_column
from hpstore.objects.survey import ColumnFile
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.rate_limit import RateLimit
from hpstore.units import MIB

T = TypeVar("T")
POSITION_FILE = "scrub-columns.json"
_RUN_BYTES = 4 * MIB  # of a column, read and verified by one call on its device


@dataclass(slots=True, kw_only=True)
class ColumnScrubReport:
    """What a scrub of columns has found. `failed`: keys or devices, with the reasons."""

    columns: int = 0
    bytes: int = 0
    damaged_columns: int = 0  # with bytes that do not match, or that cannot be read
    repaired: int = 0  # objects with a damaged column that are whole again
    failed: dict[str, str] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()  # devices that were not read to their end
    stopped: bool = False  # before all was looked at

    @property
    def clean(self) -> bool:
        """All was read, and nothing was damaged."""
        return not (self.damaged_columns or self.failed or self.stopped)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "clean": self.clean}


def scrub_columns(
    store: PoolContext,
    devices: Collection[str],
    *,
    since_ms: int | None = None,
    progress: ProgressCallback | None = None,
    pace: WorkPace | None = None,
) -> ColumnScrubReport:
    """Verify every block of every column on `devices`, and repair objects with damaged ones.

    A device that does not work is given up and named. One that works and cannot read some bytes has
    a bad sector: the column is damaged. Files that other software has left in tmp/ are swept. With
    a `pace` it may be stopped between two objects.

    `since_ms`: when the pass began that this goes on with. Each device is read from where that pass
    was stopped, and not again where it ended. None: all from the beginning, and nothing is noted.

    Raises DescriptorsExhausted when this process has no descriptors left: the position is noted.
    """
    report, pace = ColumnScrubReport(), pace or RateLimit(None, store.clock)
    here = store.without(store.view.devices.keys() - set(devices))
    catalog = walk(here)
    scrub = _ColumnScrub(here, since_ms, pace, report)
    scrub.give_up(catalog.unknown, "it could not be listed to its end")
    before = ""
    for number, key in enumerate(sorted(catalog.surveys), 1):
        if not pace.go_on():
            report.stopped = True
            break
        try:
            damaged = sum(scrub.verify(key, file) for file in catalog.surveys[key].files)
        except DescriptorsExhausted:
            scrub.note_stop(before)
            raise
        if damaged:
            report.damaged_columns += damaged
            _repair(store, key, pace, report)
        before = key
        scrub.note_now_and_then(key)
        if progress is not None:
            done = Progress(done=number, total=len(catalog.surveys), bytes=report.bytes, key=key)
            progress(done)
    if report.stopped:
        scrub.note_stop(before)
    else:
        scrub.note("")
        store.each(here.view.devices, lambda _, device: device.sweep())
    return report


class _ColumnScrub:
    """The devices of one scrub, and how far each of them is read. Of one thread."""

    def __init__(
        self, here: PoolContext, since_ms: int | None, pace: WorkPace, report: ColumnScrubReport
    ) -> None:
        self._here, self._since_ms, self._pace, self._report = here, since_ms, pace, report
        self._noted = here.clock.monotonic()
        self._given_up: set[str] = set()
        self._ended: set[str] = set()
        self._after: dict[str, str] = {}  # device -> the last key that was read of it
        if since_ms is not None:
            self._go_on_with(since_ms)

    def _go_on_with(self, since_ms: int) -> None:
        """Take up the positions of the pass that began then; others are of earlier passes."""
        now_ms = self._here.clock.wall_ms()
        for device, found in self._here.each(self._here.view.devices, _position).items():
            if isinstance(found, Exception) or not max(1, since_ms) <= found[0] <= now_ms:
                continue
            if found[1]:
                self._after[device] = found[1]
            else:
                self._ended.add(device)

    def give_up(self, devices: Collection[str], reason: str) -> None:
        """Read no more of these devices, and say why."""
        known = self._here.view.devices
        fresh = {d for d in devices if d in known and d not in self._given_up}
        self._given_up |= fresh
        self._report.failed.update({known[d].url: reason for d in fresh})
        self._report.given_up = tuple(sorted(known[d].url for d in self._given_up))

    def verify(self, key: str, file: ColumnFile) -> bool:
        """Read a column to its end, if that is still to be done; whether it is damaged."""
        device = file.device
        if device in self._given_up or device in self._ended or key <= self._after.get(device, ""):
            return False
        try:
            self._read_column(key, file)
        except FileNotFoundError:
            return False  # deleted or replaced meanwhile
        except IntegrityError:
            return True
        except DescriptorsExhausted:
            raise
        except (DeviceError, OSError) as error:
            if not dead_devices(self._here, [device]):
                return True
            self.give_up([device], str(error))
            return False
        self._report.columns += 1
        return False

    def _read_column(self, key: str, file: ColumnFile) -> None:
        column = _on(self._here, file.device, partial(_open, self._here, key, file))
        try:
            total = column.header.geometry.column_bytes
            for low in range(0, total, _RUN_BYTES):
                size = min(_RUN_BYTES, total - low)
                self._pace(size)
                _on(self._here, file.device, partial(_read, column, low, size))
                self._report.bytes += size
        finally:
            column.close()

    def note_now_and_then(self, key: str) -> None:
        """Note the position, if the last note is a while ago."""
        now = self._here.clock.monotonic()
        if now - self._noted >= CURSOR_SECONDS:
            self._noted = now
            self.note(key)

    def note_stop(self, key: str) -> None:
        """Note the last key that was read; "": none was."""
        if key:
            self.note(key)

    def note(self, after: str) -> None:
        """Note on each device that it was read up to a key; "": to its end. A device that was given
        up keeps its last position, and so does one that was further or had ended before."""
        if self._since_ms is None:
            return
        moving = {
            d
            for d in self._here.view.devices.keys() - self._given_up - self._ended
            if not after or after > self._after.get(d, "")
        }
        at_ms = self._here.clock.wall_ms()

        def write(_: str, device: Device) -> None:
            note_position(device, POSITION_FILE, after=after, at_ms=at_ms)

        self._here.each(moving, write)


def _position(_: str, device: Device) -> tuple[int, str]:
    """The position on a device; (0, "") for none that can be read."""
    try:
        return decode_cursor(device.read_small(POSITION_FILE, MAX_CURSOR_BYTES))
    except (FileNotFoundError, IntegrityError):
        return (0, "")


def _on(here: PoolContext, device_id: str, call: Callable[[Device], T]) -> T:
    """Make a call on a device, under its deadline. Raises what it raises."""
    (answer,) = here.each([device_id], lambda _, device: call(device)).values()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _open(here: PoolContext, key: str, file: ColumnFile, device: Device) -> ColumnReader:
    return open_column(here, file.device, device, key, file.name)


def _read(column: ColumnReader, low: int, size: int, _: Device) -> None:
    """Into memory of its own: a call that is given up goes on writing there."""
    column.read_into(low, aligned_array(size))


def _repair(store: PoolContext, key: str, pace: WorkPace, report: ColumnScrubReport) -> None:
    try:
        found = repair_object(store, key, verify=True, throttle=pace)
    except (HpstoreError, OSError) as error:
        report.failed[key] = str(error)
        return
    if found.action is RepairAction.STUCK:
        report.failed[key] = "too few devices to make the damaged column again"
    report.repaired += found.action in (RepairAction.REBUILT, RepairAction.RELAID)
