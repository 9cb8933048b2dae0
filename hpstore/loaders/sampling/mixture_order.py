"""Several datasets in one order, in fixed shares. Pure.

An epoch is cut into mix blocks. After any number of blocks each source has had its exact share
rounded up or down (largest remainders), so that every block and the long run keep the weights;
within a block the sources are shuffled. Source and place in the source are arithmetic in the
position, whatever has been read before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.loaders.sampling.mixture_shares import MixtureSchedule, MixtureShares
from hpstore.loaders.sampling.order import Order, check_length, check_range
from hpstore.loaders.sampling.order_cache import Ahead, Recent
from hpstore.loaders.sampling.random_draws import (
    DRAWS_VERSION,
    Indices,
    Purpose,
    check_seed,
    shuffled,
)

MIX_BLOCK_POSITIONS = 1024
_MAX_BLOCK_POSITIONS = 1 << 22
_BLOCKS_KEPT = 4
_PART_BITS = 40  # an epoch has fewer blocks

_Small: TypeAlias = npt.NDArray[np.unsignedinteger[npt.NBitBase]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Which source, and which of its samples: int64[n] each."""

    source: Indices
    sample: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One mix block: the source of each position and how many came from it before."""

    start: int
    stop: int
    source: _Small  # (stop - start,)
    number: Indices  # (stop - start,): draws of that source since the first epoch


def sources_of(indices: Indices, offsets: Indices) -> Sources:
    """Source and sample within it, of sources laid end to end. Raises IndexError beyond them.

    `offsets`: (sources + 1), where each begins, and their end.
    """
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < offsets[-1]:
        bad = indices[(indices < 0) | (indices >= offsets[-1])][0]
        raise IndexError(f"sample {bad} of a mixture of {offsets[-1]}")
    source = np.searchsorted(offsets, indices, "right") - 1
    return Sources(source=source, sample=indices - offsets[source])


class MixtureOrder:
    """Positions from several orders, by weight.

    An index is a sample of the sources laid end to end, as in torch's ConcatDataset: sample i of
    source s is offsets[s] + i. `split` gives (source, i) back. So a mixture is an order like any
    other, also inside a SubsetOrder or a mixture.

    A source goes through its own epochs, one after another, whatever the epoch of the mixture:
    a small one with a large weight is repeated, a large one goes on in the next epoch. Give each
    its own seed (draws.derive_seed), or equally long ones run through equal permutations.
    Kept: 1.5 MB, and what the sources keep: 1 MB for a network, 8 bytes a sample for a table
    (GlobalOrder's `table_samples` limits these).

    `weights` may change by position: see MixtureSchedule. Then blocks are counted from there, and
    one that is shorter, as the weights or the epoch change, may miss a source.

    `length` is the epoch's, by default all samples that an epoch of each source has. `block` is
    1024, or more where a source would be missing from a block otherwise. Raises ConfigError when
    a block or an epoch is too short for every source to appear in it.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        weights: Sequence[float] | MixtureSchedule,
        seed: int,
        *,
        length: int | None = None,
        block: int | None = None,
    ) -> None:
        schedule = weights
        if not isinstance(schedule, MixtureSchedule):
            schedule = MixtureSchedule([(0, schedule)])
        self.weights = schedule.weights[0]
        if len(orders) != len(self.weights):
            raise ConfigError(
                f"{len(orders)} sources, {len(self.weights)} weights: one each is needed"
            )
        for source, (order, ever) in enumerate(zip(orders, schedule.ever, strict=True)):
            if ever and not order.length:
                raise ConfigError(f"source {source} of the mixture has a weight and no samples")
        self.seed = check_seed(seed)
        self.length = check_length(sum(o.length for o in orders) if length is None else length)
        self.offsets = np.cumsum([0, *(order.samples for order in orders)], dtype=np.int64)
        self.samples = check_length(int(self.offsets[-1]))
        self.orders = tuple(orders)
        self.block = max(
            _block_positions(shares, length=self.length, block=block) for shares in schedule.shares
        )
        self._schedule = schedule.fitted(self.length, self.block)
        self._blocks: Recent[tuple[int, int, int], _Block] = Recent(_BLOCKS_KEPT)
        self._ahead = Ahead(self.length)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """See Order. Indices count through the sources laid end to end."""
        check_range(self, epoch, start, stop)
        if start == stop:
            return np.empty(0, np.int64)
        return self._ahead.read(self._evaluate, epoch, start, stop)

    def split(self, indices: Indices) -> Sources:
        """Source and sample within it of indices that `indices` gave."""
        return sources_of(indices, self.offsets)

    def describe(self) -> dict[str, object]:
        """See Order."""
        return {
            "kind": "mixture",
            "draws": DRAWS_VERSION,
            "length": self.length,
            "seed": self.seed,
            "block": self.block,
            "weights": self._schedule.describe(),
            "orders": [order.describe() for order in self.orders],
        }

    def draws(self, epoch: int, start: int, stop: int) -> Sources:
        """The source of each position, and the number of its draw since the first epoch.

        For 0 <= start < stop <= length. Those of a source are consecutive.
        """
        blocks = [self._block_at(epoch, start)]
        while blocks[-1].stop < stop:
            blocks.append(self._block_at(epoch, blocks[-1].stop))
        rows = slice(start - blocks[0].start, stop - blocks[0].start)
        return Sources(
            source=np.concatenate([block.source for block in blocks])[rows].astype(np.int64),
            sample=np.concatenate([block.number for block in blocks])[rows],
        )

    def places(self, epoch: int, position: int) -> list[tuple[int, int]]:
        """(epoch, position) at which each source stands before a position of an epoch of this."""
        if position >= self.length:
            before = self._schedule.totals((epoch + 1) * self.length)
        else:
            block = self._block_at(epoch, position)
            before = self._schedule.totals(epoch * self.length + block.start)
            drawn = np.bincount(block.source[: position - block.start], minlength=len(before))
            before = [a + b for a, b in zip(before, drawn.tolist(), strict=True)]
        return [divmod(n, max(1, o.length)) for n, o in zip(before, self.orders, strict=True)]

    def _evaluate(self, epoch: int, start: int, stop: int) -> Indices:
        found = self.draws(epoch, start, stop)
        kind = np.min_scalar_type(len(self.orders) - 1)  # numpy sorts small types ten times as fast
        return self._look_up(found.source.astype(kind), found.sample)

    def _block_at(self, epoch: int, position: int) -> _Block:
        """Blocks are counted from where the epoch begins, or the weights change in it."""
        first = epoch * self.length
        part = self._schedule.part_of(first + position)
        start = max(0, self._schedule.starts[part] - first)
        end = self._schedule.end_of(part)
        stop = self.length if end is None else min(self.length, end - first)
        # the last block takes what is left too, so that none is shorter than `block`
        number = min((position - start) // self.block, max(1, (stop - start) // self.block) - 1)
        return self._blocks.get(
            (epoch, part, number), lambda: self._make_block(epoch, part, number, start, stop)
        )

    def _make_block(self, epoch: int, part: int, number: int, begin: int, end: int) -> _Block:
        start = begin + number * self.block
        stop = end if start + 2 * self.block > end else start + self.block
        before = np.array(self._schedule.totals(epoch * self.length + start), np.int64)
        after = np.array(self._schedule.totals(epoch * self.length + stop), np.int64)
        counts = after - before
        # sorted by source: draws of a source are numbered on from those before the block
        # in the smallest type: numpy sorts 8 and 16 bits by radix, ten times as fast
        kind = np.min_scalar_type(len(counts) - 1)
        source = np.repeat(np.arange(len(counts), dtype=kind), counts)
        first = np.cumsum(counts) - counts
        # shuffling gives each source its set of places; within it draws keep their order
        places = shuffled(
            Purpose.MIX,
            seed=self.seed,
            epoch=epoch,
            part=part << _PART_BITS | number,
            count=stop - start,
        )
        mixed = source[places]
        by_source = np.argsort(mixed, kind="stable")
        numbers = np.empty(stop - start, np.int64)
        numbers[by_source] = np.arange(stop - start) - first[source] + before[source]
        return _Block(start=start, stop=stop, source=mixed, number=numbers)

    def _look_up(self, source: _Small, number: Indices) -> Indices:
        """Indices of draws. Those of a source are consecutive, also from block to block."""
        by_source = np.argsort(source, kind="stable")
        ordered = source[by_source]
        borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        out = np.empty(len(source), np.int64)
        for rows in np.split(by_source, borders):
            chosen, first = int(source[rows[0]]), int(number[rows[0]])
            out[rows] = self._draws(chosen, first, first + len(rows)) + self.offsets[chosen]
        return out

    def _draws(self, source: int, start: int, stop: int) -> Indices:
        """Draws start .. stop - 1 of a source, counted through its epochs."""
        order = self.orders[source]
        parts = []
        while start < stop:
            epoch, position = divmod(start, order.length)
            end = min(order.length, position + stop - start)
            parts.append(order.indices(epoch, position, end))
            start += end - position
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _block_positions(exact: MixtureShares, *, length: int, block: int | None) -> int:
    """Length of a mix block; raises ConfigError when a source could be missing from one."""
    needed = exact.needed_positions()
    rarest = min(range(len(exact.numerators)), key=lambda i: exact.numerators[i] or math.inf)
    share = exact.numerators[rarest] / exact.denominator
    hint = f"source {rarest} has {share:.3g} of the weights and needs {needed} positions"
    if block is None and needed > _MAX_BLOCK_POSITIONS:
        raise ConfigError(f"{hint} to appear for sure: leave it out or give it more weight")
    chosen = max(MIX_BLOCK_POSITIONS, needed) if block is None else block
    if chosen < needed:
        raise ConfigError(f"{hint} in a mix block to appear for sure, {chosen} are set")
    if 0 < length < needed:
        raise ConfigError(
            f"{hint} in an epoch to appear for sure, it has {length}: "
            "set a larger length= or leave the source out"
        )
    return chosen
