"""The direct reads of one batch: started, waited for, decoded, checked, gathered into rows."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from hpstore.errors import DeviceTimeout, HpstoreError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.loaders.dataset.record_layout import FixedPlan, Int64s
from hpstore.loaders.gpu.direct.cufile_queue import DirectArena
from hpstore.loaders.gpu.direct.device_columns import DirectColumn
from hpstore.loaders.gpu.direct.gpu_checksums import Blocks
from hpstore.loaders.gpu.direct.gpu_plan import (
    NO_ROWS,
    ArenaLayout,
    Bools,
    decodes,
    pages_of,
    record_checks,
)
from hpstore.loaders.gpu.gpu_device import Gpu


@dataclass(slots=True)
class DirectResult:
    """What became of the reads of one batch.

    `rows` (n, stride) uint8 on the GPU are the records of `numbers`; the rest of what was asked
    for is to be read in another way. `failed`: by device, why; `hung`: those that did not answer.
    `seconds`, `nbytes`: of every device that went well. `late`: reads that still write.
    """

    rows: torch.Tensor | None = None
    numbers: Int64s = field(default_factory=lambda: NO_ROWS)
    failed: dict[str, str] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    late: tuple[Future[int], ...] = ()
    mismatches: int = 0
    decoded: int = 0


class DirectRead:
    """Reads on their way into a range of an arena. One thread.

    The range, and the columns, belong to it until land() returned, and longer while Outcome.late
    is not over (PROTOCOL 21). `columns`: for each of landing.reads, or why it cannot be read.
    """

    def __init__(
        self,
        gpu: Gpu,
        arena: DirectArena,
        landing: ArenaLayout,
        plan: FixedPlan,
        columns: list[DirectColumn | Exception],
    ) -> None:
        self._gpu, self._arena, self._landing, self._plan = gpu, arena, landing, plan
        self._columns = columns
        self._began = time.perf_counter()
        self._over: dict[str, float] = {}  # by device, when its last read ended
        self._futures = [self._start(number) for number in range(len(columns))]

    def _start(self, number: int) -> list[Future[int]]:
        reads, column = self._landing.reads[number], self._columns[number]
        if isinstance(column, Exception):
            return []
        lane, found = reads.held.device_id, list[Future[int]]()
        spans = zip(reads.low.tolist(), reads.high.tolist(), reads.place.tolist(), strict=True)
        for low, high, place in spans:
            try:
                future = column.read(low, high, self._arena, place, lane=lane)
            except HpstoreError as error:
                future = Future()
                future.set_exception(error)
            future.add_done_callback(lambda _: self._ended(lane))
            found.append(future)
        return found

    def _ended(self, device: str) -> None:
        self._over[device] = time.perf_counter()

    def land(
        self, deadline_seconds: float, checksum: NDArray[np.uint64], *, exact: bool
    ) -> DirectResult:
        """Wait for the reads, make rows of what is good. `checksum`: of every record asked for.

        Raises what the GPU raises; the reads are over then, or late().
        """
        found = DirectResult()
        wait([f for futures in self._futures for f in futures], timeout=deadline_seconds)
        ended = time.perf_counter()
        arrived = [
            self._arrived(number, found, deadline_seconds) for number in range(len(self._futures))
        ]
        with self._gpu.side():
            blocks, owner = (_NO_BLOCKS, NO_ROWS) if exact else self._blocks(arrived)
            good_blocks = self._gpu.verify(self._arena.tensor, blocks) if len(owner) else None
            parts = self._whole(arrived)
            for jobs in decodes(self._landing, parts):
                self._gpu.decode(self._arena.tensor, jobs)
                found.decoded += len(jobs.targets)
            good_records = None
            if exact:
                records, numbers = record_checks(self._landing, self._plan.length, checksum)
                good_records = self._gpu.verify(self._arena.tensor, records)
            wanted = np.concatenate(
                [NO_ROWS, *(p.rows[w] for p, w in zip(self._landing.parts, parts, strict=True))]
            )
            pages, found.numbers = pages_of(self._landing, wanted, self._plan.stride)
            found.rows = self._gathered(pages)
            mark = self._gpu.mark()
        mark.wait_on_host()
        bad = np.empty(0, np.int64)
        if good_blocks is not None:
            bad = self._rows_of(owner[~good_blocks.cpu().numpy()])
        elif good_records is not None:
            bad = numbers[~good_records.cpu().numpy()]
        self._drop(found, np.intersect1d(bad, found.numbers))
        self._measure(found, ended)
        return found

    def _arrived(self, number: int, found: DirectResult, deadline_seconds: float) -> Bools:
        """Which runs came; notes what did not."""
        reads, futures = self._landing.reads[number], self._futures[number]
        device, column = reads.held.device_id, self._columns[number]
        there = np.zeros(len(reads.low), bool)
        if isinstance(column, Exception):
            found.failed[device] = str(column)
            if isinstance(column, DeviceTimeout):
                found.hung.add(device)
            return there
        for place, future in enumerate(futures):
            if not future.done():
                found.failed[device] = f"a direct read did not end in {deadline_seconds:.1f} s"
                found.hung.add(device)
                found.late += (future,)
                continue
            error = future.exception()
            if error is None:
                there[place] = True
            else:
                found.failed[device] = str(error)
        found.nbytes[device] = found.nbytes.get(device, 0) + int(
            (reads.high - reads.low)[there].sum()
        )
        return there

    def _whole(self, arrived: list[Bools]) -> list[Bools]:
        """Records of each part of which all came."""
        good = [np.ones(len(part.rows), bool) for part in self._landing.parts]
        for reads, there in zip(self._landing.reads, arrived, strict=True):
            good[reads.part] &= there[reads.run]
        return good

    def _blocks(self, arrived: list[Bools]) -> tuple[Blocks, Int64s]:
        """Checks of the blocks that came, and for each its run, counted through all reads."""
        found, owner, base = list[Blocks](), list[Int64s](), 0
        for reads, column, there in zip(self._landing.reads, self._columns, arrived, strict=True):
            for run in np.flatnonzero(there).tolist():
                assert isinstance(column, DirectColumn)
                made = column.blocks(
                    int(reads.low[run]), int(reads.high[run]), int(reads.place[run])
                )
                found.append(made)
                owner.append(np.full(len(made.starts), base + run, np.int64))
            base += len(there)
        if not found:
            return _NO_BLOCKS, NO_ROWS
        return Blocks(
            starts=np.concatenate([b.starts for b in found]),
            lengths=np.concatenate([b.lengths for b in found]),
            seeds=np.concatenate([b.seeds for b in found]),
            expected=np.concatenate([b.expected for b in found]),
        ), np.concatenate(owner)

    def _rows_of(self, runs: Int64s) -> Int64s:
        """Rows that have anything to do with these runs."""
        found, base = [NO_ROWS], 0
        for reads in self._landing.reads:
            mine = runs[(runs >= base) & (runs < base + len(reads.low))] - base
            part = self._landing.parts[reads.part]
            found.append(part.rows[np.isin(reads.run, mine)])
            base += len(reads.low)
        return np.unique(np.concatenate(found))

    def _gathered(self, pages: Int64s) -> torch.Tensor:
        memory = self._arena.tensor
        whole = memory[: len(memory) // ALIGNMENT_BYTES * ALIGNMENT_BYTES]
        chosen = torch.from_numpy(pages).to(memory.device, non_blocking=True)
        made = whole.view(-1, ALIGNMENT_BYTES).index_select(0, chosen)
        return made.view(-1, self._plan.stride)

    def _drop(self, found: DirectResult, bad: Int64s) -> None:
        """Rows whose bytes are not those that were written."""
        if not len(bad):
            return
        found.mismatches = len(bad)
        for part in self._landing.parts:
            if np.isin(part.rows, bad).any():
                for device in part.devices:
                    found.failed.setdefault(device, "bytes did not match their checksum")
        keep = ~np.isin(found.numbers, bad)
        assert found.rows is not None
        with self._gpu.side():
            found.rows = found.rows[torch.from_numpy(np.flatnonzero(keep)).to(found.rows.device)]
        found.numbers = found.numbers[keep]

    def _measure(self, found: DirectResult, ended: float) -> None:
        """What each device took; the GPU's work after the last read counts for all of them."""
        after = time.perf_counter() - ended
        for device, when in list(self._over.items()):
            if device not in found.failed:
                found.seconds[device] = when - self._began + after

    def devices(self) -> frozenset[str]:
        """That are read from."""
        return frozenset(reads.held.device_id for reads in self._landing.reads)

    def columns(self) -> list[DirectColumn]:
        """To be given back."""
        return [column for column in self._columns if isinstance(column, DirectColumn)]

    def late(self) -> list[Future[int]]:
        """Reads that are not over."""
        return [f for futures in self._futures for f in futures if not f.done()]


_NO_BLOCKS = Blocks(
    starts=NO_ROWS, lengths=NO_ROWS, seeds=np.empty(0, np.uint64), expected=np.empty(0, np.uint64)
)
