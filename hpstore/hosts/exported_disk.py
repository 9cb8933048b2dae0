"""A local device that other hosts may call, so many calls at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceTimeout


class ExportedDisk:
    """Calls of a disk are made by the threads of their connections; a limit on them is its lane: a
    disk that hangs keeps so many threads, and no other disk waits for it."""

    def __init__(self, number: int, device: LocalDevice, most_calls: int) -> None:
        self.number, self.device = number, device
        self._most = most_calls
        self._room = threading.BoundedSemaphore(most_calls)

    @contextlib.contextmanager
    def call(self, seconds: float) -> Iterator[LocalDevice]:
        """A place for one call. Raises DeviceTimeout when none is free within `seconds`."""
        if not self._room.acquire(timeout=seconds):
            raise DeviceTimeout(
                f"{self._most} calls of device {self.device.url} have not ended within "
                f"{seconds:.1f} s: the disk hangs. This one was not made",
                device=self.device.url,
            )
        try:
            yield self.device
        finally:
            self._room.release()
