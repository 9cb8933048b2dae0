"""From hit ratios to verdicts: shares of MIN, and distance to the best peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CAPACITIES = (0.1, 0.2, 0.4)
POINTS = 0.5  # percentage points by which the best peer may be better


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Shares of MIN in %, by capacity; None: only peers count."""

    unknown: tuple[float, float, float] | None
    known: float | None


BARS = {
    "uniform": Bars(unknown=(98, 98, 98), known=99),
    "rank1of8": Bars(unknown=(25, 36, 53), known=95),
    "zipf0.9": Bars(unknown=(87, 88, 91), known=97),
    "zipf1.1": Bars(unknown=(94, 95, 97), known=98),
    "importance": Bars(unknown=(63, 72, 83), known=91),
    "mix": Bars(unknown=(92, 94, 95), known=98),
    "2jobs 1:1": Bars(unknown=(65, 75, 85), known=95),
    "2jobs 1:0.6": Bars(unknown=(60, 72, 84), known=95),
    "valscan": Bars(unknown=(86, 86, 89), known=96),
    "block32": Bars(unknown=None, known=98),
    "recency": Bars(unknown=None, known=None),
    "sizes": Bars(unknown=None, known=None),
}
"""Of equal blocks MIN is the optimum. block32, order unknown: at least the share of the blocks that
fit, which is not a share of MIN. sizes: no optimum is known in reasonable time."""


def share_of_min(name: str, mode: str, at: int, ours: float, best: float) -> dict[str, object]:
    """Our hits in % of MIN's. `at`: which of CAPACITIES; `mode`: "unknown" or "known"."""
    share = 100 * ours / best
    found: dict[str, object] = {"share_of_min": round(share, 1)}
    bars = BARS[name]
    bar = bars.known if mode == "known" else bars.unknown[at] if bars.unknown else None
    if bar is not None:
        found |= {"bar": bar, "met": share >= bar}
    elif name == "block32":
        least = 100 * CAPACITIES[at]
        found |= {"bar_hit_ratio": least, "met": 100 * ours >= least}
    return found


def to_best_peer(
    ours: float, peers: Mapping[str, Mapping[str, float]], ratio: str
) -> dict[str, object]:
    """Our hit ratio less that of the best peer, in percentage points."""
    if not peers:
        return {"skipped": "no peer was measured"}
    best = max(peers, key=lambda name: peers[name][ratio])
    points = 100 * (ours - peers[best][ratio])
    return {"best": best, "points": round(points, 2), "bar": -POINTS, "met": points >= -POINTS}
