"""The layout of the save before, for states that look like it.

States of a run hardly ever change their shape: planning 10,000 tensors anew would cost more than
writing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpstore.checkpoint.format.segment_plan import Slice
from hpstore.checkpoint.state.plain_tensors import has_chunks
from hpstore.checkpoint.state.state_tree import CollectedTensors


class SliceLayout:
    """Slices of a state of plain tensors, and how to tell whether another state is like it."""

    def __init__(self, found: CollectedTensors, slices: Sequence[Slice]) -> None:
        self._slices = tuple(replace(piece, tensors=()) for piece in slices)
        self._counts = [len(piece.items) for piece in slices]
        self._names, self._columns = list(found.tensors), found.columns
        self._sharing = _sharing(found)

    @staticmethod
    def fits(tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether states like this one can have a layout: all tensors are plain ones."""
        return not any(map(has_chunks, tensors.values()))

    def applied(self, found: CollectedTensors) -> tuple[Slice, ...] | None:
        """The same slices of other tensors; None when these look different."""
        if (
            self._names != list(found.tensors)
            or self._columns != found.columns
            or self._sharing != _sharing(found)
        ):
            return None
        slices, at, values = [], 0, list(found.tensors.values())
        for piece, count in zip(self._slices, self._counts, strict=True):
            slices.append(replace(piece, tensors=values[at : at + count]))
            at += count
        return tuple(slices)


View = tuple[int, tuple[int, ...], bool, bool]  # number, strides, conjugated, negated


def _sharing(found: CollectedTensors) -> list[list[View]]:
    """Groups of tensors that begin at the same address, and how they look at it."""
    addresses = found.columns.addresses
    if len(set(addresses)) == len(addresses):
        return []
    first: dict[int, int] = {}
    shared: dict[int, list[int]] = {}
    for n, at in enumerate(addresses):
        if at and first.setdefault(at, n) != n:
            shared.setdefault(first[at], []).append(n)
    values = list(found.tensors.values())
    return [
        [(n, values[n].stride(), values[n].is_conj(), values[n].is_neg()) for n in (one, *others)]
        for one, others in shared.items()
    ]
