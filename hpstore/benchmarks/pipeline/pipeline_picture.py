"""A step of a pipeline as it was: one row a rank, from the events of its hooks. matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Any: JSON of hpstore/benchmarks/pipeline/pipeline_bench.py, and matplotlib's objects
COLOURS = {"F": "#7fa8d1", "B": "#e0a458", "I": "#e0a458", "W": "#c97b63", "R": "#999999"}
COPY = "#3a7d44"


def draw(steps: Sequence[Sequence[Any]], directory: Path) -> Path:
    """One picture, `pipeline.png`; a panel a step, each a list of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    height = 0.9 + 0.55 * sum(len(ranks) for ranks in steps)
    figure, panels = plt.subplots(len(steps), 1, figsize=(11, height), squeeze=False)
    for axes, ranks in zip(panels[:, 0], steps, strict=True):
        _panel(axes, ranks)
    names = {
        "F": "forward",
        "B": "backward",
        "R": "gradients scaled",
        "copy": "a checkpoint is copied",
    }
    handles = [Patch(color=COLOURS.get(kind, COPY), label=name) for kind, name in names.items()]
    figure.legend(handles=handles, loc="upper right", ncols=4, fontsize=8, frameon=False)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "pipeline.png"
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(axes: Any, ranks: Sequence[Any]) -> None:
    begin = min(event["begin"] for rank in ranks for event in rank["events"])
    end = max(event["end"] for rank in ranks for event in rank["events"])
    for row, rank in enumerate(ranks):
        for event in rank["events"]:
            _event(axes, row, event, begin)
        for started, ended, _ in rank["copies"]:
            if started < end:
                width = max(1e3 * (ended - started), 0.3)
                axes.broken_barh([(1e3 * (started - begin), width)], (row + 0.28, 0.14), color=COPY)
    case = ranks[0]["case"]
    copied = sum(size for rank in ranks for *_, size in rank["copies"]) / 1e6
    axes.set_title(
        f"{case['schedule']}, {case['stages']} stages, {case['microbatches']} micro-batches, "
        f'snapshot="{case["snapshot"]}": {copied:.0f} MB copied',
        fontsize=9,
        loc="left",
    )
    axes.set_yticks(range(len(ranks)), [f"rank {n}" for n in range(len(ranks))], fontsize=8)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8)


def _event(axes: Any, row: int, event: Any, begin: float) -> None:
    width = 1e3 * (event["end"] - event["begin"])
    left = 1e3 * (event["begin"] - begin)
    axes.broken_barh(
        [(left, width)],
        (row - 0.35, 0.6),
        facecolors=COLOURS[event["kind"]],
        edgecolors="white",
        linewidth=0.5,
    )
    if event["microbatch"] >= 0:
        axes.text(
            left + width / 2,
            row - 0.05,
            str(event["microbatch"]),
            ha="center",
            va="center",
            fontsize=7,
        )
