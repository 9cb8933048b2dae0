"""What the user's functions make of a batch: on the thread that read it, or in a worker process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from hpstore.loaders.batches import Batch, Ragged, samples_of
from hpstore.loaders.draws import Indices
from hpstore.loaders.fields import Field

_DOMAIN = 0x68707374  # keeps generators for transforms apart from those of orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A batch as it was read, and which it is. `rows`: places of its samples in the piece."""

    batch: Batch
    fields: Mapping[str, Field]
    indices: Indices
    rows: Sequence[int]
    epoch: int
    start: int
    listed: bool  # by a user's sampler
    single: bool  # one sample by itself


# Any below: samples and batches are whatever the user's functions return
class Work:
    """The user's functions, with random numbers that depend on (seed, epoch, position) alone."""

    def __init__(
        self, *, collate_fn: Any, transform: Any, batch_transform: Any, seed: int, nested: bool
    ) -> None:
        given = {"collate_fn": collate_fn, "transform": transform,
                 "batch_transform": batch_transform}  # fmt: skip
        self.names = [name for name, function in given.items() if function is not None]
        self._collate, self._seed, self._nested = collate_fn, seed, nested
        self._transform, self._batch_transform = transform, batch_transform
        self._takes_rng = {
            name: function is not None and takes_rng(function) for name, function in given.items()
        }

    def __call__(self, task: Task) -> Any:
        """The finished batch. Raises what the functions raise, with a note of which samples."""
        made: Any = task.batch
        if self._transform is not None or self._collate is not None or task.single:
            made = self._by_sample(task)
        if self._nested and isinstance(made, dict):
            made = {k: v.nested() if isinstance(v, Ragged) else v for k, v in made.items()}
        if self._batch_transform is not None:
            made = self._whole(task, made)
        return made

    def _by_sample(self, task: Task) -> Any:
        indices = task.indices
        samples: list[Any] = samples_of(task.batch, task.fields, len(indices))
        if self._transform is not None:
            for number, (row, sample) in enumerate(zip(task.rows, samples, strict=True)):
                # positions of an order are unique; a sampler's batch is one position
                key = [task.start, row] if task.listed else [task.start + row]
                try:
                    samples[number] = self._called("transform", sample, [task.epoch, *key])
                except Exception as error:
                    where = f"position {task.start + row} of epoch {task.epoch}"
                    error.add_note(f"hpstore: in transform, of sample {indices[number]} ({where})")
                    raise
        try:
            if task.single:
                return self._collate(samples[0]) if self._collate is not None else samples[0]
            return (self._collate or default_collate)(samples)
        except Exception as error:
            error.add_note(f"hpstore: in collate_fn, of samples {indices.tolist()}")
            raise

    def _whole(self, task: Task, made: Any) -> Any:
        try:
            return self._called("batch_transform", made, [task.epoch, task.start, 0, 1])
        except Exception as error:
            error.add_note(f"hpstore: in batch_transform, of samples {task.indices.tolist()}")
            raise

    def _called(self, name: str, value: Any, key: Sequence[int]) -> Any:
        function = self._transform if name == "transform" else self._batch_transform
        if not self._takes_rng[name]:
            return function(value)
        return function(value, np.random.default_rng([_DOMAIN, self._seed, *key]))


def takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a user's function wants a generator as its second argument."""
    try:
        wanted = [
            p for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]  # fmt: skip
    except (TypeError, ValueError):  # builtins do not tell
        return False
    return len(wanted) >= 2


__all__ = ["Task", "Work"]
