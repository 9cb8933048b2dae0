"""What processes of one pool agree through: small named records, and holds (PROTOCOL 6, 15).

`Registers` is the whole of what an engine offers. Two are here: the pool's own devices
(device_registers.py), and a run directory for stores that have no locks (run_registers.py).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from hpstore.devices.base import Device
from hpstore.errors import LockTimeout
from hpstore.runtime.clock import Clock

VALUE_BYTES_MOST = 200
BUCKETS = 4096
MEMBERSHIP, REPAIR, AGENT = "membership", "repair", "agent"  # what is held for long
WAITING = "waiting"  # by who waits for REPAIR, so that a pass of days gives way
HOLDS = (MEMBERSHIP, REPAIR, AGENT, WAITING)  # their places in the registers: added to at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A record as it is. `order` rises with every change; `value` None: it was never written."""

    order: tuple[int, int] = (0, 0)
    value: bytes | None = None


Change = Callable[[Register], bytes | None]


class HeldRegister(Protocol):
    """A hold that is kept for long."""

    def keep(self) -> None:
        """Take the devices that have come, let those go that have left. Raises LockTimeout when
        another process has got a majority meanwhile."""


class Registers(Protocol):
    """Linearizable records, and holds. Thread-safe; every call has a deadline."""

    def update(self, name: str, change: Change, *, what: str) -> Register:
        """Replace a record by what `change` returns for it (None: leave it), as one step.

        Returns it as it is afterwards, durable. `change` may be called several times, the last call
        counts. Raises LockTimeout and RegistersForeign, and nothing has changed; or
        RegistersUnavailable, then it may have: reading it again tells.
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
    ) -> AbstractContextManager[None]:
        """Nothing is updated while the block stores a new membership, and no other one is stored.

        Records are then known to a majority of `staying`, ids of the members to be, of which
        `joining` are not members yet. Raises RegistersUnavailable unless `force`.
        """

    def after_fork(self) -> None:
        """In the child: what the parent holds is the parent's. No lock, no waiting."""


def bucket_of(key: str) -> int:
    """One of a bounded number: few keys wait for a stranger."""
    return zlib.crc32(key.encode()) % BUCKETS


def key_register(key: str) -> str:
    """The record of a key's claims."""
    return f"key-{bucket_of(key):04d}"


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
    ) -> Iterator[None]:
        yield

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._held.clear()


class NothingToKeep:
    """A hold that cannot come apart."""

    def keep(self) -> None:
        """It is whole."""
