"""Claims over records in memory, by clocks that stand still (PROTOCOL 6)."""

from __future__ import annotations

import socket

import pytest

from hpstore.agreement.claims import ClaimLost, Claims
from hpstore.agreement.registers import VALUE_BYTES_MOST, LocalRegisters, Register, key_register
from hpstore.errors import LockTimeout, RegistersUnavailable
from hpstore.runtime.clock import HybridCounter
from hpstore.testing.memory_pool import FakeClock

HOUR_MS = 3_600_000


class Process:
    """A process with a clock of its own over shared registers."""

    def __init__(self, registers: LocalRegisters, ahead_ms: int = 0) -> None:
        self.clock = FakeClock(1_700_000_000_000 + ahead_ms)
        self.claims = Claims(
            registers,
            self.clock,
            HybridCounter(self.clock).next,
            deadline_seconds=20.0,
            ttl_seconds=3.0,
        )


@pytest.fixture
def registers() -> LocalRegisters:
    return LocalRegisters(FakeClock())


@pytest.mark.parametrize("ahead_ms", [0, HOUR_MS, -HOUR_MS])
def test_a_claim_that_was_taken_over_has_the_lower_counter_and_is_not_given_back_rule_6(
    registers: LocalRegisters, ahead_ms: int
) -> None:
    """Whatever the clock of the one that was stopped says."""
    a, b = Process(registers, ahead_ms), Process(registers)
    first = a.claims.take("k")
    second = b.claims.take("k")
    assert b.clock.elapsed >= 3.0
    assert second.next_counter(0) > first.next_counter(0)
    second.give_back()
    with pytest.raises(ClaimLost):
        first.give_back()
    assert a.claims.take("k").next_counter(0) > second.counter


def test_a_raised_counter_is_in_the_record_before_it_is_used_rule_6(
    registers: LocalRegisters,
) -> None:
    """A survey showed a newer version: the next holder is above what the first may write."""
    a, b = Process(registers), Process(registers, -HOUR_MS)
    first = a.claims.take("k")
    seen = first.counter + 10 * HOUR_MS
    assert first.next_counter(seen) == seen + 1
    again = first.next_counter(seen)  # of the next attempt of its put
    assert again > seen + 1
    assert b.claims.take("k").counter > again
    with pytest.raises(ClaimLost):
        first.next_counter(again + 5)


def test_a_holder_that_shows_that_it_lives_keeps_its_claim(registers: LocalRegisters) -> None:
    """Another one waits for it until its own deadline, which names the holder."""
    a, b = Process(registers), Process(registers)
    claim = a.claims.take("k")
    plain = b.clock.wait

    def wait(seconds: float) -> None:
        plain(seconds)
        a.clock.wait(seconds)
        claim.keep()

    b.clock.wait = wait  # type: ignore[method-assign]
    with pytest.raises(LockTimeout, match=r"process \d+ on .* has its claim for more than 20 s"):
        b.claims.take("k")
    claim.give_back()
    b.claims.take("k").give_back()


def test_an_answer_that_was_lost_is_asked_for_again(registers: LocalRegisters) -> None:
    """The record says whether it was given back; nothing is acknowledged twice."""
    claim = Process(registers).claims.take("k")
    plain, lost = registers.update, [0]

    def update(name: str, change: object, *, what: str) -> Register:
        found = plain(name, change, what=what)  # type: ignore[arg-type]
        lost[0] += 1
        if lost[0] == 1:
            raise RegistersUnavailable("the answer was lost")
        return found

    registers.update = update  # type: ignore[method-assign]
    claim.give_back()
    assert lost[0] == 2
    with pytest.raises(ClaimLost):
        claim.give_back()


def test_a_claim_of_a_put_that_failed_is_let_go_by_one_try(registers: LocalRegisters) -> None:
    """While registers do not answer each try takes its whole deadline, and the claim is free after
    its time anyway."""
    claim = Process(registers).claims.take("k")
    tries = [0]

    def update(name: str, change: object, *, what: str) -> Register:
        tries[0] += 1
        raise RegistersUnavailable("away")

    registers.update = update  # type: ignore[method-assign]
    with pytest.raises(RegistersUnavailable):
        claim.let_go()
    assert (tries, claim.held) == ([1], False)


def test_a_claim_of_a_machine_with_a_long_name_fits_its_register(
    registers: LocalRegisters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character beyond ASCII is six bytes of JSON."""
    monkeypatch.setattr(socket, "gethostname", lambda: "é" * 64)
    process = Process(registers)
    claim = process.claims.take("k")
    value = registers.update(key_register("k"), lambda _: None, what="look").value
    assert value is not None
    assert len(value) <= VALUE_BYTES_MOST
    assert claim.held
