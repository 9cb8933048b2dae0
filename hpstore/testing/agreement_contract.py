"""The contract of Registers, whatever engine they are of. Needs pytest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hpstore.agreement.registers import AGENT, MEMBERSHIP, Register, Registers
from hpstore.errors import LockTimeout
from hpstore.testing.histories import Observed, is_linearizable


def add_one(registers: Registers, name: str) -> int:
    """Count in a record; the number that this call has made."""

    def change(register: Register) -> bytes:
        return b"%d" % (int(register.value or b"0") + 1)

    return int(registers.update(name, change, what="a test").value or b"0")


def look(registers: Registers, name: str) -> Register:
    """A record as it is."""
    return registers.update(name, lambda _: None, what="a test")


class AgreementContract:
    """Subclasses give `pair`: registers of two processes that share them."""

    threads, rounds = 4, 12  # of the tests in which several are at one record
    few = ""  # where an engine that is slow takes the names of all records from

    @pytest.fixture
    def pair(self) -> tuple[Registers, Registers]:
        """Of two processes."""
        raise NotImplementedError

    def test_a_record_that_was_never_written_holds_nothing(
        self, pair: tuple[Registers, Registers]
    ) -> None:
        """Looking at it changes nothing."""
        assert look(pair[0], "key-0001").value is None
        assert look(pair[1], "key-0001").value is None

    def test_what_is_written_is_seen_by_the_other_and_its_order_rises(
        self, pair: tuple[Registers, Registers]
    ) -> None:
        """Each record for itself; the order is the same in both processes."""
        a, b = pair
        first = a.update("key-0001", lambda _: b"one", what="a test")
        assert look(b, "key-0001") == first
        second = b.update("key-0001", lambda r: (r.value or b"") + b" two", what="a test")
        assert second.value == b"one two"
        assert second.order > first.order
        assert look(a, "key-0001") == second
        assert look(a, "key-0002").value is None
        assert a.update("key-0001", lambda _: None, what="a test") == second

    def test_a_change_that_raises_changes_nothing(self, pair: tuple[Registers, Registers]) -> None:
        """Neither does it leave a lock."""
        a, b = pair
        a.update("key-0001", lambda _: b"one", what="a test")

        def change(_: Register) -> bytes:
            raise KeyError("no")

        with pytest.raises(KeyError):
            a.update("key-0001", change, what="a test")
        assert look(b, "key-0001").value == b"one"

    def test_no_update_is_lost_between_processes(self, pair: tuple[Registers, Registers]) -> None:
        """Threads of both add one to a number at once."""
        total = self.threads * self.rounds

        def add(number: int) -> int:
            return add_one(pair[number % 2], "key-0007")

        with ThreadPoolExecutor(self.threads) as threads:
            made = list(threads.map(add, range(total)))
        assert sorted(made) == list(range(1, total + 1))
        assert look(pair[0], "key-0007").value == b"%d" % total

    def test_concurrent_updates_are_linearizable(self, pair: tuple[Registers, Registers]) -> None:
        """What each one saw and wrote, and when, fits one order in time."""
        history: list[Observed] = []
        lock = threading.Lock()

        def work(number: int) -> None:
            registers = pair[number % 2]
            for turn in range(self.rounds):
                written = None if turn % 3 == 2 else b"%d-%d" % (number, turn)
                seen: list[bytes | None] = []
                begin = time.monotonic()
                registers.update("key-0009", remember(seen, written), what="a test")
                end = time.monotonic()
                with lock:
                    history.append(Observed(begin=begin, end=end, seen=seen[-1], written=written))

        with ThreadPoolExecutor(self.threads) as threads:
            list(threads.map(work, range(self.threads)))
        assert len(history) == self.threads * self.rounds
        assert is_linearizable(history)

    def test_all_records_are_updated_at_once(
        self, pair: tuple[Registers, Registers], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each with its name and what it held."""
        a, b = pair
        if self.few:
            monkeypatch.setattr(self.few, lambda: ["key-0000", "key-0003", "key-4095"])
        b.update("key-0003", lambda _: b"three", what="a test")
        a.update_all(lambda name, r: name.encode() + b" " + (r.value or b"-"), what="a test")
        assert look(b, "key-0000").value == b"key-0000 -"
        assert look(b, "key-0003").value == b"key-0003 three"
        assert look(a, "key-4095").value == b"key-4095 -"
        b.update_all(lambda name, _: b"x" if name == "key-0003" else None, what="a test")
        assert look(a, "key-0003").value == b"x"
        assert look(a, "key-4095").value == b"key-4095 -"

    def test_a_hold_excludes_the_other_process_by_its_name(
        self, pair: tuple[Registers, Registers]
    ) -> None:
        """Another name is free, and so is this one after its end."""
        a, b = pair
        with a.hold(MEMBERSHIP, "first") as held:
            held.keep()
            with refused(lambda: b.hold(MEMBERSHIP, "second", deadline_seconds=0.0)):
                pass
            with b.hold(AGENT, "another", deadline_seconds=0.0):
                pass
        with b.hold(MEMBERSHIP, "second", deadline_seconds=1.0):
            pass


def remember(seen: list[bytes | None], written: bytes | None) -> Callable[[Register], bytes | None]:
    """A change that notes what it saw; the last call counts."""

    def change(register: Register) -> bytes | None:
        seen.append(register.value)
        return written

    return change


@contextmanager
def refused(hold: Callable[[], object]) -> Iterator[None]:
    """A hold that another one has."""
    with pytest.raises(LockTimeout, match="Nothing"), hold():  # type: ignore[attr-defined]
        pass
    yield
