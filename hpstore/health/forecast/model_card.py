"""The model card: what a model was made from, what it covers, what it was seen to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpstore.errors import ForecastError

KNOWN_LIMITS = (
    "It forecasts a failure within the horizon, not its day.",
    "Many drives fail without a sign in their counters: it misses them.",
    "It does not see drives that are slow.",
    "It was never shown families outside this card and refuses them.",
    "Firmware, workload and temperature other than in its data shift its rates of false alarms.",
)

# Any below: what JSON holds; every part is checked by its type
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFacts:
    """How many drives of a family were learned from, and how many of them failed."""

    drives: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Days are dates as text. `evaluation` is None where nothing was left to evaluate on.

    `choice`: how the scores compared on the training days; None in a model of version 1.
    """

    horizon_days: int
    window_days: int  # of the false alarm rate
    known_from: str
    known_until: str
    files: tuple[str, ...]
    families: Mapping[str, FamilyFacts]
    left_out: Mapping[str, FamilyFacts]  # families with too few failures
    rows: int
    positive_rows: int
    negative_rows: int
    healthy_share: float
    settings: Mapping[str, float]
    strongest: Mapping[str, float]  # features by their share of the gain
    evaluation: Json = None
    limits: tuple[str, ...] = field(default=KNOWN_LIMITS)
    choice: Json = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def card_from_dict(body: Json) -> ModelCard:
    """A card from JSON; what decides about drives is checked. Raises ForecastError."""
    wanted = set(ModelCard.__dataclass_fields__)
    if not isinstance(body, Mapping) or {*body, "choice"} != wanted:
        raise damaged("its card lacks parts, or has others")
    days = (body["horizon_days"], body["window_days"])
    if not all(type(count) is int and 0 < count <= 3650 for count in days):
        raise damaged("the days of its card are no numbers of days")
    if not all(isinstance(body[name], str) for name in ("known_from", "known_until")):
        raise damaged("the dates of its card are no dates")
    if not isinstance(body["files"], list) or not isinstance(body["limits"], list):
        raise damaged("a list of its card is none")
    if not all(isinstance(body[name], Mapping) for name in ("settings", "strongest")):
        raise damaged("a table of its card is none")
    parts = dict(body)
    for name in ("families", "left_out"):
        parts[name] = _families(body[name])
    for name in ("files", "limits"):
        parts[name] = tuple(map(str, body[name]))
    return ModelCard(**parts)


def _families(body: Json) -> dict[str, FamilyFacts]:
    if not isinstance(body, Mapping):
        raise damaged("the families of its card are no table")
    found = {}
    for name, facts in body.items():
        if not isinstance(facts, Mapping) or set(facts) != {"drives", "failed"}:
            raise damaged(f"family {str(name)[:80]!r} of its card lacks its counts")
        if not all(type(count) is int and count >= 0 for count in facts.values()):
            raise damaged(f"the counts of family {str(name)[:80]!r} are no counts")
        found[name] = FamilyFacts(**facts)
    return found


def damaged(what: str) -> ForecastError:
    """The error for a model that does not hold what it must."""
    return ForecastError(
        f"the model is damaged or not one of ours: {what}. No drive was judged; train it again"
    )
