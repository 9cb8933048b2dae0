"""What the user's functions make of a batch: on the thread that read it, or in a worker process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from hpstore.errors import IntegrityError
from hpstore.loaders.dataset.batch_values import Batch, Ragged, samples_of
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.value_decoder import ValueDecoder
from hpstore.loaders.sampling.random_draws import Indices

MOST_FAILURES = 32  # of a transform that has never worked, until that is an error
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


@dataclass(frozen=True, slots=True)
class Worked:
    """A finished batch. `failed`: samples that could not be decoded, or that `transform` failed
    for, which were left out; all of them where `batch` is nothing. `first`: what went wrong with
    the first one."""

    batch: Any
    failed: int = 0
    first: str = ""
    empty: bool = False
    undecoded: bool = False  # the first one could not be decoded


# Any below: samples and batches are whatever the user's functions return
class UserTransforms:
    """The user's functions, with random numbers that depend on (seed, epoch, position) alone."""

    def __init__(
        self,
        *,
        collate_fn: Any,
        transform: Any,
        batch_transform: Any,
        seed: int,
        nested: bool,
        skip: bool,
        decoder: ValueDecoder | None = None,
    ) -> None:
        """`skip`: samples that `transform` fails for are left out, unless it never succeeds; so are
        those that `decoder` fails for.
        """
        given = {
            "collate_fn": collate_fn,
            "transform": transform,
            "batch_transform": batch_transform,
        }
        self.names = [name for name, function in given.items() if function is not None]
        self.names += ["decode"] if decoder is not None and decoder.images else []
        self._decoder = decoder
        self._collate, self._seed, self._nested, self._skip = collate_fn, seed, nested, skip
        self._transform, self._batch_transform = transform, batch_transform
        self._worked, self._failures = False, 0  # of transform, in this process
        self._takes_rng = {
            name: function is not None and takes_rng(function) for name, function in given.items()
        }

    def __call__(self, task: Task) -> Worked:
        """The finished batch. Raises what the functions raise, with a note of which samples."""
        errors: list[Exception] = []
        if self._decoder is not None:
            task = self._decoded(self._decoder, task, errors)
            if not len(task.rows):
                return Worked(None, len(errors), _brief(errors), empty=True, undecoded=True)
        made: Any = task.batch
        undecoded = bool(errors)
        if self._transform is not None or self._collate is not None or task.single:
            samples = self._transformed(task, errors)
            if not samples:
                return Worked(None, len(errors), _brief(errors), empty=True, undecoded=undecoded)
            made = self._collated(task, samples)
        if self._nested and isinstance(made, dict):
            made = {k: v.nested() if isinstance(v, Ragged) else v for k, v in made.items()}
        if self._batch_transform is not None:
            made = self._whole(task, made)
        return Worked(made, len(errors), _brief(errors), undecoded=undecoded)

    def _decoded(self, decoder: ValueDecoder, task: Task, errors: list[Exception]) -> Task:
        """The same batch of values. Samples that cannot be decoded are left out, or raise."""
        found = decoder.batch(task.batch, len(task.indices))
        if not found.failed:
            return replace(task, batch=found.batch)
        for row, error in found.failed.items():
            where = f"position {task.start + task.rows[row]} of epoch {task.epoch}"
            said = f"sample {task.indices[row]} ({where}) cannot be decoded: {error}"
            if not self._skip:
                raise IntegrityError(
                    f"{said}. The loader stands before this batch; "
                    'on_error="skip" leaves such samples out.'
                ) from error
            errors.append(IntegrityError(said))
        rows = [row for row in range(len(task.indices)) if row not in found.failed]
        return replace(
            task,
            batch=found.batch,
            indices=task.indices[rows],
            rows=[task.rows[row] for row in rows],
        )

    def _transformed(self, task: Task, errors: list[Exception]) -> list[Any]:
        """The samples; those that `transform` fails for are left out and go into `errors`."""
        samples: list[Any] = samples_of(task.batch, task.fields, len(task.indices))
        if self._transform is None:
            return samples
        made = []
        for number, (row, sample) in enumerate(zip(task.rows, samples, strict=True)):
            # positions of an order are unique; a sampler's batch is one position
            key = [task.start, row] if task.listed else [task.start + row]
            try:
                made.append(self._called("transform", sample, [task.epoch, *key]))
                self._worked = True
            except Exception as error:
                where = f"position {task.start + row} of epoch {task.epoch}"
                error.add_note(f"hpstore: in transform, of sample {task.indices[number]} ({where})")
                errors.append(error)
                self._failures += 1
                # the function's fault and no sample's: it has never worked, or these
                never = not self._worked and self._failures >= MOST_FAILURES
                if not self._skip or never or isinstance(error, StopIteration | MemoryError):
                    raise
        return made

    def _collated(self, task: Task, samples: list[Any]) -> Any:
        try:
            if task.single:
                return self._collate(samples[0]) if self._collate is not None else samples[0]
            if self._collate is None and self._decoder is not None:
                return self._decoder.collate(samples, default_collate)
            return (self._collate or default_collate)(samples)
        except Exception as error:
            what = "collate_fn" if self._collate is not None else "torch's default_collate"
            error.add_note(f"hpstore: in {what}, of samples {task.indices.tolist()}")
            if self._transform is not None and any(sample is None for sample in samples):
                error.add_note(
                    "hpstore: transform returned None. To leave a sample out, raise an error in it "
                    'and give on_error="skip".'
                )
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


def _brief(errors: Sequence[Exception]) -> str:
    """Of the first one."""
    if not errors:
        return ""
    note = " ".join(getattr(errors[0], "__notes__", ())[-1:])
    return f"{type(errors[0]).__name__}: {errors[0]}" + (f" ({note})" if note else "")


def takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a user's function wants a generator as its second argument."""
    try:
        wanted = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
    except (TypeError, ValueError):  # builtins do not tell
        return False
    return len(wanted) >= 2
