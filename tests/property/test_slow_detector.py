"""The slow detector on any ticks: what it never says, what it does not depend on, what it finds."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpstore.health import DeviceVerdict, HealthState, SlowConfig, SlowDetector

Ticks = list[dict[str, float]]

seconds = st.floats(1e-5, 10.0)
seeds = st.integers(0, 2**32 - 1)
TINY = SlowConfig(excess_nvme_seconds=1e-300)  # no absolute floor


@st.composite
def ticks(draw: st.DrawFn, least: int = 1, most: int = 12) -> Ticks:
    """Ticks of a pool of which some devices may be idle."""
    names = [f"d{i}" for i in range(draw(st.integers(least, most)))]
    one = st.dictionaries(st.sampled_from(names), seconds, min_size=0)
    return draw(st.lists(one, max_size=30))


def pool_ticks(seed: int, count: int, number: int, noise: float = 0.1) -> Ticks:
    """Log-normal means of `count` devices around 2 ms."""
    rng = np.random.default_rng(seed)
    means = 2e-3 * rng.lognormal(0, noise, (number, count))
    return [{f"d{i}": float(m) for i, m in enumerate(row)} for row in means]


def run(given_ticks: Ticks, detector: SlowDetector | None = None) -> list[list[DeviceVerdict]]:
    """Verdicts tick by tick, two seconds apart."""
    judge = detector or SlowDetector()
    return [judge.tick(2.0 * number, tick) for number, tick in enumerate(given_ticks)]


@given(ticks(most=4))
def test_fewer_than_five_devices_are_never_told_to_sit_out(given_ticks: Ticks) -> None:
    """Also after they were calibrated on themselves: without peers, suspect is the most."""
    detector = SlowDetector(SlowConfig(alone_ticks=2))
    states = {v.state for verdicts in run(given_ticks, detector) for v in verdicts}
    assert states <= {HealthState.SUSPECT}


@given(st.lists(seconds, max_size=40))
def test_a_lone_device_of_which_nothing_is_known_is_not_judged_at_first(times: list[float]) -> None:
    """Eight ticks within its limit come first, however its times jump."""
    verdicts = run([{"d0": value} for value in times])
    assert not any(verdicts[:8])


@given(ticks(least=5), st.randoms(use_true_random=False))
def test_verdicts_do_not_depend_on_the_order_of_devices(given_ticks: Ticks, rng: object) -> None:
    """The same, to the last bit of the score."""
    shuffled = []
    for tick in given_ticks:
        items = list(tick.items())
        rng.shuffle(items)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
        shuffled.append(dict(items))
    assert run(given_ticks) == run(shuffled)


@given(ticks(least=5), st.integers(-20, 20))
def test_scaling_all_times_changes_no_verdict_but_by_the_floors(
    given_ticks: Ticks, exponent: int
) -> None:
    """By a power of two, which is exact; with the absolute floors out of the way."""
    scaled = [{d: math.ldexp(m, exponent) for d, m in tick.items()} for tick in given_ticks]
    before = run(given_ticks, SlowDetector(TINY))
    after = run(scaled, SlowDetector(TINY))
    assert [[(v.device, v.state, v.score) for v in verdicts] for verdicts in before] == [
        [(v.device, v.state, v.score) for v in verdicts] for verdicts in after
    ]


@given(
    st.integers(5, 12),
    st.lists(st.lists(st.floats(1.0, 1.49), min_size=12, max_size=12)),
    st.floats(1e-4, 1.0),
)
def test_devices_within_half_again_of_each_other_are_never_slow(
    count: int, rows: list[list[float]], usual: float
) -> None:
    """The ratio floor is 1.5, whatever the fence says."""
    given_ticks = [{f"d{i}": usual * row[i] for i in range(count)} for row in rows]
    assert not any(run(given_ticks))


@given(seeds, st.integers(5, 12), st.floats(3.0, 50.0), st.integers(0, 40))
def test_a_slow_device_among_five_or_more_is_found_within_six_ticks(
    seed: int, count: int, factor: float, onset: int
) -> None:
    """Three times or more, from the first tick or from a later one; nobody else is named."""
    given_ticks = pool_ticks(seed, count, onset + 6)
    for tick in given_ticks[onset:]:
        tick["d1"] *= factor
    verdicts = run(given_ticks)
    assert not any(verdicts[:onset])
    assert [v.device for v in verdicts[-1]] == ["d1"]
    assert {v.device for found in verdicts for v in found} == {"d1"}


@given(seeds, st.integers(1, 4), st.floats(5.0, 50.0), st.integers(0, 40))
def test_a_slow_device_among_four_or_fewer_is_suspect_within_ten_ticks(
    seed: int, count: int, factor: float, onset: int
) -> None:
    """By its peers, from the start, too; a lone one by its own first ticks."""
    onset = max(onset, 12) if count == 1 else onset
    given_ticks = pool_ticks(seed, count, onset + 10)
    for tick in given_ticks[onset:]:
        tick["d0"] *= factor
    verdicts = run(given_ticks)
    assert not any(verdicts[:onset])
    assert [(v.device, v.state) for v in verdicts[-1]] == [("d0", HealthState.SUSPECT)]


@given(seeds, st.integers(5, 20), st.floats(5.0, 50.0), st.integers(0, 30), st.data())
def test_slow_devices_below_half_are_all_found_and_no_other(
    seed: int, count: int, factor: float, onset: int, data: st.DataObject
) -> None:
    """They hide neither each other nor themselves, from the start or later."""
    most = (count - 1) * 2 // 5
    slow = {
        f"d{i}" for i in data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=most))
    }
    given_ticks = pool_ticks(seed, count, onset + 8)
    for tick in given_ticks[onset:]:
        tick.update({device: tick[device] * factor for device in slow})
    verdicts = run(given_ticks)
    assert not any(verdicts[:onset])
    assert {v.device for v in verdicts[-1]} == slow
    assert {v.device for found in verdicts for v in found} == slow


@given(seeds, st.integers(5, 9), st.floats(1.0, 100.0), st.integers(5, 15))
def test_a_slow_down_that_all_share_names_nobody(
    seed: int, count: int, factor: float, length: int
) -> None:
    """All devices at once, for a while, and back."""
    given_ticks = pool_ticks(seed, count, 15 + length + 8)
    for tick in given_ticks[15 : 15 + length]:
        for device in tick:
            tick[device] *= factor
    assert not any(run(given_ticks))


@given(ticks(), st.integers(0, 4), seconds)
def test_scores_stay_within_their_bounds(given_ticks: Ticks, which: int, value: float) -> None:
    """From 0 to the limit, whatever comes."""
    detector = SlowDetector()
    for number, tick in enumerate(given_ticks):
        detector.tick(2.0 * number, tick | {f"d{which}": value})
        for device in tick:
            assert 0 <= detector.score(device) <= detector.config.score_most
