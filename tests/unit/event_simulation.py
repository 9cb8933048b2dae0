"""Groups of devices played event by event: the oracle for the models of hpstore.durability."""

from __future__ import annotations

import math

import numpy as np

from hpstore.durability import HOURS_PER_YEAR, Estimate, Floats, Group

_Z95 = 1.96


def simulate(
    group: Group, *, years: float, groups: int, rng: np.random.Generator, fixed: bool = True
) -> Estimate:
    """Play so many groups for so many years, event by event; losses a year of one group.

    For failure rates at which losses are seen. Repair takes `repair_hours`, or, not `fixed`, an
    exponential time with that mean. Begins in the long run's state, so no warming up is needed.
    """
    horizon, rate = years * HOURS_PER_YEAR, group.afr / HOURS_PER_YEAR
    shape = (groups, group.width)
    up = rng.random(shape) < 1 / (1 + group.load)
    rest = group.repair_hours * (rng.random(shape) if fixed else rng.exponential(size=shape))
    due = np.where(up, rng.exponential(1 / rate, shape), rest)  # next change of each device
    losses = np.zeros(groups)
    rows = np.arange(groups)
    while True:
        which = due.argmin(1)
        now = due[rows, which]
        alive = now < horizon
        if not alive.any():
            break
        fails = up[rows, which]
        up[rows, which] = ~fails
        losses += alive & fails & ((~up).sum(1) == group.parity + 1)
        due[rows, which] = now + np.where(
            fails, repairs(group, groups, rng, fixed=fixed), rng.exponential(1 / rate, groups)
        )
    mean = float(losses.mean()) / years
    half = _Z95 * float(losses.std(ddof=1)) / years / math.sqrt(groups)
    if not mean:
        return Estimate(value=0.0, low=0.0, high=3.0 / (groups * years))  # the rule of three
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)


def repairs(group: Group, count: int, rng: np.random.Generator, *, fixed: bool) -> Floats:
    """Hours that repairs take."""
    if fixed:
        return np.full(count, group.repair_hours)
    return rng.exponential(group.repair_hours, count)
