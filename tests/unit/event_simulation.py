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
    exponential time with that mean. Begins in the long run's state, so no warming up is needed;
    with `repair_streams`, whole, and the first tenth of the time does not count.
    """
    if group.repair_streams:
        return _simulate_shared(group, years=years, groups=groups, rng=rng)
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
    return _estimate(losses, years)


def _simulate_shared(
    group: Group, *, years: float, groups: int, rng: np.random.Generator
) -> Estimate:
    """Exponential repairs, of which so many go on at full speed and more share that: the next event
    of each group in turn, by its rates at this moment."""
    fails, repairs_alone = group.afr, HOURS_PER_YEAR / group.repair_hours
    down, now = np.zeros(groups, int), np.zeros(groups)
    losses = np.zeros(groups)
    warm = years / 10
    while (now < years).any():
        failing = (group.width - down) * fails
        mending = np.minimum(down, group.repair_streams) * repairs_alone
        now += rng.exponential(1 / (failing + mending))
        fall = rng.random(groups) < failing / (failing + mending)
        down += np.where(fall, 1, -1)
        counts = (now > warm) & (now < years) & fall
        losses += counts & (down == group.parity + 1)
    return _estimate(losses, years - warm)


def _estimate(losses: Floats, years: float) -> Estimate:
    groups = len(losses)
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
