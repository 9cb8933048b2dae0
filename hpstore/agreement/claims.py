"""Claims: one conditional put of a key at a time, proof against a holder that was paused.

A claim hands out the counter of the put's version (PROTOCOL 1). Counters of a bucket rise with each
holder, so columns of one that has lost its claim are older than its successor's wherever and
whenever they land (PROTOCOL 7). Giving it back is the acknowledgement: only who still has it can.

A claim that is seen unchanged for `ttl_seconds` by the taker's own monotonic clock may be taken
over. That is for liveness alone; wall clocks that differ change nothing but the size of numbers.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from hpstore.agreement.registers import Register, Registers, key_register
from hpstore.errors import HpstoreError, LockTimeout, RegistersUnavailable
from hpstore.format.keys import MAX_COUNTER
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.runtime.clock import Clock

_POLL_SECONDS = (0.003, 0.05)  # the first pause, the longest


class ClaimLost(HpstoreError):
    """Another process has taken the claim over. What was written under it is older than its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """A record of claims. `nonce` of who has it, "" when it is free."""

    counter: int = 0
    nonce: str = ""
    owner: str = ""

    def encode(self) -> bytes:
        """For the register."""
        owner = self.owner.encode("ascii", "replace").decode()  # 6 bytes a character in JSON
        return json.dumps({"c": self.counter, "n": self.nonce, "o": owner}).encode()

    @classmethod
    def of(cls, register: Register) -> _State:
        """What a register holds; as if never used when it holds nothing."""
        if register.value is None:
            return cls()
        with parsing("a record of claims"):
            body = json.loads(register.value)
            counter = whole(body["c"], "its counter", most=MAX_COUNTER)
            return cls(counter=counter, nonce=str(body["n"]), owner=str(body["o"]))


class Claims:
    """Of one pool in one process.

    `next_counter(seen)`: above `seen` and all that this process has used (HybridCounter.next).
    """

    def __init__(
        self,
        registers: Registers,
        clock: Clock,
        next_counter: Callable[[int], int],
        *,
        deadline_seconds: float,
        ttl_seconds: float,
    ) -> None:
        self.registers, self.clock, self.next_counter = registers, clock, next_counter
        self.ttl_seconds, self._deadline_seconds = ttl_seconds, deadline_seconds

    def take(self, key: str) -> KeyClaim:
        """Wait for the claim of a key. Raises LockTimeout, RegistersUnavailable."""
        claim = KeyClaim(self, key)
        until, pause = self.clock.monotonic() + self._deadline_seconds, _POLL_SECONDS[0]
        seen, since = (-1, -1), 0.0
        while True:
            now = self.clock.monotonic()
            register = claim.try_take(over=seen if now - since >= self.ttl_seconds else None)
            if claim.held:
                return claim
            if register.order != seen:
                seen, since = register.order, now
            elif now >= until:
                owner = _State.of(register).owner
                raise LockTimeout(
                    f"conditional put of {key!r}: {owner} has its claim for more than "
                    f"{self._deadline_seconds:.0f} s. Nothing was changed; try again later."
                )
            self.clock.wait(pause)
            pause = min(_POLL_SECONDS[1], 1.5 * pause)


class KeyClaim:
    """A claim while its put is made. One thread at a time."""

    def __init__(self, claims: Claims, key: str) -> None:
        self._claims, self._key, self._name = claims, key, key_register(key)
        self._nonce = secrets.token_hex(8)
        self._owner = f"process {os.getpid()} on {socket.gethostname()[:48]}"
        self._order = (-1, -1)  # of the register as this claim has left it
        self._kept_seconds = 0.0  # when it was changed last, by the monotonic clock
        self._used = False
        self.counter = 0
        self.held = False

    def _update(self, change: Callable[[_State, Register], _State | None]) -> Register:
        def decide(register: Register) -> bytes | None:
            new = change(_State.of(register), register)
            return None if new is None else new.encode()

        return self._claims.registers.update(
            self._name, decide, what=f"conditional put of {self._key!r}"
        )

    def try_take(self, *, over: tuple[int, int] | None) -> Register:
        """Take it when it is free, or still as `over` says; the register as it is then."""

        def take(state: _State, register: Register) -> _State | None:
            if state.nonce not in ("", self._nonce) and register.order != over:
                return None
            counter = self._claims.next_counter(state.counter)
            return _State(counter=counter, nonce=self._nonce, owner=self._owner)

        register = self._update(take)
        self._note(register)
        return register

    def _note(self, register: Register) -> None:
        state = _State.of(register)
        self.held = state.nonce == self._nonce
        if self.held:
            self.counter, self._order = state.counter, register.order
            self._kept_seconds = self._claims.clock.monotonic()

    def next_counter(self, seen: int) -> int:
        """The counter of the next version: the claim's, or a raised one when that was used or is
        not above `seen`. Raises ClaimLost."""
        if self._used or self.counter <= seen:
            self._keep(lambda counter: self._claims.next_counter(max(counter, seen)))
        self._used = True
        return self.counter

    def keep(self) -> None:
        """Show that its holder lives, when a while has passed. Raises ClaimLost."""
        now = self._claims.clock.monotonic()
        if self.held and now - self._kept_seconds >= self._claims.ttl_seconds / 4:
            self._keep(lambda counter: counter)

    def _keep(self, raised: Callable[[int], int]) -> None:
        def change(state: _State, _: Register) -> _State | None:
            if state.nonce != self._nonce:
                return None
            return _State(counter=raised(state.counter), nonce=self._nonce, owner=self._owner)

        self._note(self._update(change))
        if not self.held:
            raise ClaimLost(f"the claim of {self._key!r} was taken over")

    def give_back(self) -> None:
        """The acknowledgement. Raises ClaimLost; RegistersUnavailable when that cannot be told.

        What was not answered for certain is asked again: the record says what became of it.
        """
        if not self.held:
            raise ClaimLost(f"the claim of {self._key!r} was taken over")
        try:
            self.let_go()
        except RegistersUnavailable:
            self._free()

    def let_go(self) -> None:
        """Try once to give it back, so that others need not wait. If that fails, they can take it
        over after `ttl_seconds`. Raises as give_back()."""
        self.held = False
        self._free()

    def _free(self) -> None:
        given = f"given back {self._nonce}"

        def change(state: _State, _: Register) -> _State | None:
            if state.nonce != self._nonce:
                return None
            return _State(counter=state.counter, nonce="", owner=given)

        state = _State.of(self._update(change))
        if state.nonce or state.owner != given:
            raise ClaimLost(f"the claim of {self._key!r} was taken over")
