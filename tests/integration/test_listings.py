"""A listing that is cut short never passes for a complete one (r10)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

import hpstore.maintenance.rebuild as rebuild_module
from hpstore.config import Settings
from hpstore.devices.base import Device
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DeviceError, TooFewDevices
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import MIB

T = TypeVar("T")
KEYS = [f"k{n}" for n in range(12)]


class Listed(DeviceWrapper):
    """Calls `before(url)` before each listing of a directory."""

    def __init__(self, inner: Device, before: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._before = before

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "list":
            self._before(self.url)
        return call()


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """4+2 over eight devices; one was evicted, and not made up for."""
    harness = Harness(
        tmp_path,
        data=4,
        parity=2,
        devices=8,
        settings=replace(Settings(memory_bytes=64 * MIB), device_deadline_seconds=1.0),
    )
    with harness.open() as pool:
        for key in KEYS:
            pool.put(key, bytes(200_000))
        pool.evict(harness.columns("k0")[0][0])
    return harness


def breaking(bad: set[str], after: int) -> Callable[[str], None]:
    """Listings of some devices fail after so many directories."""
    counts = dict.fromkeys(bad, 0)

    def before(url: str) -> None:
        if url in bad:
            counts[url] += 1
            if counts[url] > after:
                raise DeviceError(f"{url}: EIO", device=url)

    return before


def holders(harness: Harness, count: int) -> set[str]:
    """Members that hold something."""
    evicted = harness.columns("k0")[0][0]
    urls = [url for key in KEYS for url, _ in harness.columns(key) if url != evicted]
    return set(list(dict.fromkeys(urls))[:count])


@pytest.mark.parametrize("after", [0, 3])
def test_what_was_not_listed_is_not_called_whole(harness: Harness, after: int) -> None:
    """One device fails in the midst of its walk: the report says so, nothing is marked healed."""
    bad = holders(harness, 1)
    broken = breaking(bad, after)
    with harness.open(lambda _, device: Listed(device, broken)) as pool:
        report = pool.rebuild()
        assert report.unlisted == tuple(bad)
        assert not report.whole
        assert pool.admin.record.unhealed()
        assert not pool.scrub(resume=False).clean
    with harness.open() as pool:
        report = pool.rebuild()
        assert report.unlisted == ()
        assert report.whole
        assert not pool.admin.record.unhealed()


def test_objects_that_no_listed_device_has_are_not_called_absent(harness: Harness) -> None:
    """Three devices at m = 2: an object may be on these alone."""
    bad = holders(harness, 3)
    broken = breaking(bad, 0)
    with harness.open(lambda _, device: Listed(device, broken)) as pool:
        for work in (pool.rebuild, pool.scrub):
            report = work()
            assert set(report.unlisted) == bad
            assert not report.whole
        assert pool.admin.record.unhealed()
        with pytest.raises(TooFewDevices):
            pool.list(certain=True)


def test_a_walk_that_goes_on_is_not_silent(harness: Harness) -> None:
    """Longer than the device deadline in all, each directory within it: complete."""
    pause = threading.Event()
    slow = holders(harness, 1)

    def before(url: str) -> None:
        if url in slow:
            pause.wait(0.15)

    with harness.open(lambda _, device: Listed(device, before), threads=True) as pool:
        assert pool.rebuild().unlisted == ()


def test_a_walk_that_stands_still_is_given_up_after_the_device_deadline(harness: Harness) -> None:
    """A device that hangs in the midst of its walk costs one deadline, and is unknown."""
    free = threading.Event()
    hung = holders(harness, 1)
    counts = dict.fromkeys(hung, 0)

    def before(url: str) -> None:
        if url in hung:
            counts[url] += 1
            if counts[url] == 3:
                free.wait(20)

    try:
        with harness.open(lambda _, device: Listed(device, before), threads=True) as pool:
            assert pool.admin.condition().silent == {
                m.device_id for m in pool.admin.record.members if m.url in hung
            }
            free.set()
    finally:
        free.set()


def test_a_walk_without_a_member_marks_nothing_as_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was missing when a rebuild listed the objects, and was back at its end, may
    hold some that no other device has."""
    harness = Harness(tmp_path, data=2, parity=2, devices=6, clock=FakeClock())
    with harness.open() as pool:
        for key in KEYS:
            pool.put(key, bytes(100_000))
        pool.evict(harness.urls[0])
    harness.lose([harness.urls[1]])
    with harness.open() as pool:
        plain = rebuild_module.pay_debts

        def back(store: object) -> int:
            harness.bring_back()
            pool.admin.refresh()
            return plain(store)  # type: ignore[arg-type]

        monkeypatch.setattr(rebuild_module, "pay_debts", back)
        report = pool.rebuild(include_missing=True)
        monkeypatch.undo()
        assert report.absent == (harness.urls[1],)
        assert report.whole
        assert pool.admin.record.unhealed()
        assert pool.rebuild().whole
        assert not pool.admin.record.unhealed()
