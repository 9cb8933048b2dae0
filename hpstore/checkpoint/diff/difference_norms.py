"""How far two saved tensors are apart, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch

from hpstore.checkpoint.restore.saved_step import SavedStep
from hpstore.checkpoint.restore.whole_tensors import load_tensors
from hpstore.pool.pool import Pool

SLAB_ELEMENTS = 1 << 21  # of a tensor at a time: 16 MiB as float64, three of which are in memory
GROUP_ELEMENTS = 1 << 23  # of small tensors that are read together: each read costs milliseconds
Slab = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceNorms:
    """Of `after - before`, in float64. NaN where one of the values is.

    `relative`: `l2` by the L2 norm of `before`; None where that is 0.
    """

    l2: float
    max_abs: float
    relative: float | None
    differing: int  # elements

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


class _Sums:
    """Adds up the slabs of one pair of tensors."""

    def __init__(self) -> None:
        self._square = self._before_square = self._max = 0.0
        self._differing = 0
        self.same = True  # byte by byte

    def add(self, before: torch.Tensor, after: torch.Tensor, *, norms: bool) -> None:
        """A part of both, of one shape."""
        if before.dtype == after.dtype and torch.equal(_bytes(before), _bytes(after)):
            if norms:
                self._before_square += _square(_wide(before))
            return
        self.same = False
        if not norms:
            return
        first, second = _wide(before), _wide(after)
        self._before_square += _square(first)
        self._differing += _differing(before, after)
        distance = (second - first).abs()
        self._square += _square(distance)
        if distance.numel():
            largest = float(distance.max())
            self._max = max(self._max, largest) if not math.isnan(largest) else largest

    def norms(self) -> DifferenceNorms:
        """Of all that was added."""
        l2, before = math.sqrt(self._square), math.sqrt(self._before_square)
        return DifferenceNorms(
            l2=l2,
            max_abs=self._max,
            relative=l2 / before if before else None,
            differing=self._differing,
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differing(before: torch.Tensor, after: torch.Tensor) -> int:
    """Elements whose bytes differ; of two dtypes, whose values do."""
    if before.dtype != after.dtype:
        return int((_wide(before) != _wide(after)).sum())
    pairs = (_bytes(t).view(-1, before.dtype.itemsize) for t in (before, after))
    return int((next(pairs) != next(pairs)).any(1).sum())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.abs().square().sum())


def slabs(shape: Sequence[int], limit: int = SLAB_ELEMENTS) -> Iterator[Slab]:
    """Boxes of at most `limit` elements that make a tensor of this shape, in order. Pure."""
    count = prod(shape)
    if count <= limit:
        yield (slice(None),) * len(shape)
        return
    inner = count // shape[0]
    rows = limit // inner
    if rows:
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows), *(slice(None),) * (len(shape) - 1))
        return
    for row in range(shape[0]):
        for below in slabs(shape[1:], limit):
            yield (slice(row, row + 1), *below)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPair:
    """The names of one tensor in two steps; both have one shape."""

    path: str
    before: str
    after: str


class PairReader:
    """Reads pairs of tensors of two steps, and compares them: a slab of large ones at a time, small
    ones in groups. `seen` gets the bytes that were read. One thread at a time."""

    def __init__(
        self,
        pool: Pool,
        before: SavedStep,
        after: SavedStep,
        seen: Callable[[int], None] | None,
    ) -> None:
        self._pool, self._before, self._after, self._seen = pool, before, after, seen

    def compare(
        self, pairs: Sequence[TensorPair], *, norms: bool
    ) -> Iterator[tuple[TensorPair, DifferenceNorms | None]]:
        """Each pair with its norms; those that are the same byte by byte are left out. Without
        `norms` there are none, and each is read up to its first difference. Raises what reading
        raises."""
        group: list[TensorPair] = []
        count = 0
        for pair in pairs:
            elements = prod(self._before[pair.before].shape)
            if elements > SLAB_ELEMENTS:
                yield from self._outcome(pair, self._by_slabs(pair, norms=norms), norms=norms)
                continue
            if count + elements > GROUP_ELEMENTS:
                yield from self._together(group, norms=norms)
                group, count = [], 0
            group.append(pair)
            count += elements
        yield from self._together(group, norms=norms)

    def _together(
        self, pairs: Sequence[TensorPair], *, norms: bool
    ) -> Iterator[tuple[TensorPair, DifferenceNorms | None]]:
        if not pairs:
            return
        before, after = (
            load_tensors(self._pool, step.manifest, sorted(names), None)
            for step, names in (
                (self._before, {pair.before for pair in pairs}),
                (self._after, {pair.after for pair in pairs}),
            )
        )
        for pair in pairs:
            sums = _Sums()
            sums.add(before[pair.before], after[pair.after], norms=norms)
            self._count(before[pair.before], after[pair.after])
            yield from self._outcome(pair, sums, norms=norms)

    def _by_slabs(self, pair: TensorPair, *, norms: bool) -> _Sums:
        sums = _Sums()
        first, second = self._before[pair.before], self._after[pair.after]
        for slab in slabs(first.shape):
            before, after = first[slab], second[slab]
            sums.add(before, after, norms=norms)
            self._count(before, after)
            if not norms and not sums.same:
                break
        return sums

    def _outcome(
        self, pair: TensorPair, sums: _Sums, *, norms: bool
    ) -> Iterator[tuple[TensorPair, DifferenceNorms | None]]:
        if not sums.same:
            yield pair, sums.norms() if norms else None

    def _count(self, *tensors: torch.Tensor) -> None:
        if self._seen is not None:
            self._seen(sum(t.numel() * t.dtype.itemsize for t in tensors))
