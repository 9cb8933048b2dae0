"""What detectors say of a device, and the states that the policy keeps it in. Plain data."""

from __future__ import annotations

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
class Verdict:
    """One device, one tick. `state` is what the evidence calls for; the policy decides.

    SUSPECT, SITOUT or FAULTED. `score` is the level of the device's leaky bucket. A device without
    a verdict gives no reason for one.
    """

    device: str
    state: HealthState
    score: float
    reason: str


__all__ = ["HealthState", "Verdict"]
