"""A few elements of tensors whose copy is deferred, to see whether what was copied was changed.

A write through `.data`, of numpy or of a kernel of one's own moves no version counter. Changes of
whole tensors (clamping, normalising, pruning) show in any of their elements, so a few do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from hpstore.checkpoint.save.accelerator import Accelerator
from hpstore.format.checksum import digest128

TENSORS, POINTS = 64, 64  # of a save, of a tensor: about a millisecond of the trainer's time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
Pair = tuple[torch.Tensor, torch.Tensor]  # (to, from)


class Samples:
    """Of copies (to, from), taken before they are made: of all, or of some from number `turn` on.

    Made on the thread that enqueues the copies; looked at by any other.
    """

    def __init__(self, pairs: Sequence[Pair], turn: int) -> None:
        fit = [n for n, (_, source) in enumerate(pairs) if _fits(source)]
        every = -(-len(fit) // TENSORS) or 1
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for n in fit[turn % every :: every]:
            source = pairs[n][1]
            kinds.setdefault((source.device, _WORDS[source.element_size()]), []).append(n)
        self._groups: list[tuple[list[int], torch.Tensor]] = []
        with torch.no_grad():
            for numbers in kinds.values():
                found = torch.cat([_points(pairs[n][1]) for n in numbers])
                self._groups.append((numbers, found))
        self._pairs = pairs

    def changed(self, accelerator: Accelerator | None) -> int | None:
        """Number of a copy that does not hold what its tensor held; None where all do. The copies
        are finished."""
        for numbers, before in self._groups:
            if accelerator is not None and accelerator.holds(before):
                on_host = torch.empty(before.shape, dtype=before.dtype, device="cpu")
                accelerator.copy([(on_host, before)]).wait_on_host()
                before = on_host
            copied = [_points(self._pairs[n][0]) for n in numbers]
            if torch.equal(before, torch.cat(copied)):
                continue
            parts = torch.split(before, [len(part) for part in copied])
            return next(
                n
                for n, was, now in zip(numbers, parts, copied, strict=True)
                if not torch.equal(was, now)
            )
        return None


def sampled_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By name: of a few elements of each, of TENSORS tensors at most. One wait for each device."""
    fit = {n: t for n, t in tensors.items() if _fits(t) and not hasattr(t, "to_local")}
    kinds: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    with torch.no_grad():
        for name, tensor in islice(fit.items(), TENSORS):
            kind = tensor.device, _WORDS[tensor.element_size()]
            kinds.setdefault(kind, {})[name] = _points(tensor)
    found = {}
    for points in kinds.values():
        parts = torch.split(
            torch.cat(list(points.values())).cpu(), [len(p) for p in points.values()]
        )
        for name, part in zip(points, parts, strict=True):
            found[name] = digest128(part.numpy().tobytes()).hex()
    return found


def _fits(tensor: torch.Tensor) -> bool:
    return (
        tensor.element_size() in _WORDS
        and tensor.numel() > 0
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _points(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements, evenly spread, in their order, as words: NaNs compare, too."""
    count = min(POINTS, tensor.numel())
    step = tensor.numel() // count
    tensor = tensor.detach()
    if tensor.is_contiguous():
        some = tensor.as_strided((count,), (step,), tensor.storage_offset() + step // 2)
    else:
        at = torch.arange(count, device="cpu") * step + step // 2
        some = tensor[torch.unravel_index(at, tensor.shape)]
    return some.view(_WORDS[tensor.element_size()])
