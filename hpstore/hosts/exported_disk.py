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
        self._most, self._calls = most_calls, 0
        self._room = threading.Condition()  # guards _calls; a semaphore takes five times as long

    @contextlib.contextmanager
    def call(self, seconds: float) -> Iterator[LocalDevice]:
        """A place for one call. Raises DeviceTimeout when none is free within `seconds`."""
        with self._room:
            if not (self._calls < self._most or self._room.wait_for(self._has_room, seconds)):
                raise DeviceTimeout(
                    f"{self._most} calls of device {self.device.url} have not ended within "
                    f"{seconds:.1f} s: the disk hangs. This one was not made",
                    device=self.device.url,
                )
            self._calls += 1
        try:
            yield self.device
        finally:
            with self._room:
                self._calls -= 1
                self._room.notify()

    def _has_room(self) -> bool:
        return self._calls < self._most
