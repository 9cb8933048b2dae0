"""The schedule of faults of a soak: data, drawn from a seed. Pure.

A fault of a device may have to wait when it comes, so that no more devices are away than parity
allows; the rig writes down when each one really happened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PROCESSES = ("trainer", "agent", "ingest", "evaluator", "operator")
DEVICES = 8
SETTLE_SECONDS = 20.0  # at the start, until all processes are at work
PROCESS_SECONDS, DEVICE_SECONDS = 9.0, 16.0  # mean time between two faults of a kind
PROCESS_FAULTS = {"kill": 5, "stop": 2}
PROCESS_WEIGHTS = {"trainer": 4, "agent": 3, "ingest": 3, "evaluator": 1, "operator": 1}
# what it is, how often it is chosen, and for how long: seconds at least and at most
DEVICE_FAULTS = {
    "pull": (3, 2.0, 45.0),  # EIO on everything, then another device with the same bytes
    "unmount": (2, 2.0, 30.0),  # the path names the parent file system
    "slow": (2, 8.0, 25.0),  # throttled to 1 MiB a second
    "hang": (2, 2.0, 30.0),  # no call ends
    "flip": (3, 0.0, 0.0),  # bits of columns; ends with a scrub that finds nothing
    "fill": (1, 8.0, 20.0),
    "evict": (1, 5.0, 20.0),  # by the operator, who readmits it
    "drain": (1, 5.0, 20.0),  # the same
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fault. `target`: a process, or the number of a device. `seed` decides what it hits."""

    at_seconds: float
    fault: str
    target: str
    seconds: float  # for which it lasts; 0: it is over at once
    seed: int

    @property
    def device(self) -> int | None:
        """The number of its device; None for a fault of a process."""
        return None if self.target in PROCESSES else int(self.target)

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        what = self.target if self.device is None else f"device {self.target}"
        return f"{self.at_seconds:7.1f}  {self.fault} {what}{lasting}"


def make_schedule(seed: int, seconds: float) -> list[Event]:
    """Faults of a soak of so many seconds, in their order."""
    rng = random.Random(seed)
    found = []
    at = SETTLE_SECONDS
    while (at := at + rng.expovariate(1 / PROCESS_SECONDS)) < seconds:
        target = rng.choices(list(PROCESS_WEIGHTS), list(PROCESS_WEIGHTS.values()))[0]
        fault = rng.choices(list(PROCESS_FAULTS), list(PROCESS_FAULTS.values()))[0]
        lasts = rng.uniform(1.0, 6.0) if fault == "stop" else 0.0
        found.append(_event(at, fault, target, lasts, rng))
    at = SETTLE_SECONDS
    while (at := at + rng.expovariate(1 / DEVICE_SECONDS)) < seconds:
        weights = [weight for weight, _, _ in DEVICE_FAULTS.values()]
        fault = rng.choices(list(DEVICE_FAULTS), weights)[0]
        _, least, most = DEVICE_FAULTS[fault]
        target = str(rng.randrange(DEVICES))
        found.append(_event(at, fault, target, rng.uniform(least, most), rng))
    return sorted(found, key=lambda event: event.at_seconds)


def _event(at: float, fault: str, target: str, seconds: float, rng: random.Random) -> Event:
    return Event(
        at_seconds=round(at, 1),
        fault=fault,
        target=target,
        seconds=round(seconds, 1),
        seed=rng.getrandbits(32),
    )
