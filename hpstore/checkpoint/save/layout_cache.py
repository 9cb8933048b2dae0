"""The layout of the save before, for states that look like it.

States of a run hardly ever change their shape: planning 10,000 tensors anew would cost more than
writing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from hpstore.checkpoint.format.segment_plan import Slice


class SliceLayout:
    """Slices of a state of plain tensors, and how to tell whether another state is like it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> None:
        self._slices = tuple(replace(piece, tensors=()) for piece in slices)
        self._counts = [len(piece.items) for piece in slices]
        self._names, self._specs = list(tensors), _specs(tensors)
        self._sharing = _sharing(tensors)

    @staticmethod
    def fits(tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether states like this one can have a layout: all tensors are plain ones."""
        return not any(hasattr(tensor, "__create_chunk_list__") for tensor in tensors.values())

    def applied(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Slice, ...] | None:
        """The same slices of other tensors; None when these look different."""
        if (
            self._names != list(tensors)
            or self._specs != _specs(tensors)
            or self._sharing != _sharing(tensors)
        ):
            return None
        found, at, values = [], 0, list(tensors.values())
        for piece, count in zip(self._slices, self._counts, strict=True):
            found.append(replace(piece, tensors=values[at : at + count]))
            at += count
        return tuple(found)


View = tuple[int, tuple[int, ...], bool, bool]  # number, strides, conjugated, negated
Spec = tuple[type, torch.dtype, torch.Size, torch.device]


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[Spec]:
    return [(type(t), t.dtype, t.shape, t.device) for t in tensors.values()]


def _sharing(tensors: Mapping[str, torch.Tensor]) -> list[list[View]]:
    """Groups of tensors that begin at the same address, and how they look at it."""
    first: dict[int, int] = {}
    shared: dict[int, list[int]] = {}
    for n, tensor in enumerate(tensors.values()):
        at = tensor.data_ptr()
        if at and first.setdefault(at, n) != n:
            shared.setdefault(first[at], []).append(n)
    values = list(tensors.values())
    return [
        [(n, values[n].stride(), values[n].is_conj(), values[n].is_neg()) for n in (one, *others)]
        for one, others in shared.items()
    ]
