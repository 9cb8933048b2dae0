"""A version that lacks columns: acknowledged with a debt, or never (PROTOCOL 5, 7; r13)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from hpstore.devices.base import DEBTS, Device, Stamp
from hpstore.devices.wrappers import DeviceWrapper, SimulatedCrash
from hpstore.errors import ObjectNotFound, TooManyErasures
from hpstore.format.keys import Version
from hpstore.format.records import Debt
from hpstore.testing.memory_pool import FakeClock, Harness

T = TypeVar("T")
OLD, NEW = (np.random.default_rng(n).bytes(300_000 + n) for n in (1, 2))


class Publishing(DeviceWrapper):
    """Calls `after(url)` when a file has its name, and `before()` first of all."""

    def __init__(
        self, inner: Device, after: Callable[[str], None], before: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(inner)
        self._after, self._before = after, before

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        self._before()
        found = call()
        if operation == "publish":
            self._after(self.url)
        return found


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """4+2 over six devices: nowhere else to go."""
    return Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())


def torn_put(harness: Harness, columns: int) -> set[str]:
    """An overwrite that a power cut ends after so many columns; who has one."""
    named: list[str] = []

    def over() -> None:  # what a dead process would still do: take its columns back
        if len(named) == columns:
            raise SimulatedCrash("power")

    def after(url: str) -> None:
        named.append(url)
        over()

    with pytest.raises(SimulatedCrash):
        harness.open(lambda _, device: Publishing(device, after, over)).put("k", NEW)
    harness.restart()
    new = max(path.split("@")[1][:33] for _, path in harness.columns("k"))
    assert {url for url, path in harness.columns("k") if new in path} == set(named)
    return set(named)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("evict", [False, True])
def test_a_torn_put_never_hides_what_was_acknowledged(
    harness: Harness, columns: int, evict: bool
) -> None:
    """r13: no device that answers has a debt of it, so it lacks more columns than can hide."""
    with harness.open() as pool:
        pool.put("k", OLD)
    torn = torn_put(harness, columns)
    dead = sorted(set(harness.urls) - torn)[:2]
    harness.lose(dead)
    with harness.open() as pool:
        assert pool.get("k") == OLD
        assert pool.list() == ["k"]
        if evict:
            for url in dead:
                pool.evict(url)
            assert pool.rebuild().unreadable == {}
            assert pool.get("k") == OLD
            pool.add_device("memory://n1")
            pool.add_device("memory://n2")
            assert pool.rebuild().whole
            assert not pool.admin.record.unhealed()
            assert pool.get("k") == OLD


def test_a_torn_first_put_does_not_block_the_pool(harness: Harness) -> None:
    """There is no older version: the key is absent, the dead devices can be evicted."""
    torn = torn_put(harness, 2)
    dead = sorted(set(harness.urls) - torn)[:2]
    harness.lose(dead)
    with harness.open() as pool:
        with pytest.raises(ObjectNotFound):
            pool.get("k")
        for url in dead:
            pool.evict(url)
        assert pool.rebuild().unreadable == {}


def short_put(harness: Harness) -> str:
    """An overwrite that is acknowledged with five of six columns and a debt; who has none."""
    bad = harness.columns("k")[0][0]

    def fails(_: str, device: Device) -> Device:
        def after(url: str) -> None:
            if url == bad:
                raise OSError(5, "EIO")

        return Publishing(device, after)

    with harness.open(fails) as pool:
        pool.put("k", NEW)
    harness.devices[bad].files = {
        path: file for path, file in harness.devices[bad].files.items() if "/k/" not in path
    }
    return bad


@pytest.mark.parametrize("holders", [0, 1, 2, 3])
def test_what_was_acknowledged_with_a_debt_is_never_passed_over(
    harness: Harness, holders: int
) -> None:
    """Two of its five columns are away: an error, not the older version. `holders` of the debt's
    copies on devices that answer are gone, too: one is enough."""
    with harness.open() as pool:
        pool.put("k", OLD)
    bad = short_put(harness)
    owed = [
        url
        for url in harness.urls
        if any(path.startswith("debts/") for path in harness.devices[url].files)
    ]
    assert len(owed) >= 3
    away = [url for url in harness.urls if url != bad][:2]
    harness.lose(away)
    there = [url for url in owed if url not in away]
    for url in there[: min(holders, len(there) - 1)]:
        files = harness.devices[url].files
        harness.devices[url].files = {p: f for p, f in files.items() if not p.startswith("debts/")}
    with harness.open(read_only=True) as pool, pytest.raises(TooManyErasures):
        pool.get("k")
    harness.bring_back()
    with harness.open() as pool:
        assert pool.get("k") == NEW


def with_debts(harness: Harness) -> set[str]:
    """Devices that have a debt."""
    return {
        url
        for url, device in harness.devices.items()
        if any(path.startswith("debts/") for path in device.files)
    }


def test_debts_are_kept_when_their_holders_leave(tmp_path: Path) -> None:
    """PROTOCOL 7: before a device that knows a debt leaves, m + 1 others know it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=6, clock=FakeClock())
    debt = Debt(key="k", version=Version(5, 6, 0), missing=(1,))
    with harness.open() as pool:
        store = pool._store
        holder = next(iter(store.view.devices))
        store.view.devices[holder].write_small(f"{DEBTS}/{debt.name}", debt.encode())
        pool.evict(holder)
        assert len(with_debts(harness) & {member.url for member in pool.admin.record.members}) >= 2


def test_a_debt_that_is_paid_while_it_is_looked_for_is_no_torn_put(harness: Harness) -> None:
    """A reader sees three of five columns; the version is completed, and its debt cleared, before
    the reader looks for the debt."""
    with harness.open() as pool:
        pool.put("k", OLD)
    bad = short_put(harness)
    away = [url for url in harness.urls if url != bad][:2]
    paid: list[int] = []

    class Late(DeviceWrapper):
        """The debt is paid before the first look for it."""

        def stamp(self, path: str) -> Stamp | None:
            if path.startswith(f"{DEBTS}/") and not paid:
                paid.append(1)
                for url in away:
                    harness.devices[url].missing = False
                with harness.open() as other:
                    assert other.rebuild().whole
                harness.lose(away)
            return super().stamp(path)

    harness.lose(away)
    with harness.open(lambda _, device: Late(device), read_only=True) as pool:
        assert pool.list(certain=True) == ["k"]
        assert pool.get("k") == NEW
    assert paid
