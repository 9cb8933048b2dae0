"""Many step numbers in few bytes: steps at even distances are one range."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from hpstore.checkpoint.format.checkpoint_manifest import MAX_STEP

_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12})(?:/([0-9]{1,12}))?)?")
_FEWEST = 3  # steps that are worth a range


class StepRanges:
    """A set of steps, as ranges in ascending order that do not overlap. Immutable."""

    def __init__(self, ranges: Sequence[range] = ()) -> None:
        self._ranges = tuple(ranges)
        self._starts = [found.start for found in self._ranges]

    @classmethod
    def of(cls, steps: Iterable[int]) -> StepRanges:
        """These steps: as many at one distance as there are become a range."""
        ordered, ranges, at = sorted(set(steps)), list[range](), 0
        while at < len(ordered):
            end = at + 1
            if end < len(ordered):
                stride = ordered[end] - ordered[at]
                while end < len(ordered) and ordered[end] - ordered[end - 1] == stride:
                    end += 1
            if end - at < _FEWEST:
                end = at + 1
            stride = ordered[at + 1] - ordered[at] if end - at > 1 else 1
            ranges.append(range(ordered[at], ordered[end - 1] + 1, stride))
            at = end
        return cls(ranges)

    @classmethod
    def parse(cls, text: str) -> StepRanges:
        """Inverse of text(). Raises ValueError."""
        ranges: list[range] = []
        for part in text.split(",") if text else ():
            found = _RANGE.fullmatch(part)
            if found is None:
                raise ValueError(f"{part[:40]!r} is no range of steps")
            first, last, stride = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            if last > MAX_STEP or last < first or stride < 1:
                raise ValueError(f"{part[:40]!r} is no range of steps")
            if ranges and first < ranges[-1].stop:
                raise ValueError(f"{part[:40]!r} is not above the range before it")
            ranges.append(range(first, last + 1, stride))
        return cls(ranges)

    def text(self) -> str:
        """As `1-9,12,20-100/10`: ranges, of which the last number is in, with their distance."""
        return ",".join(map(_text, self._ranges))

    def __contains__(self, step: int) -> bool:
        at = bisect_right(self._starts, step) - 1
        return at >= 0 and step in self._ranges[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepRanges) and self._ranges == other._ranges

    def __hash__(self) -> int:
        return hash(self._ranges)

    def __repr__(self) -> str:
        return f"StepRanges({self.text()})"


def _text(found: range) -> str:
    last = found[-1]
    if last == found.start:
        return str(found.start)
    return f"{found.start}-{last}" + (f"/{found.step}" if found.step > 1 else "")
