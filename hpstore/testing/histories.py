"""Whether what concurrent users of one record saw and wrote fits one order in time.

The search of Wing and Gong, with the memory of Lowe: small histories, one record. An update sees a
value and writes one, or writes nothing; one whose outcome was never learned may take its place at
any time after it began, or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One update. `written` None: it only looked. `end` infinite: its outcome was never learned."""

    begin: float
    end: float
    seen: object
    written: object | None

    @property
    def unsure(self) -> bool:
        """Whether it may not have happened."""
        return math.isinf(self.end)


def is_linearizable(history: Sequence[Observed], first: object = None) -> bool:
    """Whether an order exists in which each update saw what was written last, `first` to begin
    with, and which keeps those apart that did not overlap."""
    updates = sorted(history, key=lambda one: one.begin)
    done: set[tuple[int, object]] = set()  # places that were searched: which are placed, the value
    stack: list[tuple[int, object]] = [(0, first)]
    needed = sum(1 << number for number, one in enumerate(updates) if not one.unsure)
    while stack:
        placed, value = stack.pop()
        if placed & needed == needed:
            return True
        if (placed, value) in done:
            continue
        done.add((placed, value))
        left = [number for number in range(len(updates)) if not placed >> number & 1]
        soonest = min(updates[number].end for number in left)
        for number in left:
            one = updates[number]
            if one.begin > soonest:
                break  # it began after another one had ended
            if one.seen == value:
                after = value if one.written is None else one.written
                stack.append((placed | 1 << number, after))
    return False
