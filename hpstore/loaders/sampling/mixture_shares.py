"""Exact shares of the sources of a mixture, which may change as it goes on. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias, get_args

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.weighted import check_weights
from hpstore.units import div_ceil, whole_argument

Stop: TypeAlias = Literal["first", "all"]
"""When an epoch of a mixture ends: as soon as the first of its sources has been gone through once,
so that none is repeated within it, or when all of them have."""

WeightSteps: TypeAlias = Sequence[tuple[int, Sequence[float]]]
"""(step, the weights from there on), rising, the first at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShares:
    """Exact shares that add up to 1: numerators over a common denominator."""

    numerators: tuple[int, ...]
    denominator: int

    @classmethod
    def of(cls, weights: Sequence[float]) -> MixtureShares:
        """Of weights that are finite and not all 0."""
        exact = [Fraction(weight) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        numerators = tuple(int(weight * common) for weight in exact)
        return cls(numerators=numerators, denominator=sum(numerators))

    def split(self, total: int) -> list[int]:
        """`total` by shares: rounded down, then one more for the largest remainders.

        Each is within one of its share of `total`; equal remainders go to the earlier source.
        """
        counts, remainders = [], []
        for number in self.numerators:
            count, remainder = divmod(number * total, self.denominator)
            counts.append(count)
            remainders.append(remainder)
        rest = total - sum(counts)
        for source in sorted(range(len(counts)), key=lambda i: -remainders[i])[:rest]:
            counts[source] += 1
        return counts

    def needed_positions(self) -> int:
        """The shortest block in which every source of a share above 0 surely appears.

        Totals are within one of the shares before and after a block, so that a source gains more
        than its share of the block less 2 (less 1 for two sources, where one rounds as the other).
        """
        positive = [number for number in self.numerators if number]
        if len(positive) < 2:
            return 1
        return div_ceil((1 if len(positive) == 2 else 2) * self.denominator, min(positive))


class MixtureSchedule:
    """Shares by position, counted from the first epoch on: from each start others.

    What the sources have had by then is added up once, so that a position anywhere is a search in
    the starts.
    """

    def __init__(self, weights: WeightSteps, *, epoch: int = 0, shortest: int = 0) -> None:
        """`epoch`: positions of one; `shortest`: positions in which no source loses any.

        Raises ConfigError for weights that cannot be used; the starts are checked.
        """
        self.starts = [start for start, _ in weights]
        self.weights = [tuple(map(float, check_weights(some))) for _, some in weights]
        self.shares = [MixtureShares.of(some) for some in self.weights]
        self._before = [[0] * len(self.weights[0])]  # what each source has had at each start
        for share, (low, high) in zip(self.shares, itertools.pairwise(self.starts), strict=False):
            begun = high // epoch * epoch if epoch else 0  # the epoch in which the weights change
            # of the next few positions largest remainders might take back what a source has had
            middle = begun if low < begun and high - begun < shortest else low
            had = [share.split(middle - low), share.split(high - middle)]
            self._before.append([sum(three) for three in zip(self._before[-1], *had, strict=True)])

    def fitted(self, epoch: int, shortest: int) -> MixtureSchedule:
        """The same with epochs of so many positions."""
        steps = list(zip(self.starts, self.weights, strict=True))
        return MixtureSchedule(steps, epoch=epoch, shortest=shortest)

    def part_of(self, position: int) -> int:
        """Which shares hold at a position."""
        return bisect.bisect_right(self.starts, position) - 1

    def end_of(self, part: int) -> int | None:
        """Where a part ends; None for the last one."""
        return self.starts[part + 1] if part + 1 < len(self.starts) else None

    def totals(self, position: int) -> list[int]:
        """What each source has had before a position, each within one of its share in that part."""
        part = self.part_of(position)
        had = self.shares[part].split(position - self.starts[part])
        return [a + b for a, b in zip(self._before[part], had, strict=True)]

    def mean_shares(self) -> list[float]:
        """Of each source, over the parts: they add up to 1."""
        parts = [[n / share.denominator for n in share.numerators] for share in self.shares]
        return [math.fsum(some) / len(parts) for some in zip(*parts, strict=True)]

    @property
    def ever(self) -> list[bool]:
        """Whether each source ever has a weight."""
        return [any(some) for some in zip(*self.weights, strict=True)]

    def describe(self) -> list[object]:
        """The weights, or (start, weights) where they change: for an order's description."""
        if len(self.weights) == 1:
            return list(self.weights[0])
        return [[a, list(some)] for a, some in zip(self.starts, self.weights, strict=True)]

    def length_until(self, stop: Stop, lengths: Sequence[int]) -> int:
        """Positions from the start until the first source, or all, have been gone through once.

        `lengths`: of the sources. Raises ConfigError when that never happens.
        """
        ends = [
            self._reach(source, length)
            for source, length in enumerate(lengths)
            if self.ever[source]
        ]
        found = [end for end in ends if end is not None]
        if stop == "first" and found:
            return math.floor(min(found))
        if len(found) < len(ends):
            number = [s for s, ever in enumerate(self.ever) if ever][ends.index(None)]
            raise ConfigError(
                f'stop="{stop}": source {number} of the mixture has no weight before it has been '
                "gone through, and an epoch would not end. Give it a weight at the end, or length="
            )
        return math.ceil(max(found))

    def _reach(self, source: int, wanted: int) -> Fraction | None:
        """The position at which a source has had so many; None for never."""
        for part, share in enumerate(self.shares):
            number, end = share.numerators[source], self.end_of(part)
            lacking = wanted - self._before[part][source]
            if lacking <= 0:
                return Fraction(self.starts[part])
            if number:
                at = self.starts[part] + Fraction(lacking * share.denominator, number)
                if end is None or at <= end:
                    return at
        return None


def schedule_of(
    weights: Sequence[float] | WeightSteps, sources: int, step_samples: int
) -> MixtureSchedule:
    """Weights as a mixture is given them. Raises ConfigError.

    `step_samples`: samples of all ranks in a step.
    """
    each = whole_argument("step_samples", step_samples, least=1)
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise ConfigError(f"weights are {weights!r}: give a number for each data set")
    given: list[Any] = list(weights)
    stepped = bool(given) and all(isinstance(one, tuple | list) for one in given)
    steps = [_step(one) for one in given] if stepped else [(0, given)]
    if steps[0][0] != 0 or any(b[0] <= a[0] for a, b in itertools.pairwise(steps)):
        raise ConfigError(
            f"weights change at steps {[step for step, _ in steps]}: these rise, from 0 on"
        )
    for step, some in steps:
        if len(some) != sources:
            at = f" from step {step} on" if stepped else ""
            raise ConfigError(f"{sources} data sets, {len(some)} weights{at}")
    return MixtureSchedule([(step * each, some) for step, some in steps])


# Any: whatever the user gave
def _step(given: Any) -> tuple[int, list[float]]:
    if len(given) != 2 or not isinstance(given[1], tuple | list):
        raise ConfigError(
            f"weights: {given!r} is no (step, weights): give [1, 2] or [(0, [1, 2]), (500, [2, 1])]"
        )
    return whole_argument("step", given[0], least=0), list(given[1])


def require_stop(stop: object) -> None:
    """Raise ConfigError unless this is a Stop or None."""
    if stop is not None and stop not in get_args(Stop):
        raise ConfigError(f'stop {stop!r} is neither "first" nor "all"')
