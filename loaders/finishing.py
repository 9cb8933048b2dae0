"""From a batch as it was read to what the user gets: transforms, collation, the way to a device."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from hpstore.buffers import lock_for_life
from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, IntegrityError, TooManyErasures
from hpstore.loaders.batches import Batch, Ragged, nbytes_of
from hpstore.loaders.draws import Indices
from hpstore.loaders.gpu import Cuda, Gpu, gpu_of
from hpstore.loaders.mixture import AnySession
from hpstore.loaders.progress import Piece
from hpstore.loaders.transfer import Arriving, Transfer

_log = logging.getLogger(__name__)
_DOMAIN = 0x68707374  # keeps generators for transforms apart from those of orders


@dataclass(frozen=True, slots=True)
class Made:
    """A finished batch, `empty` when nothing is left of it, and how many samples were skipped.

    `samples` and `nbytes` are those that were read for it.
    """

    batch: Any
    skipped: int
    empty: bool = False
    samples: int = 0
    nbytes: int = 0


# Any below: batches are whatever the user's functions return
class Finish:
    """What happens to each batch after reading, on the threads that make batches ahead."""

    def __init__(
        self, *, collate_fn: Any, transform: Any, batch_transform: Any,
        device: str | torch.device | Gpu | None, seed: int, on_error: str,
        layout: torch.layout | None = None,
    ) -> None:  # fmt: skip
        if layout not in (None, torch.jagged):
            raise ConfigError(f"layout {layout}: torch.jagged, or None for values and offsets")
        if on_error not in ("raise", "skip"):
            raise ConfigError(f'on_error {on_error!r} is neither "raise" nor "skip"')
        self._collate, self._seed, self._skip = collate_fn, seed, on_error == "skip"
        self._nested = layout is not None
        self._transform = _with_rng(transform)
        self._batch_transform = _with_rng(batch_transform)
        self.gpu = gpu_of(device)
        self._transfer = None if self.gpu is None else Transfer(self.gpu)
        self._locks: Gpu | None = None  # whose batches are page-locked in torch's own memory
        self.batches_total = self.skipped_total = 0  # handed out, or skipped there
        self.samples_total = self.bytes_total = 0  # handed out
        self._said = False  # that samples are skipped
        self.transform_seconds = 0.0

    def begin(self, pin_memory: bool) -> Callable[[Bytes], object] | None:
        """On the thread that iterates, before others make batches. What page-locks their memory;
        None where the user copies it, whose copies may run after the batch was dropped: torch alone
        knows of them, and only of those from memory of its own.
        """
        if self.gpu is not None:
            self.gpu.begin()
            return partial(lock_for_life, self.gpu)
        if pin_memory and torch.cuda.is_available():
            self._locks = Cuda(torch.device("cuda"))
            self._locks.begin()
        return None

    @property
    def on_host(self) -> str:
        """What of the user's works on samples in host memory, by name; "" for nothing."""
        given = {"collate_fn": self._collate, "transform": self._transform,
                 "batch_transform": self._batch_transform}  # fmt: skip
        return ", ".join(name for name, function in given.items() if function is not None)

    def make(self, session: AnySession, piece: Piece) -> Made:
        """Read and finish a piece."""
        try:
            return self._make(session, piece)
        except StopIteration as error:  # it would end the epoch (PEP 479)
            raise RuntimeError("a function given to the loader raised StopIteration") from error

    def _make(self, session: AnySession, piece: Piece) -> Made:
        rows: Sequence[int] | None = None
        skipped = 0
        try:
            indices, batch = session.make(piece)
        except (IntegrityError, TooManyErasures):
            indices = piece.indices(session.order)
            rows = self._readable(session, piece, indices)
            skipped = len(indices) - len(rows)
            if not rows:
                return Made(None, skipped, empty=True)
            indices = indices[list(rows)]
            batch = session.batch(indices)
        made: Any = batch
        nbytes = nbytes_of(batch)
        began = time.perf_counter()
        if self._transform is not None or self._collate is not None or piece.single:
            made = self._by_sample(session, piece, indices, batch, rows or range(len(indices)))
        if self._nested and isinstance(made, dict):
            made = {k: v.nested() if isinstance(v, Ragged) else v for k, v in made.items()}
        if self._batch_transform is not None:
            made = self._whole(piece, indices, made)
        self.transform_seconds += time.perf_counter() - began
        if self._transfer is not None:
            made = self._transfer.send(made)
        elif self._locks is not None:
            with self._locks.side():
                made = pinned(made)  # type: ignore[no-untyped-call]  # torch's
        return Made(made, skipped, samples=len(indices), nbytes=nbytes)

    def settle(self) -> None:
        """Wait for copies to a device that are under way."""
        if self._transfer is not None:
            self._transfer.settle()

    def counted(self, samples: int) -> None:
        """Torch has made a batch, of so many samples where that is known."""
        self.batches_total += 1
        self.samples_total += samples

    def stats(self) -> dict[str, Any]:
        """What was handed out, and how long its finishing took."""
        sent = 0.0 if self._transfer is None else self._transfer.seconds
        return {"batches": self.batches_total, "samples": self.samples_total,
                "bytes": self.bytes_total, "transform_seconds": self.transform_seconds,
                "host_to_device_seconds": sent, "skipped_samples": self.skipped_total}  # fmt: skip

    def _by_sample(
        self, session: AnySession, piece: Piece, indices: Indices, batch: Batch, rows: Sequence[int]
    ) -> Any:
        """`rows`: places of the samples in the piece."""
        samples: list[Any] = session.samples_of(batch, len(indices))
        if self._transform is not None:
            for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
                # positions of an order are unique; a sampler's batch is one position
                key = [piece.start + row] if piece.listed is None else [piece.start, row]
                rng = np.random.default_rng([_DOMAIN, self._seed, piece.epoch, *key])
                try:
                    samples[number] = self._transform(sample, rng)
                except Exception as error:
                    where = f"position {piece.start + row} of epoch {piece.epoch}"
                    error.add_note(f"hpstore: in transform, of sample {indices[number]} ({where})")
                    raise
        try:
            if piece.single:
                return self._collate(samples[0]) if self._collate is not None else samples[0]
            return (self._collate or default_collate)(samples)
        except Exception as error:
            error.add_note(f"hpstore: in collate_fn, of samples {indices.tolist()}")
            raise

    def _whole(self, piece: Piece, indices: Indices, made: Any) -> Any:
        assert self._batch_transform is not None
        rng = np.random.default_rng([_DOMAIN, self._seed, piece.epoch, piece.start, 0, 1])
        try:
            return self._batch_transform(made, rng)
        except Exception as error:
            error.add_note(f"hpstore: in batch_transform, of samples {indices.tolist()}")
            raise

    def _readable(self, session: AnySession, piece: Piece, indices: Indices) -> list[int]:
        """Rows of a piece that can be read, found one by one. Names what cannot, or counts it."""
        good = []
        for row, index in enumerate(indices.tolist()):
            try:
                session.batch(indices[row : row + 1])
            except (IntegrityError, TooManyErasures) as error:
                if not self._skip:
                    where = f"position {piece.start + row} of epoch {piece.epoch}"
                    raise type(error)(
                        f"sample {index} ({where}) cannot be read: {error} The loader stands "
                        'before this batch; on_error="skip" leaves such samples out.'
                    ) from error
                if not self._said:
                    self._said = True
                    _log.warning("sample %d cannot be read and is skipped: %s", index, error)
            else:
                good.append(row)
        return good

    def hand_out(self, made: Made) -> Any:
        """On the user's thread: what was sent to a device is ordered before what the user does."""
        self.skipped_total += made.skipped
        self.batches_total += not made.empty
        self.samples_total += made.samples
        self.bytes_total += made.nbytes
        return made.batch.wait() if isinstance(made.batch, Arriving) else made.batch


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


__all__ = ["Finish"]
