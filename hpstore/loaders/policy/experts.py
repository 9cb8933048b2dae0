"""Ways to guess the next use of a block, and small caches that show which of them is right now.

Each expert runs a shadow cache over a fixed sample of the blocks, with the same share of the
capacity (miniature simulation: C. Waldspurger et al., "Cache modeling and optimization using
miniature simulations", USENIX ATC 2017). The one that hits most decides in the real cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.cache_plan import Floats, Int64s
from hpstore.loaders.policy.frequency import HALF_LIVES

MARGIN = 0.3 * 0.6931471805599453
"""By how much, ln of requests, a newcomer must be better than what it displaces."""

NO_ROOM = 1e30
"""A newcomer that never displaces anything; still takes free room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One guess. `column` of the learner, or None: by phase bits.

    A newcomer is judged by what was known of it before this request, plus the margin; with `fresh`
    by what is known now. The former keeps a scan from washing the cache out, the latter follows
    a moving working set. Hits are divided by `handicap` before they are compared.
    """

    name: str
    column: int | None
    margin: float = MARGIN
    fresh: bool = False
    handicap: float = 1.0


def _experts() -> tuple[Expert, ...]:
    column = {half: number for number, half in enumerate(HALF_LIVES)}
    forever = column[math.inf]
    old = [
        Expert(name=f"half-life {half:g}", column=column[half])
        for half in (math.inf, 8.0, 2.0, 0.5)
    ]
    new = [
        Expert(name=f"half-life {half:g}, fresh", column=column[half], margin=0.0, fresh=True)
        for half in (math.inf, 2.0, 1.0, 0.5)
    ]
    return (
        *old,
        *new,
        Expert(name="never evict", column=forever, margin=NO_ROOM, handicap=1.05),
        Expert(name="recency", column=column[min(HALF_LIVES)], margin=0.0, fresh=True),
        Expert(name="phase", column=None),
    )


EXPERTS = _experts()
"""The first one begins: what is asked for most, safe against scans and reshuffled epochs."""

PHASE = len(EXPERTS) - 1
_HANDICAPS = np.array([expert.handicap for expert in EXPERTS])

BEYOND = Expert(name="beyond the horizon", column=0)
"""Ranks what no known order asks for within its horizon, where nothing else is learned."""

SAMPLE_SHARE = 1 / 8
SAMPLE_LEAST, SAMPLE_MOST = 4096, 16_384
_MEMORY = 2.0  # half-life of an expert's score, in epochs
_GAIN = 0.005  # of its hits: less is not worth the change
_DEVIATIONS = 1.5  # of the difference of two experts' hits: what less says is chance


def sample_of(blocks: int) -> int:
    """How many blocks the experts are compared on."""
    return min(blocks, max(SAMPLE_LEAST, min(SAMPLE_MOST, round(blocks * SAMPLE_SHARE))))


class Shadows:
    """A cache in miniature for each expert. Counted in blocks, each of the mean size."""

    def __init__(self, blocks: int, capacity_share: float, seed: int) -> None:
        count = sample_of(blocks)
        chosen = np.random.Generator(np.random.PCG64(seed)).choice(blocks, count, replace=False)
        self.sample: Int64s = np.sort(chosen).astype(np.int64)
        self.room = max(1, round(count * capacity_share))
        self.every = max(16, self.room // 8)
        self.resident = np.zeros((len(EXPERTS), count), np.bool_)
        self.scores = np.zeros(len(EXPERTS))
        self.spread = np.zeros((len(EXPERTS), len(EXPERTS)))
        self._came = np.zeros(len(EXPERTS), np.int64)
        self.active = 0
        self.switches = 0
        self._waiting: list[Int64s] = []
        self._held = 0

    def record(self, blocks: Int64s) -> bool:
        """Requests of sampled blocks; True when there are enough for a step()."""
        self._waiting.append(blocks)
        self._held += len(blocks)
        return self._held >= self.every

    def step(self, waits: Floats, newcomers: Floats, epochs: float, *, phases: bool) -> bool:
        """Play what was recorded to all shadow caches; True when another expert takes over.

        Both float32[experts, sample]: expected use now, and that which a newcomer is judged by.
        `epochs` since the last step. `phases`: the phase expert may be chosen.
        """
        asked, times = np.unique(
            np.searchsorted(self.sample, np.concatenate(self._waiting)), return_counts=True
        )
        self._waiting, self._held = [], 0
        there = self.resident[:, asked]
        value = np.where(self.resident, waits, np.float32(np.inf))
        # what was never asked for takes free room too
        new = np.minimum(newcomers[:, asked], np.float32(2 * NO_ROOM))
        value[:, asked] = np.where(there, waits[:, asked], new)
        kept = np.isfinite(value)
        # Requests are played many at a time, and nobody leaves in between: who lets in many would
        # have more room than others. So half of what came in the last time is taken off.
        for row, came in enumerate(self._came.tolist()):
            room = max(1, self.room - came // 2)
            if room < value.shape[1]:
                kept[row, np.argpartition(value[row], room - 1)[room:]] = False
        self._came = np.count_nonzero(kept[:, asked] & ~there, axis=1)
        self.resident = kept
        # the first request of a newcomer misses, its repeats in the same step hit if it stays
        hits = there @ times + (kept[:, asked] & ~there) @ (times - 1)
        fade = 0.5 ** (epochs / _MEMORY)
        self.scores = self.scores * fade + hits
        # squares of differences step by step: experts see the same requests, so pairs tell
        self.spread = self.spread * fade + np.square(hits[:, None] - hits).astype(np.float64)
        return self._choose(phases=phases)

    def _choose(self, *, phases: bool) -> bool:
        scores = self.scores / _HANDICAPS
        scores = scores if phases else scores[:PHASE]
        best, now = int(np.argmax(scores)), self.active
        if now < len(scores):
            gain = scores[best] - scores[now]
            if gain <= max(_GAIN * scores[now], _DEVIATIONS * math.sqrt(self.spread[best, now])):
                return False
        self.active = best
        self.switches += 1
        return True

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Arrays, not copied."""
        held = np.concatenate(self._waiting) if self._waiting else np.empty(0, np.int64)
        numbers = np.array([self.active, self.switches])
        return {
            "resident": self.resident,
            "scores": self.scores,
            "spread": self.spread,
            "came": self._came,
            "numbers": numbers,
            "waiting": held,
        }

    def load(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        """The opposite of state()."""
        self.resident = arrays["resident"].astype(np.bool_)
        self.scores = arrays["scores"].astype(np.float64)
        self.spread = arrays["spread"].astype(np.float64)
        self._came = arrays["came"].astype(np.int64)
        self.active, self.switches = arrays["numbers"].astype(np.int64).tolist()
        held = arrays["waiting"].astype(np.int64)
        self._waiting, self._held = ([held] if len(held) else []), len(held)
