"""Holds that are kept for long, on most of the devices that answer."""

from __future__ import annotations

import json
import os
import socket

from hpstore.agreement.register_slots import (
    SLOT_BYTES,
    SlotEntry,
    decode_entry,
    encode_entry,
    range_of,
)
from hpstore.agreement.registers import HOLDS, VALUE_BYTES_MOST
from hpstore.devices.base import Device, Hold
from hpstore.errors import LockTimeout
from hpstore.format.untrusted_bytes import MALFORMED
from hpstore.membership.device_locks import (
    POLL_SECONDS,
    DeviceLocks,
    LockAttempt,
    lock_timeout,
    majority,
    unavailable,
)
from hpstore.objects.context import PoolContext


class KeptHold:
    """A hold on most of the devices that answer."""

    def __init__(self, store: PoolContext, locks: DeviceLocks, name: str, what: str) -> None:
        self._store, self._locks, self._name, self._what = store, locks, name, what
        self._offset, self._bytes = range_of(name)
        self._holds: dict[str, tuple[Device, Hold]] = {}

    def take(self, limit_seconds: float) -> None:
        """Wait for it. Raises LockTimeout, RegistersUnavailable."""
        clock = self._store.clock
        until, pause = clock.monotonic() + limit_seconds, POLL_SECONDS[0]
        while (found := self._try_all()) is not None:
            if clock.monotonic() >= until:
                holder = next(filter(None, map(_holder, found.busy.values())), "")
                raise lock_timeout(self._store, self._what, limit_seconds, found, holder)
            clock.wait(pause)
            pause = min(POLL_SECONDS[1], 1.5 * pause)

    def _try_all(self) -> LockAttempt | None:
        """Take what can be had; None when that is enough, else nothing is kept."""
        locks = self._locks
        view = self._store.view
        members = [m.device_id for m in view.record.members]
        found = locks.attempt(view.devices, self._offset, self._bytes, majority(members))
        answering = len(found.holds) + len(found.busy)
        if not answering:
            raise unavailable(self._what, 0, 1, len(members), found)
        if found.blocked or len(found.holds) < min(majority(members), answering):
            locks.release(found.holds)
            return found
        self._holds = {d: (view.devices[d], hold) for d, hold in found.holds.items()}
        self._sign()
        return None

    def _sign(self) -> None:
        """Leave a word of who holds it, for those who wait."""
        if self._name not in HOLDS:
            return
        store = self._store
        who = {"pid": os.getpid(), "host": socket.gethostname()[:48], "what": self._what[:80]}
        value, order = json.dumps(who).encode(), (0, store.clock.wall_ms())
        if len(value) > VALUE_BYTES_MOST:
            return
        holds = {d: hold for d, (_, hold) in self._holds.items()}
        entries = {d: decode_entry(hold.content) for d, hold in holds.items()}
        data = {
            d: encode_entry(
                SlotEntry(order=max(order, (0, e.order[1] + 1)), value=value, copy=e.copy)
            )
            for d, e in entries.items()
        }
        try:
            self._locks.write(holds, data, len(holds))
        finally:
            self._holds = {d: kept for d, kept in self._holds.items() if d in holds}

    def keep(self) -> None:
        locks = self._locks
        view = self._store.view
        for device_id, (device, hold) in list(self._holds.items()):
            if view.devices.get(device_id) is not device or not hold.taken:
                locks.release({device_id: hold})
                del self._holds[device_id]
        if view.devices.keys() == self._holds.keys():
            return
        known, found = self._holds.keys() | locks.late(), LockAttempt()
        rest = {d: x for d, x in view.devices.items() if d not in known}
        limit = self._store.settings.device_deadline_seconds
        locks.ask(rest, self._offset, self._bytes, len(rest), limit, found)
        self._holds |= {d: (rest[d], hold) for d, hold in found.holds.items()}
        if found.busy and len(self._holds) < majority(view.record.members):
            holder = next(filter(None, map(_holder, found.busy.values())), "another process")
            self.release()
            raise LockTimeout(
                f"{self._what}: this process was stopped or cut off, and {holder} has its hold "
                "now. Its earlier work is kept."
            )

    def release(self) -> None:
        """Let all go."""
        self._locks.release({d: hold for d, (_, hold) in self._holds.items()})
        self._holds = {}


def _holder(hold: Hold) -> str:
    """Who holds it, by what it has left there."""
    if len(hold.content) < SLOT_BYTES:
        return ""  # it is only locked
    try:
        who = json.loads(decode_entry(hold.content).value or b"{}")
        return f"process {who['pid']} on {who['host']} ({who['what']})"
    except MALFORMED:
        return ""
