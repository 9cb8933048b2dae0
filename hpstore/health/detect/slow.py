"""Which devices are slow, by the service times of their peers. Pure; the clock is the caller's.

Each tick brings one mean service time for each device that was used. A device beyond its peers'
fence gets points into a leaky bucket: above one level it is suspect, above another it should sit
out. docs/health.md describes the rules, decision 0016 where they differ from their models (OpenZFS,
`vdev_child_slow_outlier`; Perseus, FAST'23).
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median

from hpstore.errors import ConfigError
from hpstore.health.detect.evidence import ErrorWindow, Media, Signs, Traits
from hpstore.health.detect.outlier_fence import Fence, fence_of, points, quantile
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState
from hpstore.units import format_seconds

_LEAVE_ONE_OUT_MOST = 8  # in larger groups one device hardly moves the quartiles
_NO_TRAITS = Traits()
_RECENT = 15  # values that `accept` looks at
_NOISE_WEIGHT = 0.05  # of the newest tick


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowConfig:
    """Thresholds of the detector. Defaults are those of docs/decisions/0016."""

    group_least: int = 5  # devices of a kind that make each other's peers; ZFS's figure
    fence_widths: float = 3.0  # K of single ticks; 1.5 is sensitive
    calm_widths: float = 2.0  # K of smoothed ones, whose tails are lighter
    fence_floor_ratio: float = 0.25  # of Q1, in place of the IQR of peers that hardly differ
    ratio_least: float = 1.5  # to the peers' median
    excess_nvme_seconds: float = 200e-6  # above the peers' median; also of unknown media
    excess_ssd_seconds: float = 1e-3
    excess_hdd_seconds: float = 10e-3
    excess_remote_seconds: float = 10e-3
    smoothing_ratio: float = 0.2  # weight of the newest tick
    smoothing_clip_ratio: float = 4.0  # one freeze may not look like four slow ticks
    smoothing_still_ratio: float = 1.25  # the tick itself, for its smooth value to count
    smoothing_stale_seconds: float = 60.0
    suspect_score: float = 10.0
    release_score: float = 5.0  # below it a suspect is let go
    sitout_score: float = 20.0
    score_most: float = 40.0  # two half-lives above `suspect_score`
    half_life_seconds: float = 600.0
    drain_points: float = 2.0  # lost by all for each n points that others of the n get
    shared_ratio: float = 0.25  # more of the peers on one link than this: their link is slow
    shared_rise_ratio: float = 2.0  # the median of all above its baseline
    shared_baseline_seconds: float = 600.0
    shared_baseline_ticks: int = 10  # before that there is no baseline
    shared_most_seconds: float = 300.0  # the same few for longer than this are slow themselves
    alone_ticks: int = 30  # to calibrate a device on itself
    alone_strictness: float = 2.0  # times the thresholds, where there are too few peers
    probation_outliers: int = 2
    hang_suspect_seconds: float = 5.0
    hang_suspect_ratio: float = 20.0  # to the device's own p99.9
    hang_fault_seconds: float = 30.0
    error_count: int = 10
    error_window_seconds: float = 600.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not 0 < getattr(self, limit.name) < math.inf:
                raise ConfigError(f"{limit.name} of the slow detector must be above 0 and finite")
        if not self.release_score < self.suspect_score < self.sitout_score < self.score_most:
            raise ConfigError("scores must ascend: release, suspect, sitout, most")
        if self.smoothing_ratio > 1 or self.shared_ratio > 1 or self.group_least < 3:
            raise ConfigError("ratios of smoothing and sharing are at most 1, groups at least 3")

    def excess_least(self, media: Media) -> float:
        """Seconds above the peers' median below which no device of that kind is slow."""
        return {
            Media.SSD: self.excess_ssd_seconds,
            Media.HDD: self.excess_hdd_seconds,
            Media.REMOTE: self.excess_remote_seconds,
        }.get(media, self.excess_nvme_seconds)


class _Track:
    """What is remembered of one device."""

    __slots__ = (
        "bucket",
        "checksums",
        "errors",
        "few",
        "outliers",
        "own",
        "reason",
        "recent",
        "scale",
        "seen",
        "smooth",
        "suspect",
        "tripped",
    )

    def __init__(self, config: SlowConfig) -> None:
        self.bucket = 0.0
        self.smooth = 0.0
        self.seen = -math.inf
        self.scale = 1.0  # what `accept` has found normal
        self.own: list[float] = []  # first healthy values, ascending
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.few = False  # judged without enough peers
        self.outliers = 0  # since it was forgiven
        self.suspect = self.tripped = False
        self.reason = ""
        self.errors = ErrorWindow(config.error_count, config.error_window_seconds)
        self.checksums = ErrorWindow(config.error_count, config.error_window_seconds)


class _Noise:
    """The usual IQR of a group, as a share of Q1: one of few values is small by chance."""

    __slots__ = ("ratio", "ticks")

    def __init__(self) -> None:
        self.ratio = 0.0
        self.ticks = 0

    def learn(self, values: Sequence[float]) -> None:
        """Weigh one tick of healthy values in; the first ones by their plain mean."""
        ordered = sorted(values)
        low = quantile(ordered, 0.25) if ordered else 0.0
        if low > 0:
            self.ticks += 1
            spread = min(quantile(ordered, 0.75) / low - 1, 1.0)
            self.ratio += max(_NOISE_WEIGHT, 1 / self.ticks) * (spread - self.ratio)


@dataclass(slots=True)
class _Baseline:
    """The usual median of a group of peers, and how long a veto has lasted."""

    seconds: float
    ticks: int = 0
    vetoed_since: float | None = None
    rough: _Noise = field(default_factory=_Noise)  # of single ticks
    quiet: _Noise = field(default_factory=_Noise)  # of smoothed ones


class SlowDetector:
    """Finds slow, hung and failing devices among peers.

    `traits` say which devices are peers (the same model where five of it are there, else the same
    media) and which share a link. Not thread-safe: one thread calls it. `shared_slow` counts vetoed
    ticks.
    """

    def __init__(
        self, config: SlowConfig | None = None, traits: Mapping[str, Traits] | None = None
    ) -> None:
        self.config = config or SlowConfig()
        self.traits = dict(traits or {})
        self.shared_slow = 0
        self._tracks: dict[str, _Track] = {}
        self._baselines: dict[str, _Baseline] = {}
        self._now = -math.inf

    def tick(
        self,
        now_seconds: float,
        mean_service_seconds: Mapping[str, float],
        signs: Mapping[str, Signs] | None = None,
        watched: Collection[str] = (),
    ) -> list[DeviceVerdict]:
        """Judge one tick; verdicts of all devices that are not well now, by name.

        `mean_service_seconds` has the devices that were used, each with the mean of its
        *normalised* service times (`telemetry.Tick.means`); plain means do for equal loads.
        `now_seconds` is monotonic. `watched` devices, those on probation, are suspect after two
        values beyond the fence. Raises ValueError for a time that is negative or not finite.
        """
        elapsed = max(0.0, now_seconds - self._now)
        self._now = max(self._now, now_seconds)
        decay = 0.5 ** (elapsed / self.config.half_life_seconds)
        for track in self._tracks.values():
            track.bucket *= decay
        values = self._values(mean_service_seconds)
        for group in self._groups(values):
            group.judge(elapsed)
        found = []
        for device in sorted({*self._tracks, *(signs or {})}):
            sign = (signs or {}).get(device)
            verdict = self._verdict(device, sign, device in watched)
            if verdict is not None:
                found.append(verdict)
        return found

    def accept(self, device: str) -> float:
        """Take what a device does now, compared with its peers, as normal; returns the ratio.

        For a device that is slower by nature and whose traits do not say so. Forgives it. Raises
        ValueError for a device that was in no tick.
        """
        track = self._tracks.get(device)
        if track is None:
            raise ValueError(f"device {device} was in no tick: there is nothing to accept")
        others = [
            median(t.recent)
            for d, t in self._tracks.items()
            if d != device and t.recent and self._media(d) is self._media(device)
        ]
        if others and track.recent and median(others) > 0:
            track.scale *= median(track.recent) / median(others)
        track.own.clear()
        self.forgive(device)
        return track.scale

    def forgive(self, device: str) -> None:
        """Forget a device's score and errors, not its normal values: it starts anew."""
        old = self._tracks.get(device)
        if old is None:
            return
        fresh = self._tracks[device] = _Track(self.config)
        fresh.scale, fresh.own = old.scale, old.own

    def forget(self, device: str) -> None:
        """Drop all that is known of a device that left."""
        self._tracks.pop(device, None)

    def score(self, device: str) -> float:
        """Level of a device's bucket, 0 when it is not known."""
        track = self._tracks.get(device)
        return 0.0 if track is None else track.bucket

    def _media(self, device: str) -> Media:
        return self.traits.get(device, _NO_TRAITS).media

    def _values(self, means: Mapping[str, float]) -> dict[str, float]:
        """Values of this tick by device, in the order of names, so that no sum depends on it."""
        values = {}
        for device in sorted(means):
            value = float(means[device])
            if not 0 <= value < math.inf:
                raise ValueError(f"mean service time of device {device} is {value}")
            track = self._tracks.setdefault(device, _Track(self.config))
            values[device] = value / track.scale
            track.recent.append(values[device])
        return values

    def _groups(self, values: Mapping[str, float]) -> Iterable[_Group]:
        """Devices of one model, where there are enough of them; the others by their media."""
        models: defaultdict[tuple[Media, str], list[str]] = defaultdict(list)
        medias: defaultdict[Media, list[str]] = defaultdict(list)
        for device in values:
            traits = self.traits.get(device, _NO_TRAITS)
            models[traits.media, traits.model].append(device)
            medias[traits.media].append(device)
        rest: defaultdict[Media, list[str]] = defaultdict(list)
        for (media, model), devices in models.items():
            if len(devices) >= self.config.group_least:
                yield _Group(self, f"{media}/{model}", media, devices, devices, values)
            else:
                rest[media] += devices
        for media, devices in rest.items():
            yield _Group(self, str(media), media, sorted(devices), medias[media], values)

    def _verdict(self, device: str, sign: Signs | None, watched: bool) -> DeviceVerdict | None:
        config, track = self.config, self._tracks.setdefault(device, _Track(self.config))
        track.suspect = track.bucket > (
            config.release_score if track.suspect else config.suspect_score
        )
        track.tripped = track.bucket > (
            config.suspect_score if track.tripped else config.sitout_score
        )
        state, reasons = HealthState.ONLINE, []
        if track.suspect or (watched and track.outliers >= config.probation_outliers):
            state = HealthState.SITOUT if track.tripped and not track.few else HealthState.SUSPECT
            reasons.append(track.reason)
        if sign is not None:
            track.errors.add(self._now, sign.io_errors)
            track.checksums.add(self._now, sign.checksum_errors)
        hang, why = self._hang(sign or Signs())
        if hang is not HealthState.ONLINE:
            state = max(state, hang, key=_SEVERITY.index)
            reasons.append(why)
        window = f"within {config.error_window_seconds:.0f} s"
        if track.checksums.full(self._now):
            state = max(state, HealthState.SUSPECT, key=_SEVERITY.index)
            reasons.append(f"{config.error_count} checksum errors {window}")
        if track.errors.full(self._now):
            state = HealthState.FAULTED
            reasons.append(f"{config.error_count} I/O errors {window}")
        if state is HealthState.ONLINE:
            return None
        return DeviceVerdict(
            device=device, state=state, score=track.bucket, reason="; ".join(reasons)
        )

    def _hang(self, sign: Signs) -> tuple[HealthState, str]:
        config = self.config
        why = f"a call has been in flight for {sign.oldest_seconds:.1f} s"
        if sign.oldest_seconds > config.hang_fault_seconds:
            return HealthState.FAULTED, why
        usual = config.hang_suspect_ratio * sign.usual_seconds_p999
        if sign.oldest_seconds > max(config.hang_suspect_seconds, usual):
            return HealthState.SUSPECT, why
        return HealthState.ONLINE, ""


_SEVERITY = (HealthState.ONLINE, HealthState.SUSPECT, HealthState.SITOUT, HealthState.FAULTED)


class _Group:
    """Devices that are judged together in one tick: `judged` against `peers`, which hold them."""

    def __init__(
        self,
        detector: SlowDetector,
        name: str,
        media: Media,
        judged: Sequence[str],
        peers: Sequence[str],
        values: Mapping[str, float],
    ) -> None:
        self.name, self.judged, self.peers, self.values = name, judged, peers, values
        self._config, self._now = detector.config, detector._now
        self._detector, self._tracks = detector, detector._tracks
        self._excess = self._config.excess_least(media)

    def judge(self, elapsed_seconds: float) -> None:
        """Move the buckets of the judged."""
        enough = len(self.peers) >= self._config.group_least
        middle = median(self.values[d] for d in self.peers)
        self._base = self._detector._baselines.setdefault(self.name, _Baseline(middle))
        for device in self.judged:
            self._tracks[device].few = not enough
            self._smooth(device, middle if enough else 0.0)
        gains = self._by_peers() if enough else {d: self._by_itself(d) for d in self.judged}
        if self._shared(middle, gains, elapsed_seconds, enough):
            self._detector.shared_slow += 1
            return
        total = sum(gains.values())
        share = self._config.drain_points / len(self.peers)
        for device, gain in gains.items():
            track = self._tracks[device]
            level = track.bucket + gain - share * (total - gain)
            track.bucket = min(max(0.0, level), self._config.score_most)
            track.outliers += gain > 0
            if not gain and len(track.own) < self._config.alone_ticks:
                insort(track.own, self.values[device])

    def _smooth(self, device: str, middle: float) -> None:
        """Weigh the value of this tick in; it counts for at most 4 medians of the group."""
        config, track = self._config, self._tracks[device]
        value = self.values[device]
        usual = middle or (track.own[len(track.own) // 2] if track.own else value)
        value = min(value, config.smoothing_clip_ratio * usual)
        stale = self._now - track.seen > config.smoothing_stale_seconds
        weight = 1.0 if stale or not track.smooth else config.smoothing_ratio
        track.smooth += weight * (value - track.smooth)
        track.seen = self._now

    def _by_peers(self) -> dict[str, float]:
        """Points of each: the tick's value against the tick's, the smooth one against the smooth.

        The smooth values' noise is smaller by sqrt(w / (2 - w)), and so is what their fence needs
        as a floor. Devices that were found slow are nobody's reference.
        """
        config = self._config
        smooth = {d: self._tracks[d].smooth for d in self.peers}
        calm = math.sqrt(config.smoothing_ratio / (2 - config.smoothing_ratio))
        well = [d for d in self.peers if not self._tracks[d].tripped]
        if len(well) < config.group_least:
            well = list(self.peers)
        rough = _Reference(
            {d: self.values[d] for d in well},
            self._base.rough,
            widths=config.fence_widths,
            floor=config.fence_floor_ratio,
        )
        quiet = _Reference(
            {d: smooth[d] for d in well},
            self._base.quiet,
            widths=config.calm_widths,
            floor=calm * config.fence_floor_ratio,
        )
        gains = {}
        for device in self.judged:
            value, fence = self.values[device], rough.fence(device)
            gain = self._points(value, fence)
            gain = min(gain, max(1.0, value / (2 * fence.middle))) if gain else 0.0
            if value > config.smoothing_still_ratio * fence.middle:  # no spike counts twice
                gain = max(gain, self._points(smooth[device], quiet.fence(device)))
            gains[device] = gain
            if gain:
                self._explain(device, fence, "the median of its peers")
        for noise, found in ((self._base.rough, self.values), (self._base.quiet, smooth)):
            noise.learn([found[d] for d in well if not gains.get(d)])
        return gains

    def _by_itself(self, device: str) -> float:
        """Points against its own first values, twice as strict; none before there are enough."""
        config, track = self._config, self._tracks[device]
        if len(track.own) < config.alone_ticks:
            return 0.0
        strict = config.alone_strictness
        fence = fence_of(
            track.own, widths=strict * config.fence_widths, floor=config.fence_floor_ratio
        )
        gain = max(
            self._points(self.values[device], fence, strict),
            self._points(track.smooth, fence, strict),
        )
        if gain:
            self._explain(device, fence, "its own first values")
        return gain

    def _points(self, value: float, fence: Fence, strict: float = 1.0) -> float:
        return points(
            value, fence, ratio_least=self._config.ratio_least, excess_least=strict * self._excess
        )

    def _explain(self, device: str, fence: Fence, whom: str) -> None:
        value, track = self.values[device], self._tracks[device]
        usual = fence.middle or value or 1.0
        track.reason = (
            f"{format_seconds(value)} a call is {value / usual:.1f} x {whom}, "
            f"{track.smooth / usual:.1f} x lately"
        )

    def _shared(
        self, middle: float, gains: Mapping[str, float], elapsed_seconds: float, enough: bool
    ) -> bool:
        """Whether many are slow at once: all by the median, or new outliers on one link.

        A link's veto ends when it has lasted: then they are slow, whatever the cause.
        """
        config = self._config
        base = self._base
        risen = (
            enough
            and base.ticks >= config.shared_baseline_ticks
            and middle > config.shared_rise_ratio * base.seconds
        )
        base.ticks += 1
        weight = -math.expm1(-elapsed_seconds / config.shared_baseline_seconds)
        if base.ticks <= config.shared_baseline_ticks:  # the first ones by their plain mean
            weight = 1 / base.ticks
        base.seconds += weight * (middle - base.seconds)
        if risen:
            return True
        if not self._crowded(gains):
            base.vetoed_since = None
            return False
        if base.vetoed_since is None:
            base.vetoed_since = self._now
        return self._now - base.vetoed_since <= config.shared_most_seconds

    def _crowded(self, gains: Mapping[str, float]) -> bool:
        """Two or more new outliers on one link, and more than a quarter of the peers there."""
        on_link: defaultdict[str, list[str]] = defaultdict(list)
        for device in self.peers:
            on_link[self._detector.traits.get(device, _NO_TRAITS).link].append(device)
        for devices in on_link.values():
            fresh = sum(gains.get(d, 0) > 0 and not self._tracks[d].suspect for d in devices)
            if fresh >= 2 and fresh > self._config.shared_ratio * len(devices):
                return True
        return False


class _Reference:
    """Fences over a group of values; of small groups over all others."""

    def __init__(
        self, values: Mapping[str, float], noise: _Noise, *, widths: float, floor: float
    ) -> None:
        self._values, self._noise = values, noise
        self._widths, self._floor = widths, floor
        self._ordered = sorted(values.values())
        self._whole = None if len(values) <= _LEAVE_ONE_OUT_MOST else self._make(self._ordered)

    def fence(self, device: str) -> Fence:
        """The fence for one device."""
        if self._whole is not None:
            return self._whole
        others = self._ordered
        if device in self._values:
            others = list(others)
            others.remove(self._values[device])
        return self._make(others)

    def _make(self, ordered: Sequence[float]) -> Fence:
        return fence_of(ordered, widths=self._widths, floor=self._floor, noise=self._noise.ratio)
