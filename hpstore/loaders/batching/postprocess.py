"""From a batch as it was read to what the user gets: transforms, collation, the way to a device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, IntegrityError, TooManyErasures
from hpstore.loaders.batching.engines import AnySession
from hpstore.loaders.batching.transforms import Task, UserTransforms
from hpstore.loaders.batching.worker_pool import Processes, Workers
from hpstore.loaders.dataset.batch_values import nbytes_of
from hpstore.loaders.dataset.value_decoder import ValueDecoder
from hpstore.loaders.gpu.gpu_device import CudaGpu, Gpu, gpu_of
from hpstore.loaders.gpu.upload import Arriving, Transfer
from hpstore.loaders.sampling.batch_plan import BatchPiece
from hpstore.loaders.sampling.random_draws import Indices
from hpstore.runtime.buffers import lock_for_life
from hpstore.runtime.lacks import blamed, lacks_total

_log = logging.getLogger(__name__)


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
        self,
        *,
        collate_fn: Any,
        transform: Any,
        batch_transform: Any,
        device: str | torch.device | Gpu | None,
        seed: int,
        on_error: str,
        layout: torch.layout | None = None,
        processes: Processes | None = None,
        ring_bytes: int = 0,
        decoder: ValueDecoder | None = None,
    ) -> None:
        if layout not in (None, torch.jagged):
            raise ConfigError(f"layout {layout}: torch.jagged, or None for values and offsets")
        if on_error not in ("raise", "skip"):
            raise ConfigError(f'on_error {on_error!r} is neither "raise" nor "skip"')
        self._skip = on_error == "skip"
        self._work = UserTransforms(
            collate_fn=collate_fn,
            transform=transform,
            batch_transform=batch_transform,
            seed=seed,
            nested=layout is not None,
            skip=self._skip,
            decoder=decoder,
        )
        self._workers: Workers | None = None
        if processes is not None and self._work.names:
            if layout is not None:
                raise ConfigError(
                    "layout with worker processes: nested tensors cannot be sent between "
                    "processes. Leave multiprocessing_context out, or call Ragged.nested()."
                )
            self._workers = Workers(processes, self._work, seed)
        self.gpu = gpu_of(device)
        if ring_bytes and self.gpu is None:
            raise ConfigError("gpu: ring_bytes are memory of a GPU: give device= with them")
        self._transfer = None if self.gpu is None else Transfer(self.gpu, ring_bytes)
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
            self._locks = CudaGpu(torch.device("cuda"))
            self._locks.begin()
        return None

    @property
    def on_host(self) -> str:
        """What of the user's works on samples in host memory, by name; "" for nothing."""
        return ", ".join(self._work.names)

    def make(self, session: AnySession, piece: BatchPiece) -> Made:
        """Read and finish a piece."""
        try:
            return self._make(session, piece)
        except StopIteration as error:  # it would end the epoch (PEP 479)
            raise RuntimeError("a function given to the loader raised StopIteration") from error

    def _make(self, session: AnySession, piece: BatchPiece) -> Made:
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
        nbytes = nbytes_of(batch)
        began = time.perf_counter()
        task = Task(
            batch=batch,
            fields=session.fields,
            indices=indices,
            epoch=piece.epoch,
            rows=range(len(indices)) if rows is None else rows,
            start=piece.start,
            listed=piece.listed is not None,
            single=piece.single,
        )
        worked = self._work(task) if self._workers is None else self._workers.run(task)
        took = time.perf_counter() - began
        self.transform_seconds += took
        skipped += worked.failed
        if worked.failed:
            what = "cannot be decoded" if worked.undecoded else "transform failed"
            self._say_once(f"{what}, the sample is skipped: %s", worked.first)
        if worked.empty:
            return Made(None, skipped, empty=True)
        made = worked.batch
        if self._transfer is not None:
            made = self._transfer.send(made)
        elif self._locks is not None:
            with self._locks.side():
                made = pinned(made)  # type: ignore[no-untyped-call]  # torch's
        return Made(made, skipped, samples=len(indices) - worked.failed, nbytes=nbytes)

    @property
    def processes(self) -> int:
        """Worker processes that run the user's functions; 0 for none."""
        return 0 if self._workers is None else self._workers.count

    def start(self) -> None:
        """On the thread that iterates, before others make batches: worker processes, if asked."""
        if self._workers is not None:
            self._workers.start()

    def close(self) -> None:
        """Wait for copies to a device that are under way, and end worker processes."""
        if self._workers is not None:
            self._workers.close()
        if self._transfer is not None:
            self._transfer.settle()

    def counted(self, samples: int) -> None:
        """Torch has made a batch, of so many samples where that is known."""
        self.batches_total += 1
        self.samples_total += samples

    def stats(self) -> dict[str, Any]:
        """What was handed out, and how long its finishing took."""
        sent = 0.0 if self._transfer is None else self._transfer.seconds
        ring: dict[str, Any] = {}
        if self._transfer is not None and self._transfer.ring is not None:
            made = self._transfer.ring
            ring = {
                "device_ring_bytes": made.made_bytes,
                "batches_outside_ring": made.outside_total,
            }
        return {
            "batches": self.batches_total,
            "samples": self.samples_total,
            "bytes": self.bytes_total,
            "transform_seconds": self.transform_seconds,
            "host_to_device_seconds": sent,
            "skipped_samples": self.skipped_total,
            "worker_processes": self.processes,
            **ring,
        }

    def _readable(self, session: AnySession, piece: BatchPiece, indices: Indices) -> list[int]:
        """Rows of a piece that can be read, found one by one. Names what cannot, or counts it."""
        good = []
        before = lacks_total()
        for row, index in enumerate(indices.tolist()):
            try:
                session.batch(indices[row : row + 1])
            except (IntegrityError, TooManyErasures) as error:
                if (cause := blamed(error, before)) is not error:
                    raise cause from error
                away = isinstance(error, TooManyErasures) and error.away
                if away or not self._skip:
                    where = f"position {piece.start + row} of epoch {piece.epoch}"
                    hint = "leaves out what is damaged" if away else "leaves such samples out"
                    raise type(error)(
                        f"sample {index} ({where}) cannot be read: {error} The loader stands "
                        f'before this batch; on_error="skip" {hint}.'
                    ) from error
                self._say_once("sample %d cannot be read and is skipped: %s", index, error)
            else:
                good.append(row)
        return good

    def _say_once(self, text: str, *facts: object) -> None:
        """The first sample that is skipped; the others are counted."""
        if not self._said:
            self._said = True
            _log.warning(text + ". Others are counted in stats()", *facts)

    def hand_out(self, made: Made) -> Any:
        """On the user's thread: what was sent to a device is ordered before what the user does."""
        self.skipped_total += made.skipped
        self.batches_total += not made.empty
        self.samples_total += made.samples
        self.bytes_total += made.nbytes
        return made.batch.wait() if isinstance(made.batch, Arriving) else made.batch
