"""The disks under the pool's devices: their counters, and whether they are expected to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from hpstore.agent.disk_load import block_device, disks_below
from hpstore.errors import ForecastError
from hpstore.health.forecast import disk_record as records
from hpstore.health.forecast.drive_histories import DriveHistory
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.forecaster import FailureForecaster, Forecast, Risk
from hpstore.health.forecast.this_machine import judge_past, judge_reading, recorded
from hpstore.health.policy.states import ForecastOutlook
from hpstore.health.smart.readout import Readout, SmartReading, read_disk
from hpstore.runtime.threads import WorkerThreads

_log = logging.getLogger(__name__)
RECORD_FILE = "disks.csv"
_AT_ONCE = 8
_DAYS = 3  # an alarm on two of them counts
_ALARMING = (Risk.WARN, Risk.FAILING)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSight:
    """One disk. `risk` is "" when it did not answer; `readout` says how asking it went."""

    disk: str
    readout: str
    problem: str
    risk: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    outlook: ForecastOutlook

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def outlook_of(now: Forecast | None, before: list[Forecast]) -> ForecastOutlook:
    """From forecasts to what the policy acts on. `before`: those of the last days. Pure.

    What the disk says itself is fatal; a score counts when it alarmed on two of three days.
    """
    if now is None:
        return ForecastOutlook.NONE
    if now.risk is Risk.FAILING:
        return ForecastOutlook.FATAL
    days = {f.day for f in (*before, now) if f.risk in _ALARMING}
    return (
        ForecastOutlook.ALARM if len(days) >= 2 and now.risk in _ALARMING else ForecastOutlook.NONE
    )


def worst(sights: list[DiskSight]) -> ForecastOutlook:
    """Of the disks below one device."""
    order = list(ForecastOutlook)
    return max((sight.outlook for sight in sights), key=order.index, default=ForecastOutlook.NONE)


class DiskWatch:
    """Reads the disks below devices and judges them; `look` blocks, up to the deadline of a disk.

    A row a disk and day goes into a record beside the agent's memory. Sleeping disks stay asleep.
    """

    def __init__(
        self,
        directory: Path,
        forecaster: FailureForecaster,
        *,
        timeout_seconds: float,
        read: Callable[[str], SmartReading] | None = None,
        disks_of: Callable[[str], list[str]] | None = None,
    ) -> None:
        self._record, self._forecaster = directory / RECORD_FILE, forecaster
        self._read = read or (lambda disk: read_disk(disk, timeout_seconds=timeout_seconds))
        self._disks_of = disks_of or disks_of_path

    def look(self, places: Mapping[str, str], today: int) -> dict[str, list[DiskSight]]:
        """Return disks by device id; a device whose disks are unknown has none."""
        below = {
            device: self._disks_of(url.removeprefix("file://"))
            for device, url in places.items()
            if "://" not in url.removeprefix("file://")
        }
        every = sorted({disk for disks in below.values() for disk in disks})
        readings = self._read_all(every)
        before = self._recorded()
        self._remember(list(readings.values()), today)
        sights = {disk: self._judge(found, before, today) for disk, found in readings.items()}
        return {device: [sights[disk] for disk in disks] for device, disks in below.items()}

    def _read_all(self, disks: list[str]) -> dict[str, SmartReading]:
        if not disks:
            return {}
        with WorkerThreads(_AT_ONCE, "hpstore-smart") as pool:
            futures: dict[str, Future[SmartReading]] = {
                d: pool.submit(self._read, d) for d in disks
            }
            wait(futures.values())
        found = {}
        for disk, future in futures.items():
            error = future.exception()
            found[disk] = (
                future.result()
                if error is None
                else SmartReading(device=disk, readout=Readout.FAILED, problem=str(error))
            )
        return found

    def _recorded(self) -> dict[str, DriveHistory]:
        try:
            return recorded(self._record, BadRows())
        except ForecastError as error:
            _log.warning("the record of disks cannot be read: %s; forecasts have no past", error)
            return {}

    def _remember(self, readings: list[SmartReading], today: int) -> None:
        new = [r for r in readings if r.readout is Readout.OK and r.serial]
        if not new:
            return
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            records.append(str(self._record), today, new)
        except (ForecastError, OSError) as error:
            _log.warning("counters of disks are not recorded: %s", error)

    def _judge(
        self, reading: SmartReading, before: Mapping[str, DriveHistory], today: int
    ) -> DiskSight:
        past = before.get(reading.serial)
        now = judge_reading(self._forecaster, reading, past, today)
        first = today - _DAYS + 1
        earlier = [] if past is None else judge_past(self._forecaster, past, first, today)
        return DiskSight(
            disk=reading.device,
            readout=reading.readout,
            problem=reading.problem,
            risk="" if now is None else now.risk,
            reasons=() if now is None else now.reasons,
            notes=reading.notes,
            outlook=outlook_of(now, earlier),
        )


def disks_of_path(path: str) -> list[str]:
    """Paths of the disks below a directory."""
    name = block_device(path)
    return [] if name is None else disks_below(name)
