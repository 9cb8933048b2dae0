"""Copies of large batches by stores that pass the cache by, where hpstore was built with them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import platform
from typing import Protocol

import numpy as np

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.dataset.shard_layout import UInt64s
from hpstore.units import KIB, MIB

_log = logging.getLogger(__name__)
LARGE_BYTES = 2 * MIB  # in all, from which on it is no slower: as large as a core's own caches
PIECE_BYTES = 8 * KIB  # and in the mean of its pieces (docs/decisions/0052)
_LIBRARY = "hpstore._nontemporal"  # of nontemporal.c; an extension to be installed, not to import


class Join(Protocol):
    """Pieces of memory, one after another, into one place."""

    def __call__(self, addresses: UInt64s, lengths: Int64s, out: Bytes) -> None:
        """Copy `lengths[i]` bytes from `addresses[i]`, both (n,), into `out`, as long as them all.

        Any thread, without the interpreter's lock. The caller keeps what is at the addresses alive
        and knows that it is that long; it overlaps nothing of `out`. Raises ValueError for arrays
        of another kind, lengths below 0 or an `out` of another length, before anything is written.
        """


def worth_it(nbytes: int, pieces: int) -> bool:
    """So many bytes in so many pieces are copied past the cache sooner than through it."""
    return nbytes >= max(LARGE_BYTES, PIECE_BYTES * pieces)


def past_the_cache(nbytes: int, pieces: int) -> Join | None:
    """None where it is not worth it or not to be had."""
    return _installed() if worth_it(nbytes, pieces) else None


def missed(nbytes: int, pieces: int) -> bool:
    """It is worth it, this processor may well be able to, and what was built is not there or not
    usable.
    """
    return worth_it(nbytes, pieces) and _installed() is None and not _cannot()


@functools.cache
def _installed() -> Join | None:
    library = _library()
    return None if library is None else _usable(library)


@functools.cache
def _library() -> str | None:
    """Its file. None where hpstore was installed without a C compiler, or not on x86-64."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is not None and spec.origin is not None:
        return spec.origin
    if platform.machine() == "x86_64":
        _log.warning(
            "hpstore was installed without a C compiler: large batches are copied through the "
            "cache, which is up to a fifth slower. With one there (gcc, libc6-dev), install it anew"
        )
    return None


def _cannot() -> bool:
    """This processor is known to have no such stores."""
    path = _library()
    if path is None:
        return platform.machine() != "x86_64"
    try:
        return not ctypes.CDLL(path).hpstore_width()
    except (OSError, AttributeError):
        return False


def _usable(path: str) -> Join | None:
    """None where this processor cannot, or the library is of another version or copies wrongly."""
    try:
        library = ctypes.CDLL(path)
        width = int(library.hpstore_width())
        return tried(library.hpstore_join_1, width) if width else None
    except (OSError, AttributeError, RuntimeError) as error:
        _log.warning("%s is not usable, large batches go through the cache: %s", path, error)
        return None


def tried(function: ctypes._NamedFuncPointer, width: int) -> Join:
    """What calls hpstore_join_1, with stores of `width` bytes. Raises RuntimeError when it copies
    wrongly on this machine.
    """
    pointers = [ctypes.c_void_p] * 3
    function.argtypes, function.restype = [*pointers, ctypes.c_int64, ctypes.c_int], None

    def join(addresses: UInt64s, lengths: Int64s, out: Bytes) -> None:
        _check(addresses, lengths, out)
        if len(out):
            tables = (address_of(table.view(np.uint8)) for table in (addresses, lengths))
            function(address_of(out), *tables, len(addresses), width)

    source = np.random.default_rng(0).integers(0, 256, 9002, np.uint8)
    starts, lengths = np.array([1, 4003, 7, 0, 100]), np.array([4001, 4999, 0, 63, 777])
    found = np.zeros(int(lengths.sum()), np.uint8)
    join(starts.astype(np.uint64) + np.uint64(address_of(source)), lengths, found)
    wanted = [source[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    if not np.array_equal(found, np.concatenate(wanted)):
        raise RuntimeError("its self-test found other bytes than were to be copied")
    return join


def _check(addresses: UInt64s, lengths: Int64s, out: Bytes) -> None:
    """What the library takes on trust."""
    kinds = ((addresses, np.uint64), (lengths, np.int64), (out, np.uint8))
    if not all(
        one.dtype == kind and one.ndim == 1 and one.flags.c_contiguous for one, kind in kinds
    ):
        raise ValueError("addresses uint64 (n,), lengths int64 (n,), out uint8 (bytes,) are wanted")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if len(addresses) != len(lengths) or int(lengths.sum()) != len(out):
        raise ValueError(
            f"{len(addresses)} pieces, {len(lengths)} lengths of {int(lengths.sum())} bytes in "
            f"all, room for {len(out)}"
        )
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"a piece of {int(lengths.min())} bytes")
