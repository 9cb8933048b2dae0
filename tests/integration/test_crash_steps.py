"""Crash before every device operation, lose devices, bring them back: old or new, never else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import ObjectNotFound, TooManyErasures
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.thorough import crash_points

OLD, NEW = b"o" * 300_000, b"n" * 350_000
SMALL_OLD, SMALL_NEW = b"o" * 1000, b"n" * 1200
Outcome = bytes | None

CRASHES: dict[str, Callable[[Harness], None]] = {
    "process dies": Harness.restart,
    "power cut": Harness.power_cut,
}


def loss_patterns(harness: Harness, most: int) -> Iterator[tuple[str, ...]]:
    for count in range(most + 1):
        yield from itertools.combinations(harness.urls, count)


def read(pool: Pool, key: str = "key") -> Outcome:
    try:
        return pool.get(key)
    except ObjectNotFound:
        return None


def check_all_losses(harness: Harness, allowed: tuple[Outcome, ...], *, acknowledged: bool) -> None:
    """Any m losses: an allowed state, or (unacknowledged only) an error; whole again after return.

    PROTOCOL 7: with devices missing, an unacknowledged put may look like acknowledged data that
    cannot be read; then it raises, it never falls back.
    """
    for lost in loss_patterns(harness, 2):
        harness.lose(lost)
        with harness.open(read_only=True) as pool:
            try:
                found = read(pool)
            except TooManyErasures:
                assert not acknowledged, f"acknowledged data unreadable without {lost}"
            else:
                assert found in allowed, f"neither old nor new without {lost}"
        harness.bring_back()
    with harness.open(read_only=True) as pool:
        assert read(pool) in allowed, "neither old nor new after the devices returned"


def check_heals(harness: Harness, allowed: tuple[Outcome, ...]) -> None:
    """A rebuild changes nothing a reader sees; past the horizon a scrub sweeps what was torn.

    From then on any two devices may go.
    """
    with harness.open() as pool:
        before = read(pool)
        assert before in allowed
        assert not pool.rebuild().unreadable
        assert read(pool) == before
        assert isinstance(harness.clock, FakeClock)
        harness.clock.advance(2 * pool.config.settings.tombstone_seconds)
        assert not pool.scrub().unreadable
        assert read(pool) == before
    for lost in loss_patterns(harness, 2):
        harness.lose(lost)
        with harness.open(read_only=True) as pool:
            assert read(pool) == before, f"after healing, without {lost}"
        harness.bring_back()


def check_losses_keep(harness: Harness, value: bytes, most: int) -> None:
    """Acknowledged bytes read with any so many devices lost, and after their return."""
    for lost in loss_patterns(harness, most):
        harness.lose(lost)
        with harness.open(read_only=True) as pool:
            assert read(pool) == value, f"without {lost}"
        harness.bring_back()
    with harness.open(read_only=True) as pool:
        assert read(pool) == value, "after the devices returned"


def crash_everywhere(
    make: Callable[[], Harness],
    act: Callable[[Pool], None],
    crash: Callable[[Harness], None],
    allowed: tuple[Outcome, ...],
    final: Outcome,
) -> int:
    """Run `act` with a crash before operation 0, 1, 2, ... until it runs through."""
    for crash_at in crash_points():
        harness = make()
        pool, _ = harness.open_crashing(crash_at)
        try:
            act(pool)
            finished = True
        except SimulatedCrash:
            finished = False
        crash(harness)
        if finished:
            check_all_losses(harness, (final,), acknowledged=True)
            assert crash_at > 0
            return crash_at
        check_all_losses(harness, allowed, acknowledged=False)
        check_heals(harness, allowed)
    raise AssertionError("unreachable")


@pytest.fixture(params=list(CRASHES))
def crash(request: pytest.FixtureRequest) -> Callable[[Harness], None]:
    return CRASHES[request.param]


def maker(tmp_path: Path, before: bytes | None, devices: int = 4) -> Callable[[], Harness]:
    numbers = itertools.count()

    def make() -> Harness:
        directory = tmp_path / str(next(numbers))
        directory.mkdir()
        harness = Harness(directory, data=2, parity=2, devices=devices, clock=FakeClock())
        if before is not None:
            with harness.open() as pool:
                pool.put("key", before)
        return harness

    return make


def test_first_put_is_absent_or_whole(tmp_path: Path, crash: Callable[[Harness], None]) -> None:
    """PROTOCOL 4, 5, 7: crash at every step of a first put, any two losses, their return."""
    steps = crash_everywhere(
        maker(tmp_path, None), lambda p: void(p.put("key", NEW)), crash, (None, NEW), NEW
    )
    assert steps > 20


def test_overwrite_is_old_or_new(tmp_path: Path, crash: Callable[[Harness], None]) -> None:
    """PROTOCOL 4, 7, 8: crash at every step of an overwrite, any two losses, their return."""
    crash_everywhere(
        maker(tmp_path, OLD), lambda p: void(p.put("key", NEW)), crash, (OLD, NEW), NEW
    )


def test_small_overwrite_is_old_or_new(tmp_path: Path, crash: Callable[[Harness], None]) -> None:
    """PROTOCOL 5: objects kept as whole copies, crash at every step."""
    crash_everywhere(
        maker(tmp_path, SMALL_OLD),
        lambda p: void(p.put("key", SMALL_NEW)),
        crash,
        (SMALL_OLD, SMALL_NEW),
        SMALL_NEW,
    )


def test_delete_is_there_or_gone(tmp_path: Path, crash: Callable[[Harness], None]) -> None:
    """PROTOCOL 12: crash at every step of a delete; it never comes back once it was seen gone."""
    crash_everywhere(maker(tmp_path, OLD), lambda p: p.delete("key"), crash, (OLD, None), None)


def test_shrinking_relayout_keeps_the_bytes(
    tmp_path: Path, crash: Callable[[Harness], None]
) -> None:
    """PROTOCOL 1, 10: crash at every step of a re-layout onto fewer devices."""
    base = maker(tmp_path, OLD, devices=5)

    def make() -> Harness:
        harness = base()
        with harness.open() as pool:
            pool.put("key", OLD)
            pool.evict(holder(harness))
        harness.urls = [u for u in harness.urls if harness.devices[u] is not None]
        return harness

    def holder(harness: Harness) -> str:
        return harness.columns("key")[0][0]

    for crash_at in crash_points():
        harness = make()
        pool, _ = harness.open_crashing(crash_at)
        try:
            pool.rebuild()
            finished = True
        except SimulatedCrash:
            finished = False
        crash(harness)
        # one of m = 2 losses is the evicted device already, until the re-layout is done
        check_losses_keep(harness, OLD, 2 if finished else 1)
        with harness.open() as again:
            assert again.get("key") == OLD
            report = again.rebuild()
            assert not report.unreadable
            assert again.stat("key").losses_tolerated == 2
        if finished:
            return


def void(_: object) -> None:
    """Drop a result."""


def test_membership_change_is_old_or_new(tmp_path: Path, crash: Callable[[Harness], None]) -> None:
    """PROTOCOL 14: crash at every step of adding a device; the pool opens with either record."""
    for crash_at in crash_points():
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=2, devices=4)
        with harness.open() as pool:
            pool.put("key", OLD)
        pool, _ = harness.open_crashing(crash_at)
        try:
            pool.add_device("memory://d9")
            finished = True
        except SimulatedCrash:
            finished = False
        crash(harness)
        # a new member that has no record yet counts as one that does not answer (PROTOCOL 7), until
        # somebody who may write opens the pool and finishes the change
        check_losses_keep(harness, OLD, 1)
        harness.open().close()
        check_losses_keep(harness, OLD, 2)
        with harness.open() as again:
            members = len(again.status().devices)
            assert members in (4, 5)
            assert again.get("key") == OLD
            if members == 4:
                again._session.config = pool.config
                again.add_device("memory://d9")
            assert len(again.status().devices) == 5
            again.put("key", NEW)
        with harness.open() as third:
            assert third.get("key") == NEW
        if finished:
            assert members == 5
            return
