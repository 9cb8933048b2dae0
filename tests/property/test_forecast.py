"""Forecasts, the pure parts: what rows may be used, what features may see, what thresholds keep."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpstore.health.forecast.alarm_scores import FailedDrive, outcome, threshold_at
from hpstore.health.forecast.counter_series import increases, rises
from hpstore.health.forecast.drive_histories import DriveHistory
from hpstore.health.forecast.features import MODEL_COUNTERS, compute, feature_names
from hpstore.health.forecast.labels import labels, thinned
from hpstore.health.smart.counters import COUNTERS, INDEX

NAMES = feature_names(MODEL_COUNTERS)


@st.composite
def made_histories(draw: st.DrawFn) -> DriveHistory:
    """Days with gaps, counters that rise, fall and are missing, perhaps a failure at last."""
    days = sorted(draw(st.sets(st.integers(1, 120), min_size=1, max_size=40)))
    cells = st.one_of(st.just(float("nan")), st.integers(0, 30).map(float))
    values = np.full((len(days), len(COUNTERS)), np.nan)
    for name in draw(st.sets(st.sampled_from(MODEL_COUNTERS), min_size=1)):
        values[:, INDEX[name]] = draw(st.lists(cells, min_size=len(days), max_size=len(days)))
    failed = days[-1] if draw(st.booleans()) else None
    return DriveHistory(
        serial=draw(st.text(min_size=1, max_size=4)),
        family="F",
        days=np.array(days),
        values=values,
        failed_day=failed,
    )


@given(made_histories(), st.integers(1, 30), st.integers(0, 130), st.integers(0, 60))
def test_labels_use_no_day_whose_outcome_is_not_known(
    history: DriveHistory, horizon: int, until: int, since: int
) -> None:
    """Against the definition, a day at a time: no row on or after the failure, none whose horizon
    is not known to have been lived through, none outside (since, until]; never both."""
    found = labels(history, horizon=horizon, until=until, since=since)
    failure = history.failed_day
    known = failure is not None and failure <= until
    assert found.failed == known
    for row, day in enumerate(history.days.tolist()):
        positive = negative = False
        if since < day <= until:
            if known and failure is not None:
                positive = day < failure <= day + horizon
                negative = failure > day + horizon
            else:  # alive on day + horizon, seen by then
                negative = any(day + horizon <= d <= until for d in history.days.tolist())
        assert (found.positive[row], found.negative[row]) == (positive, negative)


@given(made_histories(), st.integers(1, 40))
def test_features_of_a_day_never_see_a_later_day(history: DriveHistory, kept: int) -> None:
    """Cut the history anywhere: what remains has the same features, to the last bit."""
    kept = min(kept, len(history.days))
    whole = compute(history.days, history.values, NAMES)[:kept]
    part = compute(history.days[:kept], history.values[:kept], NAMES)
    assert np.array_equal(whole, part, equal_nan=True)


@given(made_histories())
def test_rises_are_what_counters_gained_in_the_window(history: DriveHistory) -> None:
    """Against a walk: gains since the last row that is at least 14 and at most 21 days old."""
    days, column = history.days.tolist(), INDEX["smart_5"]
    found = rises(history.days, increases(history.values), 14)[:, column]
    for row, day in enumerate(days):
        begin = max((i for i, d in enumerate(days) if d <= day - 14), default=None)
        if begin is None or day - days[begin] > 21:
            assert np.isnan(found[row])
            continue
        gained, last = 0.0, None
        for i, value in enumerate(history.values[: row + 1, column].tolist()):
            if not np.isnan(value):
                if last is not None and i > begin:
                    gained += max(0.0, value - last)
                last = value
        assert found[row] == gained


peaks = st.lists(st.sampled_from([-np.inf, 0.0, 0.0, 1.0, 2.5, 9.0]), min_size=1, max_size=60)


@given(peaks, st.floats(0, 0.5))
def test_a_threshold_alarms_at_most_the_share_asked_for_and_no_lower_one_does(
    scores: list[float], far: float
) -> None:
    """Ties, infinities; the next lower score as a threshold would alarm too many."""
    found = threshold_at(np.array(scores), far)
    assert sum(s > found for s in scores) <= far * len(scores) + 1e-6
    lower = [s for s in scores if s < found]
    if lower:
        assert sum(s > max(lower) for s in scores) > far * len(scores) - 1e-6


@given(peaks, st.lists(peaks, min_size=1, max_size=20), st.floats(0, 0.5))
def test_outcomes_count_drives(healthy: list[float], failed: list[list[float]], far: float) -> None:
    """FDR, FAR, precision and lead days against counting by hand."""
    drives = [
        FailedDrive(days_ahead=np.arange(len(s), 0.0, -1), scores=np.array(s)) for s in failed
    ]
    threshold = threshold_at(np.array(healthy), far)
    found = outcome(
        drives,
        np.array(healthy),
        threshold,
        far=far,
        resamples=20,
        healthy_share=0.5,
        rng=np.random.default_rng(0),
    )
    detected = sum(max(s) > threshold for s in failed)
    alarms = sum(s > threshold for s in healthy)
    assert (found.fdr, found.far) == (detected / len(failed), alarms / len(healthy))
    if detected:
        leads = [
            next(len(s) - i for i, v in enumerate(s) if v > threshold)
            for s in failed
            if max(s) > threshold
        ]
        assert found.lead_days is not None
        assert found.lead_days.median == np.median(leads)
        assert found.precision == detected / (detected + alarms)
        assert found.precision_rescaled == detected / (detected + 2 * alarms)
    assert 0 <= found.fdr_interval.low <= found.fdr_interval.high <= 1


@given(made_histories(), st.integers(1, 30))
def test_thinning_keeps_one_day_in_a_stride(history: DriveHistory, stride: int) -> None:
    """Every run of `stride` days of a mask keeps exactly one, whatever the gaps."""
    days = np.arange(3 * stride)
    whole = DriveHistory(
        serial=history.serial,
        family="F",
        days=days,
        values=np.full((len(days), len(COUNTERS)), np.nan),
    )
    kept = thinned(whole, np.ones(len(days), bool), stride=stride, salt="s")
    assert kept.sum() == 3
    assert len(set(days[kept] % stride)) == 1
