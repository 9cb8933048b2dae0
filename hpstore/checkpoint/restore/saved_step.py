"""A committed step without a model to fill: its tensors by name, whole or in part, and its tree."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from hpstore.checkpoint.catalog.removed_steps import reading_step
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.backed_bytes import LARGE_BYTES, Backed
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.format.items import Item, by_name, whole
from hpstore.checkpoint.format.segment_plan import Chunk
from hpstore.checkpoint.restore.chosen_names import choose
from hpstore.checkpoint.restore.fresh_memory import fresh
from hpstore.checkpoint.restore.load_options import LoadOptions, checked_load
from hpstore.checkpoint.restore.read_items import Warm, fill_chunks
from hpstore.checkpoint.restore.transformed_tensors import transformed
from hpstore.checkpoint.restore.whole_tensors import load_tensors
from hpstore.checkpoint.state.scalars import Classes, dtype_named
from hpstore.checkpoint.state.state_tree import Decoding, decode_tree, tensor_names
from hpstore.errors import CheckpointError
from hpstore.runtime.collector_pause import collector_paused


def names_under(names: Collection[str], keys: Collection[str] | None, step: int) -> list[str]:
    """Names that `keys` ask for: themselves, or what is under them. Raises CheckpointError."""
    if keys is None:
        return list(names)
    found = [n for n in names if any(n == k or n.startswith(f"{k}/") for k in keys)]
    absent = [k for k in keys if not any(n == k or n.startswith(f"{k}/") for n in found)]
    if absent:
        raise CheckpointError(f"step {step} holds no {absent}")
    return found


class SavedTensor:
    """One tensor of a committed step, read when it is indexed. Thread-safe."""

    def __init__(
        self, catalog: StepCatalog, manifest: Manifest, name: str, items: Sequence[Item]
    ) -> None:
        self._catalog, self._manifest, self._items = catalog, manifest, items
        self.name, self.shape = name, torch.Size(items[0].shape)
        self.dtype = dtype_named(items[0].dtype)

    def __getitem__(self, index: object) -> torch.Tensor:
        """A part, as of a tensor: whole numbers, slices, `...`. Only its bytes are read.

        A step in a slice is applied after reading what it spans.
        """
        cut, rest = _box_of(index, self.shape)
        if prod(n for _, n in cut) * self.dtype.itemsize >= LARGE_BYTES:
            backed = Backed(self._catalog.pool, self._manifest.segments)
            backed.require(self.name, self._items)
        tensor = fresh([n for _, n in cut], self.dtype, None)
        chunk = Chunk(
            name=self.name,
            dtype=str(self.dtype).removeprefix("torch."),
            shape=tuple(self.shape),
            box=whole([n for _, n in cut]).moved([at for at, _ in cut]),
            tensor=tensor,
        )
        with reading_step(self._catalog, self._manifest):
            fill_chunks(self._catalog.pool, self._manifest.segments, self._items, [chunk])
        return tensor[tuple(rest)]

    def tensor(self) -> torch.Tensor:
        """All of it."""
        return self[...]

    def __repr__(self) -> str:
        return f"<saved {self.name} {self.dtype} {tuple(self.shape)}>"


def _box_of(index: object, shape: Sequence[int]) -> tuple[list[tuple[int, int]], list[int | slice]]:
    """(start, count) by axis of what an index spans, and the index that is left to apply to it."""
    parts = [_plain_index(p) for p in (index if isinstance(index, tuple) else (index,))]
    gaps = [n for n, part in enumerate(parts) if part is Ellipsis]
    if len(gaps) > 1 or len(parts) - len(gaps) > len(shape):
        raise IndexError(f"index {index!r} does not fit shape {tuple(shape)}")
    for at in gaps:
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    cut: list[tuple[int, int]] = []
    rest: list[int | slice] = []
    for part, size in zip(parts, shape, strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 0:
                raise IndexError("a saved tensor cannot be read backwards")
            cut.append((start, max(0, stop - start)))
            rest.append(slice(None, None, step))
        elif type(part) is int and -size <= part < size:  # not a bool: that would be a mask
            cut.append((part % size, 1))
            rest.append(0)
        else:
            raise IndexError(f"index {part!r} does not fit an axis of {size}")
    return cut, rest


def _plain_index(part: Any) -> Any:  # Any: whatever a caller indexes with
    """A whole number of numpy or torch, or of any type that gives itself as one, as Python's."""
    if type(part) is int or isinstance(part, (bool, np.bool_, slice)):
        return part
    if getattr(part, "shape", ()) or getattr(part, "dtype", None) in (torch.bool, np.bool_):
        return part  # that would be a gather or a mask
    try:
        return operator.index(part)
    except TypeError:
        return part


class SavedStep(Mapping[str, SavedTensor]):
    """A committed step: `ckpt.read(7)`. A mapping of its tensors by name; nothing is read at first.

        step = ckpt.read(7)
        step["model/weight"][2:4]           # these rows, and no other bytes
        step.tensors(["model"])             # dict of whole tensors, by name
        step.tree()                         # all of it, as it was saved

    Not collective. Every byte that is read is verified.
    """

    def __init__(
        self,
        catalog: StepCatalog,
        manifest: Manifest,
        *,
        rank: int = 0,
        allow_pickle: bool = False,
        warm: Warm | None = None,
    ) -> None:
        self._catalog, self.manifest = catalog, manifest
        self._items = by_name(manifest.items)
        self._rank, self._allow_pickle, self._warm = rank, allow_pickle, warm

    def __getitem__(self, name: str) -> SavedTensor:
        items = self._items.get(name)
        if items is None:
            near = difflib.get_close_matches(str(name), self._items, 3, 0.0)
            raise KeyError(f"step {self.manifest.step} holds no {name!r}; it has {near} and others")
        return SavedTensor(self._catalog, self.manifest, name, items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @collector_paused()
    def tensors(
        self,
        keys: Collection[str] | None = None,
        *,
        map_location: str | torch.device | None = None,
        load: LoadOptions | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read whole tensors, without a model.

        Parameters
        ----------
        keys
            Names, or prefixes of names at a slash. Default: all tensors.
        map_location
            The device that the tensors are made on. Default: the host.
        load
            Under which names, in which dtype, and which of them; `keys` are of the new names.

        Returns
        -------
        dict
            Tensors by name, in memory that the caller owns.

        Raises
        ------
        CheckpointError, ConfigError
            The step holds nothing under one of `keys`; `load` cannot be done; the step was removed.
        IntegrityError, RedundancyError
            Bytes cannot be read.
        """
        options = checked_load(load, into_state=False)
        manifest = choose(self.manifest, options).manifest
        names = names_under(by_name(manifest.items), keys, manifest.step)
        device = torch.device(map_location) if map_location is not None else None
        cast = options.cast if isinstance(options.cast, torch.dtype) else None
        pool, changed = self._catalog.pool, dict[str, torch.Tensor]()
        with reading_step(self._catalog, self.manifest):
            if options.transform is not None:
                changed = transformed(pool, manifest, names, options.transform, self._warm)
            others = [name for name in names if name not in changed]
            found = load_tensors(pool, manifest, others, device, self._warm, cast=cast)
        for name, tensor in changed.items():
            found[name] = tensor.to(device, cast if tensor.is_floating_point() else None)
        return {name: found[name] for name in names}

    @collector_paused()
    def tree(
        self, *, map_location: str | torch.device | None = None, strict: bool = True
    ) -> dict[str, Any]:
        """Read all of the step as plain nested values, as they were collected from the state.

        Parameters
        ----------
        map_location
            The device that the tensors are made on. Default: the host, as for numpy arrays always.
        strict
            Whether an enum or dataclass whose class is not loaded is an error. With False it
            becomes a StandIn, which has the name of the class and what it held.

        Returns
        -------
        dict
            The state. Of values that ranks kept for themselves (`per_rank`) this rank's.

        Raises
        ------
        CheckpointError
            The step holds pickled objects, and `allow_pickle` is False; it holds a value of a class
            that is not loaded, and `strict` is True; the step was removed.
        IntegrityError, RedundancyError
            Bytes cannot be read.
        """
        device = torch.device(map_location) if map_location is not None else None
        arrays = frozenset(tensor_names(self.manifest.tree, kinds=("ndarray",)))
        with reading_step(self._catalog, self.manifest):
            tensors = load_tensors(
                self._catalog.pool,
                self.manifest,
                list(self._items),
                device,
                self._warm,
                on_host=arrays,
            )
        how = Decoding(
            tensor=tensors.__getitem__,
            rank=self._rank,
            allow_pickle=self._allow_pickle,
            classes=Classes(strict=strict),
        )
        tree: dict[str, Any] = decode_tree(self.manifest.tree, how)
        return tree
