"""Slow devices: seconds per call, or a limit of bytes per second that can be set and lifted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from hpstore.devices.base import Device, ReadHandle
from hpstore.devices.wrappers import Bandwidth, DeviceWrapper, WrappedReader
from hpstore.runtime.clock import Clock

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


class SlowableDevice(DeviceWrapper):
    """A device whose bytes per second can be limited, and the limit lifted, while it is in use.

    It acts as the limit of a block device, for users who may not set one. Reads and writes share
    it. While there is none, batches of reads go to the kernel as they would without this wrapper.
    """

    def __init__(self, inner: Device, clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._bandwidth: Bandwidth | None = None
        self._clock = clock

    @property
    def slow(self) -> bool:
        """Whether there is a limit now."""
        return self._bandwidth is not None

    def throttle(self, bytes_per_second: float) -> None:
        """Limit it from the next call on; 0 lifts the limit. Any thread."""
        limit = Bandwidth(bytes_per_second, self._clock) if bytes_per_second else None
        self._bandwidth = limit

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        bandwidth = self._bandwidth
        if bandwidth is not None and operation in ("read", "write") and nbytes:
            bandwidth.wait(nbytes)
        return call()

    def open(self, path: str) -> ReadHandle:
        return _SlowableReader(self, self.around("open", 0, lambda: self.inner.open(path)))


class _SlowableReader(WrappedReader):
    _device: SlowableDevice

    @property
    def descriptor(self) -> int:  # type: ignore[override]  # a constant in the parent
        return -1 if self._device.slow else self.inner.descriptor
