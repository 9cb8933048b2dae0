"""The part of the status page on verdicts: what a person reads of each device."""

from __future__ import annotations

from dataclasses import replace

from hpstore.agent.agent_status import DeviceView
from hpstore.agent.verdict_page import verdict_curve, verdict_rows
from hpstore.health.detect.device_track import SlowEvidence
from hpstore.health.detect.slow_episodes import ActionGain

SEEN = SlowEvidence(
    value_seconds=20e-3,
    smooth_ratio=8.0,
    peers_low_seconds=0.9e-3,
    peers_seconds=1e-3,
    peers_high_seconds=1.2e-3,
    limit_seconds=1.5e-3,
    compared_with="its peers",
    gain=ActionGain(
        lasted_seconds=12, expected_seconds=60, saved_seconds=1140, cost_seconds=34, gains=True
    ),
    observed_seconds=1000,
    slow_seconds=17,
    suspected_seconds=15,
)
DEVICE = DeviceView(
    device="d0",
    url="/mnt/<b>",
    domain="h0",
    state="online",
    since_seconds=0.0,
    pool_state="online",
    present=True,
    problem="",
    read_only=False,
    score=12.0,
    refused="",
    reason="20 ms a call is 20.0 x its peers",
    process_state="",
    process_reason="",
    total_bytes=0,
    free_bytes=0,
    probe_seconds=(),
    latency_seconds=(1e-3, 1e-3, 20e-3),
    read_seconds_p50=0.0,
    read_seconds_p99=0.0,
    disks=(),
    evidence=SEEN,
)
WELL = replace(
    DEVICE, url="/mnt/a", reason="", evidence=replace(SEEN, smooth_ratio=1.0, gain=ActionGain())
)


def test_a_verdict_is_shown_with_its_evidence() -> None:
    """What it took, what peers take, the limit; gain and cost; slow and suspected time."""
    first, second = verdict_rows([WELL, DEVICE])
    for part in (
        "20 ms, 8.0 x its peers lately; 0.9 ms to 1.2 ms; limit 1.5 ms",
        "pays: slow for 12 s, 60 s more expected; saves 1140 s of waiting, costs 34 s",
        "1.7% / 1.5%",
        "20 ms a call is 20.0 x its peers",
        "/mnt/&lt;b&gt;",
    ):
        assert part in first
    assert "it is not slow" in second
    assert ">well<" in second


def test_a_device_that_was_not_compared_is_not_listed() -> None:
    assert verdict_rows([replace(DEVICE, evidence=SlowEvidence())]) == []


def test_a_curve_lies_over_the_band_and_the_limit() -> None:
    """All within the picture, whatever the values are."""
    drawn = verdict_curve(DEVICE.latency_seconds, SEEN)
    assert drawn.count("<rect") == drawn.count("<line") == drawn.count("<polyline") == 1
    assert "band" not in verdict_curve((1e-3, 2e-3), SlowEvidence())
    assert verdict_curve((1e-3,), SEEN) == ""
    assert "nan" not in verdict_curve((0.0, 0.0), SlowEvidence())
