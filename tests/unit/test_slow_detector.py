"""Rules of the slow detector one by one: score, vetoes, floors, hangs, errors, probation."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from hpstore.errors import ConfigError
from hpstore.health import (
    DeviceVerdict,
    HealthState,
    Media,
    Signs,
    SlowConfig,
    SlowDetector,
    Traits,
)
from hpstore.health.detect.slow_episodes import SlowEpisodes

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
        every: float = 2.0,
        **more: object,
    ) -> dict[str, HealthState]:
        """States of the last of `times` ticks, `every` seconds apart."""
        found: list[DeviceVerdict] = []
        for _ in range(times):
            self.now += every
            found = self.detector.tick(
                self.now,
                means(slow, count, usual),
                **more,  # type: ignore[arg-type]
            )
        return {v.device: v.state for v in found}


def test_a_slow_device_is_suspect_then_to_sit_out() -> None:
    """After three ticks, and after half a minute; the reason says by how much, against whom."""
    run = Run()
    assert run.tick({}, times=20) == {}
    states = [run.tick({"d3": 5.0}).get("d3") for _ in range(20)]
    assert states == [None] * 2 + [SUSPECT] * 15 + [SITOUT] * 3
    (verdict,) = run.detector.tick(run.now + 2, means({"d3": 5.0}))
    assert verdict.score == 15
    assert verdict.reason == "10.6 ms a call is 5.2 x its peers, 5.1 x lately"


def test_a_device_is_let_go_as_fast_as_it_was_found() -> None:
    """Three ticks in, four out; not at the level where it became suspect."""
    run = Run()
    run.tick({}, times=20)
    found = [bool(run.tick({"d0": 5.0})) for _ in range(60)]
    assert found.index(True) == 2
    scores, states = [], []
    for _ in range(6):
        states.append(bool(run.tick({})))
        scores.append(run.detector.score("d0"))
    assert states.index(False) <= 3
    assert all(state == (score >= 5) for state, score in zip(states, scores, strict=True))


def test_a_score_of_a_device_that_does_nothing_halves_in_a_minute() -> None:
    """Without values nothing else would end the suspicion."""
    run = Run()
    while run.detector.score("d0") < 10.0:
        run.tick({"d0": 5.0})
    score = run.detector.score("d0")
    run.now += 60
    assert run.detector.tick(run.now, {})[0].device == "d0"
    assert run.detector.score("d0") == pytest.approx(score / 2)
    run.now += 60
    assert run.detector.tick(run.now, {}) == []


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("factor", [3.0, 5.0, 20.0])
def test_one_of_few_devices_that_was_slow_from_the_start_is_found(
    count: int, factor: float
) -> None:
    """Its peers tell, though they are few; it is read less, and never sits out."""
    run = Run()
    assert run.tick({"d0": factor}, times=6, count=count) == {"d0": SUSPECT}
    assert run.tick({"d0": factor}, times=60, count=count) == {"d0": SUSPECT}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_onset_within_the_first_ticks_is_found(count: int) -> None:
    """Nothing has been learnt by then but what the others take."""
    run = Run()
    run.tick({}, times=4, count=count)
    assert run.tick({"d1": 5.0}, times=4, count=count).keys() == {"d1"}


@pytest.mark.parametrize(("count", "slow"), [(8, 3), (12, 4), (24, 7), (20, 9)])
@pytest.mark.parametrize("before", [0, 30])
def test_many_that_turn_slow_together_are_all_found(count: int, slow: int, before: int) -> None:
    """The faster ones are the reference: they hide nobody, below half of the devices."""
    run = Run()
    run.tick({}, times=before, count=count)
    many = {f"d{i}": 20.0 for i in range(slow)}
    assert run.tick(many, times=6, count=count).keys() == many.keys()


@pytest.mark.parametrize("every", [1.0, 2.0])
def test_five_seconds_of_slowness_lead_to_no_minutes_of_verdict(every: float) -> None:
    """Four times as slow: a verdict for some seconds at the most, and no sit-out."""
    run = Run()
    run.tick({}, times=60, every=every)
    slow = round(5 / every)
    states = [run.tick({"d0": 4.0}, every=every).get("d0") for _ in range(slow)]
    states += [run.tick({}, every=every).get("d0") for _ in range(60)]
    assert SITOUT not in states
    assert states.count(SUSPECT) * every <= 8


def test_pauses_that_end_by_themselves_are_learnt() -> None:
    """After a few of them a device is no more avoided for what is over before that gains; one that
    lasts longer is found, also then."""
    run = Run()
    run.tick({}, times=60, every=1.0)
    found = []
    for pause in range(12):
        slow = {f"d{pause % 8}": 4.0}
        states = [run.tick(slow, every=1.0) for _ in range(5)]
        states += [run.tick({}, every=1.0) for _ in range(55)]
        found.append(any(states))
    assert found[0]
    assert not any(found[4:])
    assert run.tick({"d3": 4.0}, times=8, every=1.0).keys() == {"d3"}


def test_acting_gains_by_what_is_left_of_an_episode() -> None:
    """Where others of the same length ended, nothing is; where they went on, or none is known,
    there is much. What is hardly slow gains less than the detour costs."""
    config, episodes = SlowConfig(), SlowEpisodes()
    assert episodes.gain(0.0, 3.0, 4.0, config).gains
    assert not episodes.gain(0.0, 3.0, 1.4, config).gains
    for number in range(5):
        episodes.note(float(number), 5.0)
    short = episodes.gain(10.0, 3.0, 4.0, config)
    assert not short.gains
    assert 2 < short.expected_seconds < 5
    assert episodes.gain(10.0, 6.0, 4.0, config).gains
    assert episodes.gain(4000.0, 3.0, 4.0, config).gains


def test_time_slow_and_time_suspected_are_counted() -> None:
    """For people to see one beside the other."""
    run = Run()
    run.tick({}, times=30)
    run.tick({"d0": 5.0}, times=10)
    run.tick({}, times=10)
    seen = run.detector.evidence("d0")
    assert seen.observed_seconds == pytest.approx(102, abs=2)
    assert seen.slow_seconds == 20
    assert 16 <= seen.suspected_seconds <= 22
    assert run.detector.evidence("d1").slow_seconds == 0
    assert run.detector.evidence("nobody").observed_seconds == 0


def test_evidence_has_the_peers_band_and_what_acting_gains() -> None:
    """Own value, what peers take, the limit; the gain while it is slow."""
    run = Run()
    run.tick({}, times=20)
    run.tick({"d0": 5.0}, times=5)
    seen = run.detector.evidence("d0")
    assert seen.peers_low_seconds <= seen.peers_seconds <= seen.peers_high_seconds
    assert seen.peers_high_seconds < seen.limit_seconds < seen.value_seconds
    assert seen.compared_with == "its peers"
    assert seen.gain.gains
    assert seen.gain.saved_seconds > seen.gain.cost_seconds
    assert not run.detector.evidence("d1").gain.gains


@pytest.mark.parametrize(
    ("sign", "found"),
    [
        (Signs(), False),
        (Signs(past_ratio=3.0), True),
        (Signs(past_ratio=1.5), False),
        (Signs(class_ratio=2.0), True),
        (Signs(class_ratio=0.9), False),
        (Signs(class_ratio=2.0, past_ratio=1.0), False),
    ],
)
def test_a_lone_device_is_known_by_its_past_and_its_class(sign: Signs, found: bool) -> None:
    """Slow from the start and without a peer: what earlier processes learnt goes before what its
    class may take."""
    run = Run()
    assert bool(run.tick({}, times=20, count=1, signs={"d0": sign})) == found


def test_few_peers_and_the_demand_find_what_few_peers_alone_do_not() -> None:
    """Twice as slow as two others: only with a queue that never empties while theirs do."""
    run = Run()
    assert run.tick({"d0": 2.0}, times=40, count=3) == {}
    idle = {f"d{i}": Signs(busy_share=0.2) for i in range(1, 3)}
    busy = {"d0": Signs(busy_share=0.99)}
    found = Run().tick({"d0": 2.1}, times=20, count=3, signs=idle | busy)
    assert found == {"d0": SUSPECT}
    all_busy = {f"d{i}": Signs(busy_share=0.99) for i in range(3)}
    assert Run().tick({"d0": 2.1}, times=20, count=3, signs=all_busy) == {}


def test_two_slow_devices_do_not_mask_each_other() -> None:
    """Every outlier gets points, not the worst alone."""
    run = Run()
    run.tick({}, times=20)
    assert run.tick({"d2": 4.0, "d5": 9.0}, times=20) == {"d2": SITOUT, "d5": SITOUT}


def test_devices_found_slow_are_no_reference_for_others() -> None:
    """One after the other, three of eight are found, and stay so."""
    run = Run()
    run.tick({}, times=20)
    slow: dict[str, float] = {}
    for device in ("d1", "d4", "d6"):
        slow[device] = 4.0
        found = run.tick(slow, times=10)
        assert found.keys() == slow.keys()


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
    assert run.tick({"d7": 5.0}, times=20) == {"d7": SITOUT}
    assert run.detector.shared_slow == 0


def test_new_outliers_on_one_link_are_its_fault_for_five_minutes() -> None:
    """Then they are slow themselves. A lone one on the link is found at once."""
    linked = {f"d{i}": Traits(link="a" if i < 4 else "b") for i in range(8)}
    run = Run(**linked)
    run.tick({}, times=20)
    assert run.tick({"d0": 5.0, "d1": 5.0}, times=150) == {}
    assert run.detector.shared_slow == 150
    assert run.tick({"d0": 5.0, "d1": 5.0}, times=20) == {"d0": SITOUT, "d1": SITOUT}
    alone = Run(**linked)
    alone.tick({}, times=20)
    assert alone.tick({"d0": 5.0}, times=3) == {"d0": SUSPECT}


@pytest.mark.parametrize(
    ("media", "usual", "slow"),
    [
        (Media.NVME, 1e-5, False),
        (Media.NVME, 8e-5, True),
        (Media.UNKNOWN, 8e-5, True),
        (Media.SSD, 5e-5, False),
        (Media.SSD, 2e-4, True),
        (Media.HDD, 1e-3, False),
        (Media.HDD, 5e-3, True),
        (Media.REMOTE, 1e-3, False),
        (Media.REMOTE, 5e-3, True),
    ],
)
def test_a_small_excess_never_matters(media: Media, usual: float, slow: bool) -> None:
    """20 us, 100 us, 3 ms, 2 ms: twice the peers' time is nothing below."""
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
    assert run.tick(slower | {"d0": 16.0}, times=20, count=10) == {"d0": SITOUT}


def test_few_devices_of_a_model_are_compared_with_all_of_their_media() -> None:
    """Nobody escapes for being the only one of its kind."""
    run = Run(**{f"d{i}": Traits(media=Media.SSD, model="B" if i else "A") for i in range(8)})
    assert run.tick({"d0": 5.0}, times=20) == {"d0": SITOUT}


def test_one_freeze_is_not_enough_and_counts_once() -> None:
    """A tick a thousand times too long is a third of what makes a suspect."""
    run = Run()
    run.tick({}, times=20)
    run.tick({"d0": 1000.0})
    assert run.detector.score("d0") == pytest.approx(11.5 / 3)
    run.tick({}, times=5)
    assert run.detector.score("d0") == 0


def test_stalls_apart_make_no_suspect() -> None:
    """Each is forgotten before the next one."""
    run = Run()
    run.tick({}, times=20)
    for _ in range(20):
        assert run.tick({"d0": 100.0}) == {}
        assert run.tick({}, times=4) == {}


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
    assert run.tick({"d0": 10.0}, times=20) == {"d0": SITOUT}
    assert run.detector.accept("d0") == pytest.approx(9.7, abs=0.3)
    assert run.tick({"d0": 10.0}, times=100) == {}
    assert run.tick({"d0": 40.0}, times=20) == {"d0": SITOUT}


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
    """One is not; without probation neither. They may lie apart."""
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
        {"spread_widths": 0},
        {"suspect_score": 30},
        {"half_life_seconds": math.inf},
        {"group_least": 2},
        {"smoothing_ratio": 1.5},
        {"ratio_few": 1.0},
        {"peers_quantile": 0.6},
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
