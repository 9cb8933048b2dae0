"""Conditional puts by claims: any pauses, take-overs, lost answers and clocks (PROTOCOL 6, 7)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hpstore.agreement.claims import ClaimLost, Claims, KeyClaim
from hpstore.agreement.swap_registers import SwapRegisters
from hpstore.errors import LockTimeout, RegistersUnavailable
from hpstore.runtime.clock import HybridCounter
from hpstore.testing.memory_pool import FakeClock
from hpstore.testing.memory_swaps import MemoryRecords, MemorySwaps
from tests.thorough import LONG

HOUR_MS = 3_600_000
WIDTH, NEEDED = 3, 2  # columns of an object, and those that it takes to read it


@dataclass(slots=True)
class Devices:
    """What lies there: column -> versions. The newest that is whole enough is read (rule 7)."""

    columns: list[dict[tuple[int, int], str]] = field(
        default_factory=lambda: [{} for _ in range(WIDTH)]
    )

    def newest(self) -> tuple[tuple[int, int], str] | None:
        """The version that a reader gets."""
        versions = {v: who for column in self.columns for v, who in column.items()}
        whole = [v for v in versions if sum(v in column for column in self.columns) >= NEEDED]
        return (max(whole), versions[max(whole)]) if whole else None

    def highest(self) -> int:
        """The highest counter that is seen."""
        return max((v[0] for column in self.columns for v in column), default=0)


class Host:
    """A process with a clock of its own, and its puts with if_absent or if_version, in steps as
    conditional_put.py makes them. Between two steps it may be stopped for any time."""

    def __init__(self, number: int, shared: MemoryRecords, devices: Devices, ahead_ms: int) -> None:
        self.number, self.devices = number, devices
        self.clock = FakeClock(1_700_000_000_000 + ahead_ms)
        self.fault = ""
        registers = SwapRegisters(
            MemorySwaps(shared, self._fault),
            self.clock,
            where="a test",
            deadline_seconds=2.0,
            hold_seconds=15.0,
            lock_deadline_seconds=30.0,
        )
        self.claims = Claims(
            registers,
            self.clock,
            HybridCounter(self.clock).next,
            deadline_seconds=9.0,
            ttl_seconds=3.0,
        )

    def _fault(self, operation: str) -> str:
        found, self.fault = (self.fault, "") if operation == "swap" else ("", self.fault)
        return found

    def put(self, name: str, acknowledged: Callable[[str, str | None], None]) -> Generator[None]:
        """One conditional put on whatever it finds there. It ends when it is acknowledged, or when
        its condition does not hold any more."""
        found = self.devices.newest()
        condition = None if found is None else found[1]
        written = ""  # whole, under a claim that was lost
        yield
        for _ in range(3):
            try:
                claim = self.claims.take("k")
            except (LockTimeout, RegistersUnavailable):
                return
            try:
                yield
                now = self.devices.newest()
                if (None if now is None else now[1]) != (written or condition):
                    self._drop(claim)
                    return
                version = (claim.next_counter(self.devices.highest()), self.number)
                yield
                for column in range(WIDTH):
                    self.devices.columns[column][version] = name
                    yield
                try:
                    claim.give_back()
                except ClaimLost:  # it counts if nothing came, and it is put once more
                    written = name
                    raise
                acknowledged(name, condition)
                return
            except ClaimLost:
                yield
            except RegistersUnavailable:
                return

    def _drop(self, claim: KeyClaim) -> None:
        try:
            claim.give_back()
        except (ClaimLost, RegistersUnavailable):
            return


TURNS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which host
        st.integers(1, 9),  # steps
        st.sampled_from(["", "", "", "lost", "late", "down"]),
        st.sampled_from([0.0, 0.0, 4.0]),  # seconds that pass for all
    ),
    max_size=24,
)


@hypothesis_settings(max_examples=3000 if LONG else 100, deadline=None)
@given(TURNS, st.tuples(*[st.sampled_from([0, HOUR_MS, -HOUR_MS])] * 3))
@example([(0, 3, "", 0.0), (1, 9, "", 4.0), (0, 9, "", 0.0)], (HOUR_MS, 0, 0))
@example([(0, 4, "", 0.0), (1, 9, "", 4.0), (0, 9, "", 0.0)], (-HOUR_MS, 0, 0))
def test_acknowledged_conditional_puts_have_one_order_in_which_each_met_its_condition_rule_6(
    turns: list[tuple[int, int, str, float]], ahead_ms: tuple[int, ...]
) -> None:
    """Three hosts put one key, each on what it has seen. Every one that was acknowledged replaced
    what it had seen, no other one replaced that, and what is there is the last of them, or of a put
    that was not answered."""
    shared, devices = MemoryRecords(), Devices()
    hosts = [Host(n, shared, devices, ahead) for n, ahead in enumerate(ahead_ms)]
    replaced: dict[str | None, str] = {}
    puts: list[Generator[None] | None] = [None, None, None]
    made = 0

    def acknowledged(name: str, condition: str | None) -> None:
        assert condition not in replaced, f"{name} and {replaced[condition]} on {condition}"
        replaced[condition] = name

    def run(number: int, steps: int) -> None:
        nonlocal made
        for _ in range(steps):
            put = puts[number]
            if put is None:
                made += 1
                put = puts[number] = hosts[number].put(f"{number}-{made}", acknowledged)
            if next(put, "over") == "over":
                puts[number] = None
                return

    for number, steps, fault, seconds in turns:
        shared.arrive()
        for host in hosts:
            host.clock.wait(seconds)
        hosts[number].fault = fault
        run(number, steps)
        hosts[number].fault = ""
    for number in range(3):  # all go on to the end
        if puts[number] is not None:
            run(number, 99)
    if replaced:
        now = devices.newest()
        assert now is not None
        assert now[1] not in replaced
