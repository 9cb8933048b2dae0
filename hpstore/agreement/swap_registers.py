"""Registers over a store with compare-and-swap: etcd, or an object store (PROTOCOL 6, 15).

An update reads a record, makes its change and swaps it in if no other process was faster. A swap
that is not answered may have happened, and may happen later: it is made again as it was, until the
record shows its nonce, or another revision than the one that it compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hpstore.agreement.record_holds import RecordHolds
from hpstore.agreement.registers import (
    RECORD,
    Change,
    ChangeOf,
    Exchange,
    HeldRegister,
    Register,
    Successor,
    claim_registers,
)
from hpstore.agreement.swap_store import Envelope, StoredRecord, Swap, SwapStore, new_nonce
from hpstore.devices.base import Device
from hpstore.errors import IntegrityError, MembershipError, RegistersForeign, RegistersUnavailable
from hpstore.runtime.clock import Clock
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.threads import WorkerThreads

_POLL_SECONDS = (0.002, 0.1)  # the first pause between two tries, the longest


class SwapRegisters:
    """Of one pool. Thread-safe. `where`: the store, for errors."""

    def __init__(
        self,
        store: SwapStore,
        clock: Clock,
        *,
        where: str,
        deadline_seconds: float,
        hold_seconds: float,
        lock_deadline_seconds: float,
        metrics: Metrics | None = None,
    ) -> None:
        self.store, self.clock, self.where = store, clock, where
        self._deadline_seconds, self._lock_seconds = deadline_seconds, lock_deadline_seconds
        self._metrics = metrics if metrics is not None else Metrics()
        self._holds = RecordHolds(self.update, clock, hold_seconds, self._metrics)

    def update(self, name: str, change: Change, *, what: str) -> Register:
        until, pause = self.clock.monotonic() + self._deadline_seconds, _POLL_SECONDS[0]
        tried = False
        while True:
            found = self._read(name, what, until)
            envelope = self._decode(found, name)
            value = change(envelope.register)
            if value is None:
                return envelope.register
            made = envelope.followed_by(value, new_nonce())
            if self._swap(name, made, found, what, until):
                return made.register
            self._metrics.count("register_swap_lost_total")
            if tried and self.clock.monotonic() >= until:
                raise RegistersUnavailable(
                    f"{what}: register {name} in {self.where} was changed by others each time for "
                    f"{self._deadline_seconds:.1f} s. Nothing was changed; try again."
                )
            tried = True  # once alone is no contention: this process was stopped meanwhile
            self.clock.wait(pause)
            pause = min(_POLL_SECONDS[1], 1.5 * pause)

    def update_all(self, change: ChangeOf, *, what: str) -> None:
        names, batch = claim_registers(), self.store.batch
        parts = [names[at : at + batch] for at in range(0, len(names), batch)]
        with WorkerThreads(self.store.at_once, "hpstore-registers") as threads:
            for _ in threads.map(lambda part: self._update_part(part, change, what), parts):
                pass

    def _update_part(self, names: Sequence[str], change: ChangeOf, what: str) -> None:
        """Change some records at once; one at a time when others are at them."""
        try:
            found = self.store.read_many(names, self._deadline_seconds)
            swaps = []
            for name, stored in zip(names, found, strict=True):
                envelope = self._decode(stored, name)
                value = change(name, envelope.register)
                if value is not None:
                    data = envelope.followed_by(value, new_nonce()).encode()
                    swaps.append(Swap(name=name, data=data, revision=stored.revision))
            if not swaps or self.store.swap_many(swaps, self._deadline_seconds):
                return
        except RegistersUnavailable:  # some may be changed: a change is as right twice
            self._metrics.count("register_batch_unanswered_total")
        for name in names:
            self.update(name, partial(change, name), what=what)

    def _decode(self, found: StoredRecord, name: str) -> Envelope:
        try:
            return Envelope.decode(found.data, where=f"register {name} in {self.where}")
        except IntegrityError as error:
            raise RegistersUnavailable(
                f"{error}. Something else has written there. Objects are untouched; "
                "`hpstore registers reset --force` makes registers again from the devices."
            ) from error

    def _left(self, until: float) -> float:
        return max(0.05, until - self.clock.monotonic())

    def _read(self, name: str, what: str, until: float) -> StoredRecord:
        try:
            return self.store.read(name, self._left(until))
        except RegistersUnavailable as error:
            raise RegistersUnavailable(
                f"{what}: {error} Nothing was changed. Reading, plain puts, deletes and repairs go "
                "on; bring the registers back and try again."
            ) from error

    def _swap(
        self, name: str, made: Envelope, found: StoredRecord, what: str, until: float
    ) -> bool:
        """Whether the change was made; False when another one came first, for certain."""
        data, pause, unsure = made.encode(), _POLL_SECONDS[0], False
        while True:
            try:
                if self.store.swap(name, data, found.revision, self._left(until)):
                    return True
                if not unsure:
                    return False
            except RegistersUnavailable as error:
                unsure, reason = True, str(error)
            except RegistersForeign as error:  # this try was refused; one before was not answered
                if not unsure:
                    raise
                raise self._unclear(name, what, str(error)) from error
            try:
                now = self.store.read(name, self._left(until))
            except RegistersForeign as error:
                raise self._unclear(name, what, str(error)) from error
            except RegistersUnavailable as error:
                reason = str(error)
            else:
                if now.revision != found.revision:
                    return self._made(name, made, self._decode(now, name), what)
                reason = "it was not answered, and has not happened yet"
            if self.clock.monotonic() >= until:
                raise self._unclear(name, what, reason)
            self.clock.wait(pause)
            pause = min(_POLL_SECONDS[1], 2 * pause)

    def _unclear(self, name: str, what: str, reason: str) -> RegistersUnavailable:
        """For a change of which no answer came."""
        return RegistersUnavailable(
            f"{what}: a change of register {name} in {self.where} may be made or not: "
            f"{reason}. Objects are untouched; bring the registers back and try again."
        )

    def _made(self, name: str, made: Envelope, now: Envelope, what: str) -> bool:
        """Whether a change is among those that led to the record of now."""
        if made.nonces[0] in now.nonces:
            return True
        if now.sequence - made.sequence < len(now.nonces):  # it would be among them
            return False
        raise RegistersUnavailable(
            f"{what}: a change of register {name} in {self.where} was not answered, and others "
            "have changed it too often since to tell what became of it. Objects are untouched; "
            "look, and try again."
        )

    # --- holds and memberships --------------------------------------------------------------

    @contextmanager
    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> Iterator[HeldRegister]:
        limit = self._lock_seconds if deadline_seconds is None else deadline_seconds
        held = self._holds.take(name, what, limit)
        try:
            yield held
        finally:
            held.release()

    @contextmanager
    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> Iterator[Exchange]:
        yield _RecordExchange(self)

    def committed(self, what: str) -> Successor:
        """The membership that was stored last. Raises RegistersForeign where there is none, which
        is put there before any membership names this place."""
        register = self.update(RECORD, lambda _: None, what=what)
        if register.value is None:
            raise lost_registers(self.where)
        return Successor.decode(register.value)

    def after_fork(self) -> None:
        self._holds.after_fork()
        self.store.close()

    def close(self) -> None:
        """End what renews holds, and let connections go."""
        self._holds.close()
        self.store.close()


class _RecordExchange:
    """The change of a membership: the swap of its record is what commits it."""

    def __init__(self, registers: SwapRegisters) -> None:
        self._registers = registers

    def settle(self, new: Successor) -> None:
        """Store a membership as the successor of the one that it names, or of an older one.

        Raises MembershipError when another is there, IntegrityError, RegistersUnavailable.
        """

        def change(register: Register) -> bytes | None:
            if register.value is None:
                raise lost_registers(self._registers.where)
            there = Successor.decode(register.value)
            follows = there.generation < new.generation - 1 or there.order == new.parent
            if there.order != new.order and not follows:
                raise MembershipError(
                    f"the membership moved to generation {there.generation} meanwhile: another "
                    "process has changed it. Nothing was changed; look at it, and run this again "
                    "if it is still wanted."
                )
            return new.encode()

        try:
            self._registers.update(RECORD, change, what="membership change")
        except IntegrityError as error:
            raise MembershipError(
                f"the membership in {self._registers.where} cannot be read: {error}. Nothing was "
                "changed. `hpstore registers reset` makes it again from the devices."
            ) from error


def lost_registers(where: str) -> RegistersForeign:
    """For a place that has nothing of the pool."""
    return RegistersForeign(
        f"{where} does not hold the registers of this pool: its data was lost, or it is another "
        "cluster. Nothing was changed; reading and plain puts go on. Bring the right one back; if "
        "it is gone for good, `hpstore registers reset`."
    )
