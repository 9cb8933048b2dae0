"""How likely a group of k + m devices loses data in a year: three models and a simulation. Pure.

Devices fail independently, at the same rate whenever they work; each failed one is rebuilt
after its own repair time, or, where repairs share bandwidth, later. Data is lost when m + 1 are
failed at the same moment. What fails together is in failure_domains.py. Sources and limits:
docs/durability.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpstore.errors import ConfigError

HOURS_PER_YEAR = 8760.0
_REPLICATES, _T95 = 20, 2.093  # Student's t for 19 degrees of freedom
_BIAS = 0.5  # share of paths that are made to fail next; their weight makes up for it
_REPAIR_HOURS = (1e-6, 1e7)  # where the longest repair is looked for
_HALVINGS = 40  # of 30 powers of e: to a part in 10^10
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """k + m devices that hold the same stripes.

    `afr`: failures in a device-year of work (failures / drive-days x 365, as drive statistics count
    them). `repair_hours`: from a failure until every lost unit is written again, waiting included.
    `repair_streams`: repairs that take no longer for being several; more of them share that
    bandwidth. 0: no repair slows another one down. Raises ConfigError.
    """

    data: int
    parity: int
    afr: float
    repair_hours: float
    repair_streams: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.data <= 255 and 0 <= self.parity <= 64):
            raise ConfigError(f"{self.data}+{self.parity} is not a scheme: data 1-255, parity 0-64")
        if not 0 < self.afr < 1e4:
            raise ConfigError(f"the failure rate must be above 0 a year, not {self.afr}")
        if not 0 < self.repair_hours < math.inf:
            raise ConfigError(f"the repair time must be above 0 hours, not {self.repair_hours}")
        if self.repair_streams < 0:
            raise ConfigError(
                f"{self.repair_streams} repairs at once: 1 or more, or 0 for any number"
            )

    @property
    def width(self) -> int:
        """n = k + m."""
        return self.data + self.parity

    @property
    def load(self) -> float:
        """Failures of one device, while it works, in one repair time."""
        return self.afr * self.repair_hours / HOURS_PER_YEAR

    def repairs_at_once(self, failed: int) -> int:
        """With so many failed, by how many times the rate of one repair they are repaired."""
        return min(failed, self.repair_streams) if self.repair_streams else failed


Losses = Callable[[Group], float]  # a year


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

    Exact for any distribution of repair times with this mean, if the group is used on after a loss;
    where repairs share bandwidth, for exponential ones.
    """
    return _failures_with(group, group.parity)


def _failures_with(group: Group, down: int) -> float:
    """How often a year, in the long run, a device fails while exactly so many others are down."""
    if group.repair_streams:
        return (group.width - down) * group.afr * math.exp(_log_shares(group)[down])
    ways = math.comb(group.width - 1, down)
    # by logarithms: a load of 1e6 to the 64th power is no float
    busy = math.exp(down * math.log(group.load) - group.width * math.log1p(group.load))
    return group.width * group.afr * ways * busy


def _log_shares(group: Group) -> list[float]:
    """Logarithms of the shares of time with 0 ... n devices down: a birth and death process."""
    found = [0.0]
    for failed in range(1, group.width + 1):
        rise = (group.width - failed + 1) * group.load / group.repairs_at_once(failed)
        found.append(found[-1] + math.log(rise))
    largest = max(found)
    whole = largest + math.log(math.fsum(math.exp(one - largest) for one in found))
    return [one - whole for one in found]


def years_to_loss(group: Group) -> float:
    """Mean time to data loss of the Markov chain (exponential repair), from a whole group."""
    total, step = 0.0, 0.0
    for failed in range(group.parity + 1):
        fails = (group.width - failed) * group.afr
        repairs = group.repairs_at_once(failed) * HOURS_PER_YEAR / group.repair_hours
        step = 1 / fails + repairs / fails * step  # mean time from `failed` to one more
        total += step
    return total


def unreadable_per_year(group: Group, device_bytes: int, errors_per_bit: float) -> float:
    """Losses a year by a sector that cannot be read when no parity is left (k devices are read)."""
    if group.parity == 0:
        return 0.0
    sectors = Sectors(device_bytes=device_bytes, errors_per_bit=errors_per_bit)
    return _failures_with(group, group.parity - 1) * sectors.chance(group.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sectors:
    """Devices of so many bytes, and the share of bits that cannot be read."""

    device_bytes: int
    errors_per_bit: float

    def chance(self, devices: int) -> float:
        """Probability that so many devices, read in full, have such a sector."""
        return -math.expm1(8 * devices * self.device_bytes * math.log1p(-self.errors_per_bit))


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
    repair_streams: int = 0,
    losses: Losses | None = None,
) -> float:
    """The longest repair time at which `losses` has so many nines; 0 when none does.

    `losses`: losses a year of a group; total_per_year() by default.
    """
    losses = losses or (lambda group: total_per_year(group, sectors))

    def enough(hours: float) -> bool:
        made = Group(
            data=data, parity=parity, afr=afr, repair_hours=hours, repair_streams=repair_streams
        )
        return nines(in_a_year(losses(made), groups)) >= wanted

    low, high = (math.log(hours) for hours in _REPAIR_HOURS)
    if not enough(math.exp(low)):
        return 0.0
    if enough(math.exp(high)):
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if enough(math.exp(middle)) else (low, middle)
    return math.exp(low)


# --- simulation -----------------------------------------------------------------------------


def split(group: Group, *, paths: int, rng: np.random.Generator, fixed: bool = True) -> Estimate:
    """Multilevel splitting: losses a year, for rates at which no direct simulation sees a loss.

    A level is a number of failed devices. From `paths` arrivals on a level, the share that reaches
    the next before all is rebuilt is found, and arrivals there are drawn from those that
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
    streams = group.repair_streams or group.width
    paths = len(start)
    left = np.concatenate([start, np.full((paths, 1), np.inf)], axis=1)  # inf: an empty place
    weight, failed = np.ones(paths), np.full(paths, level)
    going = np.arange(paths)
    while going.size:
        here = left[going]
        down = failed[going]
        slowed = down / np.minimum(down, streams)
        first = here.min(1) * slowed
        hazard = (group.width - failed[going]) * rate
        chance = -np.expm1(-hazard * first)  # of a failure before the next repair is done
        tilted = np.maximum(chance, _BIAS)
        fails = rng.random(going.size) < tilted
        weight[going] *= np.where(
            fails, chance / tilted, (1 - chance) / np.maximum(1 - tilted, 1e-300)
        )
        after = -np.log1p(-rng.random(going.size) * chance) / hazard
        here -= (np.where(fails, after, first) / slowed)[:, None]
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
