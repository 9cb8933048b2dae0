"""What voluntary removals must leave (PROTOCOL 17). Pure.

Healing what is faulted or gone is never asked here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hpstore.format.placement import lost_columns
from hpstore.format.records import DeviceState
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import (
    DeviceFacts,
    DeviceHealth,
    PolicyConfig,
    PolicyState,
    PoolFacts,
)

_LOST = frozenset(
    {HealthState.FAULTED, HealthState.REMOVED, HealthState.EVICTED, HealthState.REBUILDING}
)
_KEPT_OFF = frozenset(
    {HealthState.SITOUT, HealthState.PROBATION, HealthState.DRAINING, HealthState.MAINTENANCE}
)
DAY_SECONDS, HOUR_SECONDS = 86400.0, 3600.0

Devices = Mapping[str, DeviceHealth]


def counted(facts: PoolFacts) -> dict[str, DeviceFacts]:
    """Devices that columns are missed of when they are bad: not those made up for already."""
    return {d: f for d, f in facts.devices.items() if f.pool_state is not DeviceState.HEALED}


def lost(devices: Devices, facts: PoolFacts) -> frozenset[str]:
    """Devices whose columns cannot be had."""
    return frozenset(
        d
        for d, fact in counted(facts).items()
        if not fact.present or devices.get(d, DeviceHealth()).state in _LOST
    )


def silent(devices: Devices, facts: PoolFacts) -> frozenset[str]:
    """Lost devices without those that are back and being reconciled: they can be read."""
    return frozenset(
        d
        for d in lost(devices, facts)
        if not facts.devices[d].present or devices[d].state is not HealthState.REBUILDING
    )


def kept_off(devices: Devices, facts: PoolFacts) -> frozenset[str]:
    """Devices that could be read and are spared: sitting out, on probation, draining."""
    gone = lost(devices, facts)
    return frozenset(
        d
        for d in counted(facts)
        if d not in gone and devices.get(d, DeviceHealth()).state in _KEPT_OFF
    )


def weight(devices: Collection[str], facts: PoolFacts) -> int:
    """Most columns of an object that these can hold: by failure domain where `spread` bounds it."""
    return lost_columns([facts.devices[d].domain or d for d in devices], facts.spread)


def may_be_kept_off(devices: Devices, facts: PoolFacts, reserve: int) -> int:
    """How many devices may be spared, so that `reserve` more can be lost. Any stripe may hold any
    devices, so the pool counts as one group."""
    left = facts.parity - weight(lost(devices, facts), facts)
    if facts.losses_tolerated is not None:
        left = min(left, facts.losses_tolerated)
    return max(0, left - reserve)


def refusal(
    devices: Devices,
    state: PolicyState,
    facts: PoolFacts,
    now_seconds: float,
    config: PolicyConfig,
    device: str,
) -> str:
    """Why `device` may not be removed by choice now; "" when it may."""
    others = kept_off(devices, facts) - {device}
    reserve = max(1, config.reserve)  # never below k + 1 readable columns
    room = may_be_kept_off(devices, facts, reserve)
    if len(others) + 1 > room:
        return (
            f"{len(others)} of {len(counted(facts))} devices are kept off and "
            f"{len(lost(devices, facts))} are lost: parity {facts.parity} allows {room}"
        )
    return too_soon(devices, state, facts, now_seconds, config, device)


def too_soon(
    devices: Devices,
    state: PolicyState,
    facts: PoolFacts,
    now_seconds: float,
    config: PolicyConfig,
    device: str,
) -> str:
    """Why nothing may be removed by choice now, whether or not parity allows it; "" when it may.

    Enough for a device that goes on being read until all of it is elsewhere.
    """
    if facts.busy:
        return f"{facts.busy} is running"
    if bad := too_many(devices, facts, config):
        return bad
    if device in kept_off(devices, facts):
        return ""  # counted when it was first removed
    recent = [at for at in state.removals if now_seconds - at < HOUR_SECONDS]
    if recent and now_seconds - recent[-1] < config.removal_seconds:
        wait = config.removal_seconds - (now_seconds - recent[-1])
        return f"another device was removed; the next one at the earliest in {wait:.0f} s"
    if len(recent) >= max(1, int(config.removals_per_hour_ratio * len(counted(facts)))):
        return f"{len(recent)} of {len(counted(facts))} devices were removed within the hour"
    return ""


def too_many(devices: Devices, facts: PoolFacts, config: PolicyConfig) -> str:
    """The alarm when too many devices are bad to trust anybody's judgement; "" otherwise."""
    well, all_of_them = (HealthState.ONLINE, HealthState.MAINTENANCE), counted(facts)
    bad = [
        d
        for d, fact in all_of_them.items()
        if not fact.present or devices.get(d, DeviceHealth()).state not in well
    ]
    if len(bad) <= config.bad_ratio_most * len(all_of_them):
        return ""
    return f"{len(bad)} of {len(all_of_them)} devices are bad: no more are removed by choice"
