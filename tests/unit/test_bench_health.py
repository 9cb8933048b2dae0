"""The health benchmark on short traces: figures are of what they say, bars can be missed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.health import health_detector as health
from hpstore.benchmarks.health import health_groups as groups
from hpstore.benchmarks.health.health_bench import bench_health
from hpstore.benchmarks.health.health_detector import first_found, hang, load, telemetry
from hpstore.benchmarks.health.health_peers import (
    RULES,
    Autosit,
    FiveInARow,
    Hadoop,
    HpstoreDetector,
)
from hpstore.benchmarks.health.health_traces import (
    DEVICES,
    HEALTHY,
    ONSET,
    SHAPES,
    TICK_SECONDS,
    HealthTrace,
    healthy_trace,
    slow_trace,
)
from hpstore.errors import ConfigError
from hpstore.health import Traits

Row = Mapping[str, object]


def steady(factors: Mapping[int, float], ticks: int = 120) -> HealthTrace:
    """No noise; devices slow from ONSET on by their factors."""
    means = np.full((ticks, DEVICES), 2e-3) * (1 + 0.01 * np.arange(DEVICES))
    for device, factor in factors.items():
        means[ONSET:, device] *= factor
    return HealthTrace(means=means)


@pytest.mark.parametrize(
    ("rule", "factor", "tick"),
    [
        (HpstoreDetector, 3.0, ONSET + 2),
        (FiveInARow, 3.0, ONSET + 4),
        (FiveInARow, 1.9, None),
        (Hadoop, 3.5, ONSET),
        (Hadoop, 2.5, None),
        (Autosit, 10.0, None),
        (Autosit, 200.0, ONSET + 5),
    ],
)
def test_each_rule_finds_what_it_says(
    rule: type[HpstoreDetector | FiveInARow | Hadoop | Autosit], factor: float, tick: int | None
) -> None:
    """The tick of the first verdict, on the slow device alone."""
    found, _ = first_found(rule({}), steady({0: factor}))
    assert found == [tick] + [None] * (DEVICES - 1)


def test_traces_are_seeded_and_slow_from_the_onset_on() -> None:
    """The same twice; the first device alone, by its factor, and no healthy one."""
    trace = slow_trace(SHAPES["x3"], 0.3, 5)
    assert np.array_equal(trace.means, slow_trace(SHAPES["x3"], 0.3, 5).means)
    assert not np.array_equal(trace.means, slow_trace(SHAPES["x3"], 0.3, 6).means)
    before, after = trace.means[:ONSET].mean(0), trace.means[ONSET:].mean(0)
    assert after / before == pytest.approx([3.0] + [1.0] * (DEVICES - 1), rel=0.1)
    for name in HEALTHY:
        assert healthy_trace(name, 0.3, 0, 300).means.shape == (300, DEVICES)


def test_recall_and_delay_are_counted_and_a_bar_can_be_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two runs in which one device is not slow at all: half is found, and the bar is not met."""
    traces = {0: steady({0: 3.0}), 1: steady({1: 3.0})}
    monkeypatch.setattr(health, "slow_trace", lambda shape, sigma, seed: traces[seed])
    monkeypatch.setattr(health, "SHAPES", {"x3": SHAPES["x3"]})
    rows = health.slow_devices(2, {"hpstore": HpstoreDetector})
    row = rows["x3, sigma 0.3"]["hpstore"]  # type: ignore[index]  # rows of rows
    assert row == {
        "runs": 2,
        "recall": 0.5,
        "ticks_median": 3,
        "ticks_most": None,
        "sitout_recall": 0.5,
        "others_found": 1,
        "recall_in_time": 0.5,
        "bar": "recall 1.0 within 6 ticks",
        "met": False,
    }
    assert "bar" not in rows["x3, sigma 1.3"]["hpstore"]  # type: ignore[index]


def test_false_alarms_are_counted_by_device_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device found once in two traces of 120 ticks."""
    traces = {0: steady({}), 1: steady({3: 5.0})}
    monkeypatch.setattr(health, "healthy_trace", lambda name, sigma, seed, ticks: traces[seed])
    monkeypatch.setattr(health, "HEALTHY", {"plain noise": None, "single stalls of 50 ms": None})
    rows = health.healthy_devices(2, {"hpstore": HpstoreDetector}, 120)
    row = rows["plain noise, sigma 0.3"]["hpstore"]  # type: ignore[index]  # rows of rows
    days = 2 * 120 * DEVICES * TICK_SECONDS / 86400
    assert (row["alarms"], row["sitouts"], row["met"]) == (1, 1, False)
    assert row["alarms_a_device_day"] == pytest.approx(1 / days, rel=0.01)
    assert "met" not in rows["single stalls of 50 ms, sigma 0.3"]["hpstore"]  # type: ignore[index]


def test_load_is_told_from_slowness() -> None:
    """Through recorders and ticks; plain means would blame the busy device."""
    rows = load(1, 90)
    assert {name: row["found"] for name, row in rows.items()} == {  # type: ignore[index]
        "4 x the load, well, hpstore": 0,
        "4 x the load, well, plain means": 1,
        "4 x the load, x3 slow, hpstore": 1,
        "4 x the load, x3 slow, plain means": 1,
    }


def test_hangs_and_telemetry_have_figures() -> None:
    """The next ticks after 5 and 30 s; nanoseconds are positive."""
    assert hang() == {"seconds_until": {"suspect": 6.0, "faulted": 32.0}}
    assert all(isinstance(value, int) and value > 0 for value in telemetry(1, 50).values())


def test_cases_are_chosen_by_name() -> None:
    """And an unknown one is refused."""
    options = Options(directory=None, size_bytes=0, repeats=1, cases="hang")
    assert bench_health(options).keys() == {"configuration", "hang", "not_met", "not_run"}
    with pytest.raises(ConfigError, match="no case of health is called 'sl0w'"):
        bench_health(Options(directory=None, size_bytes=0, repeats=1, cases="sl0w"))
    assert RULES["hpstore"]({"d0": Traits()}).tick(0.0, {"d0": 1.0}) == (set(), set())


def test_figures_of_groups_are_of_what_they_say() -> None:
    """Verdicts by tick and device; the delay counts from the onset, the tick itself included."""
    means = steady({0: 5.0, 3: 5.0}).means
    judged = groups.JudgedTicks(means)
    assert (judged.delay(0, ONSET), judged.delay(3, ONSET), judged.delay(1, ONSET)) == (3, 3, None)
    assert judged.sitout[-1].tolist() == judged.suspect[-1].tolist()
    row = groups._found(1, 8, 3, 20, 5, 1.0)
    assert (row["recall"], row["others_found"], row["met"]) == (1.0, 0, False)


def test_pauses_are_slow_for_their_share_of_the_time() -> None:
    """5 s per 300 s; what is suspected beside is counted apart."""
    false, suspected, slow = groups._pausing(0, 1.0, 2.0, 3000.0)
    assert (false, suspected) == (0.0, 0.0)
    assert 0.01 < slow < 0.04
    seconds, out = groups._hair_trigger(0, 3)
    assert 0 < seconds < 60
    assert not out
