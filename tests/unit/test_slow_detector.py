"""Rules of the slow detector one by one: bucket, vetoes, floors, hangs, errors, probation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.health import HealthState, Media, Signs, SlowConfig, SlowDetector, Traits
from hpstore.health.detect.outlier_fence import fence_of, points

SUSPECT, SITOUT, FAULTED = HealthState.SUSPECT, HealthState.SITOUT, HealthState.FAULTED


def means(slow: Mapping[str, float], count: int = 8, usual: float = 2e-3) -> dict[str, float]:
    """`count` devices that differ by a few per cent, `slow` ones by their factors."""
    return {f"d{i}": usual * (1 + 0.02 * (i % 4)) * slow.get(f"d{i}", 1.0) for i in range(count)}


class Run:
    """A detector and its clock."""

    def __init__(self, **traits: Traits) -> None:
        self.detector, self.now = SlowDetector(traits=traits), 0.0

    def tick(
        self,
        slow: Mapping[str, float],
        *,
        times: int = 1,
        count: int = 8,
        usual: float = 2e-3,
        **more: object,
    ) -> dict[str, HealthState]:
        """States of the last of `times` ticks, two seconds apart."""
        for _ in range(times):
            self.now += 2.0
            found = self.detector.tick(
                self.now,
                means(slow, count, usual),
                **more,  # type: ignore[arg-type]
            )
        return {v.device: v.state for v in found}


def test_fence_is_q3_and_three_widths() -> None:
    """Quartiles as numpy has them; the floor stands in for peers that hardly differ."""
    fence = fence_of([1.0, 2.0, 3.0, 4.0, 5.0], widths=3, floor=0.25)
    assert (fence.limit, fence.middle, fence.width) == (4 + 3 * 2, 3, 2)
    assert fence_of([4.0] * 5, widths=3, floor=0.25).limit == 4 + 3 * 1
    assert fence_of([4.0] * 5, widths=3, floor=0.25, noise=0.5).limit == 4 + 3 * 2
    assert fence_of([7.0], widths=3, floor=0.0).limit == 7


@pytest.mark.parametrize(
    ("value", "gain"), [(10.0, 0.0), (10.5, 1.0), (13.0, 1.5), (20.0, 5.0), (1e9, 5.0)]
)
def test_points_are_from_one_to_five(value: float, gain: float) -> None:
    """Excess over the fence in widths of the peers."""
    fence = fence_of([1.0, 2.0, 3.0, 4.0, 5.0], widths=3, floor=0.25)
    assert points(value, fence, ratio_least=1.5, excess_least=0.1) == gain


def test_points_need_ratio_and_excess() -> None:
    """Beyond the fence is not enough."""
    fence = fence_of([1.0, 1.0, 1.0], widths=3, floor=0.01)
    assert points(1.4, fence, ratio_least=1.5, excess_least=0.1) == 0
    assert points(1.6, fence, ratio_least=1.5, excess_least=0.7) == 0
    assert points(1.6, fence, ratio_least=1.5, excess_least=0.6) > 0


def test_a_slow_device_is_suspect_then_to_sit_out() -> None:
    """And the reason says by how much, and against whom."""
    run = Run()
    assert run.tick({}, times=20) == {}
    states = [run.tick({"d3": 5.0}).get("d3") for _ in range(8)]
    assert states == sorted(states, key=(None, SUSPECT, SITOUT).index)
    assert states[-1] is SITOUT
    (verdict,) = run.detector.tick(run.now + 2, means({"d3": 5.0}))
    assert verdict.score > 20
    assert verdict.reason == "10.6 ms a call is 5.2 x the median of its peers, 3.6 x lately"


def test_a_score_halves_in_ten_minutes_and_a_suspect_is_let_go_below_five() -> None:
    """Not at 10, where it became one."""
    run = Run()
    while run.detector.score("d0") <= 10.5:
        run.tick({"d0": 5.0})
    run.detector.forget("d1")
    score, levels = run.detector.score("d0"), []
    for _ in range(40):
        run.now += 60
        found = run.detector.tick(run.now, {})
        levels.append((run.detector.score("d0"), bool(found)))
    assert levels[9][0] == pytest.approx(score / 2)
    assert all(found == (level > 5) for level, found in levels)
    assert any(5 < level < 10 for level, _ in levels)


def test_points_of_others_drain_a_bucket() -> None:
    """Two for each n points: noise that all share fills nobody's bucket."""
    run = Run()
    run.tick({"d0": 20.0}, times=3)
    full = run.detector.score("d0")
    run.tick({"d1": 20.0}, times=3)
    assert run.detector.score("d0") < full - 2
    for turn in range(400):
        assert run.tick({f"d{turn % 8}": 8.0}, usual=1e-2).keys() <= {"d0", "d1"}
    assert run.tick({}) == {}


def test_two_slow_devices_do_not_mask_each_other() -> None:
    """Every outlier gets points, not the worst alone."""
    run = Run()
    run.tick({}, times=20)
    assert run.tick({"d2": 4.0, "d5": 9.0}, times=8) == {"d2": SITOUT, "d5": SITOUT}


def test_devices_found_slow_are_no_reference_for_others() -> None:
    """One after the other, three of eight are found; at once, they are a shared cause."""
    run = Run()
    run.tick({}, times=20)
    slow: dict[str, float] = {}
    for device in ("d1", "d4", "d6"):
        slow[device] = 4.0
        found = run.tick(slow, times=10)
        assert found.keys() == slow.keys()
    other = Run()
    other.tick({}, times=20)
    assert other.tick(slow, times=10) == {}


def test_a_rise_of_the_median_is_a_shared_cause() -> None:
    """One device is worse off than the others, and is not blamed for the burst."""
    run = Run()
    run.tick({}, times=20)
    burst = {f"d{i}": 4.0 for i in range(7)} | {"d7": 30.0}
    assert run.tick(burst, times=10) == {}
    assert run.detector.shared_slow == 10
    assert run.detector.score("d7") == 0


def test_one_odd_tick_in_the_beginning_is_no_baseline() -> None:
    """A first tick from some cache would make all later ones a shared cause."""
    run = Run()
    run.tick({}, usual=1e-4)
    run.tick({}, times=14)
    assert run.tick({"d7": 5.0}, times=5) == {"d7": SITOUT}
    assert run.detector.shared_slow == 0


def test_new_outliers_on_one_link_are_its_fault_for_five_minutes() -> None:
    """Then they are slow themselves. A lone one on the link is found at once."""
    linked = {f"d{i}": Traits(link="a" if i < 4 else "b") for i in range(8)}
    run = Run(**linked)
    run.tick({}, times=20)
    assert run.tick({"d0": 5.0, "d1": 5.0}, times=150) == {}
    assert run.detector.shared_slow == 150
    assert run.tick({"d0": 5.0, "d1": 5.0}, times=10) == {"d0": SITOUT, "d1": SITOUT}
    alone = Run(**linked)
    alone.tick({}, times=20)
    assert alone.tick({"d0": 5.0}, times=8) == {"d0": SITOUT}


@pytest.mark.parametrize(
    ("media", "usual", "slow"),
    [
        (Media.NVME, 1e-4, False),
        (Media.NVME, 4e-4, True),
        (Media.SSD, 4e-4, False),
        (Media.SSD, 2e-3, True),
        (Media.HDD, 2e-3, False),
        (Media.HDD, 2e-2, True),
        (Media.REMOTE, 2e-3, False),
    ],
)
def test_a_small_excess_never_matters(media: Media, usual: float, slow: bool) -> None:
    """200 us, 1 ms, 10 ms: twice the peers' time is nothing below."""
    run = Run(**{f"d{i}": Traits(media=media) for i in range(8)})
    found = run.tick({"d0": 2.2}, times=15, usual=usual)
    assert bool(found) == slow


def test_media_are_not_compared_and_models_only_when_there_are_few() -> None:
    """A hard disk among SSDs is no outlier; five of a slower model are each other's peers."""
    disk = {f"d{i}": Traits(media=Media.SSD if i else Media.HDD) for i in range(8)}
    assert Run(**disk).tick({"d0": 20.0}, times=100) == {}
    models = {f"d{i}": Traits(media=Media.SSD, model="A" if i < 5 else "B") for i in range(10)}
    slower = {f"d{i}": 4.0 for i in range(5)}
    run = Run(**models)
    assert run.tick(slower, times=100, count=10) == {}
    assert run.tick(slower | {"d0": 16.0}, times=8, count=10) == {"d0": SITOUT}


def test_few_devices_of_a_model_are_compared_with_all_of_their_media() -> None:
    """Nobody escapes for being the only one of its kind."""
    run = Run(**{f"d{i}": Traits(media=Media.SSD, model="B" if i else "A") for i in range(8)})
    assert run.tick({"d0": 5.0}, times=8) == {"d0": SITOUT}


def test_one_freeze_is_not_enough_and_counts_once() -> None:
    """A tick a thousand times too long gives five points, once."""
    run = Run()
    run.tick({}, times=20)
    run.tick({"d0": 1000.0})
    assert run.detector.score("d0") == 5
    run.tick({}, times=5)
    assert run.detector.score("d0") < 5


def test_a_single_tick_gets_half_its_ratio_at_the_most() -> None:
    """Three stalls within ten minutes make no suspect, where three slow ticks in a row do."""
    run = Run()
    run.tick({}, times=20)
    run.tick({"d0": 2.6})
    assert 1.2 < run.detector.score("d0") < 1.3
    for _ in range(2):
        run.tick({}, times=60)
        assert run.tick({"d0": 2.6}) == {}
    assert run.detector.score("d0") < 4
    assert run.tick({"d0": 2.6}, times=4).keys() == {"d0"}


def test_scores_are_the_same_to_the_last_bit_in_any_order() -> None:
    """Sums over devices are made in the order of names."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        slow = {f"d{i}": float(rng.uniform(1.6, 3.0)) for i in (1, 4, 7)}
        tick = means(slow, 12)
        scores = []
        for order in (list(tick), list(tick)[::-1]):
            detector = SlowDetector()
            detector.tick(0.0, {device: tick[device] for device in order})
            scores.append([detector.score(device) for device in tick])
        assert scores[0] == scores[1]
        assert max(scores[0]) > 0


def test_what_was_accepted_is_normal_until_it_gets_worse() -> None:
    """For a device that is slower by nature and whose traits do not say so."""
    run = Run()
    with pytest.raises(ValueError, match="device d0 was in no tick"):
        run.detector.accept("d0")
    assert run.tick({"d0": 10.0}, times=10) == {"d0": SITOUT}
    assert run.detector.accept("d0") == pytest.approx(9.7, abs=0.3)
    assert run.tick({"d0": 10.0}, times=100) == {}
    assert run.tick({"d0": 40.0}, times=8) == {"d0": SITOUT}


def test_a_forgiven_device_starts_anew() -> None:
    """Score and errors are gone."""
    run = Run()
    run.tick({"d0": 10.0}, times=10)
    run.tick({}, signs={"d0": Signs(io_errors=10)})
    run.detector.forgive("d0")
    run.detector.forgive("unknown")
    assert run.tick({}) == {}
    assert run.detector.score("d0") == 0


def test_on_probation_two_values_beyond_the_fence_are_enough() -> None:
    """One is not; without probation neither."""
    run = Run()
    run.tick({}, times=20)
    assert run.tick({"d0": 4.0}, watched=["d0"]) == {}
    run.tick({}, times=10, watched=["d0"])
    assert run.tick({"d0": 4.0}, watched=["d0"]) == {"d0": SUSPECT}
    assert run.tick({}) == {}


@pytest.mark.parametrize(
    ("sign", "state"),
    [
        (Signs(oldest_seconds=5.0), None),
        (Signs(oldest_seconds=5.1), SUSPECT),
        (Signs(oldest_seconds=11.0, usual_seconds_p999=0.6), None),
        (Signs(oldest_seconds=13.0, usual_seconds_p999=0.6), SUSPECT),
        (Signs(oldest_seconds=30.1, usual_seconds_p999=9.0), FAULTED),
    ],
)
def test_a_call_that_hangs_tells_at_once(sign: Signs, state: HealthState | None) -> None:
    """5 s or 20 times the device's own p99.9; 30 s whatever is usual."""
    found = SlowDetector().tick(0.0, {}, {"d0": sign})
    assert [v.state for v in found] == ([state] if state else [])


def test_ten_errors_within_ten_minutes_fault_a_device() -> None:
    """Nine do not, nor ten over a longer time; checksum errors make it suspect."""
    run = Run()
    assert run.tick({}, signs={"d0": Signs(io_errors=9)}) == {}
    run.now += 601
    assert run.tick({}, signs={"d0": Signs(io_errors=9)}) == {}
    assert run.tick({}, signs={"d0": Signs(io_errors=1)}) == {"d0": FAULTED}
    run.now += 601
    assert run.tick({}) == {}
    assert run.tick({}, signs={"d1": Signs(checksum_errors=100)}) == {"d1": SUSPECT}


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    """With the device's name."""
    with pytest.raises(ValueError, match="device d7"):
        SlowDetector().tick(0.0, {"d7": value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"fence_widths": 0},
        {"suspect_score": 30},
        {"half_life_seconds": math.inf},
        {"group_least": 2},
        {"smoothing_ratio": 1.5},
    ],
)
def test_thresholds_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    """At once, not at the first slow device."""
    with pytest.raises(ConfigError):
        SlowConfig(**wrong)  # type: ignore[arg-type]


def test_a_clock_that_goes_back_stands_still() -> None:
    """Scores do not grow by it."""
    run = Run()
    run.tick({"d0": 5.0}, times=4)
    score = run.detector.score("d0")
    run.detector.tick(run.now - 1e6, {})
    assert run.detector.score("d0") == score
