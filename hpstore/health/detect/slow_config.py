"""Thresholds of the slow detector, with their units and why (docs/decisions/0016, 0131)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hpstore.errors import ConfigError
from hpstore.health.detect.evidence import Media


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowConfig:
    """Thresholds of the detector. Scores are points: a device that reaches 10 is suspect."""

    group_least: int = 5  # devices of a kind that make each other's peers; ZFS's figure
    ratio_least: float = 1.5  # to the peers: what is within half again of them is never slow
    ratio_few: float = 2.0  # the same with fewer peers, or with a device's own past alone
    spread_widths: float = 2.0  # of the faster peers' spread, where that is wider than the ratio
    excess_nvme_seconds: float = 20e-6  # above the peers; also of unknown media: a timer's jitter
    excess_ssd_seconds: float = 100e-6
    excess_hdd_seconds: float = 3e-3
    excess_remote_seconds: float = 2e-3
    peers_quantile: float = 0.4  # of the others is the reference: below half may be slow
    noise_most: float = 13.0  # of the logarithm: plain noise alarms in e**-13 of the ticks
    ticks_least: float = 3.0  # of clear slowness until a device is suspect
    smoothing_ratio: float = 0.2  # weight of the newest tick
    offset_ratio_most: float = 1.5  # a lasting difference that is taken as a device's nature
    suspect_score: float = 10.0
    release_score: float = 5.0  # below it a suspect is let go
    score_most: float = 15.0  # as far above the release as suspicion is above nothing
    half_life_seconds: float = 60.0  # of the score of a device that does nothing
    sitout_after_seconds: float = 30.0  # of suspicion, and slow still
    expected_seconds: float = 60.0  # that slowness goes on where nothing was learnt
    expected_weight: float = 0.25  # of that, against each episode that was seen
    release_lag_seconds: float = 8.0  # that a device which is well again is avoided for nothing
    detour_ratio: float = 0.5  # cost of reading k others, in reads of a peer
    probation_sigmas: float = 3.0  # of a tick's noise beyond the limit: an outlier on probation
    shared_rise_ratio: float = 2.0  # the reference of all above its baseline
    shared_baseline_seconds: float = 600.0
    shared_baseline_ticks: int = 10  # before that there is no baseline
    shared_ratio: float = 0.25  # more of the peers on one known link than this: it is slow
    shared_most_seconds: float = 300.0  # the same few for longer than this are slow themselves
    alone_ticks: int = 8  # to calibrate a device on itself
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
        if not self.release_score < self.suspect_score < self.score_most:
            raise ConfigError("scores must ascend: release, suspect, most")
        if self.smoothing_ratio > 1 or self.shared_ratio > 1 or self.group_least < 3:
            raise ConfigError("ratios of smoothing and sharing are at most 1, groups at least 3")
        if self.ratio_least <= 1 or self.ratio_few <= 1 or self.peers_quantile > 0.5:
            raise ConfigError("ratios to peers are above 1, their quantile is at most a half")

    def excess_least(self, media: Media) -> float:
        """Seconds above the peers below which no device of that kind is slow."""
        return {
            Media.SSD: self.excess_ssd_seconds,
            Media.HDD: self.excess_hdd_seconds,
            Media.REMOTE: self.excess_remote_seconds,
        }.get(media, self.excess_nvme_seconds)
