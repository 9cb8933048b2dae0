"""Verify the columns on some devices by what they say themselves: header, table, blocks.

No other device is read, so each host scrubs its own disks and no byte of it crosses the network.
What is damaged is repaired as an object, over all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

from hpstore.devices.base import Device
from hpstore.errors import DeviceError, HpstoreError, IntegrityError
from hpstore.maintenance.rebuild import Progress, ProgressCallback, WorkPace
from hpstore.maintenance.repair_object import RepairAction, repair_object
from hpstore.objects.context import PoolContext
from hpstore.objects.key_listing import walk
from hpstore.objects.read.column_reader import ColumnReader, open_column
from hpstore.objects.survey import ColumnFile
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.rate_limit import RateLimit
from hpstore.units import MIB

T = TypeVar("T")
_RUN_BYTES = 4 * MIB  # of a column, read and verified by one call on its device


@dataclass(slots=True, kw_only=True)
class ColumnScrubReport:
    """What a scrub of columns has found. `failed`: keys or devices, with the reasons."""

    columns: int = 0
    bytes: int = 0
    damaged_columns: int = 0
    repaired: int = 0  # objects with a damaged column that are whole again
    failed: dict[str, str] = field(default_factory=dict)
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
    progress: ProgressCallback | None = None,
    pace: WorkPace | None = None,
) -> ColumnScrubReport:
    """Verify every block of every column on `devices`, and repair objects with damaged ones.

    A device that does not answer is given up and named. Files that other software has left in tmp/
    are swept. With a `pace` it may be stopped between two objects.
    """
    report, pace = ColumnScrubReport(), pace or RateLimit(None, store.clock)
    here = store.without(store.view.devices.keys() - set(devices))
    catalog = walk(here)
    given_up = {d for d in here.view.devices if d in catalog.unknown}
    for device in given_up:
        report.failed[here.view.devices[device].url] = "it could not be listed to its end"
    for number, key in enumerate(sorted(catalog.surveys), 1):
        if not pace.go_on():
            report.stopped = True
            return report
        damaged = 0
        for file in catalog.surveys[key].files:
            if file.device not in given_up:
                damaged += _verify(here, key, file, pace, report, given_up)
        if damaged:
            report.damaged_columns += damaged
            _repair(store, key, pace, report)
        if progress is not None:
            done = Progress(done=number, total=len(catalog.surveys), bytes=report.bytes, key=key)
            progress(done)
    store.each(here.view.devices, lambda _, device: device.sweep())
    return report


def _verify(
    here: PoolContext,
    key: str,
    file: ColumnFile,
    pace: WorkPace,
    report: ColumnScrubReport,
    given_up: set[str],
) -> bool:
    """Read a column to its end; whether it is damaged."""
    url = here.view.devices[file.device].url
    try:
        column = _on(here, file.device, partial(_open, here, key, file))
    except FileNotFoundError:
        return False  # deleted or replaced meanwhile
    except IntegrityError:
        return True
    except (DeviceError, OSError) as error:
        given_up.add(file.device)
        report.failed[url] = str(error)
        return False
    try:
        total = column.header.geometry.column_bytes
        for low in range(0, total, _RUN_BYTES):
            size = min(_RUN_BYTES, total - low)
            pace(size)
            _on(here, file.device, partial(_read, column, low, size))
            report.bytes += size
    except IntegrityError:
        return True
    except (DeviceError, OSError) as error:
        given_up.add(file.device)
        report.failed[url] = str(error)
    finally:
        column.close()
    report.columns += 1
    return False


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
