"""One agent decides; who is paused, cut off or dead is succeeded, and finds out (PROTOCOL 17)."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from hpstore.agreement.keeper_election import KEEPER_SECONDS, KeeperElection
from hpstore.agreement.keeper_record import KeeperRecord
from hpstore.agreement.registers import KEEPER, VALUE_BYTES_MOST, Change, LocalRegisters, Register
from hpstore.errors import MembershipError, RegistersUnavailable
from hpstore.testing.memory_pool import FakeClock
from tests.thorough import LONG


class Fleet:
    """Agents of several hosts over one place of registers; `away`: it answers nobody."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registers = LocalRegisters(self.clock)
        self.away = False
        self.unanswered = False  # a change is made, and its answer is lost

    def update(self, name: str, change: Change, *, what: str) -> Register:
        if self.away:
            raise RegistersUnavailable("no majority answers.")
        found = self.registers.update(name, change, what=what)
        if self.unanswered:
            raise RegistersUnavailable("the answer was lost.")
        return found

    def agent(
        self,
        host: str,
        clock: FakeClock | None = None,
        update: Callable[..., Register] | None = None,
    ) -> KeeperElection:
        return KeeperElection(update or self.update, clock or self.clock, host=host, run=host)

    def record(self) -> KeeperRecord:
        return KeeperRecord.of(self.registers.update(KEEPER, lambda _: None, what="a test"))


def test_the_first_agent_decides_at_once_and_the_others_while_it_lives_not() -> None:
    """An hour of rounds; who decides is seen by all."""
    fleet = Fleet()
    a, b = fleet.agent("a"), fleet.agent("b")
    assert a.look()
    for _ in range(720):
        assert not b.look()
        fleet.clock.advance(5.0)
        assert a.look()
        a.confirm()
    assert (b.sight().host, b.sight().here, a.sight().here) == ("a", False, True)
    with pytest.raises(MembershipError, match="not the keeper"):
        b.confirm()


def test_a_record_that_stands_still_for_fifteen_seconds_is_taken_over() -> None:
    """By the taker's own monotonic clock, from when it first saw the record so."""
    fleet = Fleet()
    a, b = fleet.agent("a"), fleet.agent("b")
    a.look()
    fleet.clock.advance(3600.0)
    assert not b.look()  # it has not stood still for b yet
    fleet.clock.advance(KEEPER_SECONDS - 0.1)
    assert not b.look()
    fleet.clock.advance(0.1)
    assert b.look()
    assert fleet.record().epoch == 2


def test_wall_clocks_decide_nothing() -> None:
    """The taker's is ten years ahead, its monotonic one has gone five seconds."""
    fleet, ahead = Fleet(), FakeClock(wall_ms=2_000_000_000_000)
    a, b = fleet.agent("a"), fleet.agent("b", ahead)
    a.look()
    b.look()
    ahead.now_ms += 315_360_000_000
    ahead.elapsed += 5.0
    assert not b.look()


def test_a_keeper_that_was_paused_for_an_hour_does_nothing_under_its_old_epoch() -> None:
    """It does not even ask: its term is over by its own clock; and what it asks says no. Later it
    is elected again only when its successor stands still."""
    fleet = Fleet()
    a, b = fleet.agent("a"), fleet.agent("b")
    a.look()
    b.look()
    for _ in range(720):  # a is paused
        fleet.clock.advance(5.0)
        b.look()
    assert b.decides
    assert not a.decides
    with pytest.raises(MembershipError, match=r"b \(process \d+, epoch 2\)"):
        a.confirm()
    assert not a.look()
    assert fleet.record().host == "b"


def test_a_keeper_that_was_paused_alone_goes_on() -> None:
    """Nobody took over: the record is still its own."""
    fleet = Fleet()
    a = fleet.agent("a")
    a.look()
    fleet.clock.advance(3600.0)
    assert not a.decides
    a.confirm()
    assert a.decides
    assert fleet.record().epoch == 1


def test_of_two_that_take_over_at_once_one_does() -> None:
    """Both have seen the dead one's record stand still."""
    fleet = Fleet()
    dead, b, c = fleet.agent("a"), fleet.agent("b"), fleet.agent("c")
    dead.look()
    b.look()
    c.look()
    fleet.clock.advance(KEEPER_SECONDS)
    assert (b.look(), c.look()) == (True, False)
    assert (b.decides, c.decides) == (True, False)


def test_without_registers_nobody_is_elected_and_a_term_ends() -> None:
    """The keeper goes on for its term, as nobody else can have been elected; no decision is made
    that cannot be confirmed; afterwards it is the one whose repairs go on."""
    fleet = Fleet()
    a, b = fleet.agent("a"), fleet.agent("b")
    a.look()
    b.look()
    fleet.away = True
    fleet.clock.advance(KEEPER_SECONDS - 0.1)
    assert a.look()
    assert not b.look()
    with pytest.raises(MembershipError, match="cannot know whether it still is the keeper"):
        a.confirm()
    fleet.clock.advance(0.1)
    assert not a.look()
    assert a.had_it_last
    assert not b.had_it_last
    assert "no majority answers" in a.sight().problem
    fleet.away = False
    assert a.look()


def test_a_change_whose_answer_was_lost_is_found_by_the_next_look() -> None:
    fleet = Fleet()
    a = fleet.agent("a")
    fleet.unanswered = True
    assert not a.look()
    fleet.unanswered = False
    assert a.look()
    assert fleet.record().epoch == 1


def test_who_resigns_and_who_is_of_the_same_run_directory_is_succeeded_at_once() -> None:
    """An orderly end; a restart on the same node, which holds the directory's lock."""
    fleet = Fleet()
    a = fleet.agent("a")
    a.look()
    again = fleet.agent("a")  # the first was killed
    assert again.look()
    assert not a.look()
    again.resign()
    assert fleet.agent("b").look()
    assert fleet.record().epoch == 3


def test_what_was_closed_for_an_eviction_is_known_to_the_successor() -> None:
    fleet = Fleet()
    a, b = fleet.agent("a"), fleet.agent("b")
    a.look()
    a.confirm(closed="+0123456789abcdef")
    a.resign()
    b.look()
    assert b.record.closed == "+0123456789abcdef"
    b.confirm(closed="")
    assert fleet.record().closed == ""


def test_a_damaged_record_is_one_that_stands_still() -> None:
    fleet = Fleet()
    fleet.registers.update(KEEPER, lambda _: b"\xff{", what="a test")
    b = fleet.agent("b")
    assert not b.look()
    fleet.clock.advance(KEEPER_SECONDS)
    assert b.look()


def test_a_record_fits_a_register_on_devices() -> None:
    """With the longest host, the highest numbers, and a name that would have to be escaped."""
    made = KeeperRecord(
        epoch=1 << 40,
        nonce="f" * 16,
        host='"\\é' * 40,
        process=4_194_304,
        run="f" * 16,
        beat=1 << 40,
        closed="+" + "f" * 16,
    )
    assert len(made.encode()) <= VALUE_BYTES_MOST
    assert KeeperRecord.of(Register(order=(0, 1), value=made.encode())).nonce == made.nonce


@pytest.mark.parametrize("seed", range(300 if LONG else 60))
def test_never_do_two_agents_take_themselves_for_the_keeper(seed: int) -> None:
    """A model: four agents act in turns; before and after any change of the register the one that
    makes it may be paused for up to a minute while others act."""
    rng, fleet = random.Random(seed), Fleet()
    agents: list[KeeperElection] = []
    depth = 0

    def act() -> None:
        agent = rng.choice(agents)
        if rng.random() < 0.8:
            agent.look()
        else:
            with suppress(MembershipError):
                agent.confirm()
        assert sum(one.decides for one in agents) <= 1

    def pause() -> None:
        nonlocal depth
        if depth >= 3 or rng.random() < 0.6:
            return
        depth += 1
        for _ in range(rng.randrange(6)):
            fleet.clock.advance(rng.random() * 12.0)
            act()
        depth -= 1

    def update(name: str, change: Change, *, what: str) -> Register:
        pause()
        found = fleet.update(name, change, what=what)
        pause()
        return found

    agents += [fleet.agent(host, update=update) for host in "abcd"]
    for _ in range(150):
        fleet.clock.advance(rng.random() * 6.0)
        fleet.away = rng.random() < 0.1
        act()
    assert fleet.record().epoch > 1
