"""Processes of a node share an operator's words and what devices took; the clock is the tests'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.health.detect.learnt_times import LEARNT_FILE
from hpstore.health.detect.verdicts import HealthState
from tests.integration.test_health_routing import KEYS, Slowly


@pytest.fixture
def slowly(tmp_path: Path) -> Iterator[Slowly]:
    made = Slowly(tmp_path)
    yield made
    made.pool.close()


def test_readmit_ends_a_false_verdict_in_another_process(slowly: Slowly) -> None:
    """Each judges for itself; the command reaches them all, and only those that run."""
    url = slowly.urls[1]
    slowly.latencies.slow[url] = 5.0
    slowly.until(url, HealthState.SUSPECT, 10)
    device = slowly.id_of(url)
    del slowly.latencies.slow[url]
    operator = slowly.open()
    operator.readmit(device)
    operator.close()
    slowly.clock.advance(1.0)
    slowly.pool.admin.health.tick_now()
    assert slowly.state(url) is HealthState.ONLINE
    assert slowly.pool.admin.health.snapshot().devices[device].score == 0
    reasons = [said.reason for said in slowly.pool.admin.health.snapshot().decisions]
    assert reasons[-1] == "by an operator: readmit"


def test_what_devices_took_is_known_to_the_next_process(slowly: Slowly) -> None:
    """By a file in the run directory; all devices five times as slow are seen from the start."""
    for _ in range(12):
        slowly.round()
    slowly.pool.close()
    directory = slowly.pool.admin.run_directory
    assert (directory / LEARNT_FILE).stat().st_size < 64 << 10
    slowly.latencies.slow = dict.fromkeys(slowly.urls, 5.0)
    slowly.pool = slowly.open()
    slowly.pool.admin.health.tick_now()
    slowly.read_all(KEYS)
    slowly.clock.advance(2.0)
    found = slowly.pool.admin.health.tick_now()
    ratios = [signs.past_ratio for signs in found.tick.signs.values()]
    assert min(ratios) > 3


def test_a_snapshot_has_the_evidence_of_each_verdict(slowly: Slowly) -> None:
    """Own value, peers, gain and cost; shares of time."""
    url = slowly.urls[2]
    for _ in range(10):
        slowly.round()
    slowly.latencies.slow[url] = 5.0
    slowly.until(url, HealthState.SUSPECT, 10)
    seen = slowly.pool.admin.health.snapshot().devices[slowly.id_of(url)].evidence
    assert seen.peers_high_seconds < seen.limit_seconds < seen.value_seconds
    assert seen.gain.gains
    assert 0 < seen.suspected_seconds <= seen.slow_seconds < seen.observed_seconds
