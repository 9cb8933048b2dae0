"""Holds as records: renewed by their holder, taken over when they have stood still for long.

For order and efficiency alone: a holder that is paused may lose its hold without knowing. What must
not happen twice is made sure of by the records themselves.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hpstore.agreement.registers import REPAIR, WAITING, Change, Register
from hpstore.errors import HpstoreError, LockTimeout, RegistersUnavailable, ThreadsExhausted
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.runtime.clock import Clock
from hpstore.runtime.metrics import Metrics
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
_POLL_SECONDS = (0.01, 0.25)
_BEATS = 5  # renewals within the time after which a hold may be taken over
_ENDED_KEPT = 64  # holds of this process that may not have been given back
_GO_ON = (REPAIR, WAITING)  # what goes on without registers


class Update(Protocol):
    """SwapRegisters.update()."""

    def __call__(self, name: str, change: Change, *, what: str) -> Register: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldNote:
    """Who has a hold. `nonce` "" when it is free; `beat` rises with every renewal."""

    nonce: str = ""
    owner: str = ""
    beat: int = 0

    def encode(self) -> bytes:
        """For the register."""
        return json.dumps({"n": self.nonce, "o": self.owner, "b": self.beat}).encode()

    @classmethod
    def of(cls, register: Register) -> HoldNote:
        """What a register holds. Raises IntegrityError."""
        if register.value is None:
            return cls()
        with parsing("a record of a hold"):
            body = json.loads(register.value)
            return cls(
                nonce=str(body["n"]), owner=str(body["o"]), beat=whole(body["b"], "its beat")
            )


class RecordHolds:
    """Of one pool in one process. Thread-safe.

    `hold_seconds`: a hold that is seen unchanged for so long, by this process' own monotonic clock,
    is taken over.
    """

    def __init__(self, update: Update, clock: Clock, hold_seconds: float, metrics: Metrics) -> None:
        self.update, self.clock, self.hold_seconds, self.metrics = (
            update,
            clock,
            hold_seconds,
            metrics,
        )
        self._lock = threading.Lock()  # guards _seen, _held and _ended
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}  # order of a hold, since when
        self._held: set[RecordHold] = set()
        self._ended: deque[str] = deque(maxlen=_ENDED_KEPT)  # nonces

    def take(self, name: str, what: str, limit_seconds: float) -> RecordHold:
        """Wait for a hold. Raises LockTimeout, which names the holder, and RegistersUnavailable
        where this cannot go on without."""
        held = RecordHold(self, name, what)
        until, pause = self.clock.monotonic() + limit_seconds, _POLL_SECONDS[0]
        while True:
            try:
                holder = held.try_take(self._stale(name))
            except RegistersUnavailable as error:
                if name not in _GO_ON:
                    raise
                if self.metrics.count("hold_without_registers_total") == 1:
                    _log.warning("%s begins beside others that may be at it: %s", what, error)
                return held
            if holder is None:
                with self._lock:
                    self._held.add(held)
                held.start()
                return held
            if self.clock.monotonic() >= until:
                raise LockTimeout(
                    f"{what}: {holder} holds {name} for more than {limit_seconds:.1f} s. Nothing "
                    f"was changed. Try again; when that process is gone its hold is free after "
                    f"{self.hold_seconds:.0f} s."
                )
            self.clock.wait(pause)
            pause = min(_POLL_SECONDS[1], 1.5 * pause)

    def _stale(self, name: str) -> tuple[int, int] | None:
        """The order of a hold that has stood still for long enough."""
        with self._lock:
            order, since = self._seen.get(name, ((-1, -1), 0.0))
        return order if self.clock.monotonic() - since >= self.hold_seconds else None

    def note(self, name: str, order: tuple[int, int]) -> None:
        """Another process has it so."""
        with self._lock:
            if self._seen.get(name, ((-1, -1), 0.0))[0] != order:
                self._seen[name] = (order, self.clock.monotonic())

    def forget(self, held: RecordHold, nonce: str) -> None:
        """It is over here, whether or not that can be recorded."""
        with self._lock:
            self._held.discard(held)
            self._ended.append(nonce)

    def is_over(self, nonce: str) -> bool:
        """Whether it was one of this process that has ended: its record may have stayed, where the
        answer to taking or giving it back was lost."""
        with self._lock:
            return nonce in self._ended

    def after_fork(self) -> None:
        """What the parent holds is the parent's."""
        self._lock = threading.Lock()
        held, self._held = self._held, set()
        for one in held:
            one.after_fork()

    def close(self) -> None:
        """End what renews holds; they are free when they have stood still."""
        with self._lock:
            held = list(self._held)
        for one in held:
            one.disown()


class RecordHold:
    """One hold of this process."""

    def __init__(self, holds: RecordHolds, name: str, what: str) -> None:
        self._holds, self._name, self._what = holds, f"hold-{name}", what
        self._plain = name
        self._nonce = secrets.token_hex(8)
        self._owner = f"process {os.getpid()} on {socket.gethostname()[:48]} ({what[:60]})"
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken = False
        self._mine = True  # not the parent's, which goes on with it

    def _update(self, change: Callable[[HoldNote, Register], HoldNote | None]) -> Register:
        def decide(register: Register) -> bytes | None:
            new = change(HoldNote.of(register), register)
            return None if new is None else new.encode()

        return self._holds.update(self._name, decide, what=self._what)

    def try_take(self, over: tuple[int, int] | None) -> str | None:
        """Take it when it is free, or still as `over` says. None when it is taken, else who has
        it."""

        def take(note: HoldNote, register: Register) -> HoldNote | None:
            free = note.nonce in ("", self._nonce) or self._holds.is_over(note.nonce)
            if not free and register.order != over:
                return None
            return HoldNote(nonce=self._nonce, owner=self._owner, beat=note.beat + 1)

        register = self._update(take)
        note = HoldNote.of(register)
        self._taken = note.nonce == self._nonce
        if self._taken:
            return None
        self._holds.note(self._plain, register.order)
        return note.owner

    def start(self) -> None:
        """Renew it until it is released."""
        thread = threading.Thread(target=self._renew, name="hpstore-hold", daemon=True)
        try:
            self._thread = start_thread(thread)
        except ThreadsExhausted:  # it may be taken over, which does no harm
            _log.warning("%s: no thread to renew its hold", self._what)

    def _renew(self) -> None:
        while not self._over.wait(self._holds.hold_seconds / _BEATS):
            try:
                self._beat()
            except HpstoreError as error:
                _log.info("%s: its hold was not renewed: %s", self._what, error)

    def _beat(self) -> None:
        def beat(note: HoldNote, _: Register) -> HoldNote | None:
            if note.nonce != self._nonce:
                return None
            return HoldNote(nonce=self._nonce, owner=self._owner, beat=note.beat + 1)

        self._taken = HoldNote.of(self._update(beat)).nonce == self._nonce

    def keep(self) -> None:
        """Raise LockTimeout when another process has taken it over."""
        if self._thread is not None and not self._taken and not self._over.is_set():
            raise LockTimeout(
                f"{self._what}: this process was stopped or cut off, and another one has taken its "
                "hold over. Its earlier work is kept."
            )

    def after_fork(self) -> None:
        """In the child: the thread is the parent's, which may have had the lock of the event."""
        self._over, self._thread = threading.Event(), None
        self.disown()

    def disown(self) -> None:
        """Neither renew nor release it."""
        self._taken = self._mine = False
        self._over.set()

    def release(self) -> None:
        """Give it back; others wait for a while if that fails."""
        self._over.set()
        self._holds.forget(self, self._nonce if self._mine else "")
        if self._thread is not None:
            self._thread.join(self._holds.hold_seconds)
        if not self._taken:
            return
        self._taken = False
        free = HoldNote(owner=self._owner)
        try:
            self._update(lambda note, _: free if note.nonce == self._nonce else None)
        except HpstoreError as error:
            _log.info("%s: its hold was not given back: %s", self._what, error)
