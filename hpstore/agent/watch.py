"""What this process' own monitor says, as far as there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hpstore.health.verdicts import HealthState, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A device by this process' own I/O."""

    state: HealthState
    read_seconds_p50: float  # 0 when there were no reads
    read_seconds_p99: float


class Watch(Protocol):
    """Where verdicts come from. Called by the agent's thread."""

    def verdicts(self) -> list[Verdict]:
        """Of the last round."""

    def devices(self) -> Mapping[str, Watched]:
        """Devices that it knows."""

    def forgive(self, device: str) -> None:
        """A device starts anew."""

    def accept(self, device: str) -> None:
        """What a device does is normal for it."""

    def close(self) -> None:
        """Listen no more."""


class NoWatch:
    """Says nothing."""

    def verdicts(self) -> list[Verdict]:
        return []

    def devices(self) -> Mapping[str, Watched]:
        return {}

    def forgive(self, device: str) -> None:
        pass

    def accept(self, device: str) -> None:
        pass

    def close(self) -> None:
        pass


__all__ = ["NoWatch", "Watch", "Watched"]
