"""Which blocks each of several policies would keep: directories without data, in C.

Blocks are followed one request at a time, for all policies together: 0.1 to 0.3 us a request.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.cache_plan import Floats, Int32s, Int64s

_log = logging.getLogger(__name__)
_LIBRARY = "hpstore._directories"  # of directories.c; an extension to be installed, not to import

KINDS = (
    *("LRU", "LFU", "ARC", "LIRS", "S3-FIFO", "SIEVE", "W-TinyLFU", "2Q"),
    *("count", "fresh count", "static", "phase"),
)
"""Names of rules, as the library numbers them: what other caches do; counts that do not fade, where
a newcomer is judged by what was before this request; counts that fade in half a pass, and judged
with it; never evict; and epochs where they are told."""

RULES = (
    *("LRU", "ARC", "LIRS", "S3-FIFO", "W-TinyLFU", "2Q"),
    *("count", "fresh count", "static", "phase"),
)
"""Rules that the cache follows. LFU and SIEVE are never much better than the best of these."""

PHASE = RULES.index("phase")
MARGIN = 0.3 * math.log(2)
"""By how much, ln of requests, a newcomer must be better than what it displaces."""

UInt16s = npt.NDArray[np.uint16]


class Directories:
    """Directories of some rules, by name, over the same blocks, of the same capacity in blocks.

    `masks` uint16[blocks]: bit i is set while rule i holds the block; a view, not to be changed.
    `seen` uint8[]: bits of blocks for the phase rule, read in place; `names` int32[blocks]: where
    in it each block is, None: at its own number. `left`: blocks that left the directory of the rule
    with the number `watched` during the last request(), which may have come back. One thread at a
    time.
    """

    def __init__(
        self,
        rules: Sequence[str],
        blocks: int,
        capacity: int,
        *,
        seen: npt.NDArray[np.uint8],
        names: Int32s | None = None,
    ) -> None:
        library = installed()
        assert library is not None, "the caller asks installed() first"
        self.blocks, self.capacity = blocks, capacity
        self._kinds = [KINDS.index(rule) for rule in rules]
        self.masks: UInt16s = np.zeros(blocks, np.uint16)
        self.watched = -1
        self.left: Int32s = np.empty(0, np.int32)
        self._waits: Floats = np.zeros(256, np.float32)
        self._alive = (seen, names)  # the library reads them
        kinds = np.array(self._kinds, np.int32)
        self._library = library
        self._handle = library.hpstore_directories_begin_3(
            len(rules),
            blocks,
            capacity,
            ctypes.c_void_p(kinds.ctypes.data),
            ctypes.c_double(MARGIN),
            *(ctypes.c_void_p(array.ctypes.data) for array in (self.masks, seen, self._waits)),
            ctypes.c_void_p(0 if names is None else names.ctypes.data),
        )
        if not self._handle:
            raise MemoryError(f"{len(rules)} directories of {blocks} blocks")
        handle = ctypes.c_void_p(self._handle)
        end = weakref.finalize(self, library.hpstore_directories_free_3, handle)
        end.atexit = False  # threads may be in the library yet; the process takes its memory along

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return 2 * self.blocks + sum(
            _bytes_of(kind) * self.blocks + _room_of(kind) * self.capacity for kind in self._kinds
        )

    def request(self, blocks: Int64s, waits: Floats | None = None) -> UInt16s:
        """Requests one after the other, int64[n], all within range: who has each, as masks.

        `waits` float32[256]: ln of the requests until a block of each pattern of bits is needed;
        None leaves the phase rule out.
        """
        if waits is not None:
            self._waits[:] = waits
        found: UInt16s = np.empty(len(blocks), np.uint16)
        left: Int32s = np.empty(len(blocks), np.int32)
        count = self._library.hpstore_directories_request_3(
            ctypes.c_void_p(self._handle),
            ctypes.c_void_p(blocks.ctypes.data),
            ctypes.c_int64(len(blocks)),
            int(waits is not None),
            ctypes.c_void_p(found.ctypes.data),
            self.watched,
            ctypes.c_void_p(left.ctypes.data),
        )
        self.left = left[:count]
        return found


def _bytes_of(kind: int) -> int:
    """Of a block, in the library: links and states, or places and keys."""
    return {1: 12, 3: 17, 4: 10, 6: 10, 8: 12, 9: 12, 10: 1, 11: 4}.get(kind, 9)


def _room_of(kind: int) -> int:
    """Of a block of capacity, in the library."""
    return 4 if kind in (1, 8, 9, 11) else 0


@functools.cache
def installed() -> ctypes.CDLL | None:
    """The library; None where hpstore was installed without a C compiler, said once."""
    spec = importlib.util.find_spec(_LIBRARY)
    try:
        if spec is None or spec.origin is None:
            raise OSError("it was not built")
        library = ctypes.CDLL(spec.origin)
        library.hpstore_directories_begin_3.restype = ctypes.c_void_p
        library.hpstore_directories_request_3.restype = ctypes.c_int64
        library.hpstore_directories_free_3.restype = None
    except (OSError, AttributeError) as error:
        _log.warning(
            "hpstore's cache policy runs on counts alone, with fewer hits where the order is not "
            "known: no compiled directories (%s). With a C compiler there (gcc, libc6-dev), "
            "install hpstore again",
            error,
        )
        return None
    return library
