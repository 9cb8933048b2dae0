"""What an evaluation says by itself: probabilities, strict figures, families, the choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpstore.cli.forecast_tables import show_choice, show_evaluation
from hpstore.errors import ForecastError
from hpstore.health.forecast.alarm_scores import FailedDrive, Interval, outcome, paired_difference
from hpstore.health.forecast.calibration import (
    MAX_STEPS,
    Calibration,
    calibrate,
    calibration_from_dict,
    reliability,
)
from hpstore.health.forecast.evaluate_model import ForecastEvaluation, evaluate
from hpstore.health.forecast.family_results import JudgedDrive, by_family, wilson
from hpstore.health.forecast.forecast_model import ForecastModel, model_from_json
from hpstore.health.forecast.forecaster import FailureForecaster
from hpstore.health.forecast.score_choice import ScoreComparison, better_than_sum
from hpstore.health.forecast.train_model import TrainOptions, train
from tests.integration.fleets import FIRST, fleet, histories

FLEET = [*fleet(150, 120), *fleet(60, 120, seed=9, model="WD40EFRX")]
UNTIL = FIRST.toordinal() + 75
OPTIONS = TrainOptions(folds=2, inner_folds=2, trees=8, min_failures=3, min_leaf_rows=5)
OLD_MODEL = Path(__file__).parents[1] / "fuzz" / "model.json"


@pytest.fixture(scope="module")
def model() -> ForecastModel:
    return train(histories(FLEET), until=UNTIL, files=["a.csv"], options=OPTIONS)


@pytest.fixture(scope="module")
def evaluation(model: ForecastModel) -> ForecastEvaluation:
    return evaluate(model, histories(FLEET), far=0.05, resamples=50)


def draw(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores, and outcomes whose probability is a known function of them."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=rows)
    return scores, rng.random(rows) < 0.3 / (1 + np.exp(-2 * scores))


def test_calibrated_probabilities_are_the_true_ones_on_other_rows() -> None:
    """Fitted on 20,000 rows; on others within two points of the truth, and never falling."""
    scores, positive = draw(1, 20_000)
    made = calibrate(scores, positive, np.ones(len(scores)), pseudo_days=14)
    asked = np.linspace(-2, 2, 41)
    found = made.probability(asked)
    assert (np.diff(found) >= 0).all()
    assert np.abs(found - 0.3 / (1 + np.exp(-2 * asked))).max() < 0.02 + 0.02
    assert len(made.scores) <= MAX_STEPS


def test_weights_stand_for_rows_that_were_left_out() -> None:
    """A third of the rows without a failure, three times as heavy: the same probability."""
    scores = np.repeat([0.0, 1.0], 300)
    positive = np.zeros(600, bool)
    positive[300:390] = True
    every = calibrate(scores, positive, np.ones(600), pseudo_days=1)
    kept = positive | (np.arange(600) % 3 == 0)
    thin = calibrate(
        scores[kept], positive[kept], np.where(positive, 1.0, 3.0)[kept], pseudo_days=1
    )
    assert thin.probability(np.array([0.0, 1.0])) == pytest.approx(
        every.probability(np.array([0.0, 1.0]))
    )


def test_a_step_that_few_days_reach_is_not_certain() -> None:
    """Three days, all before a failure: below 1, above the mean."""
    scores = np.array([0.0] * 97 + [9.0] * 3)
    positive = scores > 5
    made = calibrate(scores, positive, np.ones(100), pseudo_days=14)
    assert 0.03 < made.probability(np.array([9.0]))[0] == pytest.approx((3 + 0.03 * 14) / 17)


def test_a_reliability_curve_counts_days_and_draws_drives() -> None:
    """Two drives by hand: predicted 5 % and 50 %; one of four days at 50 % is before a failure."""
    days = [
        (np.array([0.05, 0.05, 0.5, 0.5]), np.array([False, False, False, True])),
        (np.array([0.05, 0.05, 0.5, 0.5]), np.array([False, False, False, False])),
    ]
    found = reliability(days, rng=np.random.default_rng(0), resamples=200)
    assert [(b.predicted, b.observed, b.drive_days, b.drives) for b in found.bins] == [
        (0.05, 0.0, 4, 2),
        (0.5, 0.25, 4, 2),
    ]
    assert (found.bins[1].observed_interval.low, found.bins[1].observed_interval.high) == (0, 0.5)
    assert [b.failed_drives for b in found.bins] == [0, 1]
    assert found.predicted_days == pytest.approx(2.2)
    assert found.observed_days == 1


def test_an_interval_of_a_bin_is_not_of_draws_without_it() -> None:
    """One drive of two has days in the upper bin, all before its failure: never 0."""
    days = [
        (np.array([0.9]), np.array([True])),
        (np.array([0.01]), np.array([False])),
    ]
    found = reliability(days, rng=np.random.default_rng(0), resamples=50).bins[-1]
    assert (found.observed_interval.low, found.observed_interval.high) == (1, 1)


def test_strict_figures_count_an_early_alarm_as_false() -> None:
    """Of three hits one was alarmed earlier; a fourth drive was alarmed only earlier."""

    def drive(score: float, earlier: float) -> FailedDrive:
        return FailedDrive(
            days_ahead=np.array([3.0]), scores=np.array([score]), earlier_peak=earlier
        )

    found = outcome(
        [drive(9, 0), drive(9, 0), drive(9, 9), drive(0, 9), drive(0, 0)],
        np.array([0.0] * 18 + [9.0, 9.0]),
        5.0,
        rng=np.random.default_rng(0),
        resamples=100,
        healthy_share=0.5,
    )
    assert (found.detected, found.earlier, found.earlier_hits) == (3, 2, 1)
    assert (found.fdr, found.fdr_strict) == (0.6, 0.4)
    assert (found.false_alarms, found.false_alarms_strict) == (2, 4)
    assert found.precision_rescaled == 3 / 7
    assert found.precision_strict == 2 / (2 + 4 + 2)
    assert found.fdr_strict_interval.low < 0.4 < found.fdr_strict_interval.high


def test_a_difference_of_two_scores_is_drawn_with_the_same_drives() -> None:
    """Scores that alarm on the same drives differ by 0, however many drives are drawn."""
    rng = np.random.default_rng(0)
    same = np.array([True, False, True, False])
    assert paired_difference(same, same, rng=rng, resamples=50) == (
        0.0,
        Interval(low=0.0, high=0.0),
    )
    ours = np.array([True, True, True, False])
    value, interval = paired_difference(ours, same, rng=rng, resamples=200)
    assert value == 0.25
    assert interval.low == 0 < interval.high


def test_a_score_is_chosen_only_if_it_is_shown_to_beat_the_sum() -> None:
    """A larger gain whose interval holds 0 is not enough."""

    def found(over: float, low: float) -> ScoreComparison:
        return ScoreComparison(
            fdr=0.5, over_sum=over, over_sum_interval=Interval(low=low, high=0.9)
        )

    none = found(0.0, 0.0)
    assert better_than_sum({"sum": none, "rule": found(0.1, -0.01), "model": none}) == "sum"
    assert better_than_sum({"sum": none, "rule": found(0.1, 0.01), "model": none}) == "rule"
    assert (
        better_than_sum({"sum": none, "rule": found(0.1, 0.01), "model": found(0.2, 0.02)})
        == "model"
    )


def test_families_have_rows_of_their_own(evaluation: ForecastEvaluation) -> None:
    """They add up to the whole; each says how many failures never had a sign."""
    assert list(evaluation.families) == ["ST4000DM000", "WD40EFRX"]
    rows = evaluation.families.values()
    judged = evaluation.scores[evaluation.judged_by].fitted
    assert sum(row.failed for row in rows) == evaluation.failed_drives
    assert sum(row.healthy for row in rows) == evaluation.healthy_drives
    assert sum(row.no_signal for row in rows) == evaluation.no_signal
    assert sum(row.detected for row in rows) == judged.detected
    assert sum(row.false_alarms for row in rows) == judged.false_alarms


def test_a_family_without_failures_has_no_rate() -> None:
    """None, and an interval that says nothing; Wilson's interval by a published example."""
    lived = JudgedDrive(family="A", failed=False, no_sign=False, alarmed=True, alarmed_by_sum=False)
    found = by_family([lived])["A"]
    assert (found.fdr, found.far, found.sum_false_alarms) == (None, 1.0, 0)
    assert found.fdr_interval == Interval(low=0.0, high=1.0)
    assert wilson(15, 148).low == pytest.approx(0.0624, abs=1e-4)
    assert wilson(15, 148).high == pytest.approx(0.1605, abs=1e-4)


def test_an_evaluation_says_all_of_it_by_itself(
    model: ForecastModel, evaluation: ForecastEvaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where alarms come from, strict figures, families, reliability, the share without a sign."""
    show_choice(model)
    show_evaluation(evaluation)
    text = capsys.readouterr().out
    for words in (
        "alarms come from: sum",
        "none was shown to find more than the sum",
        "fitted threshold",
        "Strict: an alarm more than 14 days before",
        "WD40EFRX",
        "Reliability: probability of a failure within 14",
        "never had a sign",
    ):
        assert words in text
    assert json.loads(json.dumps(evaluation.as_dict()))["reliability"]["bins"]


def test_probabilities_hold_on_later_days_of_a_fleet_like_the_one_learned_from() -> None:
    """Trained on one fleet, judged on another: the days predicted are those seen, within a half.

    A fleet has some 70 failures to be judged on: their number alone varies by an eighth.
    """
    learned, others = (histories(fleet(600, 101, seed=seed)) for seed in (3, 4))
    made = train(learned, until=FIRST.toordinal() + 100, files=[], options=OPTIONS)
    card = replace(made.card, known_until="2024-01-01")  # the others have the same days
    found = evaluate(replace(made, card=card), others, far=0.05, resamples=20).reliability
    assert found is not None
    assert found.predicted_days == pytest.approx(found.observed_days, rel=0.5)
    assert found.bins[-1].observed > 10 * found.bins[0].observed


def test_models_of_the_first_version_judge_by_the_sum() -> None:
    """They say not what they were compared with; nor have they probabilities."""
    old = model_from_json(OLD_MODEL.read_text())
    assert (old.judged_by, old.card.choice) == ("sum", None)
    found = evaluate(old, histories(fleet(90, 120)), far=0.05, resamples=10)
    assert found.reliability is None
    sick = histories(fleet(3, 60)).histories[1]
    assert FailureForecaster(old).judge(sick).probability is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"scores": [1.0]}, "1 to 256 steps"),
        ({"scores": [2.0, 1.0]}, "do not rise"),
        ({"probabilities": [0.5, 0.1]}, "do not rise"),
        ({"probabilities": [0.5, 1.5]}, "between 0 and 1"),
        ({"probabilities": [0.5, "x"]}, "no numbers"),
        ({"scores": [0, 10**400]}, "too large"),
        ({"more": []}, "lacks its steps"),
    ],
)
def test_hostile_calibrations_are_refused(changed: dict[str, object], words: str) -> None:
    body = Calibration(scores=np.array([0.0, 1.0]), probabilities=np.array([0.1, 0.2])).as_dict()
    assert calibration_from_dict(dict(body)).probability(np.array([0.5, 7.0])).tolist() == [
        0.1,
        0.2,
    ]
    with pytest.raises(ForecastError, match=words):
        calibration_from_dict({**body, **changed})
