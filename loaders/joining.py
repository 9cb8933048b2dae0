"""Pieces of many sizes into one place, in a call that gives the interpreter's lock up once."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from hpstore.codec.galois import Bytes
from hpstore.units import KIB

_log = logging.getLogger(__name__)
LARGE_BYTES = 8 * KIB  # mean size of pieces from which on torch joins them faster than numpy


def join(pieces: Sequence[Bytes], out: Bytes) -> bool:
    """Copy pieces, uint8 (n,) each, one after another into `out`, which is as long as all of them.

    Any thread, not two of them into the same memory. numpy takes the interpreter's lock anew for
    each piece, and threads that do so at once keep each other waiting: 256 times a batch. torch
    takes it once, but would wake threads of its own for each large piece: not within this call
    (docs/decisions/0042). False where numpy had to join large ones, as torch's OpenMP is not there.
    """
    if len(out) < LARGE_BYTES * len(pieces) or not all(one.flags.writeable for one in pieces):
        np.concatenate(pieces, out=out)
        return True
    with _on_this_thread() as alone:
        if alone:
            torch.cat([torch.from_numpy(one) for one in pieces], out=torch.from_numpy(out))
        else:
            _say_that_numpy_joins()
            np.concatenate(pieces, out=out)
    return alone


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

__all__ = ["LARGE_BYTES", "join"]
