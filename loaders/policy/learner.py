"""How often blocks are asked for: counts that fade, one for each half-life.

Forward decay (G. Cormode, V. Shkapenyuk, D. Srivastava, B. Xu, "Forward decay", ICDE 2009): a
request at time t weighs 2**(t / H), for ever; only the sum's logarithm is kept. So nothing ages,
and blocks that are not asked for keep their order without being touched.
"""

from __future__ import annotations

import math

import numpy as np

from hpstore.loaders.policy.plans import Floats, Int64s
from hpstore.loaders.policy.residents import Int32s

HALF_LIVES = (2.0, 1.0, 0.5, 8.0, math.inf, 0.02)
"""In epochs, one column each. The first is kept even when all orders are known: it ranks what lies
beyond the horizon. The last is recency."""

_REBASE = 2048.0  # above this float32 no longer separates requests of one batch


class Learner:
    """ln of the faded counts of every block, float32[blocks, columns]; -inf: never asked for."""

    def __init__(self, blocks: int) -> None:
        self.keys = np.full((blocks, 1), -np.inf, np.float32)
        self.epochs = 0.0
        self._bases = np.zeros(len(HALF_LIVES))
        self._fading = np.array([math.log(2) / half for half in HALF_LIVES])

    @property
    def columns(self) -> int:
        """1, or one for each half-life."""
        return self.keys.shape[1]

    def widen(self) -> None:
        """All half-lives from now on; what the first one knows is where the others start."""
        if self.columns > 1:
            return
        if not self.epochs:
            self.keys = np.full((len(self.keys), len(HALF_LIVES)), -np.inf, np.float32)
        else:
            known = self.keys[:, :1] - self._now()[:1]
            self.keys = np.empty((len(self.keys), len(HALF_LIVES)), np.float32)
            np.add(known, self._now(), out=self.keys)

    def touch(self, blocks: Int64s, counts: Int64s, epochs: float) -> tuple[Floats, Floats]:
        """Blocks, each once, asked for counts[i] times; `epochs` have passed since the last touch.

        Returns their keys before and after, float32[n, columns].
        """
        self.epochs += epochs
        self._rebase()
        now = self._now()
        before = self.keys.take(blocks, axis=0)
        after = np.exp(before - now)
        after += counts.astype(np.float32)[:, None]
        np.log(after, out=after)
        after += now
        self.keys[blocks] = after
        return before, after

    def offsets(self, requests_per_epoch: float) -> Floats:
        """offset(), float32[columns]."""
        found = [self.offset(column, requests_per_epoch) for column in range(self.columns)]
        return np.array(found, np.float32)

    def offset(self, column: int, requests_per_epoch: float) -> float:
        """offset - key is ln of the requests until the next one, on average.

        A sum that has grown for t epochs is the rate times (1 - 2**(-t / H)) H / ln 2.
        """
        fading = float(self._fading[column])
        share = fading * self.epochs
        grown = -math.expm1(-share) / fading if share > 1e-6 else self.epochs
        now = self.epochs * fading - float(self._bases[column])
        return math.log(max(grown * requests_per_epoch, 1e-30)) + now

    def column(self, blocks: Int64s | Int32s, column: int) -> Floats:
        """One half-life's keys, float32[n]."""
        return self.keys[:, column][blocks]

    def state(self) -> dict[str, np.ndarray]:
        """Arrays, not copied."""
        return {"keys": self.keys, "clock": np.concatenate(([self.epochs], self._bases))}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """The opposite of state(); shapes have been checked."""
        self.keys = arrays["keys"].astype(np.float32)
        self.epochs = float(arrays["clock"][0])
        self._bases = arrays["clock"][1:].astype(np.float64)

    def _now(self) -> Floats:
        """The key that one request of this moment has."""
        now: Floats = (self.epochs * self._fading - self._bases)[: self.columns].astype(np.float32)
        return now

    def _rebase(self) -> None:
        if self.epochs * self._fading[-1] - self._bases[-1] <= _REBASE:
            return  # recency grows fastest
        late = np.flatnonzero(self.epochs * self._fading - self._bases > _REBASE)
        for column in late:
            by = self.epochs * self._fading[column] - self._bases[column]
            self._bases[column] += by
            if column < self.columns:
                self.keys[:, column] -= np.float32(by)


__all__ = ["HALF_LIVES", "Learner"]
