"""Which of several policies is right now, and what its directory says should stay.

All of them are followed in full, as directories without data, so each one's hits are known exactly
and the cache can take over the contents of another one, as far as they come by.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Bools, Floats, Int32s, Int64s
from hpstore.loaders.policy.directories import PHASE, RULES, Directories, UInt16s
from hpstore.loaders.policy.resident_set import EXACT

WHOLE = 1 << 18
"""Up to so many blocks all are followed."""

SAMPLE = 1 << 16
"""Of more, a sample of so many is followed."""

FIRST = RULES.index("count")
"""Begins: what it keeps is right for shuffled epochs, where a wrong beginning costs most."""

LEADING_ALL = ("LRU", "ARC", "S3-FIFO", "W-TinyLFU", "2Q")
"""Rules that have a directory of all blocks where only a sample is followed: 10 bytes a block."""

_LEFT_OUT = RULES.index("LIRS")
"""The rule that cannot lead there: its directory has 17 bytes a block."""

_STEP = 256  # requests between two looks at the scores
_MEMORY = 10_000  # requests: half-life of scores, or as many as blocks have room if that is more
_GAIN = 0.002  # of its hits: less is not worth a change
_DEVIATIONS = 0.7  # of the difference of two experts' hits: what less says is chance
_ADOPTION = 0.03  # hits that must have been gained, for each block that would have to come
_MOST_HITS = 1e15  # of a saved state
_LEAD = 4.0  # votes of the leader; others have at most 1
APART = 100.0
"""ln of requests: more than what is learned of blocks can differ by."""


_BITS = np.arange(256)[:, None] >> np.arange(8) & 1


class ExpertChoice:
    """Scores of all rules on the same requests, and votes of their directories on blocks."""

    def __init__(
        self, table: Table, blocks: int, room: float, *, seed: int, apart: float = APART
    ) -> None:
        """`room`: of the blocks, in the cache. `apart`: what distance() gives to blocks that no
        rule would keep.
        """
        self._table, self._blocks, self._room, self._apart = table, blocks, room, apart
        self.whole = blocks <= WHOLE
        self._sample: Int64s | None = None
        if not self.whole:
            rng = np.random.Generator(np.random.PCG64(seed))
            chosen = rng.choice(blocks, SAMPLE, replace=False)
            self._sample = np.sort(chosen).astype(np.int64)
        count = len(RULES)
        self.leader, self.switches = FIRST, 0
        self.scores = np.zeros(count)
        self.spread = np.zeros((count, count))
        self._waiting: list[UInt16s] = []
        self._held = 0
        self._votes = np.zeros((2, 256), np.float32)
        self._open()

    def _open(self) -> None:
        names = None if self._sample is None else self._sample.astype(np.int32)
        followed = self._blocks if names is None else SAMPLE
        room = max(2, round(self._room * followed / self._blocks))
        self._memory = max(_MEMORY, room)
        self._all = Directories(RULES, followed, room, seen=self._table.seen, names=names)
        self._leavers: list[Int32s] = []
        self._left = 0
        self._leading: Directories | None = None
        self._vote()
        self._lead()

    @property
    def name(self) -> str:
        """Of the leader."""
        return RULES[self.leader]

    @property
    def nbytes(self) -> int:
        """Bytes of all directories: of a sample they do not grow with the number of blocks."""
        own = self._leading.nbytes if self._leading else 0
        drawn = 0 if self._sample is None else self._sample.nbytes
        return own + drawn + self._all.nbytes

    @property
    def by_counts(self) -> bool:
        """What is known of each block decides alone: the leader has no directory of all blocks, or
        is the phase rule, whose directory compares a few blocks where the cache compares many.
        """
        return self.leader == PHASE or (not self.whole and self._leading is None)

    def request(self, blocks: Int64s, waits: Floats | None) -> None:
        """Requests one after the other; `waits` as in Directories.request."""
        followed = blocks
        if self._sample is not None:
            at = np.minimum(self._sample.searchsorted(blocks), SAMPLE - 1)
            followed = at[self._sample[at] == blocks]
        if len(followed):
            self._waiting.append(self._all.request(followed, waits))
            self._held += len(followed)
        if self._leading is not None:
            self._leading.request(blocks)
        self._collect(self._leading or self._all)
        if self._held >= _STEP:
            self._count()
            self._choose(phases=waits is not None)

    def distance(self, blocks: Int64s | Int32s, *, strictly: bool) -> Floats:
        """float32[n]: what is added to the expected use of blocks, by how few would keep them.

        `strictly`: only the leader counts.
        """
        if strictly or self._leading is not None:
            return np.float32(self._apart) * ~self._holds(blocks)
        masks = self._all.masks[blocks]
        low, high = self._votes
        found: Floats = low.take(masks & np.uint16(255))
        found += high.take(masks >> np.uint16(8))
        np.subtract(np.float32(self._apart), found, out=found)
        return found

    def _collect(self, leading: Directories) -> None:
        """Blocks that the leader has given up, where so many are resident that some are drawn."""
        if leading.watched < 0 or not len(leading.left):
            return
        self._leavers.append(leading.left)
        self._left += len(leading.left)
        if self._left > 2 * self._room + _STEP:
            self._list_leavers()

    def _list_leavers(self) -> None:
        residents = np.flatnonzero(self._table.places >= 0)
        self._leavers = [residents[~self._holds(residents)].astype(np.int32)]
        self._left = 0

    def leavers(self, count: int) -> Int32s:
        """Some residents that the leader does not hold, about `count` at most: they go first.

        Not all that there are, but all that have left the leader's directory come round.
        """
        found: list[Int32s] = []
        while self._leavers and sum(map(len, found)) < count:
            some = self._leavers.pop()
            if len(some) > count:
                self._leavers.append(some[:-count])
                some = some[-count:]
            held = self._holds(some) | (self._table.places[some] < 0)
            found.append(some[~held])
        if not found:
            return np.empty(0, np.int32)
        known = np.unique(np.concatenate(found))
        self._leavers.append(known)  # until they have left, or come back
        return known

    def _holds(self, blocks: Int64s | Int32s) -> Bools:
        """bool[n]: which blocks the leader has."""
        if self._leading is not None:
            held: Bools = self._leading.masks[blocks] != 0
            return held
        led: Bools = self._all.masks[blocks] & np.uint16(1 << self.leader) != 0
        return led

    def _count(self) -> None:
        masks = np.concatenate(self._waiting)
        self._waiting, self._held = [], 0
        hit = (masks[:, None] >> np.arange(len(RULES), dtype=np.uint16) & 1).astype(np.float32)
        fade = 0.5 ** (len(masks) / self._memory)
        self.scores = self.scores * fade + hit.sum(axis=0)
        alone = hit.T @ (1 - hit)
        self.spread = self.spread * fade + alone + alone.T

    def _choose(self, *, phases: bool) -> None:
        allowed = len(RULES) if phases else PHASE
        now = self.leader
        scores = self.scores[:allowed].copy()
        if not self.whole:
            scores[_LEFT_OUT] = 0.0
        gains = scores - self.scores[now]
        sure = _DEVIATIONS * np.sqrt(self.spread[now, :allowed])
        gains[(gains <= sure) | (gains <= _GAIN * self.scores[now])] = 0.0
        best = int(np.argmax(gains))
        if now >= allowed or gains[best] > 0:
            if now >= allowed:
                best = int(np.argmax(scores))
            elif gains[best] <= _ADOPTION * self._missing(best):
                best = now
            if best != now:
                self.leader = best
                self.switches += 1
                self._lead()
        self._vote()

    def _missing(self, rule: int) -> int:
        """Blocks that the cache would have to get to hold what a rule holds."""
        bit = np.uint16(1 << rule)
        held = (self._all.masks & bit) != 0
        if self.whole:
            return int(np.count_nonzero(held & (self._table.places < 0)))
        return int(np.count_nonzero(held & ~self._holds_sampled()))

    def _holds_sampled(self) -> Bools:
        led: Bools = self._all.masks & np.uint16(1 << self.leader) != 0
        return led

    def _vote(self) -> None:
        behind = (self.scores - self.scores[self.leader]) / np.sqrt(self.spread[self.leader] + 1)
        weights = np.exp(np.minimum(behind, 0.0))
        weights[PHASE] = 0.0
        weights[self.leader] = _LEAD
        padded = np.zeros(16)
        padded[: len(RULES)] = weights * (self._apart / weights.sum())
        self._votes = np.stack([_BITS @ padded[:8], _BITS @ padded[8:]]).astype(np.float32)

    def _lead(self) -> None:
        """Of many blocks: the leader's own directory of all of them, begun with what is there."""
        self._leading, self._leavers = None, []
        if self.whole:
            self._all.watched = self.leader if self._room > EXACT else -1
            self._list_leavers()
            return
        if self.name in LEADING_ALL:
            self._leading = Directories(
                [self.name], self._blocks, max(2, round(self._room)), seen=self._table.seen
            )
            self._leading.watched = 0
            residents = np.flatnonzero(self._table.places >= 0)
            # the most used last: the first ones are the first that a list gives up
            rising = np.argsort(self._table.keys[residents], kind="stable")
            self._leading.request(residents[rising])
            self._list_leavers()

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Arrays, not copied: scores; directories begin with the residents."""
        return {
            "scores": self.scores,
            "spread": self.spread,
            "numbers": np.array([self.leader, self.switches]),
        }

    def load(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        """The opposite of state(); blocks that the table has places for are those to begin with."""
        self.scores, self.spread = (
            np.clip(np.nan_to_num(arrays[name].astype(np.float64)), 0.0, _MOST_HITS)
            for name in ("scores", "spread")
        )
        self.leader, self.switches = arrays["numbers"].astype(np.int64).tolist()
        self._waiting, self._held = [], 0
        self._open()
        if self._sample is None:
            self._all.request(np.flatnonzero(self._table.places >= 0))


def usable(numbers: npt.NDArray[np.generic]) -> bool:
    """Whether saved numbers name a leader that there is."""
    leader, switches = numbers.astype(np.int64).tolist()
    return bool(0 <= leader < len(RULES) and switches >= 0)
