"""Seconds that threads spend at something."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Stopwatch:
    """Seconds that threads spent at something, added up: a hint, not exact beside other threads."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self, aside: Stopwatch | None = None) -> Iterator[None]:
        """Counts until the block ends, however it does; not what `aside`, new, counted in it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began - (0.0 if aside is None else aside.seconds)
            self.seconds += took  # no call in between, in which another thread might have its turn

    def timed(self, todo: Iterable[T]) -> Iterator[T]:
        """The same items; counts while the next one is made, not what is done with it."""
        rest = iter(todo)
        while True:
            began = time.perf_counter()
            try:
                one = next(rest)
            except StopIteration:
                return
            finally:
                took = time.perf_counter() - began
                self.seconds += took
            yield one
