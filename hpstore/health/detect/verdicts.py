"""What detectors say of a device, and the states that the policy keeps it in. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class HealthState(StrEnum):
    """Where a device stands. `records.DeviceState` is what the pool has decided about it."""

    ONLINE = "online"
    SUSPECT = "suspect"  # reads are planned round it, no new columns
    SITOUT = "sitout"  # no ordinary reads, no new columns; probed
    PROBATION = "probation"  # gets a rising share of its reads
    READ_ONLY = "read-only"  # refuses writes: read as ever, no new columns
    DRAINING = "draining"  # a source to copy from, no new columns
    EVICTED = "evicted"
    FAULTED = "faulted"  # errors, or a hang
    REMOVED = "removed"  # does not answer
    REBUILDING = "rebuilding"  # came back, and is being reconciled; serves nothing yet
    MAINTENANCE = "maintenance"  # an operator's; no automation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVerdict:
    """One device, one tick. `state` is what the evidence calls for; the policy decides.

    SUSPECT, SITOUT or FAULTED. `score` is the level of the device's leaky bucket. A device without
    a verdict gives no reason for one.
    """

    device: str
    state: HealthState
    score: float
    reason: str


_SEVERITY = (HealthState.SUSPECT, HealthState.SITOUT, HealthState.FAULTED)


def worst_of(verdicts: Iterable[DeviceVerdict]) -> dict[str, DeviceVerdict]:
    """The most severe verdict on each device; of equal ones the highest score."""
    worst: dict[str, DeviceVerdict] = {}
    for verdict in verdicts:
        known = worst.get(verdict.device)
        if known is None or _weight(verdict) > _weight(known):
            worst[verdict.device] = verdict
    return worst


def _weight(verdict: DeviceVerdict) -> tuple[int, float, str]:
    return (_SEVERITY.index(verdict.state), verdict.score, verdict.reason)
