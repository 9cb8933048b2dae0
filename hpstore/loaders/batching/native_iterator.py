"""Iterating over a native dataset."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpstore.errors import AlreadyClosed, ConfigError
from hpstore.loaders.batching.batch_maker import Session
from hpstore.loaders.batching.batch_queue import BatchTimeout, Pipeline
from hpstore.loaders.batching.cached_reads import CachedRun
from hpstore.loaders.batching.chosen_data import Native
from hpstore.loaders.batching.engines import AnySession, sample_bytes
from hpstore.loaders.batching.mixture import Mixture
from hpstore.loaders.batching.served import Served
from hpstore.loaders.dataset.batch_values import slot_bytes
from hpstore.loaders.dataset.dataset import sample_numbers
from hpstore.loaders.sampling.batch_plan import BatchPiece, endless, listed
from hpstore.loaders.sampling.rank_slices import Slices

LEAST_AHEAD, MOST_AHEAD = 2, 16  # batches, unless prefetch_factor says
STEADY = 2  # that a user who keeps none holds at a time, at least: the last one and the next one
HELD = 3  # and at most: one more is on its way to a GPU
# where batches are read record by record they wait for devices
THREADS = {"records": 6, "cached": 4}


class BatchRun:
    """Batches made ahead from a position on, over the ends of epochs. It belongs to one process.

    Dropping it stops what is under way.
    """

    def __init__(self, loader: Served, native: Native, epoch: int, position: int) -> None:
        slices, finish = loader.slices, loader.finish
        finish.start()  # before there are threads, where processes are forked
        engine = loader.engine()
        few = min(2, len(os.sched_getaffinity(0)))
        threads = loader.num_workers or THREADS.get(engine.mode, few)
        threads += few if finish.processes else 0  # who waits for a process reads nothing
        self._pid, self.slices = os.getpid(), slices
        self._timeout = loader.timeout or None
        self._session = session = engine.start(epoch, position)
        rows = loader.batch_size or 1
        cached = session.cached if isinstance(session, Session) else None
        if slices is not None:
            todo = endless(slices, epoch, position, single=loader.batch_size is None)
            if cached is not None:
                cached.follow(loader.order, slices, epoch, position)
        else:
            batches = _batches(loader, native, cached, epoch, position)
            rows, batches = _first_rows(batches)
            todo = listed(batches, epoch, position)
        alone = sample_bytes(native) * max(1, rows) > int(loader.memory.prefetch_bytes)
        threads = 1 if alone else threads  # each would make one
        depth = loader.prefetch_factor
        depth = depth * threads if depth else _depth(loader, native, threads, rows)
        depth = 1 if alone else depth
        engine.expect(steady=depth + STEADY, most=depth + HELD + 1)  # 1: a small one beside these
        self._pipeline = Pipeline(
            todo,
            lambda piece: finish.make(session, piece),
            depth=depth,
            threads=threads,
            rows=rows,
            waits=loader.waits,
        )
        self._session.needed_from(self._pipeline.peek())
        # after the pipeline's: at exit it is called first, and wakes threads that wait for pages
        self._leave = weakref.finalize(self, _leave, session, os.getpid())

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """Those that make its batches."""
        return self._pipeline.threads

    def peek(self) -> BatchPiece | None:
        """What comes next; None when nothing does."""
        return self._pipeline.peek()

    def take(self) -> tuple[BatchPiece, Any]:
        """As Pipeline.take."""
        if self._pid != os.getpid():
            raise ConfigError(
                "this iterator was made before a fork and its threads are in the parent: "
                "iterate over the loader anew"
            )
        try:
            taken = self._pipeline.take(self._timeout)
        except BatchTimeout as error:  # as torch has it; the next call waits for the same batch
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds. The batch is still being "
                "made: next() waits for it again."
            ) from error
        except Exception:
            self.abandon()
            raise
        self._session.needed_from(self._pipeline.peek())
        return taken

    @property
    def cut_short(self) -> bool:
        """As Pipeline.cut_short."""
        return self._pipeline.cut_short

    @property
    def ready(self) -> int:
        """As Pipeline.ready."""
        return self._pipeline.ready

    @property
    def going(self) -> bool:
        """Whether it was not abandoned."""
        return self._leave.alive

    def begins_at(self, slices: Slices | None, epoch: int) -> bool:
        """Whether this goes on at the start of an epoch, with these slices, in this process."""
        piece = self._pipeline.peek() if self._pid == os.getpid() else None
        return piece is not None and piece.epoch == epoch and self.slices == slices

    def abandon(self) -> None:
        """Stop without waiting for what is being made. Idempotent."""
        self._pipeline.abandon()
        if self._leave.detach() is not None and self._pid == os.getpid():
            self._session.leave()

    def close(self) -> None:
        """Stop, and wait until nothing is being made. Idempotent."""
        self.abandon()
        if self._pid == os.getpid():
            self._session.close()
            self._pipeline.close()


def _leave(session: AnySession, pid: int) -> None:
    """Called when a run is dropped, or when the process ends."""
    if pid == os.getpid():
        session.leave(dropped=True)


def _depth(loader: Served, native: Native, threads: int, rows: int) -> int:
    """Batches ahead: half of the memory for batches, the other half is the user's, who may have
    HELD of them and a small one.
    """
    fitting = int(loader.memory.prefetch_bytes) // batch_bytes(native, max(1, rows))
    ahead = min(MOST_AHEAD, fitting // 2, fitting - HELD - 1)
    return max(LEAST_AHEAD, threads, ahead)


def batch_bytes(native: Native, rows: int) -> int:
    """Memory for a batch of so many samples: a slot for each stream of a dataset."""
    data = native.data
    if isinstance(data, Mixture) or native.packing is not None:
        return max(1, int(sample_bytes(native) * rows))
    per_row = [int(s.payload_bytes.sum()) / max(1, len(data)) for s in data.streams]
    # rows with several fields are read as they lie, then taken apart beside it
    parts = [2 if len(s.record.fields) > 1 else 1 for s in data.streams]
    return max(
        1,
        sum(slot_bytes(int(size * rows * part)) for size, part in zip(per_row, parts, strict=True)),
    )


class NativeIterator:
    """One epoch from a position on. What is made ahead of the next epoch is left to the loader."""

    def __init__(self, loader: Served, run: BatchRun, epoch: int) -> None:
        self._loader, self._epoch = loader, epoch
        self._run: BatchRun | None = run

    def __iter__(self) -> NativeIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def ready(self) -> int:
        """How many batches next() has at hand now, of this epoch and the next."""
        return 0 if self._run is None else self._run.ready

    def __next__(self) -> Any:
        while True:
            run = self._run
            if run is not None and not run.going:
                raise AlreadyClosed(
                    "the loader was closed, and with it this iterator: the epoch is not over. To "
                    "go on there, load state_dict() and iterate anew."
                )
            if run is not None and run.cut_short:
                raise RuntimeError(
                    "the loader was interrupted while it looked ahead: the epoch is not over. To "
                    "go on where it stands, load state_dict() and iterate anew."
                )
            piece = run.peek() if run is not None else None
            if run is None or piece is None or piece.epoch != self._epoch:
                self._end(run, more=piece is not None)
                raise StopIteration
            try:
                piece, made = run.take()
            except Exception:
                if not run.going:
                    self._run = None
                raise
            self._loader.stands.moved(piece.after)
            batch = self._loader.finish.hand_out(made)
            if not made.empty:  # else all of its samples were skipped
                return batch

    def _end(self, run: BatchRun | None, *, more: bool) -> None:
        self._run = None
        if run is not None:
            self._loader.stands.ended(self._epoch)
            if more:
                self._loader.keep_ready(run)


class EndIterator:
    """What is left of an epoch behind its last batch: its end."""

    ready = 0  # as of NativeIterator

    def __init__(self, loader: Served, epoch: int) -> None:
        self._loader, self._epoch = loader, epoch

    def __iter__(self) -> EndIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        self._loader.stands.ended(self._epoch)
        raise StopIteration


def _batches(
    loader: Served, native: Native, cached: CachedRun | None, epoch: int, skip: int
) -> Iterator[Any]:
    """Batches of samples of the user's sampler, without its first `skip`; without a batch size, its
    samples or lists. A cache is told what comes, as far as that is known.
    """
    sampler, mapping = _sampler(loader), native.mapping
    known = cached is None or cached.follow_sampler(sampler, mapping, epoch, skip)
    batches: Iterator[Any] = itertools.islice(sampler, skip, None)
    batches = (sample_numbers(chosen, native.chosen) for chosen in batches)
    if mapping is not None:
        batches = (mapping[chosen] for chosen in batches)
    return batches if known or cached is None else cached.drawn(batches)


def _first_rows(batches: Iterator[Any]) -> tuple[int, Iterator[Any]]:
    """How many samples the first batch has, and all batches: a batch sampler need not say."""
    first = next(batches, None)
    if first is None:
        return 1, batches
    return int(np.size(first)), itertools.chain([first], batches)


def _sampler(loader: Served) -> Any:
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
