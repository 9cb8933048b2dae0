"""Failures that come together: enclosures, hosts, racks, batches. A closed form. Pure.

A tree of domains holds the devices of a group. Each domain suffers events at a rate of its own; an
event destroys each device below it with probability `hit`, independently (the binomial failure rate
model of common-cause failures: Vesely 1977, Atwood 1986). A device is rebuilt a repair time
after the last blow. What lies across domains, such as a batch of drives, is an event of the root
with a small `hit`.

The state at a moment is what struck in one repair time before it: Poisson numbers of events, and
devices that fail independently given these. So the number of lost devices has a distribution that
is computed exactly, by convolution from the innermost domains outwards; all its terms are positive.
Losses a year are then the sum over all kinds of events of their rate times the probability that the
event takes the group from at most m lost devices to more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hpstore.durability.independent_failures import HOURS_PER_YEAR, Group
from hpstore.errors import ConfigError

Floats = NDArray[np.float64]
_HALF = 0.5
_DEAD = 1e-18  # probability of a device to live
_LEAST = 1e-26  # probability of a number of events that is still counted
DOMAIN = "domain"  # the kind of the failure domains that a pool knows
MOST_EVENTS = 20.0  # of one domain in one repair time; numbers of them are summed over


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainDevice:
    """One device: `afr` failures a year of its own while it works."""

    afr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDomain:
    """Devices, or domains, that one event can strike together.

    `events_per_year`: of this domain. `hit`: the share of its devices that an event destroys.
    `units_most`: units of one stripe that lie in the domain at most; more of its devices than that
    lost cost a stripe no more. None: one unit a device. Raises ConfigError.
    """

    parts: tuple[DomainDevice | FailureDomain, ...]
    events_per_year: float = 0.0
    hit: float = 1.0
    units_most: int | None = None
    kind: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError(f"failure domain {self.kind!r} holds no device")
        if not 0 <= self.events_per_year < 1e4:
            raise ConfigError(
                f"{self.kind or 'a domain'} has {self.events_per_year:g} events a year: 0 or more"
            )
        if not 0 <= self.hit <= 1:
            raise ConfigError(
                f"an event of {self.kind or 'a domain'} hits a share of {self.hit:g} of its "
                "devices: 0 to 1"
            )

    def device_count(self) -> int:
        """Devices below it, at any depth."""
        return sum(1 if isinstance(p, DomainDevice) else p.device_count() for p in self.parts)


Part = DomainDevice | FailureDomain


@dataclass(slots=True)
class _Moment:
    """Distributions at one moment, kept while they are asked for again."""

    hours: float
    known: dict[tuple[int, float], Floats] = field(default_factory=dict)

    def lost(self, part: Part, alive: float, struck: tuple[int, ...] | None) -> Floats:
        """Probabilities of 0, 1, ... lost units below `part`.

        `alive`: the probability that a device has outlived what struck the domains above. `struck`:
        the way down to a part that an event has just struck, () for this one; None: none has been.
        """
        key = (id(part), alive)  # parts outlive the moment: the tree holds them
        if struck is None and key in self.known:
            return self.known[key]
        if isinstance(part, DomainDevice):
            load = part.afr * self.hours / HOURS_PER_YEAR
            up = 0.0 if struck is not None else alive / (1 + load)
            # 1 - up would lose its digits where almost all devices live
            found = np.array([up, 1.0 if struck is not None else (1 - alive + load) / (1 + load)])
        else:
            found = self._lost_in(part, alive, struck)
        if struck is None:
            self.known[key] = found
        return found

    def _lost_in(
        self, domain: FailureDomain, alive: float, struck: tuple[int, ...] | None
    ) -> Floats:
        found: Floats = np.zeros(1)
        expected = domain.events_per_year * self.hours / HOURS_PER_YEAR
        for events, chance in _poisson(expected):
            blows = events + (struck == ())
            left = alive * (1 - domain.hit) ** blows
            left = 0.0 if left < _DEAD else left  # one distribution for all that is lost anyway
            made: Floats = np.ones(1)
            for number, part in enumerate(domain.parts):
                way = struck[1:] if struck and struck[0] == number else None
                made = np.convolve(made, self.lost(part, left, way))
            found = chance * made + (found if len(found) > 1 else 0.0)
        if domain.units_most is not None and len(found) > domain.units_most + 1:
            found = np.append(found[: domain.units_most], found[domain.units_most :].sum())
        return found


def _poisson(expected: float) -> Iterator[tuple[int, float]]:
    """Numbers of events with their probabilities, until those left do not count."""
    if expected > MOST_EVENTS:
        raise ConfigError(
            f"{expected:.3g} events of one domain in one repair time, of which {MOST_EVENTS:g} "
            "can be counted: is the rate one a year, and of events that destroy data?"
        )
    count, log_chance = 0, -expected
    while True:
        chance = math.exp(log_chance)
        if chance > _LEAST:
            yield count, chance
        elif count > expected:
            return
        if not expected:
            return
        count += 1
        log_chance += math.log(expected / count)


def _events(part: Part, way: tuple[int, ...] = ()) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Kinds of events: how many a year, of all that are alike, and the way to one of them."""
    if isinstance(part, DomainDevice):
        yield part.afr, way
        return
    if part.events_per_year and part.hit:
        yield part.events_per_year, way
    alike = Counter(part.parts)
    for one, count in alike.items():
        for rate, found in _events(one, (*way, part.parts.index(one))):
            yield rate * count, found


def crossings_per_year(root: FailureDomain, *, repair_hours: float, lost: int) -> float:
    """How often a year the stripe comes to more than `lost` lost units, from so many or fewer.

    With `lost` = m: losses of data a year. `repair_hours` are fixed. Raises ConfigError.
    """
    return _crossings(root, repair_hours, lost)[0]


def hazard_per_year(root: FailureDomain, *, repair_hours: float, lost: int) -> float:
    """`crossings_per_year`, of the time in which no more than `lost` units are lost.

    The same where losses are rare. What is lost almost always seldom comes to be lost: repair times
    are compared by this. Infinite where there is no such time. Raises ConfigError.
    """
    crossings, share = _crossings(root, repair_hours, lost)
    return crossings / share if share > _DEAD else math.inf


def _crossings(root: FailureDomain, repair_hours: float, lost: int) -> tuple[float, float]:
    """Crossings a year, and the share of the time with at most `lost` lost units."""
    if not 0 < repair_hours < math.inf:
        raise ConfigError(f"the repair time must be above 0 hours, not {repair_hours}")
    moment = _Moment(hours=repair_hours)
    usual = moment.lost(root, 1.0, None)
    share = float(usual[: lost + 1].sum())
    # of two almost equal numbers the digits are in those close to 0, not to 1
    part, sign = (slice(lost + 1, None), 1) if share > _HALF else (slice(lost + 1), -1)
    total = 0.0
    for rate, way in _events(root):
        after = moment.lost(root, 1.0, way)
        total += rate * max(0.0, sign * float(after[part].sum() - usual[part].sum()))
    return total, share


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCause:
    """What strikes several devices: of each domain, `events_per_year`, each destroying `hit`.

    `units`: units of one group in one domain; 0: all of them, as of a site, or of a batch of drives
    that lies across all other domains. Raises ConfigError.
    """

    kind: str
    events_per_year: float
    units: int = 0
    hit: float = 1.0

    def __post_init__(self) -> None:
        if self.units < 0:
            raise ConfigError(f"a {self.kind} holds {self.units} units: 1 or more, or all")
        FailureDomain(  # checks the others
            parts=(DomainDevice(afr=1.0),),
            events_per_year=self.events_per_year,
            hit=self.hit,
            kind=self.kind,
        )


def regular_tree(group: Group, causes: Sequence[SharedCause]) -> FailureDomain:
    """The tree of a group whose units fill domains one after the other, the last maybe in part.

    Raises ConfigError where domains of one kind would lie across those of another.
    """
    parts: list[Part] = [DomainDevice(afr=group.afr)] * group.width
    held, inner = 1, "device"
    whole = [cause for cause in causes if not cause.units or cause.units >= group.width]
    for cause in sorted((c for c in causes if c not in whole), key=lambda c: c.units):
        if cause.units % held:
            raise ConfigError(
                f"a {cause.kind} of {cause.units} units would hold parts of a {inner} of {held}: "
                "domains hold one another whole. Give what lies across others `all` units, and the "
                "share of devices that it hits"
            )
        step = cause.units // held
        full = tuple(parts[:step])
        made = [_domain(cause, full)] * (group.width // cause.units)
        rest = parts[len(made) * step :]
        parts = [*made, *([_domain(cause, tuple(rest))] if rest else [])]
        held, inner = cause.units, cause.kind
    root = FailureDomain(parts=tuple(parts))
    for cause in whole:
        root = _domain(cause, (root,))
    return root


def _domain(cause: SharedCause, parts: tuple[Part, ...]) -> FailureDomain:
    return FailureDomain(
        parts=parts, events_per_year=cause.events_per_year, hit=cause.hit, kind=cause.kind
    )


def domain_tree(
    members: Mapping[str, Sequence[DomainDevice]],
    causes: Sequence[SharedCause],
    *,
    units_most: int | None,
) -> FailureDomain:
    """The tree of a pool: its failure domains by name, each with its devices.

    `units_most`: units of one stripe that a domain holds at most, None where the pool counts
    devices. A cause of the kind "domain" strikes each of these; all others strike the pool.
    Raises ConfigError for two causes of the kind "domain".
    """
    own = [cause for cause in causes if cause.kind == DOMAIN]
    if len(own) > 1:
        raise ConfigError("the pool has one kind of failure domain: give `domain` once")
    cause = own[0] if own else SharedCause(kind=DOMAIN, events_per_year=0.0)
    root = FailureDomain(
        parts=tuple(
            replace(_domain(cause, tuple(devices)), units_most=units_most)
            for _, devices in sorted(members.items())
        )
    )
    for other in causes:
        if other.kind != DOMAIN:
            root = _domain(other, (root,))
    return root
