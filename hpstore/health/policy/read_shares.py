"""From the policy's states to what reads and new columns keep off. Pure."""

from __future__ import annotations

from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import DeviceHealth, PolicyState

_ORDER = (
    HealthState.EVICTED,
    HealthState.REMOVED,
    HealthState.FAULTED,
    HealthState.REBUILDING,
    HealthState.MAINTENANCE,
    HealthState.SITOUT,
    HealthState.SUSPECT,
    HealthState.PROBATION,
    HealthState.READ_ONLY,
    HealthState.DRAINING,
    HealthState.ONLINE,
)


def read_shares(state: PolicyState, shares: tuple[float, ...]) -> dict[str, float]:
    """Devices that get less than all of their reads, and how much; the worst first.

    A suspect gets none: its reads are planned round it.
    """
    found = {}
    for device, health in _worst_first(state):
        suspect = health.state is HealthState.SUSPECT
        share = 0.0 if suspect else health.read_share(shares)
        if share < 1.0:
            found[device] = share
    return found


def no_new_columns(state: PolicyState) -> tuple[str, ...]:
    """Devices that take no new columns (PROTOCOL 3), the worst first."""
    return tuple(device for device, health in _worst_first(state) if not health.takes_columns)


def _worst_first(state: PolicyState) -> list[tuple[str, DeviceHealth]]:
    return sorted(
        state.devices.items(), key=lambda d: (_ORDER.index(d[1].state), -d[1].score, d[0])
    )
