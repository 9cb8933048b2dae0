"""Samples drawn by weight, with and without replacement. Pure.

Equal on every machine: only +, -, x, / and comparisons of doubles, which IEEE 754 fixes to the
bit, and the random words of draws.py. No call of libm's log, which differs between CPUs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.order import EPOCHS_KEPT, check_length, check_range, digest
from hpstore.loaders.sampling.order_cache import Ahead, Recent
from hpstore.loaders.sampling.random_draws import DRAWS_VERSION, Indices, Purpose, check_seed, words

Doubles = npt.NDArray[np.float64]

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_TERMS = 11  # of the series below: the next one is below 2**-53 for all mantissas


def check_weights(weights: npt.ArrayLike) -> Doubles:
    """Weights as float64[n], a copy. Raises ConfigError unless finite, >= 0 and one above 0.

    Also when they differ by more than 2**1000: their ratios, and the keys made of them, would
    leave the range of doubles.
    """
    try:
        checked = np.array(weights, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"weights are numbers, not {repr(weights)[:60]}: {error}") from error
    if checked.ndim != 1:
        raise ConfigError(f"weights have the shape {checked.shape}, one dimension is needed")
    bad = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if len(bad):
        raise ConfigError(f"weight {bad[0]} is {checked[bad[0]]}: weights are finite and >= 0")
    if not (checked > 0).any():
        raise ConfigError("no weight is above 0: there is nothing to draw from")
    tiny = np.flatnonzero((checked > 0) & (checked < checked.max() * 2.0**-1000))
    if len(tiny):
        raise ConfigError(
            f"weight {tiny[0]} is {checked[tiny[0]]}, beside one of {checked.max()}: "
            "more than a factor of 2**1000 apart; set it to 0"
        )
    return checked


def natural_log(values: Doubles) -> Doubles:
    """ln of values in (0, 1], equal to the bit everywhere, within 4 ulp or 1e-16.

    x = m 2**e with m in [sqrt(1/2), sqrt(2)); ln m = 2 (s + s**3/3 + s**5/5 + ...) for
    s = (m - 1) / (m + 1).
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.zeros_like(s)
    for term in range(_TERMS - 1, -1, -1):
        series *= square
        series += 1.0 / (2 * term + 1)
    result: Doubles = (exponent - small).astype(np.float64) * _LN2 + 2.0 * s * series
    return result


class WeightedOrder:
    """Draws of an epoch from samples that have a weight each. An Order.

    With replacement every position is drawn by itself, by search in the running sum of weights
    (8 bytes a sample): seeking costs nothing. Without replacement samples are unique within an
    epoch, drawn one after another from what is left: the order of -ln(u) / weight (P. S.
    Efraimidis and P. G. Spirakis, "Weighted random sampling with a reservoir", 2006), a table of
    8 bytes a draw that is made at the first use of an epoch (0.2 s for 1e6 weights).

    Parameters
    ----------
    weights
        One for each sample, (samples,): finite and not negative, one above 0, and those above 0
        within a factor of 2**1000. They are copied. A weight of 0 is never drawn.
    num_samples
        Draws of an epoch.
    seed
        0 <= seed < 2**64. With the epoch and the position it determines each draw.
    replacement
        Whether a sample may be drawn more than once in an epoch.

    Raises
    ------
    ConfigError
        Weights, `num_samples` or the seed cannot be used, or, without replacement, there are more
        draws than weights above 0.
    """

    def __init__(
        self, weights: npt.ArrayLike, num_samples: int, seed: int, *, replacement: bool = True
    ) -> None:
        checked = check_weights(weights)
        self.length, self.samples = check_length(num_samples), check_length(len(checked))
        self.seed, self.replacement = check_seed(seed), replacement
        positive = np.flatnonzero(checked)
        if not replacement and self.length > len(positive):
            raise ConfigError(
                f"{self.length} draws without replacement from {len(positive)} weights above 0"
            )
        self._digest = digest(checked)
        self._last = int(positive[-1])
        scaled = checked / checked.max()
        self._table = np.cumsum(scaled) if replacement else scaled
        self._ahead = Ahead(self.length)
        self._epochs: Recent[int, Indices] = Recent(EPOCHS_KEPT)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Samples at positions start .. stop - 1 of an epoch. Thread-safe.

        Parameters
        ----------
        epoch
            0 <= epoch.
        start, stop
            0 <= start <= stop <= length.

        Returns
        -------
        numpy.ndarray
            int64 (stop - start,), each below `samples`. It is the caller's.

        Raises
        ------
        ValueError
            An epoch does not have these positions.
        """
        check_range(self, epoch, start, stop)
        if start == stop:
            return np.empty(0, np.int64)
        if self.replacement:
            return self._ahead.read(self._draw, epoch, start, stop)
        return self._epochs.get(epoch, lambda: self._exhaust(epoch))[start:stop].copy()

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "weighted",
            "draws": DRAWS_VERSION,
            "length": self.length,
            "seed": self.seed,
            "samples": self.samples,
            "weights": self._digest,
            "replacement": self.replacement,
        }

    def _draw(self, epoch: int, start: int, stop: int) -> Indices:
        drawn = words(
            Purpose.WEIGHTED, seed=self.seed, epoch=epoch, start=start, count=stop - start
        )
        points = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._table[-1]
        # in rising order a large table is walked once, not jumped about in for every draw
        rising = np.argsort(points)
        found = np.empty(len(points), np.int64)
        # "right" passes over weights of 0; rounding may reach the total itself
        found[rising] = np.searchsorted(self._table, points[rising], "right")
        return np.minimum(found, self._last, out=found)

    def _exhaust(self, epoch: int) -> Indices:
        drawn = words(Purpose.WEIGHTED, seed=self.seed, epoch=epoch, count=self.samples)
        uniform = ((drawn >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        positive = np.flatnonzero(self._table)
        keys = natural_log(uniform[positive]) / -self._table[positive]
        chosen: Indices = positive[np.argsort(keys, kind="stable")[: self.length]]
        return chosen
