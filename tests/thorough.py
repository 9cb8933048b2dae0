"""What a test run goes through: all cases with HPSTORE_LONG_TESTS=1, else samples."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
LONG = bool(os.environ.get("HPSTORE_LONG_TESTS"))


def crash_points(every: int = 11) -> Iterator[int]:
    """Operations before which a crash is tried, from the first one on: all, or one in `every`.

    The caller ends when its act runs through. Eleven: devices are written in turn, in threes and
    sixes, and each is to be met.
    """
    return itertools.count(0, 1 if LONG else every)


def some_of(cases: Sequence[T], *places: int) -> list[T]:
    """All cases, or those at these places: enough to meet each kind of them once."""
    return list(cases) if LONG else [cases[place] for place in places]
