"""Which registers a pool has: its devices', a run directory's, or those outside that its record
names.

Records of claims are marked with the epoch of their place. A process that finds another mark reads
the membership again: the registers have been moved, or are being moved (register_moves.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from hpstore.agreement.registers import (
    Change,
    ChangeOf,
    Exchange,
    HeldRegister,
    NothingToKeep,
    Register,
    Registers,
)
from hpstore.agreement.swap_registers import SwapRegisters, lost_registers
from hpstore.devices.base import Device
from hpstore.errors import ConfigError, HpstoreError, RegistersForeign, RegistersUnavailable
from hpstore.format.records import PoolRecord, RegisterPlace
from hpstore.membership.device_locks import majority
from hpstore.membership.device_registers import DeviceRegisters
from hpstore.membership.outside_registers import is_outside, outside_registers
from hpstore.membership.run_registers import RunRegisters
from hpstore.objects.context import PoolContext

_POLL_SECONDS = (0.05, 0.5)
_MARK_BYTES = 18  # "@", the epoch, " "


class RegistersMoved(HpstoreError):
    """A record is marked for another place of registers than this process' membership names."""


class PoolRegisters:
    """Of an open pool; chosen at each use, as members and places come and go. Thread-safe.

    Stores that answer are counted: while too few do, neither engine has what it needs, so two
    processes never choose differently and both go on.
    """

    def __init__(self, store: PoolContext, directory: Callable[[], Path]) -> None:
        self._store = store
        self.devices, self._run = DeviceRegisters(store), RunRegisters(store, directory)
        self._lock = threading.Lock()  # guards _outside
        self._outside: dict[RegisterPlace, SwapRegisters] = {}  # two while they are moved

    def engine(self, record: PoolRecord | None = None) -> Registers:
        """Those that a membership names, by default the present one. Raises RegistersForeign where
        this process cannot use them."""
        record = self._store.view.record if record is None else record
        if record.registers is not None and is_outside(record.registers):
            return self._kept_outside(record.registers)
        stores = sum(device.mode == "remote" for device in self._store.view.devices.values())
        members = record.members
        return self._run if stores > len(members) - majority(members) else self.devices

    def outside(self) -> SwapRegisters | None:
        """Those outside of the devices, if the pool has such."""
        place = self._store.view.record.registers
        return self._kept_outside(place) if place is not None and is_outside(place) else None

    def _kept_outside(self, place: RegisterPlace) -> SwapRegisters:
        """Raises RegistersForeign where this process cannot use them."""
        with self._lock:
            if place not in self._outside:
                try:
                    self._outside[place] = outside_registers(self._store, place)
                except ConfigError as error:
                    raise RegistersForeign(
                        f"the pool's registers are in {place.url}: {error} Reading, plain puts and "
                        "deletes go on."
                    ) from error
            return self._outside[place]

    def update(self, name: str, change: Change, *, what: str) -> Register:
        store, pause = self._store, _POLL_SECONDS[0]
        until = store.clock.monotonic() + store.settings.lock_deadline_seconds
        while True:
            record = store.view.record
            try:
                found = self.engine().update(name, _marked(record, change), what=what)
                return replace(found, value=_unmarked(found.value)[1])
            except (RegistersForeign, RegistersUnavailable):
                if not self._moved(record):
                    raise
                continue
            except RegistersMoved as error:
                store.refresh()
                if store.view.record.registers != record.registers:
                    continue
                if store.clock.monotonic() >= until:
                    raise RegistersUnavailable(
                        f"{what}: the pool's registers are being moved, and that has not ended: "
                        f"{error} Nothing was changed. If no `hpstore registers set` is running, "
                        "one was cut short: run it again."
                    ) from error
            store.clock.wait(pause)
            pause = min(_POLL_SECONDS[1], 1.5 * pause)

    def update_own(self, name: str, change: Change, *, what: str) -> Register:
        """As update(), of a record that each place of registers has for itself: it has no mark, and
        a move does not take it along."""
        record = self._store.view.record
        try:
            return self.engine().update(name, change, what=what)
        except (RegistersForeign, RegistersUnavailable):
            if not self._moved(record):
                raise
            return self.engine().update(name, change, what=what)

    def update_all(self, change: ChangeOf, *, what: str) -> None:
        """Of the engine in use, with the marks as they are: for moves."""
        self.engine().update_all(change, what=what)

    @contextmanager
    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> Iterator[HeldRegister]:
        record = self._store.view.record
        place = record.registers
        if name.startswith("repair-") and place is not None and is_outside(place):
            yield NothingToKeep()  # two repairs at once do no harm (PROTOCOL 10)
            return
        with ExitStack() as stack:
            try:
                taken = self.engine().hold(name, what, deadline_seconds=deadline_seconds)
                held = stack.enter_context(taken)
            except (RegistersForeign, RegistersUnavailable):
                if not self._moved(record):
                    raise
                taken = self.engine().hold(name, what, deadline_seconds=deadline_seconds)
                held = stack.enter_context(taken)
            yield held

    def _moved(self, record: PoolRecord) -> bool:
        """Whether registers outside that fail are those of before: they were moved, or reset."""
        if record.registers is None:
            return False
        self._store.refresh()
        return self._store.view.record.registers != record.registers

    @contextmanager
    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> Iterator[Exchange]:
        with self.engine().exchange(joining, staying, force=force) as exchange:
            yield exchange

    def after_fork(self) -> None:
        """In the child of a fork. No lock, no waiting."""
        self._lock = threading.Lock()
        self.devices.after_fork()
        self._run.after_fork()
        for engine in self._outside.values():
            engine.after_fork()

    def close(self) -> None:
        """Let connections go. Idempotent."""
        with self._lock:
            known, self._outside = self._outside, {}
        for engine in known.values():
            engine.close()


def epoch_of(record: PoolRecord) -> str:
    """What records are marked with that are valid now; "" in a pool whose registers never moved."""
    return "" if record.registers is None else record.registers.epoch


def _marked(record: PoolRecord, change: Change) -> Change:
    """A change of a record that is valid, and stays so."""
    epoch = epoch_of(record)

    def checked(register: Register) -> bytes | None:
        mark, value = _unmarked(register.value)
        if mark != epoch and (register.value is not None or not epoch):
            raise RegistersMoved(f"a register is marked {mark or 'as of the first place'!r}.")
        if register.value is None and epoch and record.registers is not None:
            raise lost_registers(record.registers.url)
        made = change(replace(register, value=value))
        return None if made is None else mark_value(made, epoch)

    return checked


def mark_value(value: bytes | None, epoch: str) -> bytes:
    """A record's value for an epoch; nothing was ever written where it is empty."""
    return (f"@{epoch} ".encode() if epoch else b"") + (value or b"")


def _unmarked(value: bytes | None) -> tuple[str, bytes | None]:
    """Epoch and value of a record."""
    if value is None or value[:1] != b"@" or value[_MARK_BYTES - 1 : _MARK_BYTES] != b" ":
        return "", value
    return value[1 : _MARK_BYTES - 1].decode(errors="replace"), value[_MARK_BYTES:] or None


def plain_value(value: bytes | None) -> bytes | None:
    """The value of a record, whatever it is marked with."""
    return _unmarked(value)[1]
