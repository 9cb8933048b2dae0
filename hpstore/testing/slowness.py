"""Devices that take their time: seconds a call, by a clock that tests move or a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from hpstore.clock import Clock
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper

T = TypeVar("T")
_TIMED = ("read", "write", "sync", "sync_directory")


class Latencies:
    """Seconds a call, by URL, and how often each device was asked. For Harness.open(wrap)."""

    def __init__(self, clock: Clock, usual_seconds: float = 0.001) -> None:
        self.clock, self.usual_seconds = clock, usual_seconds
        self.slow: dict[str, float] = {}  # url -> times the usual
        self.calls: dict[str, Counter[str]] = {}

    def wrap(self, url: str, device: Device) -> Device:
        """Put the latency round a device."""
        self.calls.setdefault(url, Counter())
        return LatentDevice(device, self)

    def reads(self, url: str) -> int:
        """Reads of column files on a device so far."""
        return self.calls[url]["read"]


class LatentDevice(DeviceWrapper):
    """Waits before each read, write and sync. Its reads are judged, whatever a page cache does."""

    def __init__(self, inner: Device, latencies: Latencies) -> None:
        super().__init__(inner)
        self._latencies = latencies

    @property
    def mode(self) -> str:
        return "direct"

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        latencies = self._latencies
        latencies.calls[self.url][operation] += 1
        if operation in _TIMED:
            latencies.clock.wait(latencies.usual_seconds * latencies.slow.get(self.url, 1.0))
        return call()


__all__ = ["Latencies", "LatentDevice"]
