"""Which blocks each of several policies would keep: directories without data, in C.

Blocks are followed one request at a time, for all policies together: 0.2 to 0.4 us a request.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpstore.loaders.policy.cache_plan import Floats, Int32s, Int64s

_log = logging.getLogger(__name__)
_LIBRARY = "hpstore._directories"  # of directories.c; an extension to be installed, not to import

KINDS = ("LRU", "LFU", "ARC", "LIRS", "S3-FIFO", "SIEVE", "W-TinyLFU", "2Q", "count", "static")
"""As the library numbers them; PHASE_KIND follows."""

COUNT_KIND = KINDS.index("count")
PHASE_KIND = len(KINDS)
MARGIN = 0.3 * math.log(2)
"""By how much, ln of requests, a newcomer must be better than what it displaces."""

UInt16s = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A policy with its parameters. `half_life`: of counts, in passes over all blocks.

    `fresh`: a newcomer is judged by its count with this request, else without it, and a margin.
    """

    name: str
    kind: int
    half_life: float = math.inf
    fresh: bool = False

    def growth(self, blocks: int) -> float:
        """By how much more a request weighs than the one before it: counts that fade."""
        return math.exp2(1 / (self.half_life * blocks))


RULES = (
    *(Rule(name=name, kind=kind) for kind, name in enumerate(KINDS[:8])),
    Rule(name="count", kind=8),
    Rule(name="count 2", kind=8, half_life=2.0),
    Rule(name="fresh count", kind=8, fresh=True),
    Rule(name="fresh count 2", kind=8, half_life=2.0, fresh=True),
    Rule(name="fresh count 1/2", kind=8, half_life=0.5, fresh=True),
    Rule(name="static", kind=9),
    Rule(name="phase", kind=PHASE_KIND),
)
"""What other caches do; counts that fade or do not; never evict; and epochs where they are told."""

PHASE = len(RULES) - 1


class Directories:
    """Directories of some rules over the same blocks, of the same capacity, both in blocks.

    `masks` uint16[blocks]: bit i is set while rule i holds the block; a view, not to be changed.
    `seen` uint8[]: bits of blocks for the phase rule, read in place; `names` int32[blocks]: where
    in it each block is, None: at its own number. `left`: blocks that left the directory of the rule
    with the number `watched` during the last request(), which may have come back. One thread at a
    time.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        blocks: int,
        capacity: int,
        *,
        seen: npt.NDArray[np.uint8],
        names: Int32s | None = None,
    ) -> None:
        library = installed()
        assert library is not None, "the caller asks installed() first"
        self.rules, self.blocks, self.capacity = tuple(rules), blocks, capacity
        self.masks: UInt16s = np.zeros(blocks, np.uint16)
        self.watched = -1
        self.left: Int32s = np.empty(0, np.int32)
        self._waits: Floats = np.zeros(256, np.float32)
        self._alive = (seen, names)  # the library reads them
        growths = [rule.growth(blocks) for rule in rules]
        arrays = (
            np.array([rule.kind for rule in rules], np.int32),
            np.array(growths, np.float64),
            np.array([math.exp(MARGIN) if r.kind == COUNT_KIND else MARGIN for r in rules]),
            np.array([rule.fresh for rule in rules], np.int32),
            self.masks,
            seen,
            self._waits,
        )
        places = [array.ctypes.data for array in arrays] + [
            0 if names is None else names.ctypes.data
        ]
        self._library = library
        self._handle = library.hpstore_directories_begin_2(
            len(rules), blocks, capacity, *map(ctypes.c_void_p, places)
        )
        if not self._handle:
            raise MemoryError(f"{len(rules)} directories of {blocks} blocks")
        handle = ctypes.c_void_p(self._handle)
        end = weakref.finalize(self, library.hpstore_directories_free_2, handle)
        end.atexit = False  # threads may be in the library yet; the process takes its memory along

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        counted = {rule.half_life for rule in self.rules if rule.kind == COUNT_KIND}
        return (2 + 8 * len(counted)) * self.blocks + sum(
            _bytes_of(rule.kind) * self.blocks + _room_of(rule.kind) * self.capacity
            for rule in self.rules
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
        count = self._library.hpstore_directories_request_2(
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
    """Of a block, in the library: links and states, or places; keys of counts are shared."""
    return {1: 12, 3: 17, 4: 10, 6: 10, COUNT_KIND: 4, 9: 1, PHASE_KIND: 4}.get(kind, 9)


def _room_of(kind: int) -> int:
    """Of a block of capacity, in the library."""
    return 4 if kind in (1, 8, PHASE_KIND) else 0


@functools.cache
def installed() -> ctypes.CDLL | None:
    """The library; None where hpstore was installed without a C compiler, said once."""
    spec = importlib.util.find_spec(_LIBRARY)
    try:
        if spec is None or spec.origin is None:
            raise OSError("it was not built")
        library = ctypes.CDLL(spec.origin)
        library.hpstore_directories_begin_2.restype = ctypes.c_void_p
        library.hpstore_directories_request_2.restype = ctypes.c_int64
        library.hpstore_directories_free_2.restype = None
    except (OSError, AttributeError) as error:
        _log.warning(
            "hpstore's cache policy runs on counts alone, with fewer hits where the order is not "
            "known: no compiled directories (%s). With a C compiler there (gcc, libc6-dev), "
            "install hpstore again",
            error,
        )
        return None
    return library
