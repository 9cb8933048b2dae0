"""What the slow detector remembers of one device: its score, its usual values, its episodes."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from hpstore.health.detect.evidence import ErrorWindow
from hpstore.health.detect.slow_config import SlowConfig
from hpstore.health.detect.slow_episodes import ActionGain, SlowEpisodes

_RECENT = 15  # values that `accept` looks at
_OWN_MOST = 30
_CALM_TICKS = 3  # within the limit end an episode
_STALE_SECONDS = 60.0
_TICK_MOST_SECONDS = 4.0  # that one value stands for
_OFFSET_WEIGHT = 0.01
_OFFSET_PRIOR = 10  # ticks of no difference


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEvidence:
    """Why a device is, or is not, called slow. Seconds are normalised means of a tick.

    `limit_seconds` is what it may take before it counts as slow; `compared_with` is empty when
    there is nothing to compare it with.
    """

    value_seconds: float = 0.0
    smooth_ratio: float = 1.0  # lately, to the reference
    peers_low_seconds: float = 0.0
    peers_seconds: float = 0.0  # the reference
    peers_high_seconds: float = 0.0
    limit_seconds: float = 0.0
    compared_with: str = ""
    gain: ActionGain = field(default_factory=ActionGain)
    observed_seconds: float = 0.0
    slow_seconds: float = 0.0  # of them beyond the limit
    suspected_seconds: float = 0.0


class DeviceTrack:
    """One device. Ratios are to its reference, and logarithms."""

    def __init__(self, config: SlowConfig) -> None:
        self.config = config
        self.score = 0.0
        self.seen = -math.inf
        self.tick_seconds = 0.0  # that the newest value stands for
        self.smooth = 0.0  # lately, logarithm of the ratio to the reference
        self.last: float | None = None  # ratio of the tick before
        self.scale = 1.0  # what `accept` has found normal
        self.own: list[float] = []  # first healthy values, ascending
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.offset, self.offset_ticks = 0.0, 0  # lasting difference to its peers
        self.few = False  # judged without enough peers
        self.outliers = 0  # clear ones since it was forgiven
        self.suspect = False
        self.suspect_since = math.inf
        self.beyond = False  # the newest value
        self.since: float | None = None  # of an episode
        self.until, self.calm, self.peak = 0.0, 0, 0.0
        self.excess, self.excess_ticks = 0.0, 0  # sum of the episode's ratios
        self.gain = ActionGain()
        self.evidence = SlowEvidence()
        self.observed = self.slow = self.suspected = 0.0  # seconds
        self.reason = ""
        self.errors = ErrorWindow(config.error_count, config.error_window_seconds)
        self.checksums = ErrorWindow(config.error_count, config.error_window_seconds)

    def see(self, now_seconds: float, value_seconds: float) -> None:
        """A value has come."""
        elapsed = now_seconds - self.seen
        self.tick_seconds = min(elapsed, _TICK_MOST_SECONDS)
        if elapsed > _STALE_SECONDS:
            self.smooth, self.last = 0.0, None
        self.seen = now_seconds
        self.recent.append(value_seconds)

    def weigh(
        self, now_seconds: float, ratio: float, margin: float, limit: float, episodes: SlowEpisodes
    ) -> None:
        """Move the score by how far a value is beyond its limit, in parts of `limit`.

        One tick moves it by about a third of what makes a suspect, in both directions: a freeze is
        one tick, and a device is let go as fast as it was found.
        """
        config = self.config
        step = 1.15 * config.suspect_score / config.ticks_least
        move = config.suspect_score * margin / limit
        self.score = min(max(0.0, self.score + min(max(-step, move), step)), config.score_most)
        self.smooth += config.smoothing_ratio * (ratio - self.smooth)
        self.last, self.beyond = ratio, margin > 0
        self.observed += self.tick_seconds
        self.slow += self.tick_seconds if self.beyond else 0.0
        self._episode(now_seconds, ratio, episodes)

    def _episode(self, now_seconds: float, ratio: float, episodes: SlowEpisodes) -> None:
        if self.beyond:
            if self.since is None:
                self.since = now_seconds - self.tick_seconds
                self.excess, self.excess_ticks, self.peak = 0.0, 0, 0.0
            self.peak = max(self.peak, self.score)
            self.until, self.calm = now_seconds, 0
            self.excess += ratio
            self.excess_ticks += 1
        elif self.since is not None:
            self.calm += 1
            if self.calm >= _CALM_TICKS:
                if self.peak >= self.config.suspect_score:  # else it was noise, and no matter
                    episodes.note(now_seconds, self.until - self.since)
                self.since = None
        self.gain = ActionGain()
        if self.since is not None:
            usual = math.exp(min(self.excess / self.excess_ticks, 50.0))
            self.gain = episodes.gain(now_seconds, self.until - self.since, usual, self.config)

    def learn(self, ratio: float, value: float) -> None:
        """Of a value within the limit: the device's lasting difference, and its first values."""
        self.offset_ticks += 1
        weight = max(_OFFSET_WEIGHT, 1 / (self.offset_ticks + _OFFSET_PRIOR))
        most = math.log(self.config.offset_ratio_most)
        self.offset = min(self.offset + weight * (ratio - self.offset), most)
        if len(self.own) < _OWN_MOST:
            insort(self.own, value)

    def settle(self, now_seconds: float) -> None:
        """Decide whether it is suspect, from the score and from what acting gains."""
        config = self.config
        if self.suspect:
            self.suspect = self.score >= config.release_score
        elif self.score >= config.suspect_score and self.gain.gains:
            self.suspect, self.suspect_since = True, now_seconds
        if self.suspect and self.seen == now_seconds:
            self.suspected += self.tick_seconds

    def tripped(self, now_seconds: float) -> bool:
        """Whether it should sit out: suspect for long, and slow still."""
        lasted = now_seconds - self.suspect_since
        return (
            self.suspect
            and self.score >= self.config.suspect_score
            and (lasted >= self.config.sitout_after_seconds)
        )

    def renewed(self) -> DeviceTrack:
        """A track that knows what is normal for the device, and nothing else."""
        fresh = DeviceTrack(self.config)
        fresh.scale, fresh.own, fresh.offset = self.scale, self.own, self.offset
        fresh.offset_ticks = self.offset_ticks
        fresh.observed, fresh.slow, fresh.suspected = self.observed, self.slow, self.suspected
        return fresh
