"""Pieces of many sizes into one place, in a call that gives the interpreter's lock up once."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.loaders.batching import streaming_copy
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.shard_layout import UInt64s
from hpstore.units import KIB

_log = logging.getLogger(__name__)
LARGE_BYTES = 8 * KIB  # mean size of pieces from which on torch joins them faster than numpy


@dataclass(frozen=True, slots=True)
class Pieces:
    """Ranges of one memory: piece i is `lengths[i]` bytes from `starts[i]` of it."""

    memory: Bytes
    starts: Int64s
    lengths: Int64s

    def __len__(self) -> int:
        return len(self.starts)

    def views(self) -> list[Bytes]:
        """Each piece, uint8 (length,). Raises IndexError as addresses()."""
        self._check()
        memory, ends = self.memory, self.starts + self.lengths
        return [memory[a:b] for a, b in zip(self.starts.tolist(), ends.tolist(), strict=True)]

    def cut(self, low: Int64s, lengths: Int64s) -> Pieces:
        """Of each piece `lengths[i]` bytes from its byte `low[i]` on."""
        return Pieces(self.memory, self.starts + low, lengths)

    def addresses(self) -> UInt64s:
        """Where each begins. Raises IndexError when one is not wholly in the memory."""
        self._check()
        return self.starts.astype(np.uint64) + np.uint64(address_of(self.memory))

    def _check(self) -> None:
        room = len(self.memory) - self.starts  # of what is negative, more than there is
        outside = (self.starts < 0) | (self.lengths < 0) | (self.lengths > room)
        if outside.any():
            raise IndexError(f"a piece is outside of its memory of {len(self.memory)} bytes")


class How(enum.Enum):
    """How pieces came to one place."""

    PAST_THE_CACHE = enum.auto()  # many bytes, in large pieces
    USUALLY = enum.auto()  # as is best for their sizes, on this machine
    THROUGH_THE_CACHE = enum.auto()  # as past it, but nontemporal.c is not there
    BY_NUMPY = enum.auto()  # large ones, as torch's OpenMP is not there

    @staticmethod
    def through_the_cache(nbytes: int, pieces: int) -> How:
        """So many bytes in so many pieces, by other means than nontemporal.c."""
        return How.THROUGH_THE_CACHE if streaming_copy.missed(nbytes, pieces) else How.USUALLY


def join(pieces: Pieces | Sequence[Bytes], out: Bytes) -> How:
    """Copy pieces, uint8 (n,) each, one after another into `out`, which is as long as all of them.

    Any thread, not two of them into the same memory. numpy takes the interpreter's lock anew for
    each piece, and threads that do so at once keep each other waiting: 256 times a batch. torch
    takes it once, but would wake threads of its own for each large piece: not within this call
    (docs/decisions/0042). What is too large for the cache anyway is copied past it (0052).
    """
    past = streaming_copy.past_the_cache(len(out), len(pieces))
    if past is not None:
        past(*_addressed(pieces), out)
        return How.PAST_THE_CACHE
    views = pieces.views() if isinstance(pieces, Pieces) else pieces
    otherwise = How.through_the_cache(len(out), len(pieces))
    small = len(out) < LARGE_BYTES * len(pieces)
    if small or not all(one.flags.writeable for one in views):
        np.concatenate(views, out=out)
        return otherwise
    with _on_this_thread() as alone:
        if not alone:
            _say_that_numpy_joins()
            np.concatenate(views, out=out)
            return How.BY_NUMPY
        torch.cat([torch.from_numpy(one) for one in views], out=torch.from_numpy(out))
    return otherwise


def _addressed(pieces: Pieces | Sequence[Bytes]) -> tuple[UInt64s, Int64s]:
    """Address and length of each; of views those that are not empty, which have no address."""
    if isinstance(pieces, Pieces):
        return pieces.addresses(), np.ascontiguousarray(pieces.lengths)
    some = [one for one in pieces if len(one)]
    lengths = np.array([len(one) for one in some], np.int64)
    return np.array([address_of(one) for one in some], np.uint64), lengths


@functools.cache
def _say_that_numpy_joins() -> None:
    """Once a process."""
    _log.warning("torch's OpenMP is not to be found: large ragged records are joined by numpy")


@contextmanager
def _on_this_thread() -> Iterator[bool]:
    """Inside torch computes on the calling thread alone, others are as they were. False: it does
    not, as its OpenMP was not found.

    torch.set_num_threads would also count for threads that begin later, whoever's they are.
    """
    usual = torch.get_num_threads()
    if usual == 1:
        yield True
        return
    if _set_threads is None:
        yield False
        return
    _set_threads(1)
    try:
        yield torch.get_num_threads() == 1
    finally:
        _set_threads(usual)


def _openmp() -> ctypes._NamedFuncPointer | None:
    """omp_set_num_threads of the library that torch has loaded: of the calling thread's number."""
    try:
        # PyDLL: 0.1 us with the interpreter's lock held, nothing to give it up for
        found = ctypes.PyDLL(None).omp_set_num_threads
    except (AttributeError, OSError):
        return None
    found.argtypes, found.restype = [ctypes.c_int], None
    return found


_set_threads = _openmp()
