"""The election of the one agent that decides for a pool: a record that its keeper renews.

Who sees it unchanged for `ttl_seconds` by the own monotonic clock may take it over, under the next
epoch. A keeper that was stopped finds that out where it looks, which it does before each decision;
what it decided before is stored as the successor of the membership that it was judged on, or not at
all (PROTOCOL 15, 16). So two that both take themselves for the keeper cost work, nothing else.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hpstore.agreement.keeper_record import KeeperRecord
from hpstore.agreement.registers import KEEPER, Change, Register
from hpstore.errors import (
    HpstoreError,
    IntegrityError,
    LockTimeout,
    MembershipError,
    RegistersForeign,
    RegistersUnavailable,
)
from hpstore.runtime.clock import Clock

KEEPER_SECONDS = 15.0
_WHAT = "keeper of the pool"
_AWAY = (LockTimeout, RegistersForeign, RegistersUnavailable)
KeeperChange = Callable[[KeeperRecord, Register], KeeperRecord | None]


class KeeperUpdate(Protocol):
    """PoolRegisters.update_own()."""

    def __call__(self, name: str, change: Change, *, what: str) -> Register: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSight:
    """Who decides for a pool, as one agent sees it."""

    host: str  # "" where none is known
    process: int
    epoch: int
    here: bool  # it is this agent
    problem: str  # why the registers do not say
    alone: bool = False  # no election: the pool is on one host

    def __str__(self) -> str:
        if not self.host:
            return f"no keeper is known{f': {self.problem}' if self.problem else ''}"
        away = f"; registers: {self.problem}" if self.problem else ""
        mine = ", this agent" if self.here else ""
        return f"{self.host} (process {self.process}, epoch {self.epoch}{mine}){away}"


class KeeperElection:
    """One agent's part in it. Thread-safe.

    `run` names the run directory of the agent in this boot: one agent at a time has it, so a record
    of it that is there at the first look is of one that is dead, and is taken over at once.
    """

    def __init__(
        self,
        update: KeeperUpdate,
        clock: Clock,
        *,
        host: str,
        run: str,
        ttl_seconds: float = KEEPER_SECONDS,
    ) -> None:
        self._update_register, self._clock, self._ttl = update, clock, ttl_seconds
        self._host, self._run = host, run
        self._lock = threading.Lock()  # guards all below; held for arithmetic alone
        self._record = KeeperRecord()  # as it was seen last
        self._nonce = secrets.token_hex(8)  # of this agent's next or present term
        self._order, self._since = (-1, -1), 0.0  # of another's record, and since when
        self._confirmed = -1e18  # when this agent last knew that it has it
        self._mine, self._problem = False, ""
        self._first = True  # it has not seen the record yet

    @property
    def record(self) -> KeeperRecord:
        """As it was seen last."""
        with self._lock:
            return self._record

    @property
    def decides(self) -> bool:
        """Whether this agent may go on with what it decided: it has the record, and knew that so
        lately that no other one has taken it over. Asks no register."""
        with self._lock:
            return self._mine and self._clock.monotonic() - self._confirmed < self._ttl

    @property
    def had_it_last(self) -> bool:
        """Whether the record was this agent's when it was seen last, however long ago."""
        with self._lock:
            return self._mine

    @property
    def due_seconds(self) -> float:
        """Until the record should be renewed or looked at again."""
        with self._lock:
            return self._confirmed + self._ttl / 5 - self._clock.monotonic()

    def sight(self) -> KeeperSight:
        """For people."""
        here = self.decides
        with self._lock:
            found = self._record
            return KeeperSight(
                host=found.host if found.nonce else "",
                process=found.process,
                epoch=found.epoch,
                here=here,
                problem=self._problem,
            )

    def look(self) -> bool:
        """Renew the record, or take it where it is free or has stood still; whether this agent
        decides now. Registers that do not answer are noted: it then decides until its term ends."""
        with self._lock:
            still = self._clock.monotonic() - self._since >= self._ttl
            over = self._order if still else None
        try:
            self._update(lambda record, register: self._taken(record, register, over))
        except _AWAY:
            return self.decides
        return self.decides

    def _taken(
        self, record: KeeperRecord, register: Register, over: tuple[int, int] | None
    ) -> KeeperRecord | None:
        """The record renewed or taken over; None where another agent has it. Pure."""
        if record.nonce == self._nonce:
            return record.renewed()
        dead = self._first and record.run == self._run
        if record.nonce and not dead and register.order != over:
            return None
        return KeeperRecord(
            epoch=record.epoch + 1,
            nonce=self._nonce,
            host=self._host,
            process=os.getpid(),
            run=self._run,
            beat=record.beat + 1,
            closed=record.closed,
        )

    def confirm(self, closed: str | None = None) -> None:
        """Before a decision: make sure that the record is this agent's, and note what it closes.

        Raises MembershipError where another agent has taken it, or where the registers do not
        answer: then nothing is decided.
        """

        def change(record: KeeperRecord, _: Register) -> KeeperRecord | None:
            if record.nonce != self._nonce:
                return None
            made = record.renewed()
            return made if closed is None else replace(made, closed=closed)

        try:
            self._update(change)
        except _AWAY as error:
            raise MembershipError(
                f"this agent cannot know whether it still is the keeper: {error} Nothing was "
                "changed; it tries again."
            ) from error
        if not self.had_it_last:
            raise MembershipError(
                f"this agent is not the keeper of the pool any more, {self.sight()} is. Nothing "
                "was changed, and nothing need be done."
            )

    def resign(self) -> None:
        """Let another agent take over at once. Best effort: else it waits."""

        def change(record: KeeperRecord, _: Register) -> KeeperRecord | None:
            return replace(record.renewed(), nonce="") if record.nonce == self._nonce else None

        if self.had_it_last:
            try:
                self._update(change)
            except HpstoreError:  # seen unchanged, it is taken over
                return

    def _update(self, change: KeeperChange) -> None:
        """Change the record, and note how it is then."""
        began = self._clock.monotonic()

        def decide(register: Register) -> bytes | None:
            made = change(_decoded(register), register)
            return None if made is None else made.encode()

        try:
            register = self._update_register(KEEPER, decide, what=_WHAT)
            found = _decoded(register)
        except _AWAY as error:
            with self._lock:
                self._problem = str(error)
            raise
        now = self._clock.monotonic()
        with self._lock:
            self._record, self._problem, self._first = found, "", False
            lost = self._mine and found.nonce != self._nonce
            self._mine = found.nonce == self._nonce
            if self._mine:
                self._confirmed = began
            elif self._order != register.order:
                self._order, self._since = register.order, now
            if lost:
                self._nonce = secrets.token_hex(8)  # what was decided under the old one is over


def _decoded(register: Register) -> KeeperRecord:
    """What a register holds; where that is damaged, a record of a stranger, which stands still."""
    try:
        return KeeperRecord.of(register)
    except IntegrityError:
        return KeeperRecord(nonce="damaged")
