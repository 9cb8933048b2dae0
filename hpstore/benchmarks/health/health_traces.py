"""Made-up service times of eight devices: healthy ones, and ones of which the first is slow.

Seeded. A tick is two seconds; its value is the mean over 16 I/Os, log-normal, of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hpstore.health.detect.evidence import Media, Traits

FloatArray = npt.NDArray[np.float64]
Rng = np.random.Generator

DEVICES = 8
IOS = 16  # the fewest that close a tick
TICK_SECONDS = 2.0
USUAL_SECONDS = 2e-3
ONSET = 60  # ticks before the first device is slow
SIGMAS = (0.3, 0.6, 1.0)  # of the logarithm of one I/O's time; at 1.0 a mean of 16 varies by 33 %
ROUGH_SIGMA = 1.3
HOUR_TICKS = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTrace:
    """Means by tick and device; `times` (tick, device, I/O) before they are averaged."""

    means: FloatArray
    traits: Mapping[str, Traits] = field(default_factory=dict)

    def tick(self, number: int) -> dict[str, float]:
        """One tick, as the detector takes it."""
        return {f"d{i}": float(value) for i, value in enumerate(self.means[number])}


def noise(rng: Rng, ticks: int, sigma: float) -> FloatArray:
    """Times of healthy I/Os: (tick, device, I/O), of the usual mean."""
    times = rng.lognormal(-sigma * sigma / 2, sigma, (ticks, DEVICES, IOS))
    return USUAL_SECONDS * times


# -- the first device is slow from ONSET on


def _times(factor: float) -> Callable[[Rng, FloatArray], None]:
    def shape(_: Rng, times: FloatArray) -> None:
        times[ONSET:, 0] *= factor

    return shape


def _some(share: float, factor: float) -> Callable[[Rng, FloatArray], None]:
    def shape(rng: Rng, times: FloatArray) -> None:
        slow = times[ONSET:, 0]
        slow[rng.random(slow.shape) < share] *= factor

    return shape


def _ramp(_: Rng, times: FloatArray) -> None:
    """From 1 to 5 times in ten minutes."""
    ticks = np.arange(len(times) - ONSET) * TICK_SECONDS
    times[ONSET:, 0] *= 1 + 4 * np.minimum(ticks / 600, 1)[:, None]


def _freezes(_: Rng, times: FloatArray) -> None:
    """2 s each minute: the calls of two workers wait."""
    times[ONSET :: int(60 / TICK_SECONDS), 0, :2] = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowShape:
    """A way of being slow; `within` ticks it must be found, None: there is no bar."""

    make: Callable[[Rng, FloatArray], None]
    within: int | None
    ticks: int = 60  # observed after the onset


SHAPES: dict[str, SlowShape] = {
    "x2": SlowShape(make=_times(2), within=15),
    "x3": SlowShape(make=_times(3), within=6),
    "x5": SlowShape(make=_times(5), within=6),
    "x20": SlowShape(make=_times(20), within=6),
    "20 % of I/Os x3": SlowShape(make=_some(0.2, 3), within=None, ticks=300),
    "5 % of I/Os x30": SlowShape(make=_some(0.05, 30), within=None, ticks=300),
    "ramp to x5 in 10 min": SlowShape(make=_ramp, within=None, ticks=360),
    "2 s freeze a minute": SlowShape(make=_freezes, within=None, ticks=300),
}


def slow_trace(shape: SlowShape, sigma: float, seed: int) -> HealthTrace:
    """The first device is slow from ONSET on, the others are well."""
    rng = np.random.default_rng([16, seed, round(100 * sigma)])
    times = noise(rng, ONSET + shape.ticks, sigma)
    shape.make(rng, times)
    return HealthTrace(means=times.mean(2))


# -- all devices are well


def _nothing(_: Rng, times: FloatArray) -> None:
    pass


def _stalls(rng: Rng, times: FloatArray) -> None:
    """Now and then one I/O of 50 ms on any device: garbage collection."""
    hit = rng.random(times.shape[:2]) < 0.005
    times[..., 0][hit] += 0.05


def _neighbour(_: Rng, times: FloatArray) -> None:
    """Another user's job on one device at a time: 1.3 x for five minutes."""
    for number, start in enumerate(range(100, len(times), 300)):
        times[start : start + 150, number % DEVICES] *= 1.3


def _shared(_: Rng, times: FloatArray) -> None:
    """All devices together, 5 x for a minute."""
    for start in range(100, len(times), 450):
        times[start : start + 30] *= 5


def _one_link(_: Rng, times: FloatArray) -> None:
    """Three devices behind one controller, 4 x for a minute."""
    for start in range(100, len(times), 450):
        times[start : start + 30, :3] *= 4


def _disk(_: Rng, times: FloatArray) -> None:
    """The first is a hard disk among SSDs, 8 x slower and as noisy."""
    times[:, 0] *= 8


_LINKED = {f"d{i}": Traits(link="c0" if i < 3 else "c1") for i in range(DEVICES)}
_MIXED = {f"d{i}": Traits(media=Media.SSD if i else Media.HDD) for i in range(DEVICES)}

BARRED = (
    "plain noise",
    "shared burst, x5",
    "shared burst on one link of three, x4",
    "one HDD among SSDs",
)
HEALTHY: dict[str, tuple[Callable[[Rng, FloatArray], None], Mapping[str, Traits]]] = {
    "plain noise": (_nothing, {}),
    "single stalls of 50 ms": (_stalls, {}),
    "a neighbour's job, x1.3": (_neighbour, {}),
    "shared burst, x5": (_shared, {}),
    "shared burst on one link of three, x4": (_one_link, _LINKED),
    "one HDD among SSDs": (_disk, _MIXED),
}


def healthy_trace(name: str, sigma: float, seed: int, ticks: int) -> HealthTrace:
    """No device is slow."""
    shape, traits = HEALTHY[name]
    rng = np.random.default_rng([17, seed, round(100 * sigma)])
    times = noise(rng, ticks, sigma)
    shape(rng, times)
    return HealthTrace(means=times.mean(2), traits=traits)
