"""Training: which rows, which folds, thresholds from drives that a part has not learned from.

For every fold a part is trained on the drives of all other folds. Its thresholds come from those
same other drives, each judged by a helper model that has not seen it (a second, independent
division). So a drive has no part in what judges it, neither in its trees nor in its thresholds; and
nothing that happens after `until` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpstore.errors import ForecastError
from hpstore.health.forecast.drive_histories import DriveHistory, FloatArray, Gathered
from hpstore.health.forecast.features import MIN_SAMPLES, MODEL_COUNTERS, compute, feature_names
from hpstore.health.forecast.forecast_model import MODEL, RULE, SUM, FoldModel, ForecastModel, Tail
from hpstore.health.forecast.labels import day_text, fold_of, inner_fold_of, labels, thinned
from hpstore.health.forecast.model_card import FamilyFacts, ModelCard
from hpstore.health.forecast.rules import plain_sum, rule_scores
from hpstore.health.forecast.score_choice import ScoreChoice, choose_score
from hpstore.health.forecast.trees import booster_from_sklearn, gains
from hpstore.health.smart.counters import INDEX

_KEPT_SHARE, _KEPT_MOST = 0.1, 5000  # of the peaks of healthy drives
_BATCH_DRIVES = 256
_STRONGEST = 10

Step = Callable[[int, int], None]
Fitted = Any  # Any: scikit-learn has no types


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Defaults were chosen on a public sample: docs/decisions/0017."""

    horizon_days: int = 14
    window_days: int = 90  # false alarms are counted per drive and window
    folds: int = 5
    inner_folds: int = 3
    trees: int = 100
    leaves: int = 8
    learning_rate: float = 0.1
    min_leaf_rows: int = 20
    hot_stride: int = 2  # days between rows of a healthy drive that are learned from, with errors
    cold_stride: int = 30  # and without any
    rule_weight: float = 2.0
    min_failures: int = 10  # of a family, or it is left out
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Rows to learn from. All (rows,) but `features` (rows, features)."""

    features: FloatArray
    positive: NDArray[np.bool_]
    weight: FloatArray
    fold: NDArray[np.int64]
    inner: NDArray[np.int64]


def train(
    gathered: Gathered,
    *,
    until: int,
    files: Sequence[str],
    options: TrainOptions | None = None,
    step: Step | None = None,
) -> ForecastModel:
    """Train a model with what is known at the end of day `until`. Needs scikit-learn.

    `step` gets models fitted so far and in all. The same histories and options give the same model.

    Raises
    ------
    ForecastError
        Too few failures, or scikit-learn is not installed.
    """
    chosen = options or TrainOptions()
    families, left_out = families_of(gathered.histories, until, chosen.min_failures)
    covered = [h for h in gathered.histories if h.family in families]
    counters = _counters(covered)
    names = feature_names(counters)
    salt = f"forecast-{chosen.seed}"
    table = _table(covered, names, until, chosen, salt)
    with _one_thread():
        final, helpers = _fit_all(table, chosen, step)
        peaks = _peaks(covered, names, until, chosen, salt, helpers)
    parts = tuple(
        FoldModel(
            booster=booster_from_sklearn(fitted), tails={n: _tail(p) for n, p in found.items()}
        )
        for fitted, found in zip(final, peaks, strict=True)
    )
    card = _card(gathered, covered, table, until, files, chosen, (families, left_out))
    strongest = _mean([gains(fitted, names) for fitted in final])
    made = ForecastModel(
        card=replace(card, strongest=strongest),
        salt=salt,
        counters=tuple(counters),
        features=tuple(names),
        rule_weight=float(chosen.rule_weight),
        parts=parts,
    )
    with _one_thread():
        choice = choose_score(
            made,
            covered,
            helpers=[[judge.decision_function for judge in judges] for judges in helpers],
            until=until,
            healthy_share=gathered.healthy_share,
            seed=chosen.seed,
        )
    return _with_choice(made, choice)


def _with_choice(model: ForecastModel, choice: ScoreChoice) -> ForecastModel:
    """The model, judging by the score that was chosen, with the probabilities of all scores."""
    return replace(
        model,
        card=replace(model.card, choice=choice.as_dict()),
        judged_by=choice.judged_by,
        parts=tuple(
            replace(part, calibrations=found)
            for part, found in zip(model.parts, choice.calibrations, strict=True)
        ),
    )


def _card(
    gathered: Gathered,
    covered: Sequence[DriveHistory],
    table: _Table,
    until: int,
    files: Sequence[str],
    options: TrainOptions,
    families: tuple[Mapping[str, FamilyFacts], Mapping[str, FamilyFacts]],
) -> ModelCard:
    """What a model is made from; `families`: those that it covers, and those left out."""
    positive = int(table.positive.sum())
    return ModelCard(
        horizon_days=options.horizon_days,
        window_days=options.window_days,
        known_from=day_text(min(int(h.days[0]) for h in covered)),
        known_until=day_text(until),
        files=tuple(files),
        families=families[0],
        left_out=families[1],
        rows=sum(int((h.days <= until).sum()) for h in covered),
        positive_rows=positive,
        negative_rows=len(table.positive) - positive,
        healthy_share=gathered.healthy_share,
        settings={name: float(value) for name, value in asdict(options).items()},
        strongest={},
    )


def families_of(
    histories: Sequence[DriveHistory], until: int, min_failures: int
) -> tuple[dict[str, FamilyFacts], dict[str, FamilyFacts]]:
    """Families to learn from, and those with too few failures. Pure. Raises ForecastError."""
    drives: dict[str, int] = {}
    failed: dict[str, int] = {}
    for history in histories:
        if len(history.days) and history.days[0] <= until:
            drives[history.family] = drives.get(history.family, 0) + 1
            if history.failed_day is not None and history.failed_day <= until:
                failed[history.family] = failed.get(history.family, 0) + 1
    facts = {
        name: FamilyFacts(drives=count, failed=failed.get(name, 0))
        for name, count in sorted(drives.items())
    }
    covered = {name: f for name, f in facts.items() if f.failed >= min_failures}
    if not covered:
        raise ForecastError(
            f"no family has {min_failures} failed drives by {day_text(until)} "
            f"({sum(failed.values())} failed in all, of {sum(drives.values())}): give more files. "
            "No model was written"
        )
    return covered, {name: f for name, f in facts.items() if name not in covered}


def _counters(histories: Sequence[DriveHistory]) -> list[str]:
    """The counters that any of the drives has."""
    return [
        name
        for name in MODEL_COUNTERS
        if any(not np.isnan(h.values[:, INDEX[name]]).all() for h in histories)
    ]


def _table(
    histories: Sequence[DriveHistory],
    names: Sequence[str],
    until: int,
    options: TrainOptions,
    salt: str,
) -> _Table:
    """Rows with their labels. A healthy drive's days with errors are thinned less than those
    without, and weigh as many as they stand for; a failed drive's days before the horizon teach
    nothing."""
    parts: list[tuple[FloatArray, NDArray[np.bool_], FloatArray, int, int]] = []
    for history in histories:
        found = labels(history, horizon=options.horizon_days, until=until)
        late = np.arange(len(history.days)) >= MIN_SAMPLES - 1
        weight = np.where(found.positive, 1.0, 0.0)
        if not found.failed:
            hot = rule_scores(history.days, history.values) > 0
            for mask, stride in ((hot, options.hot_stride), (~hot, options.cold_stride)):
                kept = thinned(history, found.negative & mask, stride=stride, salt=salt)
                weight[kept] = stride
        used = late & (weight > 0)
        if used.any():
            parts.append(
                (
                    compute(history.days, history.values, names)[used],
                    found.positive[used],
                    weight[used],
                    fold_of(salt, history.serial, options.folds),
                    inner_fold_of(salt, history.serial, options.inner_folds),
                )
            )
    counts = [len(part[0]) for part in parts]
    return _Table(
        features=np.concatenate([part[0] for part in parts]),
        positive=np.concatenate([part[1] for part in parts]),
        weight=np.concatenate([part[2] for part in parts]),
        fold=np.repeat([part[3] for part in parts], counts),
        inner=np.repeat([part[4] for part in parts], counts),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """scikit-learn on one thread: on a busy machine its threads, which spin, were far slower."""
    try:
        import sklearn.ensemble  # noqa: F401  (the limit finds only what is loaded)
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ForecastError(
            "training needs scikit-learn, which is not installed: pip install 'hpstore[health]'. "
            "Judging drives with a trained model does not"
        ) from error
    with threadpool_limits(limits=1, user_api="openmp"):
        yield


def _fit_all(
    table: _Table, options: TrainOptions, step: Step | None
) -> tuple[list[Fitted], list[list[Fitted]]]:
    """The model of every fold, and its helpers by inner fold."""
    total = options.folds * (1 + options.inner_folds)
    final: list[Fitted] = []
    helpers: list[list[Fitted]] = []
    for fold in range(options.folds):
        others = table.fold != fold
        masks = [others, *(others & (table.inner != inner) for inner in range(options.inner_folds))]
        fitted = []
        for mask in masks:
            fitted.append(_fit(table, mask, options))
            if step is not None:
                step(len(final) + sum(map(len, helpers)) + len(fitted), total)
        final.append(fitted[0])
        helpers.append(fitted[1:])
    return final, helpers


def _fit(table: _Table, mask: NDArray[np.bool_], options: TrainOptions) -> Fitted:
    from sklearn.ensemble import HistGradientBoostingClassifier

    positive, weight = table.positive[mask], table.weight[mask].copy()
    if not positive.any() or positive.all():
        raise ForecastError(
            "a fold is left without drives that failed, or without drives that lived: give more "
            "files, or fewer folds. No model was written"
        )
    weight[positive] *= weight[~positive].sum() / weight[positive].sum()
    made = HistGradientBoostingClassifier(
        max_iter=options.trees,
        max_leaf_nodes=options.leaves,
        random_state=options.seed,
        learning_rate=options.learning_rate,
        min_samples_leaf=options.min_leaf_rows,
        l2_regularization=1.0,
        early_stopping=False,
        monotonic_cst=[1] * table.features.shape[1],
    )
    return made.fit(table.features[mask], positive, sample_weight=weight / weight.mean())


def _peaks(
    histories: Sequence[DriveHistory],
    names: Sequence[str],
    until: int,
    options: TrainOptions,
    salt: str,
    helpers: Sequence[Sequence[Fitted]],
) -> list[dict[str, list[float]]]:
    """By fold and score: the peaks of healthy drives of all other folds, one a drive and window."""
    out: list[dict[str, list[float]]] = [{MODEL: [], RULE: [], SUM: []} for _ in helpers]
    healthy = [h for h in histories if h.failed_day is None or h.failed_day > until]
    for batch in _batches(healthy, names, until, options):
        outer = np.array([fold_of(salt, drive.serial, options.folds) for drive, *_ in batch])
        inner = np.array(
            [inner_fold_of(salt, drive.serial, options.inner_folds) for drive, *_ in batch]
        )
        for fold, judges in enumerate(helpers):
            for number, judge in enumerate(judges):
                chosen = np.flatnonzero((outer != fold) & (inner == number))
                if not len(chosen):
                    continue
                found = judge.decision_function(np.concatenate([batch[i][1] for i in chosen]))
                ends = np.cumsum([len(batch[i][1]) for i in chosen])[:-1]
                for i, trees in zip(chosen, np.split(found, ends), strict=True):
                    _, _, windows, rule, total = batch[i]
                    scores = {
                        MODEL: trees + options.rule_weight * np.log1p(rule),
                        RULE: rule,
                        SUM: total,
                    }
                    for name, score in scores.items():
                        out[fold][name] += [
                            float(score[windows == w].max()) for w in np.unique(windows)
                        ]
    return out


_Judged = tuple[DriveHistory, FloatArray, NDArray[np.int64], FloatArray, FloatArray]


def _batches(
    histories: Sequence[DriveHistory], names: Sequence[str], until: int, options: TrainOptions
) -> Iterator[list[_Judged]]:
    """Histories with features, windows and plain scores of their negative days, by batches."""
    batch: list[_Judged] = []
    for history in histories:
        found = labels(history, horizon=options.horizon_days, until=until)
        used = found.negative & (np.arange(len(history.days)) >= MIN_SAMPLES - 1)
        windows = window_numbers(history.days[used], until - options.horizon_days, options)
        keep = windows >= 0
        if not keep.any():
            continue
        rows = np.flatnonzero(used)[keep]
        batch.append(
            (
                history,
                compute(history.days, history.values, names)[rows],
                windows[keep],
                rule_scores(history.days, history.values)[rows],
                plain_sum(history.values)[rows],
            )
        )
        if len(batch) == _BATCH_DRIVES:
            yield batch
            batch = []
    if batch:
        yield batch


def window_numbers(days: NDArray[np.int64], last: int, options: TrainOptions) -> NDArray[np.int64]:
    """Windows counted back from day `last`; -1 for those that are less than half there. Pure.

    A drive that was never there for half a window counts with what there is, as its only one.
    """
    windows = np.asarray((last - days) // options.window_days)
    numbers, counts = np.unique(windows, return_counts=True)
    whole = numbers[2 * counts >= options.window_days]
    if not len(whole):
        return np.zeros(len(days), np.int64)
    return np.asarray(np.where(np.isin(windows, whole), windows, -1))


def _tail(peaks: Sequence[float]) -> Tail:
    if not peaks:
        raise ForecastError(
            "no healthy drive was seen long enough to tell what a false alarm is: give more files. "
            "No model was written"
        )
    kept = min(_KEPT_MOST, max(1, int(np.ceil(_KEPT_SHARE * len(peaks)))))
    found = np.sort(np.array(peaks))[::-1]
    return Tail(peaks=found[:kept].copy(), windows=len(peaks))


def _mean(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for share in shares for name in share}
    means = {name: sum(s.get(name, 0.0) for s in shares) / len(shares) for name in names}
    order = sorted(means, key=lambda name: (-means[name], name))
    return {name: round(means[name], 4) for name in order[:_STRONGEST]}
