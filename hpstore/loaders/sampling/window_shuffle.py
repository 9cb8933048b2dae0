"""The window shuffle: stripes in random order, samples shuffled within windows of stripes. Pure.

All samples of a window are read together as whole stripes, in large sequential reads; with a
device lost, its units are decoded from the survivors that are read anyway.

What it can do: every sample once an epoch, in another order each epoch; any two samples of a
window in any order. What it cannot: bring samples together that lie in stripes of different
windows. When neighbours in storage are alike (sorted by class, by source), a batch has a share of
each class that varies by `design_effect` more than in a global shuffle. Shuffle once on writing,
as ingest does, and that is gone: then stripes are alike.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.order import (
    EPOCHS_KEPT,
    Order,
    SubsetOrder,
    check_length,
    check_range,
    digest,
)
from hpstore.loaders.sampling.order_cache import Recent
from hpstore.loaders.sampling.random_draws import (
    DRAWS_VERSION,
    Indices,
    Purpose,
    check_seed,
    shuffled,
)
from hpstore.units import div_ceil

_WINDOWS_KEPT = 4
_FIRST_WINDOWS = 4  # of an epoch: small ones, drawn in the last window of the epoch before


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleWindow:
    """Positions start .. stop - 1 of an epoch: all samples of some stripes, in mixed order."""

    number: int
    start: int
    stop: int
    stripes: Indices
    """Numbers into the stripes given to the order, in no order; those without samples left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    """Stripes of one epoch in their order, and where each begins."""

    stripes: Indices  # (n,)
    positions: Indices  # (n + 1,): first position of every stripe, then the length


def window_edges(stripe_count: int, *, window_stripes: int, first: int) -> Indices:
    """Where windows begin, in stripes, int64[windows + 1]: first, twice as many, ... at most
    `window_stripes`, so that the first batch does not wait for a large window.

    What is left after the small ones is cut evenly: no window at the end of an epoch is tiny,
    with batches from a stripe or two.
    """
    edges, size = [0], first
    while size < window_stripes and edges[-1] + size < stripe_count:
        edges.append(edges[-1] + size)
        size *= 2
    rest = stripe_count - edges[-1]
    count = div_ceil(rest, window_stripes)
    cuts = [edges[-1] + rest * number // count for number in range(1, count + 1)]
    return np.array(edges + cuts, np.int64)


def design_effect(*, batch: int, window_stripes: int, stripe_samples: int) -> float:
    """How many times the variance of a class's share in a batch is that of a global shuffle.

    For the worst dataset: each stripe holds one class only. 1 + (batch - 1) rho, where rho =
    (stripe_samples - 1) / (window samples - 1) is the chance that two samples of a batch come
    from one stripe (L. Kish, "Survey Sampling", 1965). About 1 + batch / window_stripes; 1 for
    data that were shuffled on writing.
    """
    samples = window_stripes * stripe_samples
    return 1.0 + (batch - 1) * (stripe_samples - 1) / max(1, samples - 1)


class WindowOrder:
    """Stripes permuted; windows of 1, 2, 4, ... `window_stripes` of them permuted inside.

    `stripes` int64[S + 1] is the first sample of every stripe, then the number of samples. A
    stripe without samples (the middle of a large record) takes part in nothing. Kept: 16 bytes a
    stripe and epoch, for two epochs, and 8 bytes a sample of four windows and, for two epochs, of
    the first four.

    Who reads the second half of an epoch's last window draws the next epoch's plan and its small
    windows too: between two epochs somebody would wait for them.
    """

    def __init__(self, stripes: Indices, seed: int, *, window_stripes: int, first: int = 1) -> None:
        stripes = np.array(stripes, np.int64)
        if stripes.ndim != 1 or not len(stripes) or stripes[0] or (np.diff(stripes) < 0).any():
            raise ConfigError("stripes must be a rising list of first samples that begins with 0")
        if window_stripes < 1 or first < 1:
            raise ConfigError(
                f"windows of {first} to {window_stripes} stripes: 1 or more are needed"
            )
        self.length = self.samples = check_length(int(stripes[-1]))
        self.seed, self.window_stripes, self.first = check_seed(seed), window_stripes, first
        self._digest = digest(stripes)
        self._filled = np.flatnonzero(np.diff(stripes))
        self._starts = stripes[:-1][self._filled]
        self._counts = np.diff(stripes)[self._filled]
        self.samples_by_stripe = np.diff(stripes)
        self._edges = window_edges(len(self._filled), window_stripes=window_stripes, first=first)
        self._epochs: Recent[int, _Epoch] = Recent(EPOCHS_KEPT)
        self._windows: Recent[tuple[int, int], Indices] = Recent(_WINDOWS_KEPT)
        self._firsts: Recent[tuple[int, int], Indices] = Recent(EPOCHS_KEPT * _FIRST_WINDOWS)
        self._prepared = 0  # the last epoch that was drawn before its time

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order."""
        check_range(self, epoch, start, stop)
        parts = [np.empty(0, np.int64)]
        at = start
        begun = epoch in self._epochs  # a first batch does not wait for the next epoch
        plan = self._plan(epoch)
        while at < stop:
            number, first, end = self._bounds(plan, at)
            parts.append(self._mixed(epoch, number)[at - first : min(stop, end) - first])
            at = min(stop, end)
            late = end == self.length and 2 * at > first + end
            if begun and late and self._prepared != epoch + 1:
                self._prepare(epoch + 1)
        return np.concatenate(parts)

    def _prepare(self, epoch: int) -> None:
        """What the first batches of an epoch need."""
        self._prepared = epoch
        self._plan(epoch)
        for number in range(min(_FIRST_WINDOWS, len(self._edges) - 1)):
            self._mixed(epoch, number)

    def _bounds(self, plan: _Epoch, position: int) -> tuple[int, int, int]:
        """Number, first position and end of a position's window. By bisect: numpy gives up the
        interpreter's lock for a search, and who makes batches has to queue for it.
        """
        rank = bisect.bisect_right(plan.positions, position) - 1
        number = bisect.bisect_right(self._edges, rank) - 1
        low, high = int(self._edges[number]), int(self._edges[number + 1])
        return number, int(plan.positions[low]), int(plan.positions[high])

    def window_of(self, epoch: int, position: int) -> ShuffleWindow:
        """The window that a position of an epoch lies in. ValueError beyond the epoch."""
        check_range(self, epoch, position, position + 1)
        plan = self._plan(epoch)
        number, start, stop = self._bounds(plan, position)
        chosen = plan.stripes[self._edges[number] : self._edges[number + 1]]
        return ShuffleWindow(number=number, start=start, stop=stop, stripes=self._filled[chosen])

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "window",
            "draws": DRAWS_VERSION,
            "length": self.length,
            "seed": self.seed,
            "stripes": self._digest,
            "window_stripes": self.window_stripes,
            "first": self.first,
        }

    def _plan(self, epoch: int) -> _Epoch:
        return self._epochs.get(epoch, lambda: self._make_plan(epoch))

    def _make_plan(self, epoch: int) -> _Epoch:
        count = len(self._filled)
        stripes = shuffled(Purpose.STRIPES, seed=self.seed, epoch=epoch, count=count)
        positions = np.zeros(count + 1, np.int64)
        np.cumsum(self._counts[stripes], out=positions[1:])
        return _Epoch(stripes=stripes, positions=positions)

    def _mixed(self, epoch: int, number: int) -> Indices:
        kept = self._firsts if number < _FIRST_WINDOWS else self._windows
        return kept.get((epoch, number), lambda: self._mix(epoch, number))

    def _mix(self, epoch: int, number: int) -> Indices:
        """Samples of a window in their order."""
        plan = self._plan(epoch)
        low, high = int(self._edges[number]), int(self._edges[number + 1])
        stripes, positions = plan.stripes[low:high], plan.positions[low : high + 1]
        total = int(positions[-1] - positions[0])
        # sample = position + (first sample of its stripe - first position of its stripe)
        shift = np.repeat(self._starts[stripes] - positions[:-1], np.diff(positions))
        samples = shift + np.arange(positions[0], positions[-1])
        mixed: Indices = samples[
            shuffled(Purpose.WINDOW, seed=self.seed, epoch=epoch, part=number, count=total)
        ]
        return mixed


def windows_of(order: Order | None) -> WindowOrder | None:
    """The windows behind an order: its own, or those of the subset that it is over."""
    if isinstance(order, SubsetOrder):
        order = order.inner
    return order if isinstance(order, WindowOrder) else None


def subset_stripes(stripes: Indices, mapping: Indices) -> Indices:
    """Stripes of a subset: first position in `mapping` (sample numbers, rising) of every stripe.

    For SubsetOrder(WindowOrder(subset_stripes(...)), mapping): a subset read by whole stripes.
    """
    if (np.diff(mapping) < 0).any():
        raise ConfigError("a window shuffle of a subset needs its indices in rising order")
    return np.searchsorted(mapping, stripes).astype(np.int64)
