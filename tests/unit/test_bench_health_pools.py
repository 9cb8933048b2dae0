"""The health benchmark's pools: phases, ratios and verdicts are of what they say; clean-up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.health import health_cost, health_slow
from hpstore.benchmarks.health.health_bench import CASES, QUICK, bench_health, cases_named
from hpstore.benchmarks.health.health_durability import _row
from hpstore.benchmarks.health.health_forecast import NOT_RUN, forecast_case, forecast_verdicts
from hpstore.benchmarks.health.health_reads import ForegroundReads, Objects
from hpstore.benchmarks.health.health_rebuild import Healed, HealingFailed, Rebuild, _verdicts
from hpstore.benchmarks.health.health_rig import (
    DEVICES,
    WRAPPED,
    Rig,
    cached_bytes,
    interleaved,
    quantile,
    real_devices_problem,
)
from hpstore.benchmarks.health.health_slow import seconds_until, spoken, take
from hpstore.durability import Estimate
from hpstore.errors import ConfigError
from hpstore.health.forecast.alarm_scores import AlarmOutcome, Interval
from hpstore.health.forecast.calibration import Reliability
from hpstore.health.forecast.evaluate_model import ForecastEvaluation, ScoreResult
from hpstore.testing import ManualClock
from hpstore.testing.scratch import loops
from hpstore.units import KIB, MIB
from tests.thorough import LONG

only_long = pytest.mark.skipif(not LONG, reason="a minute: HPSTORE_LONG_TESTS=1 runs it")


def test_a_rate_is_from_the_last_batch_before_to_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten samples a second; a batch that comes after the time is over counts with its time."""
    clock = ManualClock()
    monkeypatch.setattr("hpstore.benchmarks.health.health_slow.time.monotonic", clock.monotonic)

    def batches() -> Iterator[int]:
        while True:
            clock.advance(0.3)
            yield 3

    arrivals: list[health_slow.Arrival] = []
    found = batches()
    assert take(found, 1.0, arrivals) == pytest.approx(10.0)
    when, samples = arrivals[-1]
    assert when == pytest.approx(1.2)
    assert samples == 12
    clock.advance(2.0)  # somebody is slow between two of them
    assert take(found, 0.1, arrivals) == pytest.approx(3 / 2.3)


def test_throughput_is_back_when_it_lasts() -> None:
    """One good half second in between is none."""
    rates = [100.0] * 10 + [10.0] * 6 + [100.0] + [10.0] * 4 + [90.0] * 12  # a half second each
    total, arrivals = 0.0, [(0.0, 0)]
    for number, rate in enumerate(rates, 1):
        total += rate / 2
        arrivals.append((number / 2, int(total)))
    assert seconds_until(arrivals, 5.0, 85.0) == pytest.approx(5.5)
    assert seconds_until(arrivals, 5.0, 95.0) is None
    assert spoken([5.5, None]) == [5.5, "never"]


def test_runs_take_turns_and_those_with_fewer_repeats_end_first() -> None:
    runs = {"a": lambda: 1, "b": lambda: 2}
    assert list(interleaved(runs, {"a": 3, "b": 1})) == [("a", 1), ("b", 2), ("a", 1), ("a", 1)]


def test_a_quantile_is_one_of_the_values_and_no_mean() -> None:
    assert quantile([float(x) for x in range(1, 101)], 0.99) == 100.0
    assert quantile([1.0], 0.99) == 1.0


def test_what_is_in_the_page_cache_is_seen(drive: Path) -> None:
    """All of a file that was just written through it; nothing of one that was dropped."""
    path = drive / "file"
    path.write_bytes(os.urandom(512 * KIB))
    assert cached_bytes(path) == 512 * KIB
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cached_bytes(path) == 0
    (drive / "empty").touch()
    assert cached_bytes(drive / "empty") == 0


def test_directories_stand_in_where_no_device_can_be_slow(tmp_path: Path) -> None:
    """It says so, the first one is slow, for pools that are open and for those opened later; a
    limit ends with the block."""
    with Rig(tmp_path, device_bytes=MIB, problem="needs root") as rig:
        assert (rig.kind, rig.problem) == (WRAPPED, "needs root")
        rig.create("p")
        with rig.open("p", monitor=False) as pool, rig.relieved():
            first = pool._store.view.devices[rig.first(pool)]
            assert str(rig.places[0]) in first.url
            assert not first.slow  # type: ignore[attr-defined]  # a SlowableDevice
            rig.slow()
            assert first.slow  # type: ignore[attr-defined]
            with rig.open("p", monitor=False, read_only=True) as later:
                assert later._store.view.devices[rig.first(later)].slow  # type: ignore[attr-defined]
        assert not first.slow  # type: ignore[attr-defined]
        rig.drop("p")
        assert [list(place.iterdir()) for place in rig.places] == [[]] * DEVICES


def test_a_disk_that_is_too_small_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give another --directory"):
        Rig(tmp_path, device_bytes=1 << 60, problem="x")
    assert not list(tmp_path.iterdir())


def test_foreground_reads_are_timed_and_their_errors_raised(tmp_path: Path) -> None:
    """By kind, and by when they began; a pool that is closed underneath is an error."""
    objects = Objects(count=1, stripes=1)
    with Rig(tmp_path, device_bytes=MIB, problem="x") as rig:
        rig.create("p")
        with rig.open("p", monitor=False) as pool:
            objects.write(pool)
            with ForegroundReads(pool, objects, seed=1) as reads:
                while len({read.kind for read in reads.ended}) < 2:
                    reads._stop.wait(0.01)
            assert all(0 < value < 1e5 for value in reads.p99(0.0, 1e18).values())
            assert all(value != value for value in reads.p99(0.0, 0.0).values())  # NaN: none
            pool.delete(objects.keys[0])
            failing = ForegroundReads(pool, objects, seed=2)
            with pytest.raises(Exception, match="was deleted"):
                failing.close()


def test_bandwidth_is_held_against_what_was_allowed() -> None:
    """Four fifths of it are met; a p99 of twice the one before is not; the one before the loss has
    no bar."""
    p99 = {
        "well": {"stripe": 4.0, "64 KiB": 1.0},
        "lost": {"stripe": 5.0, "64 KiB": 2.0},
        "during": {"stripe": 10.0, "64 KiB": 2.0},
    }
    one = {
        "allowed": {"alone": 0.8},
        "p99": {"": p99},
        "full": 100e6,
        "load": 0.1,
        "beside": {"rate": 24e6, "seconds": 3.0},
    }
    rows = _verdicts([one])
    assert rows["bandwidth_to_allowed, alone"]["met"] is True
    assert rows["p99_of_stripe, to before it began"]["median"] == 2.0
    assert rows["p99_of_stripe, to before it began"]["met"] is False
    assert rows["p99_of_64 KiB, to before it began"]["met"] is True
    assert "met" not in rows["p99_of_64 KiB, to before the loss"]
    assert rows["beside_readers_to_share_of_full_speed"] == pytest.approx(0.8)
    assert Healed(began=1.0, ended=3.5).seconds == 2.5
    assert _verdicts([]) == {"skipped": "not asked for"}


def evaluation(judged_by: str, predicted: float, **fdr: float) -> ForecastEvaluation:
    def outcome(value: float) -> AlarmOutcome:
        interval = Interval(low=0.0, high=1.0)
        return AlarmOutcome(
            threshold=1.0,
            fdr=value,
            fdr_interval=interval,
            far=0.01,
            far_interval=interval,
            precision=None,
            precision_interval=None,
            precision_rescaled=None,
            lead_days=None,
            failed=10,
            detected=5,
            earlier=0,
            earlier_hits=0,
            healthy=100,
            false_alarms=1,
            fdr_strict=value,
            fdr_strict_interval=interval,
            false_alarms_strict=1,
            precision_strict=None,
        )

    scores = {
        name: ScoreResult(
            at_far=outcome(value),
            fitted=outcome(value),
            over_sum=value - fdr["sum"],
            over_sum_interval=Interval(low=-0.1, high=0.1),
            over_sum_fitted=value - fdr["sum"],
            over_sum_fitted_interval=Interval(low=-0.1, high=0.1),
            far_over_sum_fitted=0.0,
            far_over_sum_fitted_interval=Interval(low=-0.1, high=0.1),
        )
        for name, value in fdr.items()
    }
    return ForecastEvaluation(
        far=0.01,
        horizon_days=14,
        after="",
        until="",
        healthy_drives=100,
        failed_drives=10,
        no_signal=0,
        failed_too_early=0,
        not_looked_at=0,
        refused={},
        scores=scores,
        judged_by=judged_by,
        flags=outcome(0.0),
        families={},
        reliability=Reliability(bins=(), predicted_days=predicted, observed_days=100),
        healthy_share=1.0,
        seed=0,
    )


@pytest.mark.parametrize(
    ("judged_by", "model", "met"),
    [
        ("sum", 0.9, True),
        ("model", 0.46, True),
        ("model", 0.43, False),
        ("model", 0.9, False),
    ],
)
def test_what_alarms_come_from_finds_no_less_than_the_sum(
    judged_by: str, model: float, met: bool
) -> None:
    """What is not used has no bar; 0.9 is too good to be true."""
    rows = forecast_verdicts(evaluation(judged_by, 100.0, model=model, rule=0.44, sum=0.44))
    assert [name for name in ("model", "rule", "sum") if "met" in rows[name]] == [judged_by]
    assert rows[judged_by]["met"] is met


@pytest.mark.parametrize(("predicted", "met"), [(100.0, True), (210.0, False), (40.0, False)])
def test_probabilities_that_are_twice_off_miss_their_bar(predicted: float, met: bool) -> None:
    """In either direction."""
    rows = forecast_verdicts(evaluation("sum", predicted, model=0.4, rule=0.4, sum=0.4))
    assert rows["probabilities"]["met"] is met


def test_durability_figures_lie_where_simulations_do() -> None:
    """All four meet their bar; a figure that is twice as high does not."""
    found = bench_health(Options(directory=None, size_bytes=0, repeats=1, cases="durability"))
    rows = found["durability"]
    assert isinstance(rows, dict)
    assert len(rows) == 4
    assert not found["not_met"]
    low, high = rows["independent"]["simulated_95"]
    wrong = _row(2 * rows["independent"]["formula"], Estimate(value=low, low=low, high=high))
    assert wrong["met"] is False


def test_without_files_no_forecast_is_made() -> None:
    """And the results say so."""
    assert forecast_case([]) == {"skipped": NOT_RUN}
    found = bench_health(Options(directory=None, size_bytes=0, repeats=1, cases="forecast"))
    assert found["not_run"] == {"forecast": NOT_RUN}
    assert cases_named("") == list(CASES)
    assert cases_named("reads, slow") == ["slow", "reads"]


@only_long
def test_an_agent_that_cannot_open_the_pool_is_an_error_not_a_figure(tmp_path: Path) -> None:
    from hpstore.benchmarks.health import health_rebuild

    with (
        pytest.raises(HealingFailed, match="ConfigError"),
        health_rebuild._agent(tmp_path / "none.toml", health_rebuild.FULL),
    ):
        pass


SMALL = replace(
    QUICK,
    data_bytes=24 * MIB,
    objects=Objects(count=2, stripes=1),
    phases=health_slow.RunPhases(warm=0.1, healthy=0.3, found=0.5, found_off=0.1, counted=0.3),
    pattern=replace(
        QUICK.pattern,
        state_bytes=4 * MIB,
        every_seconds=0.1,
        found_seconds=0.5,
        objects=Objects(count=1, stripes=1),
    ),
    plan=replace(QUICK.plan, objects=Objects(count=2, stripes=1), quiet_seconds=0.3),
    small_seconds=0.3,
    turns=1,
    turn_seconds=0.2,
    hour_ticks=100,
)


@only_long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("real", [True, False])
def test_all_cases_have_figures_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, real: bool
) -> None:
    """On loop devices where they can be had, and on directories; no bar is looked at."""
    from hpstore.benchmarks.health import health_bench, health_rig

    problem = real_devices_problem(tmp_path)
    if real and problem:
        pytest.skip(problem)
    if not real:
        monkeypatch.setattr(health_rig, "real_devices_problem", lambda root: "not wanted")
    monkeypatch.setattr(health_bench, "QUICK", SMALL)
    before = loops()
    kept: list[object] = []
    found = bench_health(
        Options(directory=tmp_path, size_bytes=0, repeats=1, quick=True, keep=kept.append)
    )
    assert found.keys() >= {*CASES, "devices", "data", "not_met", "not_run"}
    assert found["devices"]["why_not_real"] == ("" if real else "not wanted")  # type: ignore[index]
    assert found["data"]["in_page_cache"] == 0.0  # type: ignore[index]
    for case in ("window", "global"):
        assert found[case]["monitor on"]["slow_samples_per_second"] > 0  # type: ignore[index]
    assert not [r for r in caplog.records if "cannot be read" in r.message]
    assert len(kept) == len(CASES)
    assert loops() == before
    assert not list(tmp_path.iterdir())


def test_a_cost_is_of_turns_that_change_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, on; on, off: who comes first has no advantage. 1 % less is met, 2 % less is not."""
    order: list[bool] = []

    def turn(scene: object, shuffle: str, seconds: float, *, monitor: bool) -> tuple[float, float]:
        order.append(monitor)
        return (99.0 if shuffle == "global" else 98.0) if monitor else 100.0, 20.0

    monkeypatch.setattr(health_cost, "_turn", turn)
    found = health_cost.cost_case(None, 2, 1.0, lambda shuffle: None)  # type: ignore[arg-type]
    assert order == [False, True, True, False] * 2
    assert found["global"]["on_to_off"]["met"] is True
    assert found["window"]["on_to_off"]["met"] is False


def test_a_rebuild_that_leaves_something_is_an_error(tmp_path: Path) -> None:
    """Columns of a device that nobody has made again."""
    from hpstore.benchmarks.health.health_rebuild import RebuildPlan

    with Rig(tmp_path, device_bytes=MIB, problem="x") as rig:
        healing = Rebuild(rig, RebuildPlan(objects=Objects(count=1, stripes=1)))
        assert healing._lose_columns() > MIB
        with pytest.raises(HealingFailed, match="1 objects are degraded"):
            healing._require_whole()
