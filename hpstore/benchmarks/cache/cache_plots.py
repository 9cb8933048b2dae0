"""Hit ratio against capacity, a picture for each workload. matplotlib is in the extra bench."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Any: JSON, and matplotlib's objects
_CEILING, _OURS = "MIN", "hpstore"


def plot_workload(directory: Path, name: str, rows: Mapping[str, Any], ratio: str) -> Path:
    """One PNG; rows by capacity as bench_cache makes them. ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    directory.mkdir(parents=True, exist_ok=True)
    capacities = list(rows)
    policies = list(dict.fromkeys(p for row in rows.values() for p in row["hit_ratios"]))
    figure, axes = plt.subplots(figsize=(7, 5))
    for policy in policies:
        points = [
            (float(capacity), 100 * found[policy][ratio])
            for capacity in capacities
            if policy in (found := rows[capacity]["hit_ratios"])
        ]
        style: dict[str, Any] = {"linewidth": 1, "marker": "."}
        if policy == _CEILING:
            style = {"linewidth": 2, "color": "black", "linestyle": "--", "zorder": 5}
        elif policy.startswith(_OURS):
            style = {"linewidth": 2.5, "marker": "o"}
        axes.plot(*zip(*points, strict=True), label=policy, **style)
    axes.set(xlabel="capacity, % of the data", ylabel=f"{ratio.replace('_', ' ')}, %", title=name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    path = directory / f"cache-{name.replace(' ', '-').replace(':', '-')}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
