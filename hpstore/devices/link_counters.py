"""What goes over the links to a host: bytes, the time that it took, and what failed."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from hpstore.devices.base import Device
from hpstore.errors import DeviceDenied, DeviceMissing, DeviceTimeout
from hpstore.units import KIB

P = ParamSpec("P")
_TIMED_BYTES = 256 * KIB  # calls from this size on show what a link carries; others its delay
FAILED_CALLS = (DeviceDenied, DeviceMissing, DeviceTimeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSight:
    """What one process has sent to a host and received since it opened it."""

    sent_bytes: int = 0
    received_bytes: int = 0
    calls: int = 0
    errors: int = 0  # calls that were not answered, or refused
    timed_bytes: int = 0  # of calls that are large
    timed_seconds: float = 0.0  # that these took, with the disk behind

    @property
    def bytes_per_second(self) -> float:
        """Of large calls, one at a time; 0 where there were none."""
        return self.timed_bytes / self.timed_seconds if self.timed_seconds else 0.0

    def __add__(self, other: LinkSight) -> LinkSight:
        return LinkSight(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            calls=self.calls + other.calls,
            errors=self.errors + other.errors,
            timed_bytes=self.timed_bytes + other.timed_bytes,
            timed_seconds=self.timed_seconds + other.timed_seconds,
        )


class LinkCounters:
    """Of one disk of a host. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._sent = self._received = self._calls = self._errors = self._timed_bytes = 0
        self._timed_seconds = 0.0

    def after_fork(self) -> None:
        """In the child: a thread of the parent may have held the lock, and it is not here."""
        self._lock = threading.Lock()

    def add(self, sent: int, received: int, seconds: float, *, failed: bool) -> None:
        """A call is over."""
        with self._lock:
            self._calls += 1
            self._sent += sent
            self._received += received
            self._errors += failed
            if not failed and sent + received >= _TIMED_BYTES:
                self._timed_bytes += sent + received
                self._timed_seconds += seconds

    def sight(self) -> LinkSight:
        """As it is now."""
        with self._lock:
            return LinkSight(
                sent_bytes=self._sent,
                received_bytes=self._received,
                calls=self._calls,
                errors=self._errors,
                timed_bytes=self._timed_bytes,
                timed_seconds=self._timed_seconds,
            )


class Counting(Protocol):
    """What has counters."""

    @property
    def counters(self) -> LinkCounters: ...


L = TypeVar("L", bound=Counting)


def counted(call: Callable[Concatenate[L, P], bytes]) -> Callable[Concatenate[L, P], bytes]:
    """Count the calls of a method: its `bodies` are sent, its answer, or `into`, is received."""

    @functools.wraps(call)
    def counting(links: L, /, *args: P.args, **named: P.kwargs) -> bytes:
        began, sent = time.monotonic(), _size(named.get("bodies"))
        try:
            answer = call(links, *args, **named)
        except FAILED_CALLS:
            links.counters.add(sent, 0, time.monotonic() - began, failed=True)
            raise
        into = named.get("into")
        received = len(into) if isinstance(into, memoryview) else len(answer)
        links.counters.add(sent, received, time.monotonic() - began, failed=False)
        return answer

    return counting


def _size(bodies: object) -> int:
    return sum(map(len, bodies)) if isinstance(bodies, list | tuple) else 0


def link_of(device: Device) -> LinkCounters | None:
    """The counters of a device that is on another host, also behind wrappers."""
    while (inner := getattr(device, "inner", None)) is not None:
        device = inner
    found = getattr(device, "link", None)
    return found if isinstance(found, LinkCounters) else None
