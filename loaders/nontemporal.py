"""Copies of large batches by stores that pass the cache by, where hpstore was built with them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from typing import Protocol

import numpy as np

from hpstore.codec import address_of
from hpstore.codec.galois import Bytes
from hpstore.loaders.layout import Int64s
from hpstore.loaders.shards import UInt64s
from hpstore.units import MIB

_log = logging.getLogger(__name__)
LARGE_BYTES = 2 * MIB  # of a batch, from which on it is no slower: as large as a core's own caches
_LIBRARY = "hpstore._nontemporal"  # of nontemporal.c; an extension to be installed, not to import


class Join(Protocol):
    """Pieces of memory, one after another, into one place."""

    def __call__(self, addresses: UInt64s, lengths: Int64s, out: Bytes) -> None:
        """Copy `lengths[i]` bytes from `addresses[i]`, both (n,), into `out`, as long as them all.

        Any thread, without the interpreter's lock. The caller keeps what is at the addresses alive
        and knows that it is that long; it overlaps nothing of `out`. Raises ValueError when `out`
        is not as long as the pieces, before anything is written.
        """


def past_the_cache(nbytes: int) -> Join | None:
    """For what is so large in all. None for less, and where it is not to be had."""
    return _installed() if nbytes >= LARGE_BYTES else None


@functools.cache
def _installed() -> Join | None:
    """None where hpstore was installed without a C compiler or not on x86-64, which is logged."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or spec.origin is None:
        _log.info(
            "hpstore was built without nontemporal.c (no C compiler, or not x86-64): large batches "
            "are copied through the cache, which is slower. With a compiler there, install it anew"
        )
        return None
    try:
        return tried(ctypes.CDLL(spec.origin).hpstore_join)
    except (OSError, AttributeError, RuntimeError) as error:
        _log.warning("%s is not usable, large batches go through the cache: %s", spec.origin, error)
        return None


def tried(function: ctypes._NamedFuncPointer, *, wide: bool = True) -> Join:
    """What calls hpstore_join. Raises RuntimeError when it copies wrongly on this machine."""
    pointers = [ctypes.c_void_p] * 3
    function.argtypes, function.restype = [*pointers, ctypes.c_int64, ctypes.c_int], None

    def join(addresses: UInt64s, lengths: Int64s, out: Bytes) -> None:
        if len(addresses) != len(lengths) or int(lengths.sum()) != len(out):
            raise ValueError(
                f"{len(addresses)} pieces, {len(lengths)} lengths of {int(lengths.sum())} bytes in "
                f"all, room for {len(out)}"
            )
        if len(out):
            tables = (address_of(table.view(np.uint8)) for table in (addresses, lengths))
            function(address_of(out), *tables, len(addresses), wide)

    source = np.random.default_rng(0).integers(0, 256, 9002, np.uint8)
    starts, lengths = np.array([1, 4003, 7, 0, 100]), np.array([4001, 4999, 0, 63, 777])
    found = np.zeros(int(lengths.sum()), np.uint8)
    join(starts.astype(np.uint64) + np.uint64(address_of(source)), lengths, found)
    wanted = [source[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    if not np.array_equal(found, np.concatenate(wanted)):
        raise RuntimeError("its self-test found other bytes than were to be copied")
    return join


__all__ = ["LARGE_BYTES", "Join", "past_the_cache", "tried"]
