"""64 KiB reads beside a device that is twenty times as slow, or freezes: p99 with and without help.

Six directories, 4 + 2, each read of a column takes a millisecond (log-normal) by a wrapper: times
of the machine's own disk would drown what is compared. As root or not, it is the same.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import hpstore
from hpstore.benchmarks.harness.bench_verdicts import verdict
from hpstore.benchmarks.health.health_rig import interleaved, middle, quantile
from hpstore.codec.galois import Bytes
from hpstore.config import Settings, find_config
from hpstore.devices.base import Device, ReadHandle
from hpstore.devices.opener import device_opener
from hpstore.devices.wrappers import DeviceWrapper, WrappedReader
from hpstore.pool.pool import Pool
from hpstore.units import KIB, MIB

_DATA, _PARITY, _DEVICES = 4, 2, 6
_OBJECTS, _OBJECT_BYTES, _READ_BYTES = 8, 4 * MIB, 64 * KIB
_USUAL_SECONDS, _SIGMA, _FACTOR = 1e-3, 0.3, 20.0
_FREEZE_SECONDS, _FREEZE_EVERY_SECONDS = 2.0, 5.0
_THREADS, _PAUSE_SECONDS = 4, 0.05
P99_BAR = 2.0
ON, NO_SPARES, OFF = "monitor on", "hedge_percent 0", "monitor off"
FREEZES, SLOW = "2 s freeze each 5 s", "x20"


@dataclass(slots=True)
class _Trouble:
    """What is wrong with the first device now. Replaced whole, read by any thread."""

    kind: str = ""
    since: float = 0.0

    def delay(self, usual: float) -> float:
        """Seconds of a read that usually takes so long."""
        if self.kind == SLOW:
            return _FACTOR * usual
        if self.kind == FREEZES:
            phase = (time.monotonic() - self.since) % _FREEZE_EVERY_SECONDS
            return max(usual, _FREEZE_SECONDS - phase)
        return usual


class _Delayed(DeviceWrapper):
    """Each read of an open file takes its time. Reads through it are judged as direct ones."""

    def __init__(self, inner: Device, trouble: _Trouble | None) -> None:
        super().__init__(inner)
        self.trouble, self.rng = trouble, random.Random(inner.url)

    @property
    def mode(self) -> str:
        return "direct"

    def open(self, path: str) -> ReadHandle:
        return _DelayedReader(self, self.inner.open(path))


class _DelayedReader(WrappedReader):
    _device: _Delayed

    def read_into(self, offset: int, target: Bytes) -> None:
        usual = _USUAL_SECONDS * self._device.rng.lognormvariate(0, _SIGMA)
        trouble = self._device.trouble
        time.sleep(usual if trouble is None else trouble.delay(usual))
        self.inner.read_into(offset, target)


@dataclass(slots=True)
class _Reads:
    """Threads that read 64 KiB now and then; (when, seconds) of each."""

    pool: Pool
    ended: list[tuple[float, float]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        try:
            rng, buffer = random.Random(seed), bytearray(_READ_BYTES)
            with ExitStack() as stack:
                opened = [
                    stack.enter_context(self.pool.open(f"small/{n}")) for n in range(_OBJECTS)
                ]
                while not self.stop.wait(_PAUSE_SECONDS):
                    offset = rng.randrange(_OBJECT_BYTES // _READ_BYTES) * _READ_BYTES
                    began = time.monotonic()
                    rng.choice(opened).read_into(buffer, offset)
                    self.ended.append((began, time.monotonic() - began))
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            self.errors.append(error)

    def p99(self, since: float, until: float) -> float:
        """Milliseconds, of reads that began then."""
        return 1e3 * quantile([s for began, s in self.ended if since <= began < until], 0.99)


def small_reads(
    root: Path, repeats: int, seconds: float, found_seconds: float, done: Callable[[str], None]
) -> dict[str, object]:
    """p99 of 64 KiB reads to that without trouble. `seconds` of each phase.

    At x20 what counts begins `found_seconds` after the onset; of freezes all counts.
    """
    config = root / "small.toml"
    places = [root / f"small{number}" for number in range(_DEVICES)]
    settings = Settings(run_directory=str(root / "run"))
    with hpstore.create(
        places, data=_DATA, parity=_PARITY, config=config, settings=settings
    ) as pool:
        for number in range(_OBJECTS):
            pool.put(f"small/{number}", random.Random(number).randbytes(_OBJECT_BYTES))
    rows: dict[str, object] = {}
    for kind in (SLOW, FREEZES):
        runs = {
            who: partial(_one, config, str(places[0]), kind, who, seconds, found_seconds)
            for who in (ON, NO_SPARES, OFF)
        }
        found: dict[str, list[tuple[float, float]]] = {who: [] for who in runs}
        for who, one in interleaved(runs, {ON: repeats, NO_SPARES: 1, OFF: 1}):
            found[who].append(one)
            done(f"{kind}, {who}")
        rows[kind] = {who: _row(ones, who == ON) for who, ones in found.items()}
    return rows


def _row(ones: Sequence[tuple[float, float]], barred: bool) -> dict[str, object]:
    return {
        "p99_to_healthy": verdict(
            [after / before for before, after in ones], P99_BAR if barred else None, least=False
        ),
        "healthy_p99_ms": middle([before for before, _ in ones], 2),
        "p99_ms": middle([after for _, after in ones], 2),
    }


def _one(
    path: Path, first: str, kind: str, who: str, seconds: float, found_seconds: float
) -> tuple[float, float]:
    """p99 before and with the trouble."""
    config, trouble = find_config(path), _Trouble()
    changed = replace(
        config.settings,
        health=who != OFF,
        hedge_percent=config.settings.hedge_percent if who == ON else 0.0,
    )
    plain = device_opener(changed)

    def opener(url: str) -> Device:
        return _Delayed(plain(url), trouble if url == first else None)

    with Pool(replace(config, settings=changed), read_only=True, opener=opener) as pool:
        reads = _Reads(pool)
        threads = [threading.Thread(target=reads.run, args=(n,)) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(2.0)
            began = time.monotonic()
            time.sleep(seconds)
            trouble.since = onset = time.monotonic()
            trouble.kind = kind
            time.sleep(found_seconds if kind == SLOW else 0.0)
            after = time.monotonic() if kind == SLOW else onset
            time.sleep(seconds)
            until = time.monotonic()
        finally:
            trouble.kind = ""
            reads.stop.set()
            for thread in threads:
                thread.join()
        if reads.errors:
            raise reads.errors[0]
        return reads.p99(began, onset), reads.p99(after, until)
