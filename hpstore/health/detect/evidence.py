"""Evidence beside service times: hangs and errors. Thresholds are constants of `SlowConfig`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class Media(StrEnum):
    """Kinds of device that are not compared with each other."""

    NVME = "nvme"
    SSD = "ssd"  # SATA, SAS
    HDD = "hdd"
    REMOTE = "remote"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a device has in common with others."""

    media: Media = Media.UNKNOWN
    model: str = ""  # model and firmware
    link: str = ""  # host, controller or cable; "" when not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What happened on a device since the last tick, beside its service times."""

    oldest_seconds: float = 0.0  # age of the oldest call in flight
    usual_seconds_p999: float = 0.0  # 0: not known
    io_errors: int = 0  # EIO and the like, of any operation
    checksum_errors: int = 0  # but for those that our own scrub or rebuild came upon
    busy_share: float = 0.0  # of the time, with a call in flight; about
    past_ratio: float = 0.0  # mean time to that of earlier processes; 0: not known
    class_ratio: float = 0.0  # to the most that a device of its class takes; 0: not known


class ErrorWindow:
    """Whether `limit` errors came within `window_seconds`: the rule of ZFS's diagnosis engine.

    Remembers `limit` times, no more. Not thread-safe.
    """

    def __init__(self, limit: int, window_seconds: float) -> None:
        self._times: deque[float] = deque(maxlen=limit)
        self._window_seconds = window_seconds

    def add(self, now_seconds: float, count: int) -> None:
        """Note `count` errors."""
        for _ in range(min(count, self._times.maxlen or 0)):
            self._times.append(now_seconds)

    def count(self, now_seconds: float) -> int:
        """Errors within the window, at most `limit`."""
        while self._times and now_seconds - self._times[0] > self._window_seconds:
            self._times.popleft()
        return len(self._times)

    def full(self, now_seconds: float) -> bool:
        """Whether the limit is reached."""
        return self.count(now_seconds) == self._times.maxlen
