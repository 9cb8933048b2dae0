"""What goes over a link is counted by calls, also those that fail."""

from __future__ import annotations

import pytest

from hpstore.devices.link_counters import LinkCounters, LinkSight, counted, link_of
from hpstore.devices.memory import MemoryDevice
from hpstore.errors import DeviceMissing, IntegrityError


class Links:
    """A link that answers with so many bytes, or raises."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.counters, self.answer = LinkCounters(), answer

    @counted
    def call(
        self,
        operation: str,
        *,
        bodies: tuple[bytes, ...] = (),
        into: memoryview | None = None,
    ) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_bytes_are_counted_both_ways_and_large_calls_are_timed() -> None:
    links = Links(b"x" * 100)
    links.call("write", bodies=(b"a" * 10, b"b" * 20))
    found = links.counters.sight()
    assert (found.sent_bytes, found.received_bytes, found.calls, found.errors) == (30, 100, 1, 0)
    assert found.bytes_per_second == 0.0  # it shows the delay, not what the link carries
    links.call("read", into=memoryview(bytearray(1 << 20)))
    found = links.counters.sight()
    assert found.received_bytes == 100 + (1 << 20)
    assert found.timed_bytes == 1 << 20
    assert found.bytes_per_second > 0


def test_calls_that_are_not_answered_are_errors_of_the_link() -> None:
    """What the device says is none."""
    links = Links(DeviceMissing("gone", device="d"))
    with pytest.raises(DeviceMissing):
        links.call("read")
    assert links.counters.sight().errors == 1
    links = Links(IntegrityError("damaged"))
    with pytest.raises(IntegrityError):
        links.call("read")
    assert links.counters.sight() == LinkSight()


def test_a_device_of_this_host_has_no_link() -> None:
    assert link_of(MemoryDevice("memory://d0")) is None
