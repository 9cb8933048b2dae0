"""How often blocks are asked for: counts that fade, one for each half-life.

Forward decay (G. Cormode, V. Shkapenyuk, D. Srivastava, B. Xu, "Forward decay", ICDE 2009): a
request at time t weighs 2**(t / H), for ever; only the sum's logarithm is kept. So nothing ages,
and blocks that are not asked for keep their order without being touched.
"""

from __future__ import annotations

import math

import numpy as np

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Floats, Int32s, Int64s

HALF_LIVES = (2.0, 1.0, 0.5, 8.0, math.inf, 0.02)
"""In epochs, one column each. The first is kept even when all orders are known: it ranks what lies
beyond the horizon. The last is recency."""

_REBASE = 2048.0  # above this float32 no longer separates requests of one batch


class Learner:
    """ln of the faded counts of every block, in the keys of a table; -inf: never asked for."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.epochs = 0.0
        self._bases = np.zeros(len(HALF_LIVES))
        self._fading = np.array([math.log(2) / half for half in HALF_LIVES])
        self._list_paces()

    @property
    def keys(self) -> Floats:
        """float32[blocks, columns]: a view, until more columns come."""
        return self._table.keys

    @property
    def columns(self) -> int:
        """1, or one for each half-life."""
        return self._table.columns

    def widen(self) -> None:
        """All half-lives from now on; what the first one knows is where the others start."""
        if self.columns > 1:
            return
        known = self.keys[:, :1] - self._now()[:1]
        self._table.lay(len(HALF_LIVES))
        if self.epochs:
            np.add(known, self._now(), out=self.keys)

    def pass_time(self, epochs: float) -> None:
        """So many have passed since the last time. Keys may be counted anew: take rows after it."""
        self.epochs += epochs
        self._rebase()

    def touch(self, before: Floats, counts: Int64s) -> Floats:
        """Keys float32[columns, n] of blocks that are asked for counts[i] times: as they are after.

        To be kept in the table by who took them.
        """
        now = self._now()[:, None]
        after: Floats = before - now
        np.exp(after, out=after)
        after += counts.astype(np.float32)
        np.log(after, out=after)
        after += now
        return after

    def offsets(self, requests_per_epoch: float) -> Floats:
        """offset(), float32[columns]."""
        found = [self.offset(column, requests_per_epoch) for column in range(self.columns)]
        return np.array(found, np.float32)

    def offset(self, column: int, requests_per_epoch: float) -> float:
        """offset - key is ln of the requests until the next one, on average.

        A sum that has grown for t epochs is the rate times (1 - 2**(-t / H)) H / ln 2.
        """
        fading, base = self._paces[column]
        share = fading * self.epochs
        grown = -math.expm1(-share) / fading if share > 1e-6 else self.epochs
        now = self.epochs * fading - base
        return math.log(max(grown * requests_per_epoch, 1e-30)) + now

    def column(self, blocks: Int64s | Int32s, column: int) -> Floats:
        """One half-life's keys, float32[n]."""
        return self.keys[:, column][blocks]

    def state(self) -> dict[str, np.ndarray]:
        """Arrays, not copied."""
        return {"keys": self.keys, "clock": np.concatenate(([self.epochs], self._bases))}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """The opposite of state(); shapes have been checked."""
        keys = arrays["keys"]
        self._table.lay(keys.shape[1])
        self.keys[:] = keys
        self.epochs = float(arrays["clock"][0])
        self._bases = arrays["clock"][1:].astype(np.float64)
        self._list_paces()

    def _list_paces(self) -> None:
        """Both arrays as numbers of Python, which are faster one by one."""
        self._paces: list[tuple[float, float]] = list(
            zip(self._fading.tolist(), self._bases.tolist(), strict=True)
        )

    def _now(self) -> Floats:
        """The key that one request of this moment has."""
        epochs, columns = self.epochs, self.columns
        now = [epochs * fading - base for fading, base in self._paces[:columns]]
        return np.array(now, np.float32)

    def _rebase(self) -> None:
        fading, base = self._paces[-1]  # recency grows fastest
        if self.epochs * fading - base <= _REBASE:
            return
        late = np.flatnonzero(self.epochs * self._fading - self._bases > _REBASE)
        for column in late:
            by = self.epochs * self._fading[column] - self._bases[column]
            self._bases[column] += by
            if column < self.columns:
                self.keys[:, column] -= np.float32(by)
        self._list_paces()
