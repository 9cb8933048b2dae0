"""How much still fits: stripes lie on different devices, and on disks that are what they seem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpstore.devices.base import Usage
from hpstore.devices.reserve import shortage
from hpstore.pool.status import DeviceStatus, usable_bytes


def device(number: int, free: int) -> DeviceStatus:
    return DeviceStatus(
        device=f"id{number}",
        url=f"memory://d{number}",
        state="online",
        mode="memory",
        domain="",
        total_bytes=99,  # of which nothing is kept for deletes
        free_bytes=free,
        kept_bytes=0,
        rebuilt=False,
        released=False,
        waiting=0,
        problem="",
        known_by="",
        health="",
        score=0.0,
        reason="",
    )


@given(st.lists(st.integers(0, 12), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 2))
def test_room_is_what_stripes_of_different_devices_can_take(
    free: list[int], data: int, parity: int
) -> None:
    """Against laying stripes one by one onto the emptiest devices."""
    width, left, stripes = data + parity, sorted(free), 0
    while len(left) >= width and left[-width] > 0:
        left = sorted([*left[:-width], *(x - 1 for x in left[-width:])])
        stripes += 1
    found = usable_bytes([device(i, x) for i, x in enumerate(free)], data, width)
    assert found == stripes * data


def test_devices_on_one_filesystem_have_its_room_once(tmp_path: Path) -> None:
    """Four folders on one disk are not four disks."""
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    devices = [replace(device(i, 1000), url=str(tmp_path / str(i))) for i in range(4)]
    assert usable_bytes(devices, 3, 4) == 750


def test_devices_that_do_not_say_what_they_have_are_no_limit() -> None:
    """Each takes a unit of every stripe; the others bound what fits, and where there are none left
    nothing is known."""
    known = [device(number, 10) for number in range(2)]
    unsaid = [replace(device(number, 0), total_bytes=0) for number in range(2, 5)]
    assert usable_bytes([*known, *unsaid], 3, 5) == 10 * 3
    assert usable_bytes([*known, *unsaid], 2, 4) == 20 * 2
    assert usable_bytes([*known, *unsaid], 1, 3) == usable_bytes(unsaid, 1, 3) == 0


def test_a_device_that_does_not_say_what_it_has_is_not_full() -> None:
    """The store itself says when a write does not fit."""
    assert shortage(Usage(total=0, free=0), file_bytes=1 << 40) == ""
    assert shortage(Usage(total=1 << 30, free=0)) != ""
