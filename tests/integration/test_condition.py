"""What a pool says about its safety: from one view, and not of what a writer is about to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpstore.errors import TooFewDevices
from hpstore.testing.memory_pool import FakeClock, Harness


class BusyClock(FakeClock):
    """While somebody waits, others work."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], None]] = []

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        if self.meanwhile:
            self.meanwhile.pop(0)()


@pytest.fixture
def clock() -> BusyClock:
    return BusyClock()


@pytest.fixture
def harness(tmp_path: Path, clock: BusyClock) -> Harness:
    """4+2 over eight devices."""
    return Harness(tmp_path, data=4, parity=2, devices=8, clock=clock)


def hide(harness: Harness, key: str, count: int) -> Callable[[], None]:
    """Take the last columns of an object away, as if a writer had not named them yet; returns what
    puts them back."""
    taken = [
        (url, path, harness.devices[url].files.pop(path))
        for url, path in harness.columns(key)[-count:]
    ]

    def back() -> None:
        for url, path, file in taken:
            harness.devices[url].files[path] = file

    return back


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("looks_before", [0, 1, 3])
def test_a_put_under_way_is_no_damage(
    harness: Harness, clock: BusyClock, columns: int, looks_before: int
) -> None:
    """grace_skipped_when_busy, PROTOCOL 17: a walk that meets a put between two renames."""
    with harness.open() as pool:
        pool.put("old", bytes(300_000))
        pool.put("k", bytes(300_000))
        clock.meanwhile = [lambda: None] * looks_before + [hide(harness, "k", columns)]
        found = pool.admin.condition()
        assert (found.degraded, found.unreadable, found.losses_tolerated) == (0, 0, 2)


def test_what_stays_short_is_damage(harness: Harness, clock: BusyClock) -> None:
    """The same files at every look: degraded, whoever wrote it, young or old."""
    with harness.open() as pool:
        for key in ("young", "old"):
            pool.put(key, bytes(300_000))
            hide(harness, key, 1)
            if key == "young":
                assert pool.admin.condition().losses_tolerated == 1
            clock.advance(10 * pool.config.settings.put_deadline_seconds)
        found = pool.admin.condition()
        assert (found.degraded, found.losses_tolerated) == (2, 1)


def test_evicted_devices_count_until_a_rebuild_has_made_up_for_them(tmp_path: Path) -> None:
    """tolerated_after_evict: what is said to be survivable is survived, by open and by lists."""
    harness = Harness(tmp_path, data=4, parity=2, devices=12)
    with harness.open() as pool:
        pool.put("k", bytes(300_000))
        used = {url for url, _ in harness.columns("k")}
        empty = [url for url in harness.urls if url not in used]
        pool.evict(empty[0])
        assert pool.status().losses_tolerated == pool.stat("k").losses_tolerated == 1
        pool.evict(empty[1])
        assert pool.status().losses_tolerated == pool.stat("k").losses_tolerated == 0
        harness.lose([next(iter(used))])
        with pytest.raises(TooFewDevices):
            pool.list(certain=True)
        harness.bring_back()
        assert pool.rebuild().whole
        assert pool.status().losses_tolerated == pool.stat("k").losses_tolerated == 2
