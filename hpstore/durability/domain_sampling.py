"""Failures that come together, by simulation at real rates: importance sampling. Pure.

For each event that may be the last one, moments before it are drawn: events of all domains in one
repair time, then which devices are lost. Both are made likely and weighted (Shahabuddin, 1994), so
that losses are seen at any rate. It draws devices and counts them, where failure_domains.py
convolves distributions; both take repairs of a fixed time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpstore.durability.failure_domains import DomainDevice, FailureDomain
from hpstore.durability.independent_failures import HOURS_PER_YEAR, Estimate
from hpstore.errors import ConfigError

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
_Z95 = 1.96
_LEAST_DRAWS = 200  # of each event
_LIKELY = 0.5  # share of the draws in which what is rare is made likely


@dataclass(slots=True)
class _Layout:
    """A tree laid flat. `below`: of each domain, the range of its devices."""

    devices: list[DomainDevice]
    domains: list[FailureDomain]
    below: list[slice]

    @classmethod
    def of(cls, root: FailureDomain) -> _Layout:
        made = cls([], [], [])
        made._add(root)
        return made

    def _add(self, domain: FailureDomain) -> None:
        start = len(self.devices)
        for part in domain.parts:
            if isinstance(part, DomainDevice):
                self.devices.append(part)
            else:
                self._add(part)
        self.domains.append(domain)
        self.below.append(slice(start, len(self.devices)))


def sample_crossings(
    root: FailureDomain,
    *,
    repair_hours: float,
    lost: int,
    draws: int,
    rng: np.random.Generator,
) -> Estimate:
    """What `crossings_per_year` is, by so many draws, with its 95 % interval.

    Raises ConfigError for too few draws.
    """
    layout = _Layout.of(root)
    events = [(device.afr, slice(i, i + 1), 1.0) for i, device in enumerate(layout.devices)]
    events += [
        (domain.events_per_year, below, domain.hit)
        for domain, below in zip(layout.domains, layout.below, strict=True)
        if domain.events_per_year and domain.hit
    ]
    each = draws // len(events)
    if each < _LEAST_DRAWS:
        raise ConfigError(
            f"{draws} paths are too few for {len(events)} events that may be the last one: "
            f"{_LEAST_DRAWS * len(events)} at least"
        )
    value = variance = 0.0
    for rate, struck, hit in events:
        found = _crossings(root, layout, struck, hit, repair_hours, lost, each, rng)
        value += rate * float(found.mean())
        variance += rate**2 * float(found.var(ddof=1)) / each
    half = _Z95 * math.sqrt(variance)
    return Estimate(value=value, low=max(0.0, value - half), high=value + half)


def _crossings(
    root: FailureDomain,
    layout: _Layout,
    struck: slice,
    hit: float,
    repair_hours: float,
    lost: int,
    draws: int,
    rng: np.random.Generator,
) -> Floats:
    """Weights of draws in which this event is the last one; 0 where it is not. (draws,)"""
    width = len(layout.devices)
    chances, weight = _lost_before(layout, repair_hours, draws, rng)
    size = struck.stop - struck.start
    blows, more = _drawn(np.full((draws, size), hit), (lost + 1) / size, rng)
    missing = max(0.0, lost + 1 - size * hit)
    before, less = _drawn(chances, missing / width, rng)
    after = before.copy()
    after[:, struck] |= blows
    crossed = (_units(root, before, 0)[0] <= lost) & (_units(root, after, 0)[0] > lost)
    return np.asarray(np.where(crossed, weight * more * less, 0.0))


def _lost_before(
    layout: _Layout, repair_hours: float, draws: int, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Probability of each device to be lost, (draws, devices), and the weight of each draw."""
    years = repair_hours / HOURS_PER_YEAR
    alive = np.tile([1 / (1 + device.afr * years) for device in layout.devices], (draws, 1))
    weight = np.ones(draws)
    active = [i for i, domain in enumerate(layout.domains) if domain.events_per_year]
    for i in active:
        usual = layout.domains[i].events_per_year * years
        likely = max(usual, 1 / len(active))
        counts = rng.poisson(np.where(rng.random(draws) < _LIKELY, likely, usual))
        # the ratio of two Poisson probabilities; their factorials cancel
        ratio = np.exp(usual - likely + counts * math.log(likely / usual))
        weight /= 1 - _LIKELY + _LIKELY * ratio
        alive[:, layout.below[i]] *= ((1 - layout.domains[i].hit) ** counts)[:, None]
    return 1 - alive, weight


def _drawn(chances: Floats, likely: float, rng: np.random.Generator) -> tuple[Flags, Floats]:
    """What happens of each row's chances, and the weights of the rows.

    In half of the rows chances are made at least `likely`; no weight is above two.
    """
    tilted = np.where((chances > 0) & (chances < 1), np.maximum(chances, min(likely, 0.5)), chances)
    chosen = np.where(rng.random(len(chances))[:, None] < _LIKELY, tilted, chances)
    happens = rng.random(chances.shape) < chosen
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(happens, tilted / chances, (1 - tilted) / (1 - chances))
    return happens, np.asarray(1 / (1 - _LIKELY + _LIKELY * ratios.prod(axis=1)))


def _units(domain: FailureDomain, down: Flags, start: int) -> tuple[NDArray[np.int64], int]:
    """Lost units below a domain, (draws,), and where its devices end."""
    found, at = np.zeros(len(down), np.int64), start
    for part in domain.parts:
        if isinstance(part, DomainDevice):
            found += down[:, at]
            at += 1
        else:
            more, at = _units(part, down, at)
            found += more
    if domain.units_most is not None:
        found = np.minimum(found, domain.units_most)
    return found, at
