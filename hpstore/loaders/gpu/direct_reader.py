"""Direct reads for one loader: where they work, which way each device takes, what happened.

Detection takes up to a minute and runs beside the first batches, which take pinned memory. Then
every batch asks PathChoice about each device. Whatever goes wrong on the direct way, its records
are read over host memory, which verifies, decodes and repairs them: the same bytes, counted.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hpstore.errors import HpstoreError, ThreadsExhausted
from hpstore.loaders.dataset.record_layout import FixedPlan, Int64s
from hpstore.loaders.dataset.record_reader import StoredData
from hpstore.loaders.dataset.record_stream import Locations, Stream
from hpstore.loaders.dataset.shard_layout import UInt64s
from hpstore.loaders.gpu.batch_read import DirectRead, DirectResult
from hpstore.loaders.gpu.direct.cufile_queue import DirectEngine
from hpstore.loaders.gpu.direct.gpu_plan import ColumnPart, WantedRecords, fits_direct, land
from hpstore.loaders.gpu.direct.open_arena import OpenArena
from hpstore.loaders.gpu.direct.path_choice import ChoiceConfig, PathChoice, Way
from hpstore.loaders.gpu.gpu_device import Gpu
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import start_thread
from hpstore.units import MIB

LANE_THREADS = 4  # of each device: cuFile is bound by submission
MAX_PENDING = 4096  # reads of a device: two batches of small records
_log = logging.getLogger(__name__)
Rows = dict[str, torch.Tensor]
NO_CHECKSUMS: UInt64s = np.empty(0, np.uint64)


@dataclass(slots=True)
class Totals:
    """Of one loader. Records, unless it says otherwise."""

    direct: int = 0
    pinned: int = 0  # while the direct way was possible
    decoded: int = 0  # units, on the GPU
    fallen_back: int = 0  # wanted directly, read over host memory
    mismatched: int = 0
    hung_reads: int = 0
    no_room: int = 0  # batches


class DirectAccess(Closing):
    """Reads of one loader straight to its GPU. Thread-safe; belongs to one process.

    `always`: take the direct way wherever it works, however fast it is. `arena_bytes` of GPU
    memory are taken when the first device is known to work.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        arena_bytes: int,
        always: bool = False,
        config: ChoiceConfig | None = None,
    ) -> None:
        self._gpu, self._always, self._arena_bytes = gpu, always, arena_bytes
        self._choice = PathChoice(config or ChoiceConfig())
        self._totals = Totals()
        self._urls: dict[str, str] = {}  # device -> its directory
        self._pending: dict[str, str] = {}  # the same, not looked at yet
        self._refused: dict[str, str] = {}  # device -> why it is not read directly
        self._chosen: dict[str, Way | None] = {}  # what the log knows
        self._open: OpenArena | None = None
        self._looking: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards all of the above
        self._finalizer: weakref.finalize[Any, Any] | None = None

    # --- where it works ---------------------------------------------------------------------

    def _known(self, parts: Sequence[ColumnPart]) -> None:
        """Look at devices that were not seen before, on a thread of its own."""
        with self._lock:
            for part in parts:
                for held in part.held.values():
                    if held.device_id not in self._urls:
                        self._urls[held.device_id] = held.url
                        self._pending[held.device_id] = held.url
            if self._pending and self._looking is None and not self._closed:
                with suppress(ThreadsExhausted):  # they stay pending: the next read tries again
                    self._looking = start_thread(
                        threading.Thread(
                            target=self._look, name="hpstore-direct-detect", daemon=True
                        )
                    )

    def _look(self) -> None:
        while True:
            with self._lock:
                device, url = next(iter(self._pending.items()), ("", ""))
                if not device or self._closed:
                    self._looking = None
                    return
            reason = self._obstacle(url)
            with self._lock:
                self._pending.pop(device, None)
                if reason is not None:
                    self._refuse(device, reason)
            _log.info(
                "reads of %s go %s",
                url,
                "straight to the GPU where that is faster"
                if reason is None
                else f"to the GPU over pinned memory: {reason}",
            )

    def _obstacle(self, url: str) -> str | None:
        try:
            return self._gpu.obstacle(url) or self._opened()
        except Exception as error:  # noqa: BLE001 (the pinned way is there; said in log and stats)
            return f"{type(error).__name__}: {error}"

    def _opened(self) -> str | None:
        """Driver, arena: once. Why it cannot be had."""
        if self._open is not None:
            return None
        engine = DirectEngine(self._gpu.driver(), threads=LANE_THREADS, max_pending=MAX_PENDING)
        try:
            made = OpenArena.of(engine, self._arena_bytes)
        except HpstoreError as error:
            return str(error)
        with self._lock:
            closed = self._closed
            if not closed:
                self._open = made
                self._finalizer = weakref.finalize(self, made.close)
        if closed:
            made.close()
            return "the loader was closed"
        return None

    def settle(self, timeout_seconds: float) -> bool:
        """Wait until every device seen so far was looked at; whether that is so now."""
        looking = self._looking
        if looking is not None:
            looking.join(timeout_seconds)
        return self._looking is None

    def _refuse(self, device: str, reason: str) -> None:
        """Under the lock."""
        self._refused.setdefault(device, reason)
        self._choice.refuse(device, reason)

    # --- a batch ----------------------------------------------------------------------------

    def batch(
        self,
        data: StoredData,
        stream: Stream,
        indices: Int64s,
        places: Locations,
        host: Callable[[Int64s], Rows],
        fields: Callable[[torch.Tensor], Rows],
    ) -> Rows:
        """The fields of records of one size, in this order.

        On the GPU, made on its side stream, unless no record of them can be read directly: then
        as `host` makes them. `host` reads the records of these rows over host memory; `fields`
        takes rows (n, stride) uint8 apart. Raises what `host` raises.
        """
        every = np.arange(len(indices), dtype=np.int64)
        wanted = self._wanted(data, stream, places)
        if wanted is None:
            return host(every)
        plan = stream.fixed
        assert plan is not None
        ways = self._choose(wanted.parts)
        if ways is None:
            return host(every)
        parts = [p for p in wanted.parts if all(ways[d] is Way.DIRECT for d in p.devices)]
        deadline = data.pool.config.settings.device_deadline_seconds
        checksum = NO_CHECKSUMS
        if parts and wanted.exact:
            checksum = data.locate(stream, indices).checksum
        flight, give = self._launch(parts, plan, deadline)
        flown = np.concatenate([every[:0], *(p.rows for p in parts)]) if flight else every[:0]
        found: list[tuple[Int64s, Rows]] = []
        try:
            rest = np.setdiff1d(every, flown)
            if len(rest):
                found.append((rest, self._over_host(host, rest, wanted.parts, ways)))
        finally:
            landed = self._land(flight, give, deadline, checksum, exact=wanted.exact)
        if landed is not None and landed.rows is not None and len(landed.numbers):
            with self._gpu.side():
                found.append((landed.numbers, fields(landed.rows)))
        again = np.setdiff1d(flown, every[:0] if landed is None else landed.numbers)
        if len(again):
            found.append((again, self._uploaded(host(again))))
        with self._lock:
            self._totals.direct += len(flown) - len(again)
            self._totals.fallen_back += len(again)
            self._totals.pinned += len(rest)
        return self._merged(len(every), found)

    def _wanted(self, data: StoredData, stream: Stream, places: Locations) -> WantedRecords | None:
        """What could be read directly; None where nothing can."""
        plan = stream.fixed
        if self._closed or plan is None or not fits_direct(plan, stream.compression):
            return None
        shards = np.unique(places.shard).tolist()
        if len(shards) > data.shards_at_once:
            return None
        wanted = WantedRecords(plan)
        for shard in shards:
            mine = np.flatnonzero(places.shard == shard)
            data.reader(stream, shard).add_to(wanted, places.start[mine], mine)
        self._known(wanted.parts)
        return wanted

    def _choose(self, parts: Sequence[ColumnPart]) -> Mapping[str, Way] | None:
        """The way of every device of a batch; None when no device can be read directly."""
        devices = sorted(frozenset().union(*(part.devices for part in parts)))
        with self._lock:
            able = [d for d in devices if d not in self._pending and d not in self._refused]
            if not able or self._open is None:
                return None
            ways = dict.fromkeys(devices, Way.PINNED)
            for device in able:
                ways[device] = Way.DIRECT if self._always else self._choice.choose(device)
        return ways

    def _launch(
        self, parts: Sequence[ColumnPart], plan: FixedPlan, deadline_seconds: float
    ) -> tuple[DirectRead | None, Callable[[], None]]:
        """Start the reads; with what gives their memory and files back."""
        opened = self._open
        if not parts or opened is None:
            return None, _nothing
        if not opened.flights.enter():  # it is being closed
            return None, _nothing
        landing = land(parts)
        start = opened.ranges.take(landing.nbytes)
        if start is None:
            self._note_no_room(landing.nbytes, opened.arena.nbytes)
            opened.flights.leave()
            return None, _nothing
        landing = landing.moved(start)
        try:
            columns = opened.columns.borrow([r.held for r in landing.reads], deadline_seconds)
            flight = DirectRead(self._gpu, opened.arena, landing, plan, columns)
        except (HpstoreError, OSError) as error:  # no more files may be opened, for instance
            opened.ranges.give(start)
            opened.flights.leave()
            devices = frozenset[str]().union(*(part.devices for part in parts))
            self._note(DirectResult(failed=dict.fromkeys(devices, str(error))))
            return None, _nothing

        def give() -> None:
            opened.columns.give_back(flight.columns())
            opened.ranges.give(start)

        return flight, give

    def _note_no_room(self, wanted: int, room: int) -> None:
        with self._lock:
            self._totals.no_room += 1
            first = self._totals.no_room == 1
        if first:
            _log.warning(
                "a batch of %d MiB has no room in %d MiB of GPU memory for direct reads, and is "
                "read over pinned memory; raise GpuTransfer.arena_bytes",
                wanted // MIB,
                room // MIB,
            )

    def _land(
        self,
        flight: DirectRead | None,
        give: Callable[[], None],
        deadline_seconds: float,
        checksum: UInt64s,
        *,
        exact: bool,
    ) -> DirectResult | None:
        """What came of the reads; None when the GPU would not take them."""
        if flight is None:
            return None
        try:
            found = flight.land(deadline_seconds, checksum, exact=exact)
        except Exception as error:  # noqa: BLE001 (the pinned way is there; said in log and stats)
            found = DirectResult(failed=dict.fromkeys(flight.devices(), f"on the GPU: {error}"))
            found.late = tuple(flight.late())
            give = give if self._quiet() else _nothing
        _when_over(found.late, give)
        if self._open is not None:
            self._open.flights.leave()
        self._note(found)
        return found

    def _quiet(self) -> bool:
        """Whether the GPU is done with what was enqueued: else nobody may use its memory again."""
        try:
            with self._gpu.side():
                self._gpu.mark().wait_on_host()
        except Exception as error:  # noqa: BLE001 (a GPU in this state tells nothing more)
            _log.warning("memory of a batch on the GPU is lost: %s", error)
            return False
        return True

    def _note(self, found: DirectResult) -> None:
        with self._lock:
            self._totals.decoded += found.decoded
            self._totals.mismatched += found.mismatches
            self._totals.hung_reads += len(found.late)
            for device, reason in found.failed.items():
                ended = self._choice.fail(device, reason)
                if device in found.hung:
                    self._refuse(device, reason)
                if ended or device in found.hung:
                    self._refused.setdefault(device, reason)
                    _log.warning(
                        "reads of %s go to the GPU over pinned memory from here on: %s",
                        self._urls.get(device, device),
                        reason,
                    )
            for device, seconds in found.seconds.items():
                if found.nbytes.get(device) and seconds > 0:
                    self._choice.record(device, Way.DIRECT, found.nbytes[device], seconds)
            self._say()

    def _over_host(
        self,
        host: Callable[[Int64s], Rows],
        rows: Int64s,
        parts: Sequence[ColumnPart],
        ways: Mapping[str, Way],
    ) -> Rows:
        """Rows over host memory, measured for the devices that they were to come from."""
        began = time.perf_counter()
        made = self._uploaded(host(rows))
        seconds = time.perf_counter() - began
        nbytes: dict[str, int] = {}
        for part in parts:
            for held in part.held.values():
                size = int((part.high - part.low)[np.isin(part.rows, rows)].sum())
                nbytes[held.device_id] = nbytes.get(held.device_id, 0) + size
        with self._lock:
            for device, size in nbytes.items():
                if ways[device] is Way.PINNED and device not in self._refused and size:
                    self._choice.record(device, Way.PINNED, size, max(seconds, 1e-9))
            self._say()
        return made

    def _say(self) -> None:
        """Under the lock: a line for every device that changed its way."""
        for figures in self._choice.figures():
            before = self._chosen.get(figures.device)
            if figures.chosen is not before:
                self._chosen[figures.device] = figures.chosen
                if figures.device not in self._refused:
                    _log.info(
                        "reads of %s go %s: %s",
                        self._urls.get(figures.device, figures.device),
                        "straight to the GPU"
                        if figures.chosen is Way.DIRECT
                        else "to the GPU over pinned memory",
                        figures.reason,
                    )

    def _uploaded(self, rows: Rows) -> Rows:
        with self._gpu.side():
            made = {name: self._gpu.upload(value) for name, value in rows.items()}
            mark = self._gpu.mark()
        mark.wait_on_host()  # what they are copied from is used again
        return made

    def _merged(self, count: int, found: Sequence[tuple[Int64s, Rows]]) -> Rows:
        if len(found) == 1 and np.array_equal(found[0][0], np.arange(count)):
            return found[0][1]
        made: Rows = {}
        with self._gpu.side():
            for numbers, rows in found:
                where = torch.from_numpy(numbers).to(self._gpu.device)
                for name, value in rows.items():
                    if name not in made:
                        made[name] = torch.empty(
                            (count, *value.shape[1:]), dtype=value.dtype, device=value.device
                        )
                    made[name].index_copy_(0, where, value)
        return made

    # --- what happened ----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """For loader.stats()["direct"]: JSON."""
        with self._lock:
            figures = [
                replace(one, device=self._urls.get(one.device, one.device)).as_dict()
                for one in self._choice.figures()
            ]
            if self._pending:
                state = "detecting"
            elif not self._urls:
                state = "unused"  # no record was read by itself yet: pages come from memory
            else:
                state = "on" if self._urls.keys() - self._refused.keys() else "off"
            totals = self._totals
            return {
                "state": state,
                "records": totals.direct,
                "records_pinned": totals.pinned,
                "records_fallen_back": totals.fallen_back,
                "units_decoded": totals.decoded,
                "records_mismatched": totals.mismatched,
                "hung_reads": totals.hung_reads,
                "batches_without_room": totals.no_room,
                "refused": {self._urls[d]: why for d, why in self._refused.items()},
                "devices": figures,
            }

    @property
    def held_bytes(self) -> int:
        """GPU memory that batches, or reads that hang, have at the moment."""
        return 0 if self._open is None else self._open.ranges.taken_bytes

    def stop(self) -> None:
        """No more direct reads. Does not wait. Idempotent."""
        self._closed = True

    def close(self) -> None:
        """Stop, and give the GPU's memory back, after the batches that use it. Idempotent."""
        self.stop()
        if self._finalizer is not None:
            self._finalizer()


def _nothing() -> None:
    """No memory was taken."""


def _when_over(late: Sequence[Future[int]], act: Callable[[], None]) -> None:
    """Now, or when the last of these reads has ended: it may still write (PROTOCOL 21)."""
    if not late:
        act()
        return
    left = [len(late)]
    lock = threading.Lock()  # guards left

    def over(_: object) -> None:
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            act()

    for future in late:
        future.add_done_callback(over)
