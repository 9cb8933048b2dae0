"""How likely a group of k + m devices loses data in a year: three models and a simulation. Pure.

Devices fail independently, at the same rate whenever they work; each failed one is whole again
after its own repair time (many repairs at once do not slow each other down). Data is lost when
m + 1 are failed at the same moment. Sources and limits: docs/durability.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpstore.errors import ConfigError

HOURS_PER_YEAR = 8760.0
SCHEMES = ((4, 2), (8, 2), (6, 3), (8, 3), (17, 3), (10, 4), (16, 4))  # (k, m) that are compared
_REPLICATES, _T95 = 20, 2.093  # Student's t for 19 degrees of freedom
_BIAS = 0.5  # share of paths that are made to fail next; their weight makes up for it
_REPAIR_HOURS = (1e-6, 1e7)  # where the longest repair is looked for
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """k + m devices that hold the same stripes.

    `afr`: failures in a device-year of work (failures / drive-days x 365, as drive statistics count
    them). `repair_hours`: from a failure until every lost unit is written again, waiting included.
    Raises ConfigError.
    """

    data: int
    parity: int
    afr: float
    repair_hours: float

    def __post_init__(self) -> None:
        if not (1 <= self.data <= 255 and 0 <= self.parity <= 64):
            raise ConfigError(f"{self.data}+{self.parity} is not a scheme: data 1-255, parity 0-64")
        if not 0 < self.afr < 1e4:
            raise ConfigError(f"the failure rate must be above 0 a year, not {self.afr}")
        if not 0 < self.repair_hours < math.inf:
            raise ConfigError(f"the repair time must be above 0 hours, not {self.repair_hours}")

    @property
    def width(self) -> int:
        """n = k + m."""
        return self.data + self.parity

    @property
    def load(self) -> float:
        """Failures of one device, while it works, in one repair time."""
        return self.afr * self.repair_hours / HOURS_PER_YEAR


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairWindow:
    """Failures in one repair time, taken as Poisson, and a year as so many separate windows."""

    expected: float  # failures in a window
    exactly_parity: float  # probability of m failures: nothing is lost, nothing is left
    beyond_parity: float  # of m + 1 or more
    per_year: float  # windows
    loss: float  # probability of a loss in a year


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Losses a year by simulation, with the interval that holds the truth 95 times in 100."""

    value: float
    low: float
    high: float

    def holds(self, truth: float) -> bool:
        """Whether the interval does."""
        return self.low <= truth <= self.high


def nines(probability: float) -> float:
    """-log10, so 1e-12 is 12; infinite for 0."""
    return math.inf if probability <= 0 else -math.log10(probability)


def in_a_year(losses_per_year: float, groups: int = 1) -> float:
    """Probability that any of so many independent groups loses data in a year."""
    return -math.expm1(-losses_per_year * groups)


# --- models ---------------------------------------------------------------------------------


def window(group: Group) -> RepairWindow:
    """The Poisson window, as in calculators of cloud storage: simple, and optimistic.

    Clusters of failures that straddle two windows are missed, and a failed device may fail again.
    """
    expected = group.width * group.load
    exactly = _poisson(expected, group.parity)
    beyond = _poisson_beyond(expected, group.parity)
    windows = HOURS_PER_YEAR / group.repair_hours
    loss = 1.0 if beyond == 1.0 else -math.expm1(windows * math.log1p(-beyond))
    return RepairWindow(
        expected=expected, exactly_parity=exactly, beyond_parity=beyond, per_year=windows, loss=loss
    )


def _poisson(expected: float, count: int) -> float:
    return math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))


def _poisson_beyond(expected: float, count: int) -> float:
    """Of more than `count`."""
    if expected > count + 1:  # the terms up to it are the small ones, and may all be 0
        return max(0.0, 1.0 - math.fsum(_poisson(expected, n) for n in range(count + 1)))
    beyond, term, number = 0.0, _poisson(expected, count), count
    while number <= count + 1 or term > beyond * 1e-17:
        number += 1
        term *= expected / number
        beyond += term
    return min(beyond, 1.0)


def losses_per_year(group: Group) -> float:
    """Closed form: how often, in the long run, a device fails while m others are being repaired.

    Exact for any distribution of repair times with this mean, if the group is used on after a loss.
    """
    return _failures_with(group, group.parity)


def _failures_with(group: Group, down: int) -> float:
    """How often a year, in the long run, a device fails while exactly so many others are down."""
    ways = math.comb(group.width - 1, down)
    # by logarithms: a load of 1e6 to the 64th power is no float
    busy = math.exp(down * math.log(group.load) - group.width * math.log1p(group.load))
    return group.width * group.afr * ways * busy


def years_to_loss(group: Group) -> float:
    """Mean time to data loss of the Markov chain (exponential repair), from a whole group."""
    total, step = 0.0, 0.0
    for failed in range(group.parity + 1):
        fails = (group.width - failed) * group.afr
        repairs = failed * HOURS_PER_YEAR / group.repair_hours
        step = 1 / fails + repairs / fails * step  # mean time from `failed` to one more
        total += step
    return total


def unreadable_per_year(group: Group, device_bytes: int, errors_per_bit: float) -> float:
    """Losses a year by a sector that cannot be read when no parity is left (k devices are read)."""
    if group.parity == 0:
        return 0.0
    bits = 8 * group.data * device_bytes
    critical = _failures_with(group, group.parity - 1)
    return critical * -math.expm1(bits * math.log1p(-errors_per_bit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sectors:
    """Devices of so many bytes, and the share of bits that cannot be read."""

    device_bytes: int
    errors_per_bit: float


def total_per_year(group: Group, sectors: Sectors | None = None) -> float:
    """Losses a year by the Markov chain, and by sectors that cannot be read where these are given.

    What the nines of every scheme are of.
    """
    found = 1 / years_to_loss(group)
    if sectors is None:
        return found
    return found + unreadable_per_year(group, sectors.device_bytes, sectors.errors_per_bit)


def longest_repair_hours(
    data: int,
    parity: int,
    afr: float,
    *,
    wanted: float,
    groups: int,
    sectors: Sectors | None = None,
) -> float:
    """The longest repair time at which total_per_year() has so many nines; 0 when none does."""

    def enough(hours: float) -> bool:
        made = Group(data=data, parity=parity, afr=afr, repair_hours=hours)
        return nines(in_a_year(total_per_year(made, sectors), groups)) >= wanted

    low, high = (math.log(hours) for hours in _REPAIR_HOURS)
    if not enough(math.exp(low)):
        return 0.0
    if enough(math.exp(high)):
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(math.exp(middle)) else (low, middle)
    return math.exp(low)


# --- simulation -----------------------------------------------------------------------------


def split(group: Group, *, paths: int, rng: np.random.Generator, fixed: bool = True) -> Estimate:
    """Multilevel splitting: losses a year, for rates at which nobody sees a loss.

    A level is a number of failed devices. From `paths` arrivals on a level, the share that reaches
    the next before the group is whole again is found, and arrivals there are drawn from those that
    did. The next failure is made likely and weighted (failure biasing). Twenty repetitions give the
    interval. Counts a stretch of failures once, so only for loads far below 1.
    """
    if paths < _REPLICATES:
        raise ConfigError(f"{paths} paths are too few to simulate with: {_REPLICATES} at least")
    each = max(1, paths // _REPLICATES)
    found = np.array([_split_once(group, each, rng, fixed=fixed) for _ in range(_REPLICATES)])
    mean = float(found.mean())
    if not mean:
        raise ConfigError(f"none of {paths} paths has come to a loss: take ten times as many")
    half = _T95 * float(found.std(ddof=1)) / math.sqrt(_REPLICATES)
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)


def _split_once(group: Group, paths: int, rng: np.random.Generator, *, fixed: bool) -> float:
    rate = group.width * group.afr * (1 + group.load) ** -group.width  # arrivals on level 1 a year
    left = _repairs(group, paths, rng, fixed=fixed).reshape(-1, 1)
    for level in range(1, group.parity + 1):
        left, weight = _climb(group, left, level, rng, fixed=fixed)
        rate *= float(weight.sum()) / paths
        if not rate:
            return 0.0
        left = left[_resampled(weight, paths, rng)]
    return rate


def _climb(
    group: Group, start: Floats, level: int, rng: np.random.Generator, *, fixed: bool
) -> tuple[Floats, Floats]:
    """Follow every path from `level` failed devices until one more failed, or none is.

    `start`: hours left of each repair, (paths, level). Returns those of the arrivals one level up,
    (paths, level + 1), and the weights; 0 for a path that ended whole.
    """
    rate = group.afr / HOURS_PER_YEAR
    paths = len(start)
    left = np.concatenate([start, np.full((paths, 1), np.inf)], axis=1)  # inf: an empty place
    weight, failed = np.ones(paths), np.full(paths, level)
    going = np.arange(paths)
    while going.size:
        here = left[going]
        first = here.min(1)
        hazard = (group.width - failed[going]) * rate
        chance = -np.expm1(-hazard * first)  # of a failure before the next repair is done
        tilted = np.maximum(chance, _BIAS)
        fails = rng.random(going.size) < tilted
        weight[going] *= np.where(
            fails, chance / tilted, (1 - chance) / np.maximum(1 - tilted, 1e-300)
        )
        after = -np.log1p(-rng.random(going.size) * chance) / hazard
        here -= np.where(fails, after, first)[:, None]
        place = np.where(fails, np.isinf(here).argmax(1), here.argmin(1))
        fresh = _repairs(group, going.size, rng, fixed=fixed)
        here[np.arange(going.size), place] = np.where(fails, fresh, np.inf)
        left[going] = here
        failed[going] += np.where(fails, 1, -1)
        weight[going[failed[going] == 0]] = 0.0
        going = going[(failed[going] > 0) & (failed[going] <= level)]
    return left, weight


def _repairs(group: Group, count: int, rng: np.random.Generator, *, fixed: bool) -> Floats:
    """Hours that repairs take."""
    if fixed:
        return np.full(count, group.repair_hours)
    return rng.exponential(group.repair_hours, count)


def _resampled(weight: Floats, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Indices drawn in proportion to weights, evenly spread (systematic resampling)."""
    places = (rng.random() + np.arange(count)) / count * weight.sum()
    chosen: NDArray[np.intp] = np.searchsorted(np.cumsum(weight), places)
    return np.minimum(chosen, len(weight) - 1)


# --- schemes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a scheme reaches with the same devices."""

    data: int
    parity: int
    overhead: float  # bytes stored for a byte of data
    nines: float  # of a year without loss
    longest_repair_hours: float  # at which it still has the nines that are wanted
    reaches: bool


def compare(
    group: Group,
    *,
    wanted: float,
    groups: int = 1,
    sectors: Sectors | None = None,
    schemes: Sequence[tuple[int, int]] = SCHEMES,
) -> list[Scheme]:
    """The group's scheme and others at its failure rate and repair time, by total_per_year()."""
    found = []
    for data, parity in sorted({(group.data, group.parity), *schemes}, key=lambda s: (s[1], s[0])):
        made = Group(data=data, parity=parity, afr=group.afr, repair_hours=group.repair_hours)
        reached = nines(in_a_year(total_per_year(made, sectors), groups))
        found.append(
            Scheme(
                data=data,
                parity=parity,
                overhead=made.width / data,
                nines=reached,
                longest_repair_hours=longest_repair_hours(
                    data, parity, group.afr, wanted=wanted, groups=groups, sectors=sectors
                ),
                reaches=reached >= wanted,
            )
        )
    return found
