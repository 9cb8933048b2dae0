"""Durability figures at real rates against simulations that make losses likely.

Splitting plays groups of independent devices; sampling draws the moments before a last event where
devices fail together. A figure that lies outside the interval twice over is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpstore.durability import (
    Estimate,
    Group,
    SharedCause,
    crossings_per_year,
    losses_per_year,
    regular_tree,
    sample_crossings,
    split,
)

PATHS = 60_000
_SEED = 7
_GROUP = Group(data=6, parity=3, afr=0.005, repair_hours=156)
_SHARING = Group(data=6, parity=3, afr=0.005, repair_hours=156, repair_streams=1)
_CAUSES = {
    "hosts of 2": (SharedCause(kind="host", events_per_year=1e-3, units=2),),
    "hosts of 2, a batch": (
        SharedCause(kind="host", events_per_year=1e-3, units=2),
        SharedCause(kind="batch", events_per_year=1e-3, hit=0.05),
    ),
}
# Any: JSON
Found = dict[str, Any]


def durability_case(paths: int = PATHS) -> Found:
    """Losses a year of 6+3 by formula and by simulation."""
    rows: Found = {}
    for name, group in (("independent", _GROUP), ("one repair at a time", _SHARING)):
        rng = np.random.default_rng(_SEED)
        found = split(group, paths=paths, rng=rng, fixed=not group.repair_streams)
        rows[name] = _row(losses_per_year(group), found)
    for name, causes in _CAUSES.items():
        tree = regular_tree(_GROUP, causes)
        hours, lost = _GROUP.repair_hours, _GROUP.parity
        found = sample_crossings(
            tree, repair_hours=hours, lost=lost, draws=paths, rng=np.random.default_rng(_SEED)
        )
        rows[name] = _row(crossings_per_year(tree, repair_hours=hours, lost=lost), found)
    return rows


def _row(formula: float, simulated: Estimate) -> Found:
    return {
        "formula": formula,
        "simulated": simulated.value,
        "simulated_95": [simulated.low, simulated.high],
        "bar": "the formula within twice the interval of the simulation",
        "met": abs(formula - simulated.value) <= simulated.high - simulated.low,
    }
