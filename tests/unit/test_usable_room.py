"""How much still fits: stripes lie on different devices, and on disks that are what they seem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpstore.pool.status import DeviceStatus, usable_bytes


def device(number: int, free: int) -> DeviceStatus:
    return DeviceStatus(
        device=f"id{number}",
        url=f"memory://d{number}",
        state="online",
        mode="memory",
        domain="",
        total_bytes=0,
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
