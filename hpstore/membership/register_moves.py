"""Moving a pool's registers to another place while processes use them, and making lost ones again.

A move marks every record in the old place with the epoch of the new one, each as one change: from
then on no process gets a claim from it there. Then the records are in the new place, claims that
are held included, and then the membership names it. A claim that was taken before goes on.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace

from hpstore.agreement.register_url import DEVICES, parse_register_url
from hpstore.agreement.registers import RECORD, Register, Registers, claim_registers
from hpstore.agreement.swap_registers import SwapRegisters
from hpstore.agreement.swap_store import probe_swaps
from hpstore.devices.horizon_guard import HORIZON, MARK
from hpstore.errors import (
    ConfigError,
    HpstoreError,
    MembershipError,
    RegistersUnavailable,
    without_promise,
)
from hpstore.format.records import RegisterPlace
from hpstore.membership.members import commit_record, successor_of, with_registers
from hpstore.membership.outside_registers import is_outside, outside_registers
from hpstore.membership.pool_registers import PoolRegisters, mark_value, plain_value
from hpstore.objects.context import PoolContext

_log = logging.getLogger(__name__)
_DAY_MS = 86_400_000
_WHAT = "registers set"
Values = Mapping[str, bytes | None]


def new_place(url: str) -> RegisterPlace:
    """A place that no record is marked for yet. Raises ConfigError."""
    parse_register_url(url)
    return RegisterPlace(url=url, epoch=secrets.token_hex(8))


def probe_place(store: PoolContext, place: RegisterPlace) -> None:
    """Raise unless registers can be there: ConfigError where swaps are not enforced,
    RegistersUnavailable where it does not answer."""
    if not is_outside(place):
        return
    target = outside_registers(store, place)
    try:
        probe_swaps(target.store, store.settings.registers_deadline_seconds)
    finally:
        target.close()


def move_registers(store: PoolContext, registers: PoolRegisters, place: RegisterPlace) -> None:
    """Move the records to a new place, and commit it. The caller holds the membership, has probed
    the place, and refreshes afterwards.

    Conditional puts wait meanwhile, and go on. Cut short anywhere, it is run again: records that
    are marked for a place that did not come to be are refused to all but the next move. Raises
    MembershipError when the membership was changed meanwhile.
    """
    record = store.view.record
    if place.url == DEVICES and record.registers is None and not _is_cut_short(registers):
        raise ConfigError("the pool's registers are on its devices already. Nothing was changed.")
    old = registers.engine()
    new = with_registers(record, place)
    target = registers.engine(new)
    values: dict[str, bytes | None] = {}
    try:
        _mark_all(old, place, values)
        if target is not old:
            _seed(target, place, values)
        if isinstance(target, SwapRegisters):
            data = successor_of(store, new).encode()
            target.update(RECORD, lambda _: data, what=_WHAT)
        commit_record(store, new, {}, force=False)
    except HpstoreError as error:
        if not values:
            raise  # no record was marked
        raise MembershipError(
            f"the registers are half-way to {place.url}: {without_promise(error)} Conditional puts "
            "and changes of the membership wait until `hpstore registers set` has been run again, "
            "also with another place; reading, plain puts and deletes go on."
        ) from error


def reset_registers(store: PoolContext, registers: PoolRegisters, place: RegisterPlace) -> None:
    """Make registers that are lost again at a new place, from what the devices know. The caller has
    made sure that the old ones are lost, and refreshes afterwards.

    No counter was handed out that is not below the new ones, unless by a clock that is ahead by
    more than a day. Raises MembershipError, RegistersUnavailable.
    """
    new = with_registers(store.view.record, place)
    beside = registers.engine(replace(new, registers=None))  # excludes another reset
    value = json.dumps({"c": highest_counter(store) + _DAY_MS, "n": "", "o": "reset"}).encode()
    target = registers.engine(new)
    _seed(target, place, dict.fromkeys(claim_registers(), value))
    if isinstance(target, SwapRegisters):
        data = successor_of(store, new).encode()
        target.update(RECORD, lambda _: data, what="registers reset")
    commit_record(store, new, {}, force=False, registers=beside)


def highest_counter(store: PoolContext) -> int:
    """Above all that files of the pool carry: a mark is durable before them (PROTOCOL 1)."""
    answers = store.each(
        store.view.devices,
        lambda _, device: max(device.counter(kind, store.pool_key) for kind in (MARK, HORIZON)),
    )
    marks = [answer for answer in answers.values() if not isinstance(answer, Exception)]
    silent = [d for d, answer in answers.items() if isinstance(answer, Exception)]
    record = store.view.record
    if not record.opens_without(store.view.missing.union(silent)):
        raise RegistersUnavailable(
            f"{len(silent) + len(store.view.missing)} devices do not answer: how far versions are "
            "counted cannot be told. Nothing was changed; bring devices back."
        )
    return max(store.clock.wall_ms(), *marks)


def _is_cut_short(registers: PoolRegisters) -> bool:
    """Whether a move has begun and its place has not come to be."""
    found = registers.engine().update(claim_registers()[0], lambda _: None, what=_WHAT)
    return found.value is not None and found.value[:1] == b"@"


def _mark_all(old: Registers, place: RegisterPlace, values: dict[str, bytes | None]) -> None:
    """Mark all records for a new place, each as it is then; `values` become theirs, before each is
    marked."""

    def mark(name: str, register: Register) -> bytes:
        values[name] = plain_value(register.value)
        return mark_value(values[name], place.epoch)

    old.update_all(mark, what=_WHAT)


def _seed(target: Registers, place: RegisterPlace, values: Values) -> None:
    """Put records into a place that no membership names yet."""
    target.update_all(lambda name, _: mark_value(values[name], place.epoch), what=_WHAT)
