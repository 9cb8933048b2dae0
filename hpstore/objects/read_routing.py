"""What the health monitor tells reads and writes, and what batches of reads tell it.

Decisions of one process about its own I/O (PROTOCOL 16). Attributes are replaced whole by the
monitor's thread and read by any other, without a lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

NOTHING_AVOIDED: Mapping[str, float] = {}
HEDGE_COLUMNS = 2  # late columns of one window that others are read for
_HEDGE_BURST_BYTES = 16 << 20  # budget to begin with, and what it grows to
_LOST_MOST = 4  # overtaken reads of a device that are remembered
_PATIENCE_MOST = 32.0  # times what is late for peers: a millisecond becomes a blink of an eye
_PATIENCE_RISE, _PATIENCE_FALL = 1.3, 0.8  # by a spare in vain, by one that won


class Meter(Protocol):
    """Where calls on one device are noted. For any thread."""

    def begin(self, now_seconds: float) -> int:
        """A call starts; returns its ticket."""

    def leave(self, ticket: int) -> None:
        """It is over."""

    def note_batch(
        self, *, count: int, nbytes: float, in_flight: int, seconds: float, usual: float = 0.0
    ) -> None:
        """So many reads of one batch are done: their mean bytes and seconds, and what such reads
        of its other devices took, 0 where those are too few."""

    def note_errors(self, count: int) -> None:
        """So many reads failed."""

    def note_damage(self) -> None:
        """A read brought other bytes than were written."""


class Routing:
    """Which devices reads and new columns keep off, when a read is late, what spares may cost."""

    def __init__(self, hedge_ratio: float = 0.0) -> None:
        self.version = 0  # rises when `avoided` changes
        self.avoided = NOTHING_AVOIDED  # device -> share of its reads that it gets; worst first
        self.no_new: tuple[str, ...] = ()  # take no new columns; worst first
        self.deadlines: Mapping[str, tuple[float, ...]] = {}  # as Telemetry.deadlines
        self.size_class: Callable[[int], int] = lambda nbytes: 0
        self.meter: Callable[[str], Meter | None] = lambda device: None
        self.timed: Callable[[], bool] = lambda: False  # whether to time the next batch
        self.probe: Callable[[str], bool] = lambda device: False  # whether one is due; takes it
        self.probed: Callable[[str, bool], None] = lambda device, well: None  # it is over
        self.budget = HedgeBudget(hedge_ratio)
        self._turns: dict[str, itertools.count[int]] = {}
        self._lost: dict[str, deque[Future[Any]]] = {}  # the last ones

    def after_fork(self) -> None:
        """In the child: nothing is avoided until its own monitor says so."""
        self._lost = {}
        self.set_avoided(NOTHING_AVOIDED)
        self.no_new, self.deadlines = (), {}

    def set_avoided(self, avoided: Mapping[str, float]) -> None:
        """Keep reads off these devices but for a share of them; the worst device first."""
        if dict(avoided) != dict(self.avoided):
            self.avoided = dict(avoided)
            self._turns = {device: itertools.count(1) for device in avoided}
            self.version += 1

    def changed(self) -> None:
        """Readers that are open shall look again which columns they want."""
        self.version += 1

    def avoided_now(self) -> tuple[str, ...]:
        """Devices that the next read keeps off: each lets its share of reads through."""
        avoided = self.avoided
        if not avoided:
            return ()
        turns = self._turns
        return tuple(
            device
            for device, share in avoided.items()
            if not share or device not in turns or not _its_turn(next(turns[device]), share)
        )

    def patience_seconds(self, device: str, nbytes: int) -> float | None:
        """How long a read may take that peers would have done; None when that is not known."""
        row = self.deadlines.get(device)
        usual = row[self.size_class(nbytes)] if row is not None else 0.0
        if not usual:
            return None
        return 0.0 if self.lags(device) else usual * self.budget.patience

    def lost(self, device: str, read: Future[Any]) -> None:
        """A spare has overtaken this read of a device: until it ends, others need not wait."""
        self._lost.setdefault(device, deque(maxlen=_LOST_MOST)).append(read)

    def lags(self, device: str) -> bool:
        """Whether the device has not ended a read that a spare has overtaken."""
        lost = self._lost.get(device)
        return lost is not None and any(not read.done() for read in lost.copy())


def _its_turn(number: int, share: float) -> bool:
    """Whether read `number` is one of the share: evenly spread, the same for all runs."""
    return int(number * share) > int((number - 1) * share)


class HedgeBudget:
    """Bytes that may be read in vain: a share of all that are read. Races lose a little of it.

    Spares that win are given back. Those that do not make reads wait longer before the next one, so
    that the budget is there when a device freezes.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio, self.patience = ratio, 1.0  # times what peers take
        self._left = float(_HEDGE_BURST_BYTES) if ratio else 0.0

    def earn(self, nbytes: int) -> None:
        """So many were read because somebody wants them."""
        self._left = min(self._left + self._ratio * nbytes, float(_HEDGE_BURST_BYTES))

    def spend(self, nbytes: int) -> bool:
        """Take so many for spares; False when they are not there."""
        if self._left < nbytes:
            return False
        self._left -= nbytes
        return True

    def won(self, nbytes: int) -> None:
        """A spare of so many bytes was first: it cost nothing, and the next one may come sooner."""
        self._left = min(self._left + nbytes, float(_HEDGE_BURST_BYTES))
        self.patience = max(1.0, self.patience * _PATIENCE_FALL)

    def in_vain(self) -> None:
        """A spare was not needed: what is late here is later than peers' times say."""
        self.patience = min(_PATIENCE_MOST, self.patience * _PATIENCE_RISE)


def well_placed(devices: Mapping[int, str], avoided: Iterable[str], need: int) -> frozenset[int]:
    """Columns to read from, by their devices: those of avoided ones only as far as the others are
    fewer than `need`, the least bad first. `avoided`: the worst first. Pure."""
    rank = {device: number for number, device in enumerate(avoided)}
    well = [column for column, device in devices.items() if device not in rank]
    if len(well) < need:
        bad = [column for column, device in devices.items() if device in rank]
        bad.sort(key=lambda column: (-rank[devices[column]], column))
        well += bad[: need - len(well)]
    return frozenset(well)
