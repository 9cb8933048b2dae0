"""What processes of one pool agree through: small named records, and holds (PROTOCOL 6, 15).

`Registers` is the whole of what an engine offers. Two are here: the pool's own devices
(device_registers.py), and a run directory for stores that have no locks (run_registers.py).
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from hpstore.devices.base import Device
from hpstore.errors import LockTimeout
from hpstore.format.untrusted_bytes import parsing, whole
from hpstore.runtime.clock import Clock

VALUE_BYTES_MOST = 200
BUCKETS = 4096
MEMBERSHIP, REPAIR, AGENT = "membership", "repair", "agent"  # what is held for long
KEEPER = "keeper"  # the record of the agent that decides; never held
RECORD = "record"  # the membership itself, in engines that do not lie on the devices
WAITING = "waiting"  # by who waits for REPAIR, so that a pass of days gives way
HOLDS = (
    MEMBERSHIP,
    REPAIR,
    AGENT,
    WAITING,
    KEEPER,
)  # their places in the registers: added to at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A record as it is. `order` rises with every change; `value` None: it was never written."""

    order: tuple[int, int] = (0, 0)
    value: bytes | None = None


# with the run's fence, its `writer`: manifests, and names of checkpoints (trainers/)
_COMMITTED = re.compile(r"(.+)/step-\d{12}/manifest")
_NAMED = re.compile(r"(.+)/names/.+")

Change = Callable[[Register], bytes | None]
ChangeOf = Callable[[str, Register], bytes | None]  # with the name of the register


class HeldRegister(Protocol):
    """A hold that is kept for long."""

    def keep(self) -> None:
        """Take the devices that have come, let those go that have left. Raises LockTimeout when
        another process has got a majority meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A membership as engines that do not lie on the devices store it. `order` and `parent`: its
    generation and nonce, and those of the membership that it was made from."""

    order: tuple[int, str]
    parent: tuple[int, str]
    data: bytes  # as pool.json has it

    @property
    def generation(self) -> int:
        """Of the membership."""
        return self.order[0]

    def encode(self) -> bytes:
        """For a register."""
        body = {"order": list(self.order), "parent": list(self.parent), "data": self.data.decode()}
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, data: bytes) -> Successor:
        """Raises IntegrityError."""
        with parsing("a membership in a register"):
            body = json.loads(data)
            (generation, nonce), (before, old) = body["order"], body["parent"]
            return cls(
                order=(whole(generation, "its generation"), str(nonce)),
                parent=(whole(before, "its parent's generation"), str(old)),
                data=str(body["data"]).encode(),
            )


class Exchange(Protocol):
    """A change of the membership, within Registers.exchange()."""

    def settle(self, new: Successor) -> None:
        """Make a membership the one that counts, before devices have it. Raises MembershipError
        when another process was first, RegistersUnavailable."""


class Registers(Protocol):
    """Linearizable records, and holds. Thread-safe; every call has a deadline."""

    def update(self, name: str, change: Change, *, what: str) -> Register:
        """Replace a record by what `change` returns for it (None: leave it), as one step.

        Returns it as it is afterwards, durable. `change` may be called several times, the last call
        counts. Raises LockTimeout and RegistersForeign, and nothing has changed; or
        RegistersUnavailable, then it may have: reading it again tells.
        """

    def update_all(self, change: ChangeOf, *, what: str) -> None:
        """Update the records of all claims, each as one step of its own. Durable on return.

        `change` is right to be made twice on a record. Raises as update(), with some changed.
        """

    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> AbstractContextManager[HeldRegister]:
        """Keep others from holding `name`, one of HOLDS, or "repair-" and a bucket.

        Ends with the process. For order and efficiency: what must not happen twice is made sure of
        by `update` and `exchange`. Raises LockTimeout.
        """

    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> AbstractContextManager[Exchange]:
        """Nothing is updated while the block stores a new membership, and no other one is stored.

        Records are then known to a majority of `staying`, ids of the members to be, of which
        `joining` are not members yet. Raises RegistersUnavailable unless `force`.

        Engines that do not lie on the devices go on updating records: there `settle` makes sure
        that no other membership is stored.
        """

    def after_fork(self) -> None:
        """In the child: what the parent holds is the parent's. No lock, no waiting."""


def bucket_of(key: str) -> int:
    """One of a bounded number: few keys wait for a stranger."""
    return zlib.crc32(key.encode()) % BUCKETS


def key_register(key: str) -> str:
    """The record of a key's claims.

    The manifests of a run's steps share that of its fence (PROTOCOL 18): so the commits of a run
    and what moves its fence are in one order, which the counters of their versions show. So do the
    names by which a trainer knows them.
    """
    if found := _COMMITTED.fullmatch(key):
        key = f"{found[1]}/writer"
    elif found := _NAMED.fullmatch(key):
        key = f"{found[1]}/saves/writer"
    return f"key-{bucket_of(key):04d}"


def claim_registers() -> list[str]:
    """The records of all claims."""
    return [f"key-{number:04d}" for number in range(BUCKETS)]


def repair_hold(key: str) -> str:
    """What a repair of a key holds."""
    return f"repair-{bucket_of(key):04d}"


class LocalRegisters:
    """Records of one process, gone with it: for stores without a pool, and for tests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the records and what is held
        self._records: dict[str, Register] = {}
        self._held: set[str] = set()

    def update(self, name: str, change: Change, *, what: str) -> Register:
        with self._lock:
            now = self._records.get(name, Register())
            value = change(now)
            if value is None:
                return now
            made = Register(order=(0, now.order[1] + 1), value=value)
            self._records[name] = made
            return made

    def update_all(self, change: ChangeOf, *, what: str) -> None:
        for name in claim_registers():
            self.update(name, partial(change, name), what=what)

    @contextmanager
    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> Iterator[HeldRegister]:
        until = self._clock.monotonic() + (30.0 if deadline_seconds is None else deadline_seconds)
        while not self._take(name):
            if self._clock.monotonic() >= until:
                raise LockTimeout(f"{what}: another thread holds {name}. Nothing was changed.")
            self._clock.wait(0.01)
        try:
            yield NothingToKeep()
        finally:
            with self._lock:
                self._held.discard(name)

    def _take(self, name: str) -> bool:
        with self._lock:
            free = name not in self._held
            self._held.add(name)
            return free

    @contextmanager
    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> Iterator[Exchange]:
        yield NothingToSettle()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._held.clear()


class NothingToKeep:
    """A hold that cannot come apart."""

    def keep(self) -> None:
        """It is whole."""


class NothingToSettle:
    """An exchange in which what the devices hold decides."""

    def settle(self, new: Successor) -> None:
        """They will have it."""
