"""What makes the batches of a native data set: slots, slabs and who fills them, for one loader."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from hpstore.budget import available_bytes
from hpstore.closing import Closing
from hpstore.errors import ConfigError
from hpstore.loaders.batches import Assembler, Batch
from hpstore.loaders.dataset import Dataset
from hpstore.loaders.draws import Indices
from hpstore.loaders.filling import Filler, everything, in_windows
from hpstore.loaders.order import Order
from hpstore.loaders.progress import Piece
from hpstore.loaders.slab import Slab
from hpstore.loaders.slots import Slots
from hpstore.loaders.windows import WindowOrder
from hpstore.units import MIB, parse_bytes

CACHE_SHARE = 0.25  # of the memory that is available, for pages, unless the user says
PREFETCH_BYTES = 256 * MIB
WINDOWS_KEPT = 3  # the one that is read from, the one that is filled, and one being left


class Engine(Closing):
    """Batches of `data` in `order`. make() is for many threads, start() and close() for one.

    Data sets that fit `cache_bytes` are kept in memory as they are read; with a window shuffle the
    windows to come are; otherwise records are read as they are needed.
    """

    def __init__(
        self, data: Dataset, order: Order | None, *, cache_bytes: int, prefetch_bytes: int,
        pin: Callable[[Any], None] | None = None,
    ) -> None:  # fmt: skip
        self._data, self.order = data, order
        self.pid = os.getpid()  # its threads live in this process
        self._slots = Slots(prefetch_bytes, pin)
        self._slabs: dict[int, Slab] = {}
        self._filler: Filler | None = None
        self._assembler: Assembler | None = None
        self.make_seconds = 0.0
        pages = {s: int(s.page_starts[-1]) for s in data.streams}
        needed = sum(Slab.bytes_needed(stream, count) for stream, count in pages.items())
        if needed <= cache_bytes:
            self.mode = "resident"
        elif isinstance(order, WindowOrder):
            self.mode = "window"
        else:
            self.mode = "records"

    def start(self, epoch: int, position: int) -> None:
        """Get ready for the pieces from a position on; what was filled for others goes."""
        if self._assembler is not None and self.mode != "window":
            return
        if self._filler is not None:
            self._filler.close()
        data, order = self._data, self.order
        if self.mode == "resident":
            self._slabs = {s.number: Slab(data, s, int(s.page_starts[-1])) for s in data.streams}
            self._filler = Filler(self._slabs, everything(self._slabs))
        elif self.mode == "window" and isinstance(order, WindowOrder):
            self._slabs = {
                s.number: Slab(data, s, self._window_pages(order, s.number)) for s in data.streams
            }
            fills = in_windows(data, order, self._slabs, epoch, position)
            self._filler = Filler(self._slabs, fills)
        self._assembler = Assembler(data, self._slots, self._slabs, wait=self.mode == "window")

    def _window_pages(self, order: WindowOrder, number: int) -> int:
        """Pages of a stream that the kept windows have at most."""
        stream = next(s for s in self._data.streams if s.number == number)
        pages, stripes = int(stream.page_starts[-1]), max(1, len(self._data.stripes()) - 1)
        share = -(-pages * order.window_stripes // stripes) + 2 * order.window_stripes
        return min(pages, WINDOWS_KEPT * max(share, stream.pages_per_stripe))

    def make(self, piece: Piece) -> tuple[Indices, Batch]:
        """The samples of a piece, and which they are. Raises what reading raises."""
        began = time.perf_counter()
        indices = piece.indices(self.order)
        made = self.batch(indices)
        self.make_seconds += time.perf_counter() - began
        return indices, made

    def batch(self, indices: Indices) -> Batch:
        """A batch of these samples, in this order."""
        assert self._assembler is not None
        return self._assembler.batch(indices)

    def handed(self, piece: Piece) -> None:
        """A piece was given to the user: pages that only earlier ones needed may go."""
        if self.mode == "window" and self.order is not None:
            for slab in self._slabs.values():
                slab.advance(piece.epoch * self.order.length + piece.stop)

    def stats(self) -> dict[str, float | int | str]:
        """Counters since the start."""
        made = self._assembler
        return {
            "mode": self.mode,
            "assemble_seconds": self.make_seconds,
            "records_gathered": made.gathered_total if made is not None else 0,
            "records_read": made.read_total if made is not None else 0,
            "batches_in_ordinary_memory": self._slots.ordinary_total,
            "batch_memory_bytes": self._slots.made_bytes,
        }

    def close(self) -> None:
        """Stop filling. Batches that were handed out stay good. Idempotent."""
        if self._filler is not None:
            self._filler.close()


def cache_budget(cache: object) -> int:
    """Bytes for pages: what the user says, or a share of the memory that is available.

    Ranks on one node share it (LOCAL_WORLD_SIZE, as torchrun sets it). Raises ConfigError.
    """
    if cache is None:
        return int(CACHE_SHARE * available_bytes()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if isinstance(cache, bool) or not isinstance(cache, int | str):
        raise ConfigError(f'cache {cache!r}: give bytes, such as "8GiB", 0 for none, or None')
    return parse_bytes(cache)


def pinner(device: torch.device | None, pin_memory: bool) -> Callable[[Any], None] | None:
    """What page-locks batch memory; None where there is no CUDA to copy it."""
    wanted = pin_memory or (device is not None and device.type == "cuda")
    if not wanted or not torch.cuda.is_available():
        return None

    def pin(memory: Any) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        error = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(error):
            raise ConfigError(
                f"{memory.nbytes} bytes of batch memory could not be page-locked "
                f"(cudaHostRegister: {error}); lower prefetch_bytes"
            )

    return pin


__all__ = ["CACHE_SHARE", "PREFETCH_BYTES", "Engine", "cache_budget", "pinner"]
