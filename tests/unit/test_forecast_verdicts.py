"""Rule scores, spec flags, verdicts in words; evaluation against fleets whose outcome is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpstore.errors import ForecastError, ForecastRefused
from hpstore.health.forecast.drive_histories import DriveHistory
from hpstore.health.forecast.evaluate_model import ForecastEvaluation, evaluate
from hpstore.health.forecast.forecast_model import ForecastModel, Tail
from hpstore.health.forecast.forecaster import FailureForecaster, Risk
from hpstore.health.forecast.labels import fold_of
from hpstore.health.forecast.rules import evidence, plain_sum, rule_scores
from hpstore.health.forecast.train_model import TrainOptions, train, window_numbers
from hpstore.health.smart.counters import COUNTERS, INDEX, SPEC_FLAG
from tests.integration.fleets import FIRST, MadeDrive, fleet, histories

FLEET = fleet(240, 120)
UNTIL = FIRST.toordinal() + 75
OPTIONS = TrainOptions(folds=2, inner_folds=2, trees=8, min_failures=3, min_leaf_rows=5)


@pytest.fixture(scope="module")
def model() -> ForecastModel:
    return train(histories(FLEET), until=UNTIL, files=["a.csv"], options=OPTIONS)


def drive(**counters: list[float]) -> DriveHistory:
    """A drive with these counters, a row a day."""
    length = len(next(iter(counters.values())))
    values = np.full((length, len(COUNTERS)), np.nan)
    for name, column in counters.items():
        values[:, INDEX[name]] = column
    return DriveHistory(
        serial="A", family="ST4000DM000", values=values, days=FIRST.toordinal() + np.arange(length)
    )


def test_the_rule_score_is_rises_and_a_quarter_of_levels() -> None:
    """Root of 16 new reallocated sectors in 14 days, a quarter of the root of 64; pending and
    offline sectors count once; resets are no rises; a clean drive has 0."""
    old = [48.0] * 10 + [64.0] * 5
    found = drive(smart_5=old)
    assert rule_scores(found.days, found.values)[-1] == 4 + 0.25 * 8
    twice = drive(smart_5=old, smart_197=[0.0] * 14 + [4.0], smart_198=[0.0] * 14 + [1.0])
    assert rule_scores(twice.days, twice.values)[-1] == 6 + 2 + 0.25 * 2
    reset = drive(smart_5=[100.0] * 8 + [0.0] * 7)
    assert rule_scores(reset.days, reset.values)[-1] == 0
    clean = drive(smart_5=[0.0] * 15, smart_194=[40.0] * 15)
    assert rule_scores(clean.days, clean.values).tolist() == [0.0] * 15
    assert plain_sum(twice.values)[-1] == 69


def test_a_rule_score_forgets_rises_after_14_days() -> None:
    """The level stays, the rise goes."""
    found = drive(smart_5=[0.0] * 5 + [100.0] * 20)
    scores = rule_scores(found.days, found.values)
    assert scores[18] == 10 + 2.5
    assert scores[19] == 2.5


def test_nvme_errors_and_lost_spare_blocks_count() -> None:
    """9 new media errors, 4 per cent of spare blocks gone; wear of 130 % is no sign."""
    found = drive(
        nvme_media_errors=[0.0] * 14 + [9.0],
        nvme_available_spare=[100.0] * 14 + [96.0],
        nvme_percentage_used=[130.0] * 15,
    )
    assert rule_scores(found.days, found.values)[-1] == 3 + 0.25 * 3 + 2
    assert [part.sentence() for part in evidence(found.days, found.values)] == [
        "media errors rose by 9 to 9 in 14 days",
        "spare blocks in per cent fell by 4 to 96 in 14 days",
    ]


def test_verdicts_without_a_model() -> None:
    """No sign, watch, warn, failing by a flag of the file, unknown; each with its reason."""
    forecaster = FailureForecaster()
    cases = [
        (drive(smart_5=[0.0] * 9), Risk.NONE, ()),
        (
            drive(smart_5=[9.0] * 20),
            Risk.WATCH,
            ("reallocated sectors stand at 9, unchanged for 14 days",),
        ),
        (
            drive(smart_187=[0.0] * 9 + [50.0]),
            Risk.WARN,
            ("uncorrectable errors rose by 50 to 50 in 14 days",),
        ),
        (
            drive(smart_5=[0.0] * 9, **{SPEC_FLAG: [1.0] * 9}),
            Risk.FAILING,
            ("it is failing by its own specification",),
        ),
        (drive(smart_9=[5.0] * 9), Risk.UNKNOWN, ()),
    ]
    for history, risk, reasons in cases:
        found = forecaster.judge(history)
        assert (found.risk, found.reasons) == (risk, reasons)
        assert found.refusal == "no model was given"


def test_a_model_speaks_only_of_what_its_card_covers(model: ForecastModel) -> None:
    """Another family, six days, few counters: refused with the reason; the rule still speaks."""
    forecaster = FailureForecaster(model)
    sick = drive(**{name: [0.0] * 9 + [200.0] for name in model.counters})
    assert forecaster.judge(sick).risk is Risk.WARN
    assert forecaster.judge(sick).model_alarm
    assert "of healthy drives look like this within 90 days" in forecaster.judge(sick).reasons[-1]
    for changed, words in (
        (replace(sick, family="WD40EFRX"), "not in the model's card, which covers ST4000DM000"),
        (
            replace(sick, days=sick.days[4:], values=sick.values[4:]),
            "6 daily samples",
        ),
        (drive(smart_5=[0.0] * 9 + [200.0]), "more than half of the counters"),
    ):
        found = forecaster.judge(changed)
        assert found.model_score is None
        assert words in found.refusal
        assert (found.judged_by, found.alarm) == ("sum", True)


@pytest.fixture(scope="module")
def evaluation(model: ForecastModel) -> ForecastEvaluation:
    return evaluate(model, histories(FLEET), far=0.05, resamples=50)


def test_an_evaluation_looks_at_later_days_of_known_outcome_only(
    model: ForecastModel, evaluation: ForecastEvaluation
) -> None:
    """Drives by hand: failed after the horizon of the first day; healthy ones; the rest named."""
    since = UNTIL - FIRST.toordinal()
    ends = [len(d.counts) - 1 for d in FLEET if d.failed]
    assert evaluation.failed_drives == sum(end > since + 14 for end in ends)
    assert evaluation.failed_too_early == sum(since < end <= since + 14 for end in ends)
    assert evaluation.healthy_drives == sum(not d.failed for d in FLEET)
    assert evaluation.after == model.card.known_until
    for result in evaluation.scores.values():
        assert result.at_far.far <= 0.05
        assert result.at_far.fdr > 0.5  # most of the fleet's failures are announced
        lead = result.at_far.lead_days
        assert lead is not None
        assert 1 <= lead.quartile_1 <= lead.median <= lead.quartile_3 <= 14
    assert evaluation.flags.detected == 0
    assert 0 < evaluation.no_signal < evaluation.failed_drives


def test_evaluations_repeat_and_show_noise_as_noise(model: ForecastModel) -> None:
    """The same figures twice. Where failures come without a sign, FDR is about the FAR: no leak."""
    silent = [replace(d, counts=np.zeros_like(d.counts) if d.failed else d.counts) for d in FLEET]
    first, second = (evaluate(model, histories(silent), far=0.05, resamples=50) for _ in range(2))
    assert first == second
    assert all(result.at_far.fdr <= 0.05 for result in first.scores.values())
    assert first.no_signal == first.failed_drives


def test_thresholds_from_training_keep_their_rate_on_other_drives() -> None:
    """200 healthy drives set the thresholds, 200 others of the same kind and age are judged: the
    alarms are what the rate allows, within four standard deviations."""
    rng = np.random.default_rng(5)

    def noisy(drive: MadeDrive) -> MadeDrive:
        walk = np.cumsum(rng.random(drive.counts.shape) < rng.random() * 0.05, axis=0)
        return replace(drive, counts=drive.counts + walk)

    learned = [noisy(d) for d in fleet(300, 101, seed=3)]
    others = [noisy(d) for d in fleet(300, 101, seed=4)]
    made = train(histories(learned), until=FIRST.toordinal() + 100, files=[], options=OPTIONS)
    card = replace(made.card, known_until="2024-01-06")  # the others have the same days
    found = evaluate(replace(made, card=card), histories(others), far=0.05, resamples=20)
    for result in found.scores.values():
        assert abs(result.fitted.far - 0.05) <= 4 * np.sqrt(0.05 * 0.95 * (1 / 200 + 1 / 200))


def test_an_evaluation_without_anything_to_judge_is_an_error(model: ForecastModel) -> None:
    """Nothing after the known days; another family; no failures; a rate that was not kept."""
    gathered = histories(FLEET)
    last = replace(model, card=replace(model.card, known_until="2025-01-01"))
    with pytest.raises(ForecastError, match="nothing to evaluate on"):
        evaluate(last, gathered, far=0.01)
    with pytest.raises(ForecastRefused, match="covers ST4000DM000"):
        evaluate(model, histories(fleet(9, 120, model="WD40EFRX")), far=0.01)
    with pytest.raises(ForecastError, match="0 failed and"):
        evaluate(model, histories([d for d in FLEET if not d.failed]), far=0.01)
    with pytest.raises(ForecastError, match="beyond what the model has kept"):
        evaluate(model, gathered, far=0.5)
    with pytest.raises(ForecastError, match="no family has 500 failed drives"):
        train(gathered, until=UNTIL, files=[], options=replace(OPTIONS, min_failures=500))


def test_a_family_with_few_failures_is_left_out_of_the_card() -> None:
    """It is named as left out, its drives are refused and counted."""
    mixed = [*FLEET, *fleet(6, 120, seed=9, model="WD40EFRX")]
    made = train(histories(mixed), until=UNTIL, files=[], options=OPTIONS)
    assert list(made.card.families) == ["ST4000DM000"]
    assert list(made.card.left_out) == ["WD40EFRX"]
    assert evaluate(made, histories(mixed), far=0.05, resamples=10).refused == {"WD40EFRX": 6}


def test_windows_are_counted_back_and_halves_do_not_count() -> None:
    """200 days: two whole windows and 20 days that are left out; 30 days alone are one window."""
    options = TrainOptions(window_days=90)
    found = window_numbers(np.arange(1, 201), 200, options)
    assert np.unique(found, return_counts=True)[1].tolist() == [20, 90, 90]
    assert found[:20].tolist() == [-1] * 20
    assert window_numbers(np.arange(30), 400, options).tolist() == [0] * 30


def test_thresholds_come_from_peaks_of_the_other_folds_windows() -> None:
    """The rule's tail by hand: each healthy drive that is not of the fold, each whole window of
    days whose outcome is known, the tenth that is highest."""
    options = replace(OPTIONS, window_days=30)
    made = train(histories(FLEET), until=UNTIL, files=[], options=options)
    for fold, part in enumerate(made.parts):
        peaks = []
        for drive in histories(FLEET).histories:
            if drive.failed_day is not None and drive.failed_day <= UNTIL:
                continue
            if fold_of(made.salt, drive.serial, 2) != fold:
                scores = rule_scores(drive.days, drive.values)
                end = min(UNTIL, int(drive.days[-1])) - 14 - FIRST.toordinal()
                last = UNTIL - 14 - FIRST.toordinal()
                windows = [scores[max(6, last - 29) : end + 1], scores[6 : min(last - 29, end + 1)]]
                whole = [w for w in windows if len(w) >= 15]
                peaks += [w.max() for w in whole or [np.concatenate(windows)]]
        peaks.sort(reverse=True)
        assert part.tails["rule"].windows == len(peaks)
        assert part.tails["rule"].peaks.tolist() == peaks[: int(np.ceil(len(peaks) / 10))]


def test_tails_tell_thresholds_and_ranks() -> None:
    """Ten peaks kept of a hundred windows."""
    tail = Tail(peaks=np.arange(10.0, 0.0, -1), windows=100)
    assert [tail.threshold(far) for far in (0.0, 0.01, 0.05)] == [10, 9, 5]
    assert tail.share_above(11) == pytest.approx(1 / 101)
    assert tail.share_above(8) == pytest.approx(4 / 101)
