"""Which path a device's reads take to the GPU: the one that was measured to be faster here.

GPUDirect is not faster everywhere: published figures for one submitting thread have it at half of
what host memory does. So both are tried on a few batches, the better one is used, and the other
one gets a batch now and then. Pure: no clock, no thread, no randomness.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median

from hpstore.errors import ConfigError


class Way(StrEnum):
    """How bytes reach the GPU."""

    DIRECT = "direct"  # from the drive by cuFile
    PINNED = "pinned"  # into page-locked host memory, then by a copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceConfig:
    """How the choice is made. Batches are those of one device."""

    trial_batches: int = 8  # of each way before the first choice; the first of each is not counted
    again_batches: int = 500  # on the chosen way between two looks at the other one
    window: int = 8  # batches of a way whose median counts
    margin: float = 0.05  # by which the other way must be faster to be changed to
    failures: int = 3  # of the direct way in a row, then it is not used any more

    def __post_init__(self) -> None:
        small = min(self.trial_batches - 1, self.again_batches, self.window, self.failures)
        if small < 1 or not 0 <= self.margin < 1:
            raise ConfigError(
                f"{self}: trial_batches is at least 2, the other counts 1, margin from 0 to below 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of one device, for stats and benchmarks. Rates in bytes a second."""

    device: str
    chosen: Way | None  # None while both are being tried
    reason: str
    direct_bytes_per_second: float
    pinned_bytes_per_second: float
    direct_batches: int
    pinned_batches: int
    changes: int
    direct_failures: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Way:
    """Batches of one way: all that were measured, and the last rates."""

    rates: deque[float]
    batches: int = 0

    @property
    def rate(self) -> float:
        return median(self.rates) if self.rates else 0.0


@dataclass(slots=True)
class _Device:
    ways: dict[Way, _Way]
    chosen: Way | None = None
    since_look: int = 0  # batches asked for on the chosen way since the other one was tried
    asked: int = 0  # trial batches asked for
    changes: int = 0
    failures_in_a_row: int = 0
    failures: int = 0
    refused: str = ""  # why the direct way is not used at all


@dataclass(slots=True)
class PathChoice:
    """The choice for each device. Not thread-safe: the loader's plan thread owns it.

    For each batch: `choose`, then `record` or `fail` with what it said. Batches may be under way
    side by side; what is recorded late still counts for its way.
    """

    config: ChoiceConfig = field(default_factory=ChoiceConfig)
    _devices: dict[str, _Device] = field(default_factory=dict)

    def refuse(self, device: str, reason: str) -> None:
        """Never use the direct way for a device: `detect` said so, or a user did."""
        state = self._state(device)
        state.refused, state.chosen = reason, Way.PINNED

    def choose(self, device: str) -> Way:
        """The way for the next batch of a device."""
        state = self._state(device)
        if state.refused:
            return Way.PINNED
        if state.chosen is None:
            state.asked += 1
            return Way.DIRECT if state.asked % 2 else Way.PINNED
        state.since_look += 1
        if state.since_look > self.config.again_batches:
            state.since_look = 0
            return _other(state.chosen)
        return state.chosen

    def record(self, device: str, way: Way, nbytes: int, seconds: float) -> None:
        """A batch of `nbytes` was on the GPU after `seconds`. Raises ValueError for 0 of either."""
        if nbytes < 1 or not seconds > 0:
            raise ValueError(f"{nbytes} bytes in {seconds} s is no rate")
        state = self._state(device)
        measured = state.ways[way]
        measured.batches += 1
        if way is Way.DIRECT:
            state.failures_in_a_row = 0
        if measured.batches > 1:  # the first one pays for opening files and for page faults
            measured.rates.append(nbytes / seconds)
        if not state.refused:
            self._decide(state, way)

    def fail(self, device: str, reason: str) -> bool:
        """A direct batch failed, and was read over pinned memory instead.

        True when that ends the direct way for the device.
        """
        state = self._state(device)
        state.failures += 1
        state.failures_in_a_row += 1
        if state.failures_in_a_row >= self.config.failures and not state.refused:
            state.refused = f"{state.failures_in_a_row} failures in a row, the last: {reason}"
            state.changes += state.chosen is Way.DIRECT
            state.chosen = Way.PINNED
            return True
        return False

    def figures(self) -> tuple[Figures, ...]:
        """What is known, by device."""
        return tuple(self._figures(name, self._devices[name]) for name in sorted(self._devices))

    def _state(self, device: str) -> _Device:
        if device not in self._devices:
            ways = {way: _Way(deque(maxlen=self.config.window)) for way in Way}
            self._devices[device] = _Device(ways)
        return self._devices[device]

    def _decide(self, state: _Device, way: Way) -> None:
        direct, pinned = state.ways[Way.DIRECT], state.ways[Way.PINNED]
        if state.chosen is None:
            if min(direct.batches, pinned.batches) >= self.config.trial_batches:
                state.chosen = Way.DIRECT if direct.rate > pinned.rate else Way.PINNED
            return
        if way is state.chosen:
            return
        # one look: the newest rate of the other way against the usual one of the chosen way
        newest = state.ways[way].rates[-1] if state.ways[way].rates else 0.0
        if newest > state.ways[state.chosen].rate * (1 + self.config.margin):
            state.ways[way].rates = deque([newest], maxlen=self.config.window)
            state.chosen = way
            state.since_look = 0
            state.changes += 1

    def _figures(self, device: str, state: _Device) -> Figures:
        direct, pinned = state.ways[Way.DIRECT], state.ways[Way.PINNED]
        if state.refused:
            reason = state.refused
        elif state.chosen is None:
            reason = f"measuring: {direct.batches} direct and {pinned.batches} pinned batches"
        else:
            reason = f"{direct.rate / 1e9:.2f} GB/s direct, {pinned.rate / 1e9:.2f} GB/s pinned"
        return Figures(
            device=device,
            chosen=state.chosen,
            reason=reason,
            direct_bytes_per_second=direct.rate,
            pinned_bytes_per_second=pinned.rate,
            direct_batches=direct.batches,
            pinned_batches=pinned.batches,
            changes=state.changes,
            direct_failures=state.failures,
        )


def _other(way: Way) -> Way:
    return Way.PINNED if way is Way.DIRECT else Way.DIRECT
