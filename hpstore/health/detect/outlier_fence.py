"""The peer test: Tukey's fence with floors, and the points of what lies beyond it. Pure.

Fence, points and their limits are those of OpenZFS's vdev_child_slow_outlier, with another K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

POINTS_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What a group of values allows one more value to be."""

    limit: float
    middle: float  # median of the group
    width: float  # interquartile range, or its floor


def fence_of(ordered: Sequence[float], *, widths: float, floor: float, noise: float = 0.0) -> Fence:
    """Q3 + `widths` * max(IQR, `floor` * Q1) of values in ascending order, at least one.

    `noise` * Q1, the usual IQR, also stands in for one that is small by chance. Quartiles are
    interpolated as by numpy.percentile.
    """
    low, middle, high = (quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    spread = max(high - low, noise * low)
    return Fence(
        limit=high + widths * max(spread, floor * low),
        middle=middle,
        width=max(spread, floor * low / 2),
    )


def points(value: float, fence: Fence, *, ratio_least: float, excess_least: float) -> float:
    """0 within the fence or below a floor; beyond it (value - limit) / width, from 1 to 5.

    `ratio_least` is of value to median, `excess_least` of value minus median.
    """
    over = value - fence.limit
    if over <= 0 or value < ratio_least * fence.middle or value - fence.middle < excess_least:
        return 0.0
    if over >= POINTS_MAX * fence.width:
        return POINTS_MAX
    return max(over / fence.width, 1.0)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order, interpolated."""
    at = share * (len(ordered) - 1)
    below = int(at)
    if below + 1 >= len(ordered):
        return ordered[-1]
    return ordered[below] + (at - below) * (ordered[below + 1] - ordered[below])
