"""A trained model: parts by fold, thresholds, card; kept as JSON, never pickled.

Drives are divided into folds by a hash of their serial numbers. The part of a fold has been trained
and its thresholds have been set without any drive of that fold, and a drive is always judged by the
part of its own fold. So no drive is ever judged by what has learned from it, and figures of an
evaluation are those of what runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from hpstore.errors import ForecastError, FormatTooNew
from hpstore.format.untrusted_bytes import finite, no_constant
from hpstore.health.forecast.calibration import Calibration, calibration_from_dict
from hpstore.health.forecast.drive_histories import DriveHistory, FloatArray
from hpstore.health.forecast.features import MIN_SAMPLES, compute, parse_name
from hpstore.health.forecast.labels import BoolArray, fold_of
from hpstore.health.forecast.model_card import ModelCard, card_from_dict, damaged
from hpstore.health.forecast.rules import rule_scores
from hpstore.health.forecast.trees import Booster, booster_from_dict
from hpstore.health.smart.counters import INDEX

FORMAT = "hpstore-failure-forecast"
VERSION = 2
MODEL, RULE, SUM = "model", "rule", "sum"
SCORES = (MODEL, RULE, SUM)
MAX_BYTES = 256 << 20
MAX_FOLDS = 64
_MAX_FEATURES = 1024
_BATCH_ROWS = 1 << 16
_FIELDS = frozenset(
    {"format", "version", "card", "salt", "counters", "features", "rule_weight", "parts", "digest"}
)
_SINCE_2 = "judged_by"  # version 1 says not which score was shown to be better than the sum

# Any below: what JSON holds; every part is checked by its type
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The highest peaks of healthy drives, one a drive and window, of which a threshold is one.

    `peaks`: falling; `windows`: how many there were in all.
    """

    peaks: FloatArray
    windows: int

    def threshold(self, far: float) -> float:
        """The score that at most a share `far` of healthy drives goes above in a window.

        Raises ForecastError when the model has not kept that much.
        """
        allowed = math.floor(far * self.windows + 1e-9)
        if allowed >= len(self.peaks):
            raise ForecastError(
                f"a false alarm rate of {far:g} is beyond what the model has kept "
                f"(below {len(self.peaks) / max(self.windows, 1):.3g}); no drive was judged"
            )
        return float(self.peaks[allowed])

    def share_above(self, score: float) -> float:
        """At most this share of healthy drives gets as high in a window."""
        count = int((self.peaks >= score).sum())
        return min(1.0, (count + 1) / (self.windows + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldModel:
    """What judges the drives of one fold.

    `tails` and `calibrations`, both by score, are of the other folds' drives, judged by helpers
    that have not seen this fold. A model of version 1 has no calibrations.
    """

    booster: Booster
    tails: Mapping[str, Tail]
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastModel:
    """All parts, and the card. Immutable, so any thread may use it.

    `judged_by`: the score that alarms come from; the plain sum unless another was shown to be
    better (score_choice.py).
    """

    card: ModelCard
    salt: str
    counters: tuple[str, ...]
    features: tuple[str, ...]
    rule_weight: float
    parts: tuple[FoldModel, ...]
    judged_by: str = SUM

    def part_of(self, serial: str) -> FoldModel:
        """The part that has never seen this drive."""
        return self.parts[fold_of(self.salt, serial, len(self.parts))]

    def refusal(self, history: DriveHistory) -> str | None:
        """Why nothing is said of this drive, or None."""
        if history.family not in self.card.families:
            known = ", ".join(sorted(self.card.families)[:8])
            return f"family {history.family} is not in the model's card, which covers {known}"
        if len(history.days) < MIN_SAMPLES:
            return f"{len(history.days)} daily samples; {MIN_SAMPLES} are needed"
        if not self._known_rows(history)[-1]:
            return "more than half of the counters that the model looks at have no value"
        return None

    def _known_rows(self, history: DriveHistory) -> BoolArray:
        columns = [INDEX[name] for name in self.counters]
        known = (~np.isnan(history.values[:, columns])).mean(axis=1) >= 0.5
        known[: MIN_SAMPLES - 1] = False
        return np.asarray(known)

    def scores(
        self, histories: Sequence[DriveHistory], masks: Sequence[BoolArray]
    ) -> list[FloatArray]:
        """Scores of each history's rows, for those that its mask names: log-odds of the trees, and
        `rule_weight` times log(1 + rule score).

        Beyond their last split all drives are alike to the trees; the second term keeps them apart.

        Shape (rows,) each; NaN where nothing is said: too short a history, too few counters, a row
        outside the mask. Families are not looked at here: ask `refusal`.
        """
        out = [np.full(len(history.days), np.nan) for history in histories]
        folds = [fold_of(self.salt, history.serial, len(self.parts)) for history in histories]
        for fold, part in enumerate(self.parts):
            batch: list[tuple[int, BoolArray, FloatArray]] = []
            waiting = 0
            for index in (i for i, own in enumerate(folds) if own == fold):
                history = histories[index]
                wanted = masks[index] & self._known_rows(history)
                if wanted.any():
                    rows = compute(history.days, history.values, self.features)[wanted]
                    plain = rule_scores(history.days, history.values)[wanted]
                    out[index][wanted] = self.rule_weight * np.log1p(plain)
                    batch.append((index, wanted, rows))
                    waiting += len(rows)
                if waiting >= _BATCH_ROWS:
                    _score(part.booster, batch, out)
                    batch, waiting = [], 0
            _score(part.booster, batch, out)
        return out

    def to_json(self) -> str:
        """The model as text, with a digest that finds damage."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "card": self.card.as_dict(),
            "salt": self.salt,
            "counters": list(self.counters),
            "features": list(self.features),
            "rule_weight": self.rule_weight,
            "judged_by": self.judged_by,
            "parts": [
                {
                    "booster": part.booster.as_dict(),
                    "tails": {
                        name: {"peaks": tail.peaks.tolist(), "windows": tail.windows}
                        for name, tail in part.tails.items()
                    },
                    "calibrations": {
                        name: found.as_dict() for name, found in part.calibrations.items()
                    },
                }
                for part in self.parts
            ],
        }
        body = json.loads(json.dumps(body, allow_nan=False))
        return json.dumps({**body, "digest": _digest(body)}, allow_nan=False) + "\n"


def _score(
    booster: Booster, batch: list[tuple[int, BoolArray, FloatArray]], out: list[FloatArray]
) -> None:
    if not batch:
        return
    found = booster.score(np.concatenate([rows for _, _, rows in batch]))
    start = 0
    for index, wanted, rows in batch:
        out[index][wanted] += found[start : start + len(rows)]
        start += len(rows)


def _digest(body: Json) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def load_model(path: str) -> ForecastModel:
    """Read a model file. Raises ForecastError, FormatTooNew."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ForecastError(f"cannot read the model {path}: {error.strerror or error}") from error
    if len(text) > MAX_BYTES:
        raise ForecastError(f"{path} is larger than {MAX_BYTES} bytes: no model of ours")
    return model_from_json(text)


def model_from_json(text: bytes | str) -> ForecastModel:
    """A model from text that nobody vouches for: every part is checked before it is used.

    Raises
    ------
    ForecastError
        It is no model, or a part of it is not what it must be.
    FormatTooNew
        Written by a newer hpstore.
    """
    try:
        body = json.loads(text, parse_constant=no_constant, parse_float=finite)
    except (ValueError, RecursionError) as error:
        raise damaged(f"it is no JSON ({str(error)[:80]})") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise damaged(f"it does not say {FORMAT}")
    version = body.get("version")
    if type(version) is not int or version < 1:
        raise damaged("it has no version")
    if version > VERSION:
        raise FormatTooNew(
            f"the model has format {version}, this hpstore knows up to {VERSION}: upgrade, or "
            "train it again; no drive was judged"
        )
    if set(body) != (_FIELDS if version == 1 else _FIELDS | {_SINCE_2}):
        raise damaged("parts are missing, or there are others")
    if body.pop("digest") != _digest(body):
        raise damaged("its digest is that of something else")
    return _checked(body)


def _checked(body: dict[str, Json]) -> ForecastModel:
    counters, features = (_names(body[name]) for name in ("counters", "features"))
    if unknown := [name for name in counters if name not in INDEX]:
        raise damaged(f"counter {unknown[0][:80]!r} is not known")
    for name in features:
        parse_name(name)
    if not isinstance(body["salt"], str):
        raise damaged("its salt is no text")
    weight, parts = body["rule_weight"], body["parts"]
    if type(weight) is not float or not 0.0 <= weight <= 1000.0:
        raise damaged("its rule weight is no weight")
    if not isinstance(parts, list) or not 0 < len(parts) <= MAX_FOLDS:
        raise damaged(f"it must have 1 to {MAX_FOLDS} parts")
    judged_by = body.get(_SINCE_2, SUM)
    if judged_by not in SCORES:
        raise damaged(f"it must judge by one of {', '.join(SCORES)}")
    return ForecastModel(
        card=card_from_dict(body["card"]),
        salt=body["salt"],
        counters=counters,
        features=features,
        rule_weight=weight,
        parts=tuple(_part(part, len(features), body["version"]) for part in parts),
        judged_by=judged_by,
    )


def _names(found: Json) -> tuple[str, ...]:
    if (
        not isinstance(found, list)
        or not 0 < len(found) <= _MAX_FEATURES
        or not all(isinstance(name, str) for name in found)
    ):
        raise damaged("its counters or features are no list of names")
    return tuple(found)


def _part(body: Json, features: int, version: int) -> FoldModel:
    wanted = {"booster", "tails"} if version == 1 else {"booster", "tails", "calibrations"}
    if not isinstance(body, dict) or set(body) != wanted:
        raise damaged("a part lacks its trees or its thresholds")
    calibrations = body.get("calibrations", {})
    if not isinstance(calibrations, dict) or not set(calibrations) <= set(SCORES):
        raise damaged("the calibrations of a part are not those of scores")
    tails = body["tails"]
    if not isinstance(tails, dict) or set(tails) != set(SCORES):
        raise damaged(f"a part must have thresholds of {', '.join(SCORES)}")
    return FoldModel(
        booster=booster_from_dict(body["booster"], features),
        tails={name: _tail(tail) for name, tail in tails.items()},
        calibrations={name: calibration_from_dict(c) for name, c in calibrations.items()},
    )


def _tail(body: Json) -> Tail:
    if not isinstance(body, dict) or set(body) != {"peaks", "windows"}:
        raise damaged("a threshold lacks its peaks")
    peaks, windows = body["peaks"], body["windows"]
    if not isinstance(peaks, list) or not set(map(type, peaks)) <= {int, float}:
        raise damaged("peaks are no numbers")
    if type(windows) is not int or not 0 < len(peaks) <= windows < 1 << 53:
        raise damaged("there are more peaks than windows, or none")
    try:
        found = np.array(peaks, np.float64)
    except OverflowError as error:
        raise damaged("a peak is too large") from error
    if (np.diff(found) > 0).any():
        raise damaged("peaks do not fall")
    return Tail(peaks=found, windows=windows)
