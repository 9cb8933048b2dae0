"""From a state to what this rank stages and writes: collect, agree with the other ranks, place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from hpstore.checkpoint.format.segment_plan import (
    WITHIN_BYTES,
    Chunk,
    Held,
    Slice,
    assign,
    assign_within,
    chunks_of,
    fits_within,
    place,
)
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.save.copy_samples import sampled_digests
from hpstore.checkpoint.save.layout_cache import SliceLayout
from hpstore.checkpoint.state.state_tree import CollectedTensors, encode_tree
from hpstore.checkpoint.state.targets import RNG_KEY, State, objects_in
from hpstore.checkpoint.state.training_state import collect
from hpstore.checkpoint.state.unnamed_optimizers import meanings, require_one_meaning
from hpstore.errors import CheckpointError
from hpstore.format.checksum import digest128
from hpstore.runtime.budget import available_bytes
from hpstore.units import MIB

_SHARE = 0.6  # of the memory that is available, unless SaveOptions.memory says otherwise
_LEAST_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What one rank does for one save."""

    tree: Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
    slices: tuple[Slice, ...]  # staged one after the other; mostly there is one
    names: Collection[str]  # of the tensors in the tree
    within: bool = False  # the manifest holds their bytes
    differing: tuple[str, ...] = ()  # tensors that ranks have other values of; one is saved

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank stages."""
        return sum(part.size for part in self.slices)

    @property
    def largest_bytes(self) -> int:
        """What the arena must hold."""
        return max((part.size for part in self.slices), default=0)


def sizes_of_all(ranks: Ranks, prepared: Prepared) -> list[int]:
    """Bytes of every slice of every rank. Collective."""
    mine = json.dumps([part.size for part in prepared.slices])
    heard = ranks.all_gather(mine.encode(), RankChannel.TRAINER)
    return [int(size) for sizes in heard for size in json.loads(sizes)]


class Planner:
    """Plans the saves of one checkpointer. The other ranks' part is asked for again only when what
    a rank holds has changed."""

    def __init__(
        self, ranks: Ranks, memory_bytes: int | None, *, rng: bool, allow_pickle: bool
    ) -> None:
        self._ranks, self._rng, self._allow_pickle = ranks, rng, allow_pickle
        host = os.uname().nodename.encode()
        beside = ranks.all_gather(host, RankChannel.TRAINER).count(host)
        budget = memory_bytes if memory_bytes is not None else int(_SHARE * available_bytes())
        self.limit_bytes = max(budget // beside, _LEAST_BYTES if memory_bytes is None else 1)
        self.within_bytes = WITHIN_BYTES
        self._agreed: list[bytes] = []  # the fingerprints that _mine was planned from
        self._mine: list[int] = []
        self._together = False  # the manifest has room for what all ranks write
        self._layout: SliceLayout | None = None  # of the save before, when one rank saves

    def prepare(
        self, step: int, state: State, require: Callable[[int], None] | None = None
    ) -> Prepared:
        """Plan a save. Collective. Raises CheckpointError on all ranks when it fails on one, which
        includes what this rank's `require(step)` raises."""
        error: Exception | None = None
        tree, chunks, values, means = None, list[Chunk](), dict[str, str](), dict[str, str]()
        found = CollectedTensors(rank=self._ranks.rank, allow_pickle=self._allow_pickle)
        try:
            if require is not None:
                require(step)
            tree = encode_tree(collect(state, rng=self._rng), "", found)
            if self._ranks.world == 1 and self._layout is not None:
                slices = self._layout.applied(found)
                if slices is not None:
                    return Prepared(
                        tree=tree,
                        slices=slices,
                        names=tuple(found.tensors),
                        within=fits_within(slices, self.within_bytes),
                    )
            for name, tensor in found.tensors.items():
                chunks += chunks_of(name, tensor)
            if self._ranks.world > 1:
                values = sampled_digests(_of_no_model(state, found.tensors))
                means = meanings(state)
        except Exception as failed:  # noqa: BLE001 (told to the other ranks, then raised)
            error = failed
        differing: tuple[str, ...] = ()
        if self._ranks.world > 1:
            differing = self._agree(step, chunks, values, means, error)
            chunks = [chunks[n] for n in self._mine]
        elif error is not None:
            raise error
        slices = tuple(place(chunks, self.limit_bytes)) if chunks else ()
        if self._ranks.world == 1:
            plain = SliceLayout.fits(found.tensors)
            self._layout = SliceLayout(found, slices) if plain else None
        alone = self._ranks.world == 1
        within = fits_within(slices, self.within_bytes) if alone else self._together
        return Prepared(
            tree=tree,
            slices=slices,
            names=tuple(found.tensors),
            within=within,
            differing=differing,
        )

    def _agree(
        self,
        step: int,
        chunks: Sequence[Chunk],
        values: Mapping[str, str],
        means: Mapping[str, str],
        error: Exception | None,
    ) -> tuple[str, ...]:
        """Decide who writes what; sets _mine. Everybody computes the same from the same lists.

        `values`: digests by name; names of those that differ between ranks are returned. `means`:
        of the optimizers whose parameters have numbers for names.
        """
        held: list[Held] = [(c.name, c.box.offsets, c.nbytes) for c in chunks]
        shapes = [(c.dtype, c.shape, c.box.sizes) for c in chunks]
        fingerprint = digest128(json.dumps([held, shapes]).encode()).hex()
        text = "" if error is None else str(error)
        said = json.dumps([step, fingerprint, text, values, self.limit_bytes, means])
        votes = self._ranks.all_gather(said.encode(), RankChannel.TRAINER)
        if error is not None:
            raise error
        heard = [json.loads(vote) for vote in votes]
        failed = [f"rank {n}: {text}" for n, (_, _, text, *_) in enumerate(heard) if text]
        if failed:
            raise CheckpointError(f"step {step} is not saved: {'; '.join(failed)}")
        if len({number for number, *_ in heard}) > 1:
            raise CheckpointError(f"ranks save different steps: {[n for n, *_ in heard]}")
        require_one_meaning(step, [row[5] for row in heard])
        differing = differing_of([row[3] for row in heard])
        prints = [text.encode() for _, text, *_ in heard]
        if prints == self._agreed:
            return differing
        rows = [[*place, *kind] for place, kind in zip(held, shapes, strict=True)]
        lists = [
            json.loads(text)
            for text in self._ranks.all_gather(json.dumps(rows).encode(), RankChannel.TRAINER)
        ]
        require_replicas(step, lists)
        everybody = [
            [(str(name), tuple(offsets), int(n)) for name, offsets, n, *_ in rows] for rows in lists
        ]
        room = min(row[4] for row in heard)
        within = assign_within(everybody, self.within_bytes, room)
        self._together = within is not None
        self._mine = (within or assign(everybody))[self._ranks.rank]
        self._agreed = prints
        return differing


def _of_no_model(state: State, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that no model or optimizer keeps alike on all ranks."""
    kept = tuple(
        f"{name}/"
        for name, value in state.items()
        if next(objects_in(value, torch.nn.Module), None) is not None
        or next(objects_in(value, Optimizer), None) is not None
    )
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(kept) and not name.startswith(f"{RNG_KEY}@")
    }


def differing_of(values: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Names that several ranks have with other digests. Pure."""
    first: dict[str, str] = {}
    for mine in values:
        for name, digest in mine.items():
            first.setdefault(name, digest)
    return tuple(
        name for name, digest in first.items() if any(v.get(name, digest) != digest for v in values)
    )


# Any: decoded JSON of our own: name, offsets, bytes, dtype, shape, sizes
def require_replicas(step: int, lists: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raise CheckpointError when ranks hold different things under one name.

    One of them would be saved, the others lost without a word.
    """
    first: dict[tuple[Any, ...], tuple[int, list[Any]]] = {}
    for rank, rows in enumerate(lists):
        for name, offsets, _, *kind in rows:
            holder, other = first.setdefault((name, *offsets), (rank, kind))
            if other != kind:
                raise CheckpointError(
                    f"step {step} is not saved: {name!r} is {other[0]} {other[1]} on rank "
                    f"{holder} and {kind[0]} {kind[1]} on rank {rank}. Wrap what every rank has "
                    "for itself in per_rank(). What was committed before is untouched."
                )
