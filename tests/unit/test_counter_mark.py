"""The pool's mark: a clock that was ahead hides nothing above what comes later (rule 1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.devices.base import Device
from hpstore.devices.horizon_guard import MARK
from hpstore.devices.wrappers import DeviceWrapper, SimulatedCrash
from hpstore.errors import DeviceError, ObjectNotFound, TooFewDevices
from hpstore.objects.context import MARK_STEP_MS
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness

T = TypeVar("T")
YEAR = 366 * 86400


class Counted(DeviceWrapper):
    """Counts operations; raises what `fail` gives for one."""

    def __init__(
        self, inner: Device, seen: dict[str, int], fail: Callable[[str, str], BaseException | None]
    ) -> None:
        super().__init__(inner)
        self._seen, self._fail = seen, fail

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._seen[operation] = self._seen.get(operation, 0) + 1
        error = self._fail(operation, self.url)
        if isinstance(error, SimulatedCrash):  # the process dies after the operation
            call()
        if error is not None:
            raise error
        return call()


def counted(
    harness: Harness,
    seen: dict[str, int],
    fail: Callable[[str, str], BaseException | None] = lambda *_: None,
) -> Pool:
    return harness.open(lambda _, device: Counted(device, seen, fail))


def counters(harness: Harness, key: str) -> list[int]:
    return [int(path.split("@")[1][:16], 16) for _, path in harness.columns(key)]


def value(pool: Pool, key: str = "k") -> bytes | None:
    try:
        return pool.get(key)
    except ObjectNotFound:
        return None


@pytest.mark.parametrize("then", ["put", "delete"])
@pytest.mark.parametrize("ahead_seconds", [0, 3, 600, 86_400, 3 * YEAR])
@pytest.mark.parametrize(("size", "torn"), [(100, 1), (300_000, 4)])
def test_a_torn_put_by_a_clock_that_was_ahead_loses_against_what_came_later_r03(
    tmp_path: Path, then: str, ahead_seconds: int, size: int, torn: int
) -> None:
    """r03: as many columns as can be read have their name, the writer dies, the clock is set right
    while m of them are away, and a put or delete is acknowledged. It holds when they are back."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=2, devices=8, clock=clock)
    with harness.open() as pool:
        pool.put("k", b"0" * size)
    clock.advance(ahead_seconds)
    seen: dict[str, int] = {}

    def dies(operation: str, url: str) -> BaseException | None:
        done = operation == "publish" and seen["publish"] == torn
        return SimulatedCrash("here") if done else None

    with pytest.raises(SimulatedCrash):
        counted(harness, seen, dies).put("k", b"t" * size)
    harness.restart()
    newest = max(counters(harness, "k"))
    away = [url for url, path in harness.columns("k") if int(path.split("@")[1][:16], 16) == newest]
    assert len(away) == torn
    clock.advance(1 - ahead_seconds)
    harness.lose(away[:2])
    try:
        with harness.open() as pool:
            pool.put("k", b"1" * size) if then == "put" else pool.delete("k")
    finally:
        harness.bring_back()
    expected = b"1" * size if then == "put" else None
    clock.advance(60)
    with harness.open() as pool:
        assert value(pool) == expected
        pool.rebuild()
        assert value(pool) == expected


@pytest.mark.parametrize("then", ["put", "delete"])
def test_a_process_that_has_its_step_already_sees_the_clock_that_was_ahead(
    tmp_path: Path, then: str
) -> None:
    """The torn put comes while this process has counters left that the mark covers: it looks again
    before it acknowledges."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=clock)
    pool = harness.open()
    pool.put("k", b"0")
    clock.advance(600)
    seen: dict[str, int] = {}

    def dies(operation: str, url: str) -> BaseException | None:
        return SimulatedCrash("here") if operation == "publish" else None

    with pytest.raises(SimulatedCrash):
        counted(harness, seen, dies).put("k", b"torn")
    newest = max(counters(harness, "k"))
    away = [url for url, path in harness.columns("k") if int(path.split("@")[1][:16], 16) == newest]
    clock.advance(-600)
    harness.lose(away)
    pool.put("k", b"1") if then == "put" else pool.delete("k")
    harness.restart()
    harness.bring_back()
    with harness.open() as pool:
        assert value(pool) == (b"1" if then == "put" else None)


def test_processes_that_put_side_by_side_do_not_drive_the_counter_ahead(tmp_path: Path) -> None:
    """Each has its own two seconds; with clocks that agree no version is ahead of them."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=clock)
    pools = [harness.open() for _ in range(3)]
    for number in range(300):
        clock.advance(0.3)
        pools[number % 3].put("k", b"x")
        assert max(counters(harness, "k")) <= clock.wall_ms()
    assert not any("counter_ahead_total" in pool.metrics.snapshot() for pool in pools)


def test_the_clock_catches_up_although_a_process_is_started_for_each_put(tmp_path: Path) -> None:
    """Two a second: counters that are ten minutes ahead rise more slowly than the time."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=clock)
    clock.advance(600)
    with harness.open() as pool:
        pool.put("first", b"x")
    clock.advance(-600)
    ahead = []
    for number in range(40):
        with harness.open() as pool:
            pool.put(f"k/{number}", b"x")
        ahead.append(counters(harness, f"k/{number}")[0] - clock.wall_ms())
        clock.advance(0.5)
    assert ahead[0] > 600_000
    assert all(later < earlier for earlier, later in itertools.pairwise(ahead))


def test_a_put_pays_no_mark_of_its_own(tmp_path: Path) -> None:
    """50 puts within two seconds raise it once; another two seconds later, once more."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=clock)
    seen: dict[str, int] = {}
    with counted(harness, seen) as pool:
        for number in range(50):
            pool.put(f"k/{number}", b"x")
            clock.advance(MARK_STEP_MS / 1000 / 51)
        assert seen["raise_counter"] == 6
        clock.advance(MARK_STEP_MS / 1000)
        pool.put("k", b"x")
        assert seen["raise_counter"] == 12


def test_no_file_has_a_counter_that_the_mark_does_not_cover(tmp_path: Path) -> None:
    """Killed before any operation of a put, also one far ahead of what was there."""
    for crash_at in range(1000):
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        clock = FakeClock()
        harness = Harness(directory, data=2, parity=1, devices=4, clock=clock)
        with harness.open() as pool:
            pool.put("k", b"x")
        clock.advance(5000)
        pool, _ = harness.open_crashing(crash_at)
        try:
            pool.put("k", b"y")
            finished = True
        except SimulatedCrash:
            finished = False
        harness.power_cut()
        found = counters(harness, "k")
        marks = sorted(device.counter(MARK) for device in harness.devices.values())
        assert max(found) <= marks[-2], crash_at
        if finished:
            return


def test_a_put_needs_the_mark_on_m_plus_one_devices(tmp_path: Path) -> None:
    """With fewer nothing is written, and the error says why; with m away it goes on."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())
    refusing: set[str] = set(harness.urls[:4])

    def refuse(operation: str, url: str) -> BaseException | None:
        wanted = operation == "raise_counter" and url in refusing
        return DeviceError(f"no counter on {url}", device=url) if wanted else None

    with counted(harness, {}, refuse) as pool:
        with pytest.raises(TooFewDevices, match=r"Nothing was changed.*"):
            pool.put("k", b"x")
        assert harness.columns("k") == []
        refusing.remove(harness.urls[0])
        pool.put("k", b"x")
        assert pool.get("k") == b"x"


def test_a_version_far_ahead_by_its_name_alone_drags_no_other_key_along(tmp_path: Path) -> None:
    """A damaged file name: its key goes on above it, the mark does not."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    with harness.open() as pool:
        pool.put("k", b"x")
        for url, path in harness.columns("k"):
            far = path.replace(path.split("@")[1][:16], f"{clock.wall_ms() + 2000 * YEAR:016x}")
            harness.devices[url].files[far] = harness.devices[url].files[path]
        pool.put("k", b"y")
        assert max(counters(harness, "k")) > clock.wall_ms() + 1999 * YEAR
        pool.put("other", b"z")
        assert max(counters(harness, "other")) <= clock.wall_ms() + 10
