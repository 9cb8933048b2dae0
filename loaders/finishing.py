"""From a batch as it was read to what the user gets: transforms, collation, the way to a device."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from hpstore.errors import ConfigError, IntegrityError, TooManyErasures
from hpstore.loaders.batches import Batch, Ragged
from hpstore.loaders.draws import Indices
from hpstore.loaders.mixture import AnyEngine
from hpstore.loaders.progress import Piece
from hpstore.loaders.transfer import Arriving, Transfer

_DOMAIN = 0x68707374  # keeps generators for transforms apart from those of orders


# Any below: batches are whatever the user's functions return
class Finish:
    """What happens to each batch after reading, on the threads that make batches ahead."""

    def __init__(
        self, *, collate_fn: Any, transform: Any, batch_transform: Any,
        device: str | torch.device | None, seed: int, on_error: str,
    ) -> None:  # fmt: skip
        if on_error not in ("raise", "skip"):
            raise ConfigError(f'on_error {on_error!r} is neither "raise" nor "skip"')
        self._collate, self._seed, self._skip = collate_fn, seed, on_error == "skip"
        self._transform = _with_rng(transform)
        self._batch_transform = _with_rng(batch_transform)
        self.device = None if device is None else torch.device(device)
        away = self.device is not None and self.device.type != "cpu"
        self._transfer = Transfer(self.device) if away and self.device is not None else None
        self.batches_total = self.skipped_total = 0
        self.transform_seconds = 0.0

    def make(self, engine: AnyEngine, piece: Piece) -> Any:
        """Read and finish a piece; None when all of its samples were skipped."""
        try:
            indices, batch = engine.make(piece)
        except (IntegrityError, TooManyErasures):
            if not self._skip:
                raise
            indices, kept = self._without_damaged(engine, piece)
            if kept is None:
                return None
            batch = kept
        made: Any = batch
        began = time.perf_counter()
        if self._transform is not None or self._collate is not None:
            made = self._by_sample(piece, indices, batch)
        if self._batch_transform is not None:
            rng = np.random.default_rng([_DOMAIN, self._seed, piece.epoch, piece.start, 1])
            made = self._batch_transform(made, rng)
        self.transform_seconds += time.perf_counter() - began
        return self._transfer.send(made) if self._transfer is not None else made

    def _by_sample(self, piece: Piece, indices: Indices, batch: Batch) -> Any:
        samples: list[Any] = samples_of(batch, len(indices))
        if self._transform is not None:
            for row, sample in enumerate(samples):
                rng = np.random.default_rng([_DOMAIN, self._seed, piece.epoch, piece.start + row])
                try:
                    samples[row] = self._transform(sample, rng)
                except Exception as error:
                    error.add_note(
                        f"hpstore: in transform, of sample {indices[row]} (position "
                        f"{piece.start + row} of epoch {piece.epoch})"
                    )
                    raise
        try:
            return (self._collate or default_collate)(samples)
        except Exception as error:
            error.add_note(f"hpstore: in collate_fn, of samples {indices.tolist()}")
            raise

    def _without_damaged(self, engine: AnyEngine, piece: Piece) -> tuple[Indices, Batch | None]:
        """Find out one by one which samples can be read."""
        indices, good = piece.indices(engine.order), []
        for index in indices.tolist():
            try:
                engine.batch(np.array([index], np.int64))
            except (IntegrityError, TooManyErasures):
                self.skipped_total += 1
            else:
                good.append(index)
        rows = np.array(good, np.int64)
        return rows, engine.batch(rows) if good else None

    def hand_out(self, made: Any) -> Any:
        """On the user's thread: what was sent to a device is ordered before what the user does."""
        self.batches_total += 1
        return made.wait() if isinstance(made, Arriving) else made


def samples_of(batch: Batch, count: int) -> list[dict[str, Any]]:
    """The samples of a batch: views of its tensors, bytes and str as objects."""
    columns: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Ragged) and value.values.dtype is torch.uint8:
            columns[name] = list(value)
        else:
            columns[name] = list(value)
    return [{name: columns[name][row] for name in columns} for row in range(count)]


def _with_rng(function: Any) -> Callable[[Any, np.random.Generator], Any] | None:
    """A user's function as one of two arguments."""
    if function is None:
        return None
    try:
        wanted = [
            p for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]  # fmt: skip
    except (TypeError, ValueError):  # builtins do not tell
        wanted = []
    if len(wanted) >= 2:
        made: Callable[[Any, np.random.Generator], Any] = function
        return made
    return lambda value, rng: function(value)


__all__ = ["Finish", "samples_of"]
