"""What this process' own monitor says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hpstore.health.detect.device_track import SlowEvidence
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState
from hpstore.health.monitor import Monitor
from hpstore.health.snapshot import Round


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedDevice:
    """A device by this process' own I/O."""

    state: HealthState
    reason: str  # what is held against it now
    latency_seconds: tuple[float, ...]  # means of the last ticks, normalised, oldest first
    read_seconds_p50: float  # 0 when there were no reads
    read_seconds_p99: float
    evidence: SlowEvidence = field(default_factory=SlowEvidence)


class HealthWatch(Protocol):
    """Where verdicts come from. Called by the agent's thread."""

    def verdicts(self) -> list[DeviceVerdict]:
        """Of the last round."""

    def devices(self) -> Mapping[str, WatchedDevice]:
        """Devices that it knows."""

    def forgive(self, device: str, reason: str) -> None:
        """Clear a device's score and errors."""

    def accept(self, device: str) -> None:
        """What a device does is normal for it."""

    def close(self) -> None:
        """Listen no more."""


class MonitorWatch:
    """Listens to the monitor of a pool that is open in this process."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._last: tuple[DeviceVerdict, ...] = ()  # replaced whole, by the monitor's thread
        self._stop = monitor.listen(self._heard)
        monitor.start()

    def _heard(self, found: Round) -> None:
        self._last = tuple(found.verdicts)

    def verdicts(self) -> list[DeviceVerdict]:
        return list(self._last)

    def devices(self) -> Mapping[str, WatchedDevice]:
        return {
            device: WatchedDevice(
                state=sight.state,
                reason=sight.reason,
                latency_seconds=sight.latency_seconds,
                read_seconds_p50=sight.read_seconds_p50,
                read_seconds_p99=sight.read_seconds_p99,
                evidence=sight.evidence,
            )
            for device, sight in self._monitor.snapshot().devices.items()
        }

    def forgive(self, device: str, reason: str) -> None:
        self._monitor.forgive(device, reason)
        self._last = tuple(verdict for verdict in self._last if verdict.device != device)

    def accept(self, device: str) -> None:
        self._monitor.accept(device)

    def close(self) -> None:
        self._stop()
