"""The ledger of the kill loop: what it takes for a loss, and what it does not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.testing.memory_pool import Harness
from tests.fault.kills.ledger import ABSENT, Objects, digest

OLD, NEW = b"o" * 200_000, b"n" * 200_000
DIED_AT = 58  # the device operation before which NEW has exactly k' columns under their names


def torn(directory: Path) -> tuple[Harness, Objects]:
    """OLD is acknowledged; the process that put NEW over it died when k' of 5 columns had names."""
    harness = Harness(directory, data=3, parity=2, devices=7)
    with harness.open() as pool:
        pool.put("k", OLD)
    ledger = Objects()
    ledger.read([f"begin k {digest(OLD)}", f"done k {digest(OLD)}", f"begin k {digest(NEW)}"])
    pool, _ = harness.open_crashing(DIED_AT)
    with suppress(SimulatedCrash):
        pool.put("k", NEW)
    with harness.open() as pool:
        assert pool.get("k") == NEW
    return harness, ledger


def passed_over(harness: Harness) -> int:
    """How many devices there are without which a read finds OLD again."""
    found = 0
    for url in harness.urls:
        harness.lose([url])
        with harness.open() as pool:
            found += pool.get("k") == OLD
        harness.bring_back()
    return found


def test_a_put_that_died_may_be_seen_and_then_not_until_it_is_settled(tmp_path: Path) -> None:
    """PROTOCOL 7, 8."""
    harness, ledger = torn(tmp_path)
    with harness.open(read_only=True) as pool:
        assert ledger.check(pool, ["k"], settles=False) == []
    assert passed_over(harness) == 3
    for url in harness.urls:
        harness.lose([url])
        with harness.open() as pool:
            assert ledger.check(pool, ["k"], settles=False) == []
        harness.bring_back()
    with harness.open() as pool:
        assert ledger.check(pool, ["k"], settles=True) == []
    assert (ledger.acknowledged["k"], ledger.flying) == (digest(NEW), {})
    assert passed_over(harness) == 0


def test_what_is_older_than_what_was_settled_is_a_loss(tmp_path: Path) -> None:
    harness, ledger = torn(tmp_path)
    with harness.open() as pool:
        assert ledger.check(pool, ["k"], settles=True) == []
        pool.put("k", OLD)
        assert len(ledger.check(pool, ["k"], settles=True)) == 1


def test_a_delete_that_does_not_find_what_must_be_there_is_a_loss(tmp_path: Path) -> None:
    """Not where a delete before it may have ended, nor of what was never there."""
    harness, ledger = torn(tmp_path)
    ledger.read([f"begin k {ABSENT}", f"none k {ABSENT}", f"begin x {ABSENT}", f"none x {ABSENT}"])
    with harness.open() as pool:
        assert [
            text.startswith("a delete did not find k")
            for text in ledger.check(pool, [], settles=True)
        ] == [True]
    ledger.read([f"begin k {ABSENT}", f"none k {ABSENT}"])
    assert ledger.not_found == []
