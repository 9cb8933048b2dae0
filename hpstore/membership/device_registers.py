"""Registers on the pool's own devices, under locks of a majority of them (PROTOCOL 15).

A lock follows its device, so all that can reach the disks exclude each other, whatever their user,
container or temporary directory is. Two majorities have a device in common, also those before and
after a change of membership, and a change takes all records along.

While every member takes part, what a writer that died has left on some of them is seen and
finished. When some do not, it may lie where it is not seen: then a round is begun that is above it,
noted on a majority first. So of two records the one that was acknowledged always wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from hpstore.agreement.register_slots import (
    CLAIMS,
    SLOT_BYTES,
    SlotEntry,
    change_all,
    decode_entry,
    encode_entry,
    merge,
    range_of,
)
from hpstore.agreement.registers import (
    Change,
    ChangeOf,
    Exchange,
    HeldRegister,
    NothingToSettle,
    Register,
)
from hpstore.devices.base import Device, Hold
from hpstore.errors import MembershipError, RegistersUnavailable
from hpstore.membership.device_locks import (
    POLL_SECONDS,
    DeviceLocks,
    LockAttempt,
    lock_timeout,
    majority,
    unavailable,
)
from hpstore.membership.lasting_holds import KeptHold
from hpstore.objects.context import PoolContext


class DeviceRegisters:
    """Of an open pool. Thread-safe."""

    def __init__(self, store: PoolContext) -> None:
        self._store, self.locks = store, DeviceLocks(store)

    def after_fork(self) -> None:
        self.locks.after_fork()

    def update(self, name: str, change: Change, *, what: str) -> Register:
        offset, nbytes = range_of(name)
        found, members = self._lock_range(offset, nbytes, what)
        holds = found.holds
        try:
            entries = {d: decode_entry(hold.content) for d, hold in holds.items()}
            top = max(entries.values(), key=lambda e: e.order)
            value = change(Register(order=top.order, value=top.value))
            held = sum(entry.order == top.order for entry in entries.values())
            if value is None and held >= majority(members):
                return Register(order=top.order, value=top.value)
            made = self._next(holds, entries, top, value, members)
            data = {d: encode_entry(replace(made, copy=e.copy)) for d, e in entries.items()}
            finishing = {d: holds.pop(d) for d in data}  # released where they are written
            self.locks.finish(finishing, data, members, name)
            return Register(order=made.order, value=made.value)
        finally:
            self.locks.release(holds)

    def update_all(self, change: ChangeOf, *, what: str) -> None:
        """Under one lock, with one write of a device, or two while members are away."""
        found, members = self._lock_range(*CLAIMS, what)
        holds, need = found.holds, majority(members)
        try:
            images = {d: bytearray(hold.content) for d, hold in holds.items()}
            away = len(holds) < len(members)
            turns = change_all(images, change, begin=away)
            for image in turns:
                data = {d: (0, bytes(image[d])) for d in holds}
                done = self.locks.write(holds, data, need)
                for device in set(holds) - done:  # what is late there must not come after the rest
                    self.locks.release({device: holds.pop(device)})
                if len(done) < need:
                    raise RegistersUnavailable(
                        f"{what}: registers were written on {len(done)} of {len(members)} devices, "
                        "more than half are needed. Objects are untouched; bring devices back and "
                        "run it again."
                    )
        finally:
            self.locks.release(holds)

    @contextmanager
    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> Iterator[HeldRegister]:
        limit = (
            self._store.settings.lock_deadline_seconds
            if deadline_seconds is None
            else deadline_seconds
        )
        held = KeptHold(self._store, self.locks, name, what)
        try:
            held.take(limit)
            yield held
        finally:
            held.release()

    @contextmanager
    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> Iterator[Exchange]:
        what, record = "membership change", self._store.view.record
        found, members = self._lock_range(*CLAIMS, what, joining=joining, force=force)
        holds = found.holds
        try:
            if found.newest > record.generation:
                raise MembershipError(
                    f"the membership moved from generation {record.generation} to {found.newest} "
                    "meanwhile: another process has changed it. Nothing was changed; look at it, "
                    "and run this again if it is still wanted."
                )
            if set(staying) != set(members):
                self._take_along(holds, staying, force=force)
            yield NothingToSettle()
        finally:
            self.locks.release(holds)

    def _lock_range(
        self,
        offset: int,
        nbytes: int,
        what: str,
        *,
        joining: Mapping[str, Device] | None = None,
        force: bool = False,
    ) -> tuple[LockAttempt, list[str]]:
        """Lock a majority of the members, and those `joining`; with the ids of the members.

        None of them knows a newer membership, except for a change (`joining` given), which looks at
        `newest` itself. `force`: as many as answer do.
        """
        store, limit = self._store, self._store.settings.lock_deadline_seconds
        until, pause = store.clock.monotonic() + limit, POLL_SECONDS[0]
        while True:
            view = store.view
            members = [m.device_id for m in view.record.members]
            need = majority(members)
            found = self.locks.attempt({**view.devices, **(joining or {})}, offset, nbytes, need)
            mine = len(found.holds.keys() & set(members))
            if joining is None and found.newest > view.record.generation:
                self.locks.release(found.holds)
                store.refresh()
                moved = store.view.record.generation != view.record.generation
            elif mine >= need or (force and mine and not found.busy and not found.blocked):
                return found, members
            else:
                self.locks.release(found.holds)
                moved = False
                if not found.blocked and mine + len(found.busy) < need:
                    raise unavailable(what, mine + len(found.busy), need, len(members), found)
            if store.clock.monotonic() >= until:
                raise lock_timeout(store, what, limit, found)
            if not moved:
                store.clock.wait(pause)
                pause = min(POLL_SECONDS[1], 1.5 * pause)

    def _next(
        self,
        holds: dict[str, Hold],
        entries: dict[str, SlotEntry],
        top: SlotEntry,
        value: bytes | None,
        members: Collection[str],
    ) -> SlotEntry:
        """The entry to write: `value`, or what is newest where a majority does not have it yet.

        Updates `entries` when a round was begun, and leaves those out that have not taken it.
        """
        turn = max(entry.promised for entry in entries.values())
        if len(holds) < len(members):
            turn += 1
            begun = {d: replace(e, promised=turn) for d, e in entries.items()}
            data = {d: encode_entry(e) for d, e in begun.items()}
            done = self.locks.write(holds, data, majority(members))
            for device in entries.keys() - done:  # what is late there must not come after the rest
                del entries[device]
            if len(done) < majority(members):
                raise RegistersUnavailable(
                    f"a round of a register reached {len(done)} of {len(members)} devices: more "
                    "than half are needed. Nothing was changed; bring devices back and try again."
                )
            for device in done:
                entries[device] = replace(begun[device], copy=1 - entries[device].copy)
        sequence = top.order[1] + (value is not None)
        return SlotEntry(
            promised=turn, order=(turn, sequence), value=top.value if value is None else value
        )

    def _take_along(self, holds: dict[str, Hold], staying: Collection[str], *, force: bool) -> None:
        """Records of claims go where a majority of the members to be will find them."""
        lacking = merge({d: hold.content for d, hold in holds.items()})
        data = {}
        for device, entries in lacking.items():
            if not entries:
                continue
            image = bytearray(holds[device].content)
            for offset, entry in entries.items():
                where, copy = encode_entry(entry)
                image[offset + where : offset + where + len(copy)] = copy
            low, high = min(entries), max(entries) + SLOT_BYTES
            data[device] = (low, bytes(image[low:high]))
        locked = set(holds)
        failed = data.keys() - self.locks.write(holds, data, len(data))
        whole = (locked - failed) & set(staying)
        if len(whole) < majority(staying) and not force:
            raise RegistersUnavailable(
                f"records of claims reached {len(whole)} of {len(staying)} members to be, more "
                "than half are needed. The membership is unchanged; bring devices back."
            )
