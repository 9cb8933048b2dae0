"""Which registers a pool has: its devices', or a run directory's where most have no locks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

from hpstore.agreement.registers import Change, HeldRegister, Register, Registers
from hpstore.devices.base import Device
from hpstore.membership.device_locks import majority
from hpstore.membership.device_registers import DeviceRegisters
from hpstore.membership.run_registers import RunRegisters
from hpstore.objects.context import PoolContext


class PoolRegisters:
    """Of an open pool; chosen at each use, as members come and go. Thread-safe.

    Stores that answer are counted: while too few do, neither engine has what it needs, so two
    processes never choose differently and both go on.
    """

    def __init__(self, store: PoolContext, directory: Callable[[], Path]) -> None:
        self._store = store
        self._devices, self._run = DeviceRegisters(store), RunRegisters(store, directory)

    def _engine(self) -> Registers:
        view = self._store.view
        stores = sum(device.mode == "remote" for device in view.devices.values())
        members = view.record.members
        return self._run if stores > len(members) - majority(members) else self._devices

    def update(self, name: str, change: Change, *, what: str) -> Register:
        return self._engine().update(name, change, what=what)

    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> AbstractContextManager[HeldRegister]:
        return self._engine().hold(name, what, deadline_seconds=deadline_seconds)

    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> AbstractContextManager[None]:
        return self._engine().exchange(joining, staying, force=force)

    def after_fork(self) -> None:
        """In the child of a fork. No lock, no waiting."""
        self._devices.after_fork()
        self._run.after_fork()
