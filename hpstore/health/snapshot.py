"""What a process knows of its devices' health at one moment. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hpstore.health.detect.device_track import SlowEvidence
from hpstore.health.detect.telemetry import Tick
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState
from hpstore.health.policy.states import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSight:
    """One device. Times are seconds; of what this process did since the pool was opened."""

    device: str
    state: HealthState
    since_seconds: float  # since 1970
    until_seconds: float  # end of a sit-out; 0: none
    score: float
    reason: str  # of the last verdict, "" when there is none now
    read_share: float  # of its ordinary reads that it gets
    ios: int
    io_errors: int
    checksum_errors: int
    read_seconds_p50: float  # of the last 10 to 20 minutes; 0: none
    read_seconds_p99: float
    write_seconds_p99: float
    sync_seconds_p99: float
    latency_seconds: tuple[float, ...]  # normalised means of the last ticks, oldest first
    evidence: SlowEvidence = field(default_factory=SlowEvidence)  # for the verdict, or against one


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSnapshot:
    """All devices of a pool, and what was decided about them in this process."""

    at_seconds: float = 0.0  # of the last tick, since 1970; 0: none yet
    ticks: int = 0
    shared_slow: int = 0  # ticks in which many were slow at once, which accuses nobody
    devices: Mapping[str, DeviceSight]
    decisions: tuple[Decision, ...] = ()  # the last ones, newest last

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One tick of the monitor, for whoever listens."""

    tick: Tick
    verdicts: Sequence[DeviceVerdict]
    now_seconds: float  # monotonic
    at_seconds: float  # since 1970
