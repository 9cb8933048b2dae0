"""What is remembered of a device from one round of the policy to the next. Pure."""

from __future__ import annotations

from dataclasses import replace

from hpstore.format.records import DeviceState
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState
from hpstore.health.policy.guards import DAY_SECONDS, HOUR_SECONDS
from hpstore.health.policy.states import DeviceFacts, DeviceHealth, PolicyConfig, PolicyState

ABSENT = (HealthState.REMOVED, HealthState.EVICTED)
_MOST_CHANGES = 64  # of a device are remembered


def observed(
    health: DeviceHealth, fact: DeviceFacts, verdict: DeviceVerdict | None, now_seconds: float
) -> DeviceHealth:
    """Note since when a device has been quiet, away or back; entries older than a day are dropped.

    A member that takes columns, and whose eviction is no longer asked for, has not left: it came
    back in time, or an object needs it. An operator's later decision stands (PROTOCOL 16).
    """
    quiet = health.quiet_since_seconds
    quiet = None if verdict else (now_seconds if quiet is None else quiet)
    away = None if fact.present else health.gone_since_seconds
    if not fact.present and away is None:
        away = now_seconds
    here = None if not fact.present else health.here_since_seconds
    changes: dict[str, object] = {}
    if fact.present and here is None:
        here = now_seconds
        if health.state in ABSENT:
            changes = {"asked_seconds": 0.0}  # it need not wait for what was asked before
    old = sum(now_seconds - at >= DAY_SECONDS for at in health.sitouts)
    if old:
        changes |= {"sitouts": health.sitouts[old:], "sat_out": health.sat_out[old:]}
    if health.level and now_seconds - health.level_since_seconds >= DAY_SECONDS:
        changes |= {"level": health.level - 1, "level_since_seconds": now_seconds}
    changes |= {
        "quiet_since_seconds": quiet,
        "gone_since_seconds": away,
        "here_since_seconds": here,
        "score": verdict.score if verdict else 0.0,
        "lapsed": health.lapsed and (fact.leaving or fact.pool_state is not DeviceState.ONLINE),
    }
    return replace(health, **changes)  # type: ignore[arg-type]


def fresh_absences(state: PolicyState, now_seconds: float) -> PolicyState:
    """What an agent remembers when it decides again after another one did: devices that it had for
    absent are so from now on, as it has not seen what became of them."""

    def fresh(health: DeviceHealth) -> DeviceHealth:
        if health.state is not HealthState.REMOVED:
            return health
        return replace(
            health, since_seconds=now_seconds, gone_since_seconds=None, asked_seconds=0.0
        )

    devices = {device: fresh(health) for device, health in state.devices.items()}
    return replace(state, devices=devices)


def entered(
    health: DeviceHealth, state: HealthState, now_seconds: float, **changes: object
) -> DeviceHealth:
    """A device as it enters another state: refusals and requests of the one before are over."""
    if health.state is HealthState.SITOUT:
        changes = {"manual": False, **changes}
        if len(health.sat_out) < len(health.sitouts):  # not an operator's
            sat = (*health.sat_out, now_seconds - health.since_seconds)
            changes = {"sat_out": sat, **changes}
    recent = tuple(at for at in health.changes if now_seconds - at < HOUR_SECONDS)
    changes = {
        "state": state,
        "since_seconds": now_seconds,
        "changes": (*recent, now_seconds)[-_MOST_CHANGES:],
        "refused": "",
        "asked_seconds": 0.0,
        "asked": "",
        "confirmed": False,
        **changes,
    }
    return replace(health, **changes)  # type: ignore[arg-type]


def sitout_seconds(health: DeviceHealth, config: PolicyConfig) -> float:
    """Length of the next sit-out: twice as long for every failed probation of the last days."""
    return min(config.sitout_seconds * 2.0 ** min(health.level, 30), config.sitout_most_seconds)


def release_seconds(health: DeviceHealth, config: PolicyConfig) -> float:
    """How long a suspect must be quiet: twice as long for every return of the last hour."""
    returns = len(health.changes) // 2
    return min(config.release_least_seconds * 2.0 ** min(returns, 30), config.release_seconds)


def drain_reason(
    health: DeviceHealth, fact: DeviceFacts, now_seconds: float, config: PolicyConfig
) -> str:
    """Why a device that sits out should be drained; "" when it may return."""
    sat = sum(health.sat_out) + now_seconds - health.since_seconds
    if fact.writes_slow:
        return "its writes are slow, too"
    if len(health.sitouts) >= config.strikes:
        return f"{len(health.sitouts)} sit-outs within a day"
    if sat > config.sat_out_most_seconds:
        return f"{sat / 60:.0f} minutes sat out within a day"
    return ""
