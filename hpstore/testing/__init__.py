"""Tools for tests: a clock that tests move, files on a device, the device contract beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Device
from hpstore.runtime.buffers import aligned_array
from hpstore.units import KIB

PAGE = 4 * KIB
T = TypeVar("T")


class ManualClock:
    """A Clock that moves only by advance() or when a caller waits on it. Thread-safe."""

    def __init__(self, wall_ms: int = 1_700_000_000_000) -> None:
        self._seconds = 0.0
        self._began_ms = wall_ms
        self._lock = threading.Lock()  # guards _seconds

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return self._began_ms + int(self.monotonic() * 1000)

    def monotonic(self) -> float:
        """Seconds since the clock was made."""
        with self._lock:
            return self._seconds

    def wait(self, seconds: float) -> None:
        """Let time pass without waiting."""
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        with self._lock:
            self._seconds += seconds


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Aligned memory full of reproducible noise."""
    array = aligned_array(nbytes)
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return array


def store(device: Device, path: str, data: Bytes | bytes) -> None:
    """Create, write, sync, publish, sync the directory."""
    rows = aligned_array(len(data))
    rows[:] = np.frombuffer(data, np.uint8)
    handle = device.create(len(rows))
    handle.write(0, [rows])
    handle.sync()
    handle.publish(path)
    device.sync_directory(path)


def fetch(device: Device, path: str) -> bytes:
    """The whole file through an open handle."""
    handle = device.open(path)
    try:
        target = aligned_array(handle.size_bytes)
        handle.read_into(0, target)
        return target.tobytes()
    finally:
        handle.close()


def all_files(device: Device, directory: str) -> list[str]:
    """Paths of the files below a directory, as the device lists them."""
    found = []
    for entry in device.entries(directory):
        path = f"{directory}/{entry.name}"
        found += all_files(device, path) if entry.is_directory else [path]
    return sorted(found)


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Run work(0..count-1) at the same time; raises what any of them raised."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


__all__ = ["PAGE", "ManualClock", "all_files", "fetch", "in_threads", "pattern", "store"]
