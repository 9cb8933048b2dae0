"""GPU memory for direct reads, with the engine, the files and the batches that use it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpstore.errors import HpstoreError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.loaders.gpu.direct.arena_allocator import Ranges
from hpstore.loaders.gpu.direct.column_files import OpenColumns
from hpstore.loaders.gpu.direct.cufile_queue import (
    CLOSE_SECONDS,
    DirectArena,
    DirectEngine,
    SharedHandle,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenArena:
    """What is there once a device is known to work."""

    engine: DirectEngine
    arena: DirectArena
    ranges: Ranges
    columns: OpenColumns
    flights: SharedHandle  # batches that use the above now, on the host or on the GPU

    @classmethod
    def of(cls, engine: DirectEngine, arena_bytes: int) -> OpenArena:
        """Take the memory. Raises HpstoreError; the engine is then closed."""
        try:
            arena = engine.allocate(arena_bytes)
        except HpstoreError:
            engine.close()
            raise
        ranges = Ranges(arena.nbytes, ALIGNMENT_BYTES)
        return cls(engine, arena, ranges, OpenColumns(engine), SharedHandle())

    def close(self) -> None:
        """Give the memory back, after the batches that use it.

        Called once: when the reads of a loader are closed or dropped, or at the end of the process.
        Memory that a batch still uses then is never freed.
        """
        if not self.flights.shut(CLOSE_SECONDS):
            _log.warning("batches are being made still: GPU memory of direct reads is not freed")
            return
        self.columns.close()
        self.engine.close()
