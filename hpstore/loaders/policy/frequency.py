"""How often blocks are asked for: counts that fade.

Forward decay (G. Cormode, V. Shkapenyuk, D. Srivastava, B. Xu, "Forward decay", ICDE 2009): a
request at time t weighs 2**(t / H), for ever; only the sum's logarithm is kept. So nothing ages,
and blocks that are not asked for keep their order without being touched.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Floats, Int64s

HALF_LIFE = 4.0
"""In epochs: in one of them a count loses less than the margin of newcomers."""

_FADING = math.log(2) / HALF_LIFE
_REBASE = 2048.0  # above this float32 no longer separates requests of one batch
_MOST_EPOCHS = 1e12  # beyond it an epoch would not move the clock
_MOST_ABOVE = 64.0  # ln of requests that were made at once


class Learner:
    """ln of the faded counts of every block, in the keys of a table; -inf: never asked for."""

    def __init__(self, table: Table) -> None:
        self.keys = table.keys
        self.epochs = self._base = 0.0

    def pass_time(self, epochs: float) -> None:
        """So many have passed since the last time. Keys may be counted anew: take rows after it."""
        self.epochs += epochs
        if self._now() > _REBASE:
            by = self._now()
            self._base += by
            self.keys -= np.float32(by)

    def touch(self, before: Floats, counts: Int64s) -> Floats:
        """Keys float32[n] of blocks that are asked for counts[i] times: as they are after.

        To be kept in the table by who took them.
        """
        now = np.float32(self._now())
        after: Floats = before - now
        np.exp(after, out=after)
        after += counts.astype(np.float32)
        np.log(after, out=after)
        after += now
        return after

    def offset(self, requests_per_epoch: float) -> float:
        """offset - key is ln of the requests until the next one, on average.

        A sum that has grown for t epochs is the rate times (1 - 2**(-t / H)) H / ln 2.
        """
        share = _FADING * self.epochs
        grown = -math.expm1(-share) / _FADING if share > 1e-6 else self.epochs
        return math.log(max(grown * requests_per_epoch, 1e-30)) + self._now()

    def state(self) -> dict[str, np.ndarray]:
        """Arrays, not copied."""
        return {"keys": self.keys, "clock": np.array([self.epochs, self._base])}

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """The opposite of state(); shapes have been checked."""
        self.keys[:] = arrays["keys"]
        self.epochs, self._base = arrays["clock"].astype(np.float64).tolist()

    def _now(self) -> float:
        """The key that one request of this moment has."""
        return self.epochs * _FADING - self._base


def usable_keys(keys: npt.NDArray[np.generic], clock: npt.NDArray[np.generic]) -> bool:
    """Whether saved keys are of a time that can be: from others no block would be let in, for ever,
    as what is not a number stays none."""
    epochs, base = map(float, clock.astype(np.float64))
    now = epochs * _FADING - base
    if not 0 <= epochs < _MOST_EPOCHS or not -1 <= now <= 2 * _REBASE:  # nor for NaN
        return False
    latest = float(np.max(keys.astype(np.float64), initial=-np.inf))  # NaN if one is
    return latest <= now + _MOST_ABOVE
