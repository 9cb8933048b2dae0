"""Rules of hosts, registers and keepers taken out, as in mutations.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hpstore.agent.pool_keeper import PoolKeeper
from hpstore.agreement.claims import Claims, KeyClaim
from hpstore.agreement.keeper_election import KeeperElection
from hpstore.agreement.registers import Register
from hpstore.errors import RegistersUnavailable
from hpstore.format.records import PoolRecord
from hpstore.membership import pool_registers
from hpstore.objects.write import conditional_put
from hpstore.testing.simulation.checkpoint_mutations import Exchange


def _acknowledges_unanswered(exchange: Exchange) -> None:
    """Rule 6: a conditional put is acknowledged although it is not known whether its claim could
    be given back."""
    before = conditional_put._give_back

    def give_back(claim: KeyClaim, key: str, said: str) -> None:
        with suppress(RegistersUnavailable):
            before(claim, key, said)

    exchange(conditional_put, "_give_back", give_back)


def _claims_without_counters(exchange: Exchange) -> None:
    """Rule 6: a claim that is taken does not raise the counter of the one before."""
    plain = Claims.__init__

    def made(claims: Claims, registers: Any, clock: Any, _: Any, **words: Any) -> None:
        plain(claims, registers, clock, lambda seen: max(clock.wall_ms(), 1), **words)

    exchange(Claims, "__init__", made)


def _lost_is_new(exchange: Exchange) -> None:
    """Rule 15: a record that registers have lost counts as one that was never written."""

    def marked(record: PoolRecord, change: Any) -> Any:
        epoch = pool_registers.epoch_of(record)

        def changed(register: Register) -> bytes | None:
            value = pool_registers.plain_value(register.value)
            made = change(replace(register, value=value))
            return None if made is None else pool_registers.mark_value(made, epoch)

        return changed

    exchange(pool_registers, "_marked", marked)


def _no_election(exchange: Exchange) -> None:
    """Rule 17: every agent decides, evicts and sweeps."""
    exchange(PoolKeeper, "look", lambda keeper: True)
    exchange(PoolKeeper, "decides", property(lambda keeper: True))
    exchange(PoolKeeper, "repairs", property(lambda keeper: True))
    exchange(PoolKeeper, "confirm", lambda keeper: None)

    @contextmanager
    def closing(*_: object, **__: object) -> Any:
        yield

    exchange(PoolKeeper, "closing", closing)


def _endless_terms(exchange: Exchange) -> None:
    """Rule 17: an agent is the keeper until it sees another one."""
    exchange(KeeperElection, "decides", property(lambda election: election.had_it_last))


HOST_MUTATIONS: dict[str, Callable[[Exchange], None]] = {
    "acknowledges-unanswered": _acknowledges_unanswered,
    "claims-without-counters": _claims_without_counters,
    "lost-is-new": _lost_is_new,
    "no-election": _no_election,
    "endless-terms": _endless_terms,
}
