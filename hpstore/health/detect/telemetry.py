"""From single I/Os to the ticks that the detector judges.

An I/O's score is its time over what such an I/O takes: the median, over devices, of their mean in
one *cell* (operation, size class, calls in flight); for reads of one batch of several devices, what
such reads took in it. So neither sizes nor load make a device look slow. A device's value is the
mean of its scores, which keeps bursts that a median hides, times one common reference, so that
thresholds in seconds keep their meaning.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hpstore.health.detect.device_standing import DeviceStanding
from hpstore.health.detect.evidence import Media, Signs
from hpstore.health.detect.histogram import (
    BUCKETS,
    FloatArray,
    LogHistogram,
    buckets_of,
    upper_edges,
)
from hpstore.health.detect.io_recorder import IoOutcome, IoRecorder, IoRows, Operation
from hpstore.health.detect.learnt_times import LearntTimes
from hpstore.units import KIB, MIB

_JUDGED = (Operation.READ, Operation.WRITE, Operation.SYNC)
_SIZES = 16  # up to 4 KiB, 8, 16, ... 64 MiB and above
_BANDS = 4  # 1, 2-4, 5-16, 17 and more in flight
_BAND_EDGES = np.array([1.5, 4.5, 16.5])
_SHAPE = (len(_JUDGED), _SIZES, _BANDS)
CELLS = len(_JUDGED) * _SIZES * _BANDS
_CELL_DEVICES = 3  # whose median one of them cannot move alone
_CELL_IOS = 4.0
_LARGE_BYTES = MIB
_PEER_IOS = 20.0  # of a size, before their quantile is a deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class TickConfig:
    """When a device has done enough to be judged, and how long things are remembered."""

    enough_ios: int = 16
    enough_large_ios: int = 8  # of 1 MiB and above
    wait_seconds: float = 2.0  # for enough; then `least_ios` do
    least_ios: int = 4  # a mean of fewer says nothing
    forget_seconds: float = 30.0  # I/Os of a device that is hardly used
    score_most: float = 50.0
    half_life_seconds: float = 600.0  # of what is expected
    histogram_seconds: float = 600.0  # quantiles cover one to two of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one device did since its last sample."""

    ios: int
    nbytes: int
    errors: int
    dropped: int
    seconds_mean: float  # as measured
    scores: Mapping[Operation, float] = field(default_factory=dict)  # means, by operation
    counts: Mapping[Operation, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One tick: samples of the devices that did enough, signs of all."""

    now_seconds: float
    reference_seconds: float  # what an ordinary I/O takes
    samples: Mapping[str, Sample]
    signs: Mapping[str, Signs]

    def means(self, operations: Iterable[Operation] = _JUDGED) -> dict[str, float]:
        """Normalised mean service seconds by device, for `SlowDetector.tick`."""
        wanted, found = tuple(operations), {}
        for device, sample in self.samples.items():
            count = sum(sample.counts.get(op, 0) for op in wanted)
            if count:
                total = sum(
                    sample.scores[op] * n for op, n in sample.counts.items() if op in wanted
                )
                found[device] = self.reference_seconds * total / count
        return found


class _Pending:
    """Scores of a device since its last sample."""

    def __init__(self, now_seconds: float) -> None:
        self.since = now_seconds
        self.counts = np.zeros(len(_JUDGED))
        self.scores = np.zeros(len(_JUDGED))
        self.seconds = 0.0
        self.nbytes = 0
        self.large = 0


class _Device:
    """Everything of one device; of the ticking thread but for the recorder."""

    def __init__(self, recorder: IoRecorder, judge_reads: bool) -> None:
        self.recorder, self.judge_reads = recorder, judge_reads
        self.cell_ios = np.zeros(_SHAPE)
        self.cell_seconds = np.zeros(_SHAPE)
        self.cell_in_flight = np.zeros(_SHAPE)
        self.batched = np.zeros(2)  # I/Os that were compared within their batch, usual seconds
        self.recent = {operation: LogHistogram() for operation in Operation}
        self.before = {operation: LogHistogram() for operation in Operation}
        self.reads = np.zeros((2, _SIZES, BUCKETS))  # judged ones: recent, before
        self.pending = _Pending(0.0)
        self.standing = DeviceStanding()
        self.dropped = 0

    def histogram(self, operation: Operation) -> LogHistogram:
        found = LogHistogram()
        found.merge(self.before[operation])
        found.merge(self.recent[operation])
        return found


class Telemetry:
    """Recorders by device, and their ticks.

    `recorder` is for any thread; `tick` and the quantiles are for one.
    """

    def __init__(self, config: TickConfig | None = None) -> None:
        self.config = config or TickConfig()
        self._devices: dict[str, _Device] = {}
        self._lock = threading.Lock()  # guards _devices
        self._ticked: float | None = None
        self._ordinary: tuple[FloatArray, float] | None = None  # as of the last tick with I/Os
        self._turned = 0.0

    def recorder(self, device: str, *, judge_reads: bool = True) -> IoRecorder:
        """Where a device's I/Os are recorded; the same one each time.

        `judge_reads=False` for one that reads through the page cache: hits are not its work.
        """
        with self._lock:
            found = self._devices.get(device)
            if found is None:
                found = self._devices[device] = _Device(IoRecorder(), judge_reads)
            return found.recorder

    def forget(self, device: str) -> None:
        """Drop a device that left."""
        with self._lock:
            self._devices.pop(device, None)

    def classify(self, device: str, media: Media) -> None:
        """Say of what class a device is: what it may take at the most depends on that."""
        with self._lock:
            if device in self._devices:
                self._devices[device].standing.media = media

    def remember(self, learnt: LearntTimes) -> None:
        """Take what devices took in earlier processes."""
        with self._lock:
            for name, device in self._devices.items():
                device.standing.past = learnt.table(name, CELLS) if name in learnt.cells else None

    def learnt(self, before: LearntTimes, devices: Collection[str]) -> LearntTimes:
        """What is known of times, with what these devices took in this process. By the thread that
        ticks."""
        with self._lock:
            known = {name: self._devices[name] for name in devices if name in self._devices}
        for name, device in known.items():
            before = before.learn(name, device.cell_ios.ravel(), device.cell_seconds.ravel())
        return before

    def after_fork(self) -> None:
        """Forget calls and rows of the parent. Called in the child."""
        self._lock = threading.Lock()
        for device in self._devices.values():
            device.recorder.reset()

    def histogram(self, device: str, operation: Operation) -> LogHistogram:
        """Service times of the last 10 to 20 minutes, a copy; empty for an unknown device."""
        with self._lock:
            found = self._devices.get(device)
        return LogHistogram() if found is None else found.histogram(operation)

    def deadlines(self, share: float, fastest: int) -> dict[str, tuple[float, ...]]:
        """By device and `size_class`: seconds in which `share` of the reads of that size are done
        by the `fastest` of the *other* devices; 0 where those were too few to show it."""
        with self._lock:
            devices = dict(self._devices)
        if not devices:
            return {}
        own = np.stack([device.reads.sum(0) for device in devices.values()])
        return dict(zip(devices, _deadlines(own, share, fastest), strict=True))

    def tick(self, now_seconds: float) -> Tick:
        """Take what was recorded since the last tick, and judge it by what is usual."""
        with self._lock:
            devices = dict(self._devices)
        elapsed = 0.0 if self._ticked is None else now_seconds - self._ticked
        self._age(devices.values(), now_seconds)
        drained = {name: device.recorder.drain() for name, device in devices.items()}
        for name, rows in drained.items():
            _learn(devices[name], rows)
        if self._ordinary is None or any(len(rows.seconds) for rows in drained.values()):
            expected = _expected(list(devices.values()))
            self._ordinary = expected, _reference(devices.values(), expected)
        expected, reference = self._ordinary
        samples, signs = {}, {}
        for name, device in devices.items():
            rows = drained[name]
            self._score(device, rows, expected, now_seconds)
            sample = self._sample(device, rows, now_seconds)
            if sample is not None:
                samples[name] = sample
            oldest = device.recorder.oldest_seconds(now_seconds)
            _stand(device, rows, elapsed, oldest)
            signs[name] = Signs(
                oldest_seconds=oldest,
                usual_seconds_p999=_usual(device),
                io_errors=_ended(rows, IoOutcome.ERROR),
                checksum_errors=_ended(rows, IoOutcome.CHECKSUM),
                busy_share=device.standing.busy_share,
                past_ratio=device.standing.past_ratio,
                class_ratio=device.standing.class_ratio,
            )
        return Tick(
            now_seconds=now_seconds, reference_seconds=reference, samples=samples, signs=signs
        )

    def _age(self, devices: Iterable[_Device], now_seconds: float) -> None:
        if self._ticked is None:
            self._turned = self._ticked = now_seconds
        decay = 0.5 ** ((now_seconds - self._ticked) / self.config.half_life_seconds)
        self._ticked = now_seconds
        turn = now_seconds - self._turned > self.config.histogram_seconds
        if turn:
            self._turned = now_seconds
        for device in devices:
            device.cell_ios *= decay
            device.cell_seconds *= decay
            device.cell_in_flight *= decay
            device.batched *= decay
            if turn:
                device.before = device.recent
                device.recent = {operation: LogHistogram() for operation in Operation}
                device.reads = np.stack([np.zeros_like(device.reads[0]), device.reads[0]])

    def _score(
        self, device: _Device, rows: IoRows, expected: FloatArray, now_seconds: float
    ) -> None:
        pending = device.pending
        if not pending.counts.any() or now_seconds - pending.since > self.config.forget_seconds:
            pending = device.pending = _Pending(now_seconds)
        judged = _judged(device, rows) | _overdue(device, rows, expected)
        cells, operations = _cells(rows, judged), rows.operation[judged].astype(np.intp)
        within = rows.usual[judged]
        usual = np.where(within > 0, within, expected.reshape(_SHAPE)[cells])
        scores = np.minimum(rows.seconds[judged] / usual, self.config.score_most)
        count = rows.count[judged]
        pending.counts += np.bincount(operations, count, minlength=len(_JUDGED))
        pending.scores += np.bincount(operations, scores * count, minlength=len(_JUDGED))
        pending.seconds += float((rows.seconds[judged] * count).sum())
        pending.nbytes += int((rows.nbytes[judged] * count).sum())
        pending.large += int(count[rows.nbytes[judged] >= _LARGE_BYTES].sum())

    def _sample(self, device: _Device, rows: IoRows, now_seconds: float) -> Sample | None:
        """The sample that is due, if it is."""
        config, pending = self.config, device.pending
        ios = int(pending.counts.sum())
        waited = now_seconds - pending.since >= config.wait_seconds and ios >= config.least_ios
        enough = ios >= config.enough_ios or pending.large >= config.enough_large_ios
        if not (enough or waited):
            return None
        device.pending = _Pending(now_seconds)
        dropped, device.dropped = device.recorder.dropped - device.dropped, device.recorder.dropped
        used = [op for op in _JUDGED if pending.counts[op]]
        return Sample(
            ios=ios,
            nbytes=pending.nbytes,
            errors=_ended(rows, IoOutcome.ERROR),
            dropped=dropped,
            seconds_mean=pending.seconds / ios,
            scores={op: float(pending.scores[op] / pending.counts[op]) for op in used},
            counts={op: int(pending.counts[op]) for op in used},
        )


def _judged(device: _Device, rows: IoRows) -> npt.NDArray[np.bool_]:
    """I/Os that tell of speed: those that went well, but for reads of a page cache."""
    judged: npt.NDArray[np.bool_] = (
        (rows.outcome != IoOutcome.ERROR)
        & (rows.outcome != IoOutcome.CUT)
        & (rows.operation < len(_JUDGED))
    )
    if not device.judge_reads:
        judged &= rows.operation != Operation.READ
    return judged


def _deadlines(own: FloatArray, share: float, fastest: int) -> list[tuple[float, ...]]:
    """Of counts by (device, size, bucket): devices that are slow set no deadline for the others."""
    ios = own.sum(2)
    mean = (own * np.arange(BUCKETS)).sum(2) / np.maximum(ios, 1e-9)
    order = np.argsort(np.where(ios > 0, mean, np.inf), 0, kind="stable")  # (place, size)
    place = np.argsort(order, 0)
    summed = np.cumsum(np.take_along_axis(own, order[..., None], 0), 0)
    last = len(own) - 1
    some, more = summed[min(fastest - 1, last)], summed[min(fastest, last)]
    peers = np.where((place < fastest)[..., None], more - own, some)
    totals = peers.sum(2)
    reached = np.cumsum(peers, 2) >= np.maximum(share * totals, 1.0)[..., None]
    table = np.where(totals >= _PEER_IOS, upper_edges(reached.argmax(2)), 0.0)
    return [tuple(row) for row in table.tolist()]


def _overdue(device: _Device, rows: IoRows, expected: FloatArray) -> npt.NDArray[np.bool_]:
    """Calls that were given up when they had taken longer than such calls take: a spare read that
    is quicker must not hide the device that it replaces."""
    cut: npt.NDArray[np.bool_] = (rows.outcome == IoOutcome.CUT) & (rows.operation < len(_JUDGED))
    if not device.judge_reads:
        cut &= rows.operation != Operation.READ
    usual = np.zeros(len(cut))
    usual[cut] = expected.reshape(_SHAPE)[_cells(rows, cut)]
    return cut & (rows.seconds > usual)


def _stand(device: _Device, rows: IoRows, elapsed: float, oldest: float) -> None:
    """How the device stands to its class and its past."""
    judged = _judged(device, rows)
    flat = np.ravel_multi_index(_cells(rows, judged), _SHAPE)
    device.standing.look(rows, judged, flat, elapsed, oldest)


def _ended(rows: IoRows, outcome: IoOutcome) -> int:
    """I/Os that ended so."""
    return int(rows.count[rows.outcome == outcome].sum())


def size_class(nbytes: int) -> int:
    """Of an I/O: up to 4 KiB, 8, 16, ..."""
    return min(((max(nbytes, 1) - 1) // (4 * KIB)).bit_length(), _SIZES - 1)


def _cells(rows: IoRows, judged: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], ...]:
    """Indices into an array of cells."""
    pages = np.ceil(np.maximum(rows.nbytes[judged], 1) / (4 * KIB))
    size = np.minimum(np.ceil(np.log2(pages)), _SIZES - 1).astype(np.intp)
    band = np.searchsorted(_BAND_EDGES, rows.in_flight[judged])
    return rows.operation[judged].astype(np.intp), size, band


def _learn(device: _Device, rows: IoRows) -> None:
    """Add I/Os to a device's histograms and cells; how soon one failed tells of no speed."""
    answered = (rows.outcome != IoOutcome.ERROR) & (rows.outcome != IoOutcome.CUT)
    for operation in Operation:
        mine = answered & (rows.operation == operation)
        if mine.any():
            device.recent[operation].add(rows.seconds[mine], rows.count[mine])
    judged = _judged(device, rows)
    cells, count, seconds = _cells(rows, judged), rows.count[judged], rows.seconds[judged]
    reads = cells[0] == Operation.READ
    np.add.at(device.reads[0], (cells[1][reads], buckets_of(seconds[reads])), count[reads])
    usual = rows.usual[judged]
    device.batched += count[usual > 0].sum(), (count * usual).sum()
    count = np.where(usual > 0, 0.0, count)  # a batch's times would pass for those of single calls
    np.add.at(device.cell_ios, cells, count)
    np.add.at(device.cell_seconds, cells, seconds * count)
    np.add.at(device.cell_in_flight, cells, rows.in_flight[judged] * count)


def _expected(devices: list[_Device]) -> FloatArray:
    """Seconds of an ordinary I/O by cell: (operation, size, band).

    The median of the devices' means, the lower one of two. A cell that too few devices know: the
    nearest lower band's, times as many more calls in flight (a busy device's calls wait for each
    other, its throughput stays); a higher band's as it is; else the few devices' own.
    """
    if not devices:
        return np.ones(_SHAPE)
    ios = np.stack([device.cell_ios for device in devices])  # (device, operation, size, band)
    seconds = np.stack([device.cell_seconds for device in devices])
    flights = np.stack([device.cell_in_flight for device in devices]).sum(0)
    known = ios >= _CELL_IOS
    knowing = known.sum(0)
    means = np.sort(np.where(known, seconds / np.maximum(ios, 1e-9), np.inf), 0)
    lower = np.maximum(knowing - 1, 0) // 2
    middle = np.where(knowing > 0, np.take_along_axis(means, lower[None], 0)[0], np.nan)
    few = seconds.sum(0) / np.maximum(ios.sum(0), 1e-9)
    depth = flights / np.maximum(ios.sum(0), 1e-9)
    trusted = knowing >= min(_CELL_DEVICES, len(devices))
    expected = np.where(trusted, middle, np.nan)
    for band in range(_BANDS):
        for other in [*range(band - 1, -1, -1), *range(band + 1, _BANDS)]:
            unknown = ~trusted[..., band] & np.isnan(expected[..., band])
            busier = np.maximum(depth[..., band] / np.maximum(depth[..., other], 1.0), 1.0)
            usable = unknown & trusted[..., other]
            expected[..., band] = np.where(usable, middle[..., other] * busier, expected[..., band])
    expected = np.where(np.isnan(expected), np.where(knowing > 0, middle, few), expected)
    return np.where(np.isnan(expected) | (expected <= 0), 1.0, expected)


def _reference(devices: Iterable[_Device], expected: FloatArray) -> float:
    """What an ordinary I/O of now takes; 1 when there was none."""
    ios, batched = np.zeros(_SHAPE), np.zeros(2)
    for device in devices:
        ios += device.cell_ios
        batched += device.batched
    total = ios.sum() + batched[0]
    return float(((ios * expected).sum() + batched[1]) / total) if total else 1.0


def _usual(device: _Device) -> float:
    """The longest p99.9 of reads and writes; 0 when there were none."""
    return max(device.histogram(op).quantile(0.999) for op in (Operation.READ, Operation.WRITE))
