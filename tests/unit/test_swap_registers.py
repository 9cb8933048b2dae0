"""Registers over compare-and-swap: lost and late answers, holds, probes (PROTOCOL 6, 15)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hpstore.agreement.register_url import S3Url, parse_register_url
from hpstore.agreement.registers import AGENT, MEMBERSHIP, RECORD, REPAIR, Successor
from hpstore.agreement.s3_records import S3Records
from hpstore.agreement.swap_registers import SwapRegisters
from hpstore.agreement.swap_store import NONCES_KEPT, Envelope, StoredRecord, probe_swaps
from hpstore.errors import (
    ConfigError,
    IntegrityError,
    LockTimeout,
    MembershipError,
    RegistersForeign,
    RegistersUnavailable,
)
from hpstore.testing.agreement_contract import add_one, look
from hpstore.testing.memory_pool import FakeClock
from hpstore.testing.memory_swaps import MemoryRecords, MemorySwaps
from tests.register_servers import s3_or_skip

NAME = "key-0007"


def process(
    shared: MemoryRecords, fault: Callable[[str], str] = lambda _: "", prefix: str = ""
) -> SwapRegisters:
    """Registers of one process, with a clock of its own."""
    return SwapRegisters(
        MemorySwaps(shared, fault, prefix),
        FakeClock(),
        where="a test",
        deadline_seconds=2.0,
        hold_seconds=15.0,
        lock_deadline_seconds=30.0,
    )


def plan(*faults: str) -> Callable[[str], str]:
    """Faults of swaps, one after the other; then it works."""
    left = list(faults)

    def fault(operation: str) -> str:
        return left.pop(0) if operation == "swap" and left else ""

    return fault


@pytest.mark.parametrize("faults", [("lost",), ("down",), ("late",), ("late", "down", "lost")])
def test_a_swap_that_is_not_answered_is_made_exactly_once_rule_15(faults: tuple[str, ...]) -> None:
    """Done and not answered; never arrived; still on its way when it is made again."""
    shared = MemoryRecords()
    a = process(shared, plan(*faults))
    assert add_one(a, NAME) == 1
    shared.arrive()
    assert add_one(process(shared), NAME) == 2


@pytest.mark.parametrize("others", [1, NONCES_KEPT - 1, NONCES_KEPT])
def test_what_became_of_a_swap_is_found_behind_the_changes_of_others_rule_15(others: int) -> None:
    """Done and not answered; before it is asked, others have changed the record some times."""
    shared = MemoryRecords()
    a, b = process(shared, plan("lost")), process(shared)
    plain, asked = a.store.read, [0]

    def read(name: str, limit: float) -> StoredRecord:
        asked[0] += 1
        if asked[0] == 2:  # after its swap
            for _ in range(others):
                add_one(b, NAME)
        return plain(name, limit)

    a.store.read = read  # type: ignore[assignment, method-assign]
    if others < NONCES_KEPT:
        assert add_one(a, NAME) == 1
    else:
        with pytest.raises(RegistersUnavailable, match="not answered, and others have changed"):
            add_one(a, NAME)
    assert look(b, NAME).value == b"%d" % (1 + others)


def test_a_process_that_was_stopped_in_a_change_makes_it_when_it_goes_on() -> None:
    """For longer than its deadline, between its look and its swap, while another one changed the
    record: the swap is refused, and that is no contention. (Found by the simulator over hosts.)"""
    shared = MemoryRecords()
    a, b = process(shared), process(shared)
    plain = a.store.read

    def read(name: str, limit: float) -> StoredRecord:
        found = plain(name, limit)
        a.store.read = plain  # type: ignore[method-assign]
        a.clock.wait(60.0)
        add_one(b, NAME)
        return found

    a.store.read = read  # type: ignore[assignment, method-assign]
    assert add_one(a, NAME) == 2


def test_what_cannot_be_asked_for_raises_in_time_and_says_whether_it_may_have_happened() -> None:
    """Before the swap nothing has changed; after it, it may have."""
    shared, down = MemoryRecords(), [True, True]
    a = process(shared, lambda operation: "lost" if down[operation == "swap"] else "")
    with pytest.raises(RegistersUnavailable, match=r"does not answer.*Nothing was changed"):
        add_one(a, NAME)
    down[0] = False
    plain, asked = a.store.read, [0]

    def read(name: str, limit: float) -> StoredRecord:
        asked[0] += 1
        if asked[0] > 1:
            raise RegistersUnavailable("the store does not answer.")
        return plain(name, limit)

    a.store.read = read  # type: ignore[assignment, method-assign]
    with pytest.raises(RegistersUnavailable, match="may be made or not"):
        add_one(a, NAME)
    assert a.clock.monotonic() < 10.0
    assert look(process(shared), NAME).value == b"1"


@pytest.mark.parametrize("operation", ["read", "swap"])
def test_rights_that_end_during_a_swap_do_not_say_that_nothing_was_changed(operation: str) -> None:
    """It was done and not answered; when it is looked for, the caller's certificate has ended."""
    shared = MemoryRecords()
    a = process(shared, plan("lost" if operation == "read" else "down"))
    plain = getattr(a.store, operation)
    asked = [0]

    def refused(*args: object) -> object:
        asked[0] += 1
        if asked[0] > 1:
            raise RegistersForeign("it has ended. Nothing was changed.")
        return plain(*args)

    setattr(a.store, operation, refused)
    with pytest.raises(RegistersUnavailable, match="may be made or not"):
        add_one(a, NAME)
    with pytest.raises(RegistersForeign):
        add_one(a, NAME)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["", "lost", "down", "late", "arrive"])),
        max_size=30,
    )
)
def test_counts_are_exact_whatever_answers_are_lost_rule_15(turns: list[tuple[int, str]]) -> None:
    """Three processes add one, each request with a fault; late requests arrive at any turn. What
    was made is counted once, what raised at most once."""
    shared, faults = MemoryRecords(), [""]

    def fault(operation: str) -> str:
        if operation != "swap":
            return ""
        found, faults[0] = faults[0], ""
        return found

    processes = [process(shared, fault) for _ in range(3)]
    made = 0
    for number, kind in turns:
        if kind == "arrive":
            shared.arrive()
            continue
        faults[0] = kind
        made += 1
        assert add_one(processes[number], NAME) == made
    shared.arrive()
    assert int(look(processes[0], NAME).value or b"0") == made


def test_bytes_of_others_are_no_register_and_the_error_says_what_to_do() -> None:
    """Garbage, a value that is no base64, a nonce list without end, another format."""
    good = json.loads(Envelope().followed_by(b"x", "n").encode())
    for bad in (b"", b"garbage", json.dumps({**good, "value": "?"}).encode()):
        shared = MemoryRecords(records={NAME: (1, bad)}, revision=1)
        with pytest.raises(RegistersUnavailable, match="Something else has written there"):
            look(process(shared), NAME)
    with pytest.raises(IntegrityError):
        Envelope.decode(b"x" * (3 << 20), where="x")
    with pytest.raises(ConfigError, match="1048576 at most"):
        Envelope(value=bytes((1 << 20) + 1)).encode()


# --- holds --------------------------------------------------------------------------------------


def test_a_hold_is_taken_over_after_it_stood_still_for_its_seconds_by_ones_own_clock() -> None:
    """The holder was killed: looks that come in between wait, however many there are."""
    shared = MemoryRecords()
    a, b = process(shared), process(shared)
    lost = a.hold(AGENT, "agent a")
    lost.__enter__()
    a.close()  # as if it was killed: nothing is given back, nothing renewed
    for _ in range(5):
        with (
            pytest.raises(LockTimeout, match=r"agent b: process \d+ on .*\(agent a\) holds agent"),
            b.hold(AGENT, "agent b", deadline_seconds=0.0),
        ):
            pass
        b.clock.wait(2.9)
    b.clock.wait(0.6)
    with b.hold(AGENT, "agent b", deadline_seconds=0.0) as held:
        held.keep()


def test_who_lost_a_hold_is_told_so_and_gives_back_nothing() -> None:
    """It was stopped for longer than its hold lasts, and goes on."""
    shared = MemoryRecords()
    a, b = process(shared), process(shared)
    with a.hold(AGENT, "agent a") as held:
        with pytest.raises(LockTimeout), b.hold(AGENT, "agent b", deadline_seconds=0.0):
            pass
        b.clock.wait(16.0)
        with b.hold(AGENT, "agent b", deadline_seconds=0.0):
            held._beat()  # type: ignore[attr-defined]
            with pytest.raises(LockTimeout, match="another one has taken"):
                held.keep()
            with pytest.raises(LockTimeout), a.hold(AGENT, "third", deadline_seconds=0.0):
                pass


def test_a_hold_that_could_not_be_given_back_is_in_the_way_of_others_alone() -> None:
    """etcd was away as a rebuild ended: the next one of this process need not wait until the record
    has stood still; another process does, and so does a child that was forked within it."""
    shared, away = MemoryRecords(), [False]
    a = process(shared, lambda operation: "down" if operation == "swap" and away[0] else "")
    with a.hold(REPAIR, "rebuild"):
        away[0] = True
    away[0] = False
    with (
        pytest.raises(LockTimeout, match="rebuild"),
        process(shared).hold(REPAIR, "theirs", deadline_seconds=0.0),
    ):
        pass
    with a.hold(REPAIR, "the next", deadline_seconds=0.0) as held:
        held.keep()
        a._holds.after_fork()  # as in a child, which then leaves the parent's `with`
    with pytest.raises(LockTimeout), a.hold(REPAIR, "a child", deadline_seconds=0.0):
        pass


def test_repairs_go_on_without_registers_and_changes_of_the_membership_do_not() -> None:
    """etcd is away: a rebuild is not held up by it."""
    a = process(MemoryRecords(), lambda _: "down")
    with a.hold(REPAIR, "rebuild") as held:
        held.keep()
    with pytest.raises(RegistersUnavailable), a.hold(MEMBERSHIP, "membership change"):
        pass


# --- memberships --------------------------------------------------------------------------------


def successor(generation: int, nonce: str, before: str) -> Successor:
    return Successor(order=(generation, nonce), parent=(generation - 1, before), data=b"{}")


def test_of_two_successors_of_one_membership_one_is_stored_rule_14() -> None:
    """Also when the first one's answer is lost, and when a process has died before the devices had
    it."""
    shared = MemoryRecords()
    a, b = process(shared, plan("lost")), process(shared)
    with a.exchange({}, [], force=False) as exchange, pytest.raises(RegistersForeign, match="lost"):
        exchange.settle(successor(2, "a", "first"))
    b.update(RECORD, lambda _: successor(1, "first", "").encode(), what="a test")
    for registers, new, fine in (
        (a, successor(2, "a", "first"), True),
        (b, successor(2, "b", "first"), False),
        (b, successor(3, "b", "other"), False),
        (b, successor(3, "b", "a"), True),
        (a, successor(3, "b", "a"), True),  # the same once more
        (a, successor(9, "c", "x"), True),  # devices are ahead: their change was forced
    ):
        with registers.exchange({}, [], force=False) as exchange:
            if fine:
                exchange.settle(new)
            else:
                with pytest.raises(MembershipError, match="another process has changed it"):
                    exchange.settle(new)
    found = b.committed("a test")
    assert found.order == (9, "c")
    with pytest.raises(IntegrityError):
        Successor.decode(b'{"order": [1], "parent": [0, ""], "data": ""}')


# --- probes -------------------------------------------------------------------------------------


class _Careless(MemorySwaps):
    """A store that does not look at all, or only at whether there is a record."""

    looks = ""

    def swap(self, name: str, data: bytes, revision: str, limit_seconds: float) -> bool:
        now = self.read(name, limit_seconds)
        if self.looks == "creates" and not revision and now.revision:
            return False
        return super().swap(name, data, now.revision, limit_seconds)


@pytest.mark.parametrize("looks", ["", "creates"])
def test_a_store_that_does_not_compare_is_refused_and_the_reason_is_said(looks: str) -> None:
    """Both kinds were met in the field."""
    shared = MemoryRecords()
    store = _Careless(shared)
    store.looks = looks
    with pytest.raises(ConfigError, match=r"does not enforce conditional writes: .* Use etcd"):
        probe_swaps(store, 1.0)
    assert not shared.records
    probe_swaps(MemorySwaps(shared), 1.0)
    assert not shared.records
    with pytest.raises(RegistersUnavailable):
        probe_swaps(MemorySwaps(shared, lambda o: "down" if o == "swap" else ""), 1.0)


@pytest.fixture
def ignoring() -> Iterator[str]:
    with s3_or_skip(enforces=False) as url:
        yield url


def test_a_server_of_s3_that_ignores_conditions_is_refused(ignoring: str) -> None:
    """Its conditions do not reach it, as with some stores."""
    parsed = parse_register_url(ignoring)
    assert isinstance(parsed, S3Url)
    with pytest.raises(ConfigError, match="creates were taken"):
        probe_swaps(S3Records(parsed, "x"), 5.0)
