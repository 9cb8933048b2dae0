"""Devices of a kind, judged together: a reference that slow ones cannot move, and noise. Pure.

Slow devices are always on one side. So what is usual is told by the faster ones: the reference of a
device is the 0.4 quantile of the others, and the spread is that of the faster ones. Two devices of
five, or nine of twenty, may then be slow without hiding each other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpstore.health.detect.device_track import DeviceTrack, SlowEvidence
from hpstore.health.detect.evidence import Signs, Traits
from hpstore.health.detect.slow_config import SlowConfig
from hpstore.health.detect.slow_episodes import SlowEpisodes
from hpstore.units import format_seconds

_NOISE_PRIOR, _NOISE_PRIOR_TICKS = 0.2, 6.0  # of the logarithm, until values have shown theirs
_NOISE_WEIGHT = 0.005
_NOISE_CLIP = 1.5
_FROM_DIFFERENCES = math.sqrt(math.pi) / 2  # mean |x - y| of a normal variable to its deviation
_SMALLEST = 1e-300  # seconds; of nothing there is no ratio
_BUSY, _IDLE = 0.9, 0.5  # share of the time with a call in flight


@dataclass(slots=True)
class GroupMemory:
    """What is remembered of a group: noise, usual reference, episodes, how long a veto lasts."""

    noise: float = _NOISE_PRIOR
    noise_values: float = _NOISE_PRIOR_TICKS
    usual_seconds: float | None = None  # what the faster ones take
    ticks: int = 0
    vetoed_since: float | None = None
    episodes: SlowEpisodes = field(default_factory=SlowEpisodes)

    def learn_noise(self, difference: float) -> None:
        """Weigh in how much a device's ratio has changed from one tick to the next."""
        self.noise_values += 1
        weight = max(_NOISE_WEIGHT, 1 / self.noise_values)
        found = _FROM_DIFFERENCES * min(abs(difference), _NOISE_CLIP)
        self.noise += weight * (found - self.noise)


@dataclass(frozen=True, slots=True)
class _Judged:
    """One value of one tick. But for the reference all are logarithms."""

    ratio: float  # to the reference
    margin: float  # beyond its limit
    limit: float  # of the ratio
    reference_seconds: float
    whom: str


class PeerGroup:
    """One tick of a group: `judged` against `peers`, which hold them. `few`: too few to sit out."""

    def __init__(
        self,
        config: SlowConfig,
        memory: GroupMemory,
        tracks: Mapping[str, DeviceTrack],
        judged: Sequence[str],
        values: Mapping[str, float],
        signs: Mapping[str, Signs],
        excess_seconds: float,
    ) -> None:
        self._config, self._memory, self._tracks = config, memory, tracks
        self._judged, self._signs = judged, signs
        self._excess = excess_seconds
        self._values = {d: max(value, _SMALLEST) for d, value in values.items()}
        self.few = len(values) < config.group_least
        self._ordered = sorted(self._values.values())
        well = [x for d, x in self._values.items() if not tracks[d].suspect]
        enough = len(well) >= max(2, config.group_least if not self.few else len(values) - 1)
        self._well = sorted(well) if enough else self._ordered
        self._limit = math.log(config.ratio_few if self.few else config.ratio_least)
        if not self.few:
            lately = sorted(tracks[d].smooth for d in self._values)
            spread = quantile(lately, config.peers_quantile) - quantile(lately, 0.1)
            self._limit = max(self._limit, config.spread_widths * spread)

    def judge(self, now_seconds: float, elapsed: float, traits: Mapping[str, Traits]) -> bool:
        """Move the scores of the judged; returns whether all was vetoed as a shared cause."""
        found = {device: self._of(device) for device in self._judged}
        for device, one in found.items():
            self._explain(device, one)
        fresh = {d for d, x in found.items() if x.margin > 0 and not self._tracks[d].suspect}
        if self._shared(now_seconds, elapsed, fresh, traits):
            return True
        limit = self._score_limit()
        for device, one in found.items():
            track = self._tracks[device]
            if track.last is not None:
                self._memory.learn_noise(one.ratio - track.last)
            clear = self._config.probation_sigmas * self._memory.noise
            track.outliers += one.margin > clear
            track.few = self.few
            track.weigh(now_seconds, one.ratio, one.margin, limit, self._memory.episodes)
            if one.margin <= 0 and not track.suspect:
                track.learn(one.ratio, self._values[device])
        return False

    def _score_limit(self) -> float:
        """Sum of margins that makes a suspect: more where ticks are noisy (Wald's test)."""
        noise = self._config.noise_most * self._memory.noise**2 / (2 * self._limit)
        return max(1.0, noise)

    def _of(self, device: str) -> _Judged:
        if len(self._ordered) < 2:
            return self._alone(device)
        config, track = self._config, self._tracks[device]
        value = self._values[device]
        reference = _without(self._well, value, config.peers_quantile)
        ratio = math.log(value / reference)
        least, limit = math.log(config.ratio_least), self._limit
        if self.few and self._corroborated(device):
            limit = least
        margin = min(ratio - limit - track.offset, ratio - least)
        if value - reference < self._excess:
            margin = min(margin, 0.0) - least
        return _Judged(ratio, margin, limit, reference, "its peers")

    def _alone(self, device: str) -> _Judged:
        """Against what it took first, in earlier processes, and what its class takes at most."""
        config, track, sign = self._config, self._tracks[device], self._signs.get(device, Signs())
        value, limit = self._values[device], math.log(config.ratio_few)
        known: list[_Judged] = []
        if sign.past_ratio > 0:
            ratio, usual = math.log(sign.past_ratio), value / sign.past_ratio
            known.append(
                _Judged(ratio, ratio - limit, limit, usual, "what it took in earlier runs")
            )
        elif sign.class_ratio > 0:
            ratio, usual = math.log(sign.class_ratio), value / sign.class_ratio
            known.append(_Judged(ratio, ratio, 0.0, usual, "the slowest of its class"))
        if len(track.own) >= config.alone_ticks:
            usual = quantile(track.own, 0.5)
            ratio = math.log(value / usual)
            known.append(_Judged(ratio, ratio - limit, limit, usual, "its own first values"))
        if not known:
            return _Judged(0.0, -limit, limit, value, "")
        worst = max(known, key=lambda one: one.margin)
        if value - worst.reference_seconds < self._excess:
            return replace(worst, margin=-limit)
        return worst

    def _corroborated(self, device: str) -> bool:
        """Whether more than its few peers speaks against it: its past, its class, the demand."""
        sign = self._signs.get(device, Signs())
        if sign.past_ratio > self._config.ratio_least or sign.class_ratio > 1:
            return True
        others = sorted(x.busy_share for d, x in self._signs.items() if d in self._values)
        return sign.busy_share >= _BUSY and quantile(others, 0.25) <= _IDLE

    def _explain(self, device: str, one: _Judged) -> None:
        track, peers = self._tracks[device], self._well
        value = self._values[device]
        lately = track.smooth + self._config.smoothing_ratio * (one.ratio - track.smooth)
        track.evidence = SlowEvidence(
            value_seconds=value,
            smooth_ratio=math.exp(min(lately, 50.0)),
            peers_low_seconds=peers[0],
            peers_seconds=one.reference_seconds,
            peers_high_seconds=_without(peers, value, 0.75),
            limit_seconds=one.reference_seconds * math.exp(one.limit + max(track.offset, 0.0)),
            compared_with=one.whom,
        )
        if one.margin > 0:
            track.reason = (
                f"{format_seconds(value)} a call is {math.exp(one.ratio):.1f} x {one.whom}, "
                f"{math.exp(min(lately, 50.0)):.1f} x lately"
            )

    def _shared(
        self, now: float, elapsed: float, fresh: set[str], traits: Mapping[str, Traits]
    ) -> bool:
        """Whether many are slow at once: the faster ones, too, or new outliers on one link.

        A link's veto ends when it has lasted: then they are slow, whatever the cause.
        """
        config, memory = self._config, self._memory
        middle = quantile(self._ordered, config.peers_quantile)
        usual = middle if memory.usual_seconds is None else memory.usual_seconds
        known = memory.ticks >= config.shared_baseline_ticks
        risen = not self.few and known and middle > config.shared_rise_ratio * usual
        memory.ticks += 1
        weight = -math.expm1(-elapsed / config.shared_baseline_seconds)
        if memory.ticks <= config.shared_baseline_ticks:  # the first ones by their plain mean
            weight = 1 / memory.ticks
        memory.usual_seconds = usual + weight * (middle - usual)
        if risen:
            return True
        if not self._crowded(fresh, traits):
            memory.vetoed_since = None
            return False
        if memory.vetoed_since is None:
            memory.vetoed_since = now
        return now - memory.vetoed_since <= config.shared_most_seconds

    def _crowded(self, fresh: set[str], traits: Mapping[str, Traits]) -> bool:
        """Two or more new outliers on one known link, and more than a quarter of the peers there.

        Where links are not known, many that turn slow together are slow.
        """
        on_link: defaultdict[str, int] = defaultdict(int)
        slow: defaultdict[str, int] = defaultdict(int)
        for device in self._values:
            link = traits[device].link if device in traits else ""
            on_link[link] += 1
            slow[link] += device in fresh
        return any(
            link and count >= 2 and count > self._config.shared_ratio * on_link[link]
            for link, count in slow.items()
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order, interpolated; 0 of none."""
    if not ordered:
        return 0.0
    at = share * (len(ordered) - 1)
    below = int(at)
    if below + 1 >= len(ordered):
        return ordered[-1]
    return ordered[below] + (at - below) * (ordered[below + 1] - ordered[below])


def _without(ordered: Sequence[float], value: float, share: float) -> float:
    """The quantile of ascending values but for one of them, which need not be there."""
    at = bisect_left(ordered, value)
    if at == len(ordered) or ordered[at] != value:
        return quantile(ordered, share)
    place = share * (len(ordered) - 2)
    below = int(place)

    def other(index: int) -> float:
        index = min(index, len(ordered) - 2)
        return ordered[index + (index >= at)]

    return other(below) + (place - below) * (other(below + 1) - other(below))
