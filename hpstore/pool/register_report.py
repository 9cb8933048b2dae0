"""Where a pool's registers are, whether they answer; moving and resetting them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpstore.agreement.register_url import DEVICES
from hpstore.errors import HpstoreError, MembershipError, RegistersForeign, RegistersUnavailable
from hpstore.membership.register_moves import (
    move_registers,
    new_place,
    probe_place,
    reset_registers,
)
from hpstore.pool.session import PoolSession

_LOOKED_AT = "key-0000"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterReport:
    """Where registers are and how they are.

    `kind`: "devices", "run directory" or "outside". `endpoints`: each of those outside, with why it
    does not answer, "" where it does. `problem`: why conditional puts and changes of the membership
    are refused now, "" where they are not. `read_seconds`: of one register.
    """

    url: str
    kind: str
    problem: str
    read_seconds: float
    endpoints: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """For --json."""
        return {
            "url": self.url,
            "kind": self.kind,
            "answers": not self.problem,
            "problem": self.problem,
            "read_seconds": self.read_seconds,
            "endpoints": self.endpoints,
        }


def registers_report(session: PoolSession) -> RegisterReport:
    """Look at the registers of an open pool."""
    place = session.store.view.record.registers
    endpoints: dict[str, str] = {}
    problem, since = "", time.perf_counter()
    kind = "outside"
    try:
        outside = session.registers.outside()
        if outside is None:
            own = session.registers.engine() is session.registers.devices
            kind = "devices" if own else "run directory"
        session.registers.update(_LOOKED_AT, lambda _: None, what="registers show")
    except HpstoreError as error:
        problem, outside = str(error), None if isinstance(error, RegistersForeign) else outside
    seconds = time.perf_counter() - since
    if outside is not None:
        endpoints = outside.store.reachable(session.store.settings.registers_deadline_seconds)
    return RegisterReport(
        url=DEVICES if place is None else place.url,
        kind=kind,
        problem=problem,
        read_seconds=seconds,
        endpoints=endpoints,
    )


def move_registers_to(session: PoolSession, url: str) -> RegisterReport:
    """As PoolAdmin.move_registers has it."""
    place = new_place(url)
    probe_place(session.store, place)
    with session.change():
        move_registers(session.store, session.registers, place)
        session.refresh()
    return registers_report(session)


def reset_registers_at(session: PoolSession, url: str, *, force: bool) -> RegisterReport:
    """As PoolAdmin.reset_registers has it."""
    session.refresh()
    now = session.store.view.record.registers
    if not force and _old_answer(session):
        raise MembershipError(
            f"the registers at {DEVICES if now is None else now.url} answer, and have the pool's "
            "records. Nothing was changed. `hpstore registers set` moves them; --force gives them "
            "up, which is right only for etcd that was restored from a backup."
        )
    place = new_place(url or (DEVICES if now is None else now.url))
    probe_place(session.store, place)
    reset_registers(session.store, session.registers, place)
    session.refresh()
    return registers_report(session)


def _old_answer(session: PoolSession) -> bool:
    """Whether the registers in use have the pool's records; a fresh look, past what this process
    has open."""
    place = session.store.view.record.registers
    try:
        session.registers.update(_LOOKED_AT, lambda _: None, what="registers reset")
    except RegistersForeign:
        return place is None or place.url == DEVICES
    except RegistersUnavailable:
        return False
    return True
