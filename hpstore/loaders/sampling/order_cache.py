"""Results of pure functions kept for the next call. No locks: one tuple is replaced by another.

Threads that race compute the same twice, at worst; a fork in between leaves nothing behind.
Pickled without what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from hpstore.loaders.sampling.random_draws import Indices

Evaluate: TypeAlias = Callable[[int, int, int], Indices]
"""(epoch, start, stop) -> int64[stop - start], for 0 <= start < stop."""

BLOCK_POSITIONS = 1 << 16
NEAR_POSITIONS = BLOCK_POSITIONS // 32
"""A read that starts at most this far behind the end of an earlier one goes on with it. Farther,
as for a rank of a large world, a block would be used for fewer than 32 batches: see
docs/decisions/0011."""

_BLOCKS_KEPT = 2
_READERS_KEPT = 4

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """The last `keep` values, by key. For any number of threads."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._entries: tuple[tuple[Key, Value], ...] = ()

    def get(self, key: Key, compute: Callable[[], Value]) -> Value:
        """The value of `key`, computed unless kept. The value is shared: do not write to it."""
        for found, value in self._entries:
            if found == key:
                return value
        value = compute()
        others = (entry for entry in self._entries if entry[0] != key)  # of a thread that raced
        self._entries = ((key, value), *others)[: self._keep]
        return value

    def __contains__(self, key: Key) -> bool:
        return any(found == key for found, _ in self._entries)

    def __reduce__(self) -> tuple[type[Recent[Key, Value]], tuple[int]]:
        return type(self), (self._keep,)


class Ahead:
    """Reads a pure function of (epoch, position): sequential reads from blocks, jumps directly."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._blocks: Recent[tuple[int, int], Indices] = Recent(_BLOCKS_KEPT)
        self._ends: tuple[tuple[int, int], ...] = ()

    def read(self, evaluate: Evaluate, epoch: int, start: int, stop: int) -> Indices:
        """evaluate(epoch, start, stop), the caller's, from blocks of 64 Ki where that pays."""
        if stop - start >= BLOCK_POSITIONS:
            return evaluate(epoch, start, stop)
        goes_on = self._goes_on(epoch, start)
        self._ends = ((epoch, stop), *self._ends)[:_READERS_KEPT]
        parts = []
        for block in range(start // BLOCK_POSITIONS, (stop - 1) // BLOCK_POSITIONS + 1):
            first = block * BLOCK_POSITIONS
            last = min(first + BLOCK_POSITIONS, self._length)
            low, high = max(start, first), min(stop, last)
            if goes_on or (epoch, block) in self._blocks:
                kept = self._blocks.get(
                    (epoch, block),
                    lambda first=first, last=last: evaluate(epoch, first, last),  # type: ignore[misc]
                )
                parts.append(kept[low - first : high - first])
            else:
                parts.append(evaluate(epoch, low, high))
        return np.concatenate(parts)

    def _goes_on(self, epoch: int, start: int) -> bool:
        return any(epoch == seen and 0 <= start - end <= NEAR_POSITIONS for seen, end in self._ends)

    def __reduce__(self) -> tuple[type[Ahead], tuple[int]]:
        return type(self), (self._length,)
