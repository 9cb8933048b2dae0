"""Ticks in which every device that is used has its say. Pure.

Devices that are little used reach enough I/Os for a sample in different ticks. A peer that is not
in a tick cannot be compared with: so samples wait, a little, for those of others.
"""

from __future__ import annotations

from dataclasses import replace

from hpstore.health.detect.telemetry import Sample, Tick

WAIT_SECONDS = 4.0  # for the samples of others; two for each to be due, and two ticks
_USED_SECONDS = 10.0  # a device without a sample for so long is not waited for


class Gathering:
    """Samples of several ticks, to be judged as one. Not thread-safe."""

    def __init__(self) -> None:
        self._samples: dict[str, Sample] = {}
        self._since = 0.0
        self._seen: dict[str, float] = {}

    def add(self, tick: Tick) -> Tick | None:
        """Take a tick; returns all samples that have waited once nobody is waited for any more."""
        now = tick.now_seconds
        if not self._samples:
            self._since = now
        for device, sample in tick.samples.items():
            known = self._samples.get(device)
            self._samples[device] = sample if known is None else merged(known, sample)
            self._seen[device] = now
        self._seen = {d: at for d, at in self._seen.items() if now - at < _USED_SECONDS}
        waiting = self._seen.keys() - self._samples.keys()
        if not self._samples or (waiting and now - self._since < WAIT_SECONDS):
            return None
        samples, self._samples = self._samples, {}
        return replace(tick, samples=samples)


def merged(one: Sample, other: Sample) -> Sample:
    """Two samples of a device as one."""
    ios = one.ios + other.ios
    operations = {**one.counts, **other.counts}
    counts = {op: one.counts.get(op, 0) + other.counts.get(op, 0) for op in operations}
    return Sample(
        ios=ios,
        nbytes=one.nbytes + other.nbytes,
        errors=one.errors + other.errors,
        dropped=one.dropped + other.dropped,
        seconds_mean=(one.seconds_mean * one.ios + other.seconds_mean * other.ios) / ios,
        counts=counts,
        scores={
            op: sum(s.scores[op] * s.counts[op] for s in (one, other) if op in s.counts) / count
            for op, count in counts.items()
        },
    )
