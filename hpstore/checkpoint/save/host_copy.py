"""Copies on the host by several threads that take pieces as they come.

torch cuts each tensor evenly for its own threads and waits for the slowest of them, tensor by
tensor: with cores that others use too that was seen to take ten times as long. Here each thread
takes a share of what is left, smaller and smaller ones (guided self-scheduling; Polychronopoulos
and Kuck, 1987): few hand-overs of the interpreter's lock, and a thread that is kept from running
delays the end by one small share.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait

import numpy as np
import torch

from hpstore.codec.galois import Bytes
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import KIB, MIB

PIECE_BYTES = 4 * MIB
SMALL_BYTES = 64 * KIB  # below it a call of torch's costs less than a view of numpy's
MAX_THREADS = 8
MAX_SHARE_BYTES = 64 * MIB
Pair = tuple[torch.Tensor, torch.Tensor]  # (to, from)


def as_bytes(tensor: torch.Tensor) -> Bytes | None:
    """A contiguous CPU tensor's memory; None when its bytes are not simply there."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    found: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def pieces(pairs: Iterable[Pair]) -> Iterator[tuple[Bytes, Bytes]]:
    """Cut the copies of large tensors; make the others at once."""
    for target, source in pairs:
        flat = as_bytes(source) if source.nbytes >= SMALL_BYTES and source.is_cpu else None
        if flat is None:
            target.copy_(source)
            continue
        to = as_bytes(target)
        if to is None:
            raise ValueError("a staging place is contiguous")
        for at in range(0, len(flat), PIECE_BYTES):
            yield to[at : at + PIECE_BYTES], flat[at : at + PIECE_BYTES]


def shares(pairs: Sequence[Pair], threads: int) -> Iterator[list[tuple[Bytes, Bytes]]]:
    """The pieces of all copies, several at a time: a third of each thread's part of the rest."""
    left = sum(source.nbytes for _, source in pairs)
    share: list[tuple[Bytes, Bytes]] = []
    size = 0
    for piece in pieces(pairs):
        share.append(piece)
        size += len(piece[0])
        if size >= min(MAX_SHARE_BYTES, left // (3 * threads)):
            yield share
            share, left, size = [], left - size, 0
    if share:
        yield share


class Copier:
    """Makes the copies of one save at a time. Threads start with the first, end with close()."""

    def __init__(self) -> None:
        self._threads: WorkerThreads | None = None
        self._pid = os.getpid()
        self._helpers = max(0, min(MAX_THREADS, len(os.sched_getaffinity(0))) - 1)

    def run(self, pairs: Iterable[Pair]) -> None:
        """Copy all; on return the sources may change. The caller's thread takes part."""
        pairs = list(pairs)
        todo = shares(pairs, self._helpers + 1)
        lock = threading.Lock()  # guards todo

        def work() -> None:
            with torch.no_grad():
                while True:
                    with lock:
                        share = next(todo, None)
                    if share is None:
                        return
                    for to, piece in share:
                        np.copyto(to, piece)

        if self._pid != os.getpid():  # a fork: these threads are its parent's
            self._threads, self._pid = None, os.getpid()
        if self._helpers and self._threads is None:
            self._threads = WorkerThreads(self._helpers, "hpstore-copy")
        others = []
        if self._threads is not None:
            others = [self._threads.submit(work) for _ in range(self._helpers)]
        try:
            work()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
