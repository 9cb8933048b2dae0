"""Six pictures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Any below: JSON, and matplotlib, which is untyped
Results = Mapping[str, dict[str, Any]]
STYLES = ("-", "--", "-.", ":")
SMOOTH = 8  # an average is over one point in so many of a curve
ROOM = 1.3  # beyond the longest bar, for its label


def plot_all(directory: Path, rows: Results) -> list[Path]:
    """Write the PNGs; their paths. Nothing without rows."""
    if not rows:
        return []
    makers = {
        "throughput": throughput,
        "training_time": training_time,
        "loss_curves": loss_curves,
        "accuracy_curves": accuracy_curves,
        "communication_overhead": communication,
        "step_time": step_time,
    }
    return [maker(directory / f"{name}.png", rows) for name, maker in makers.items()]


def save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path


def titles(rows: Results) -> list[str]:
    return [result["title"] for result in rows.values()]


def bars(path: Path, rows: Results, name: str, label: str, title: str) -> Path:
    """One bar a method, from the lowest to the highest run a line."""
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    values, below, above = [], [], []
    for result in rows.values():
        found = result.get("repeats", {}).get(name)
        middle = found["median"] if found else result["summary"][name]
        values.append(middle)
        below.append(middle - found["lowest"] if found else 0.0)
        above.append(found["highest"] - middle if found else 0.0)
    places = range(len(values))
    axes.barh(places, values, xerr=[below, above], color="tab:blue", ecolor="black", capsize=3)
    for place, value, more in zip(places, values, above, strict=True):
        axes.annotate(
            f"{value:.1f}",
            (value + more, place),
            xytext=(6, 0),
            va="center",
            textcoords="offset points",
        )
    axes.set_yticks(places, titles(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, ROOM * max(a + b for a, b in zip(values, above, strict=True)))
    axes.set(xlabel=label, title=title)
    axes.grid(axis="x", alpha=0.3)
    return save(figure, path)


def throughput(path: Path, rows: Results) -> Path:
    return bars(path, rows, "avg_throughput", "samples a second", "Throughput")


def training_time(path: Path, rows: Results) -> Path:
    return bars(path, rows, "total_time", "seconds", "Training time, without the start")


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Mean over so many values up to each."""
    return [
        sum(values[max(0, at - width + 1) : at + 1]) / (at + 1 - max(0, at - width + 1))
        for at in range(len(values))
    ]


def curves(path: Path, rows: Results, name: str, label: str, title: str) -> Path:
    """By step, where methods that agree lie on each other, and by time, where they do not."""
    figure = Figure(figsize=(11, 4.5))
    left, right = figure.subplots(1, 2, sharey=True)
    for number, result in enumerate(rows.values()):
        steps = result["steps"]
        values = smoothed([step[name] for step in steps], max(1, len(steps) // SMOOTH))
        style: dict[str, Any] = {
            "linestyle": STYLES[number % len(STYLES)],
            "label": result["title"],
            "linewidth": 1 + 0.7 * (len(rows) - number),
            "color": f"C{number}",
        }
        left.plot([step["step"] for step in steps], values, **style)
        right.plot([step["clock"] for step in steps], values, **style | {"linewidth": 1.5})
    left.set(xlabel="step (equal curves lie on each other, thin on thick)", ylabel=label)
    right.set(xlabel="seconds of training")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    return save(figure, path)


def loss_curves(path: Path, rows: Results) -> Path:
    return curves(path, rows, "loss", "loss", "Loss, running mean")


def accuracy_curves(path: Path, rows: Results) -> Path:
    title = "Accuracy on training batches before their update, running mean"
    return curves(path, rows, "accuracy", "share that is right", title)


def communication(path: Path, rows: Results) -> Path:
    """Milliseconds a step: pulls and pushes apart where there are both."""
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    places = list(range(len(rows)))
    left = [0.0] * len(rows)
    for way, color in (("comm", "tab:orange"), ("pull", "tab:green"), ("push", "tab:red")):
        widths = [1e3 * part_of(result, way) for result in rows.values()]
        label = {"comm": "all of it", "pull": "pull parameters", "push": "push gradients"}[way]
        axes.barh(places, widths, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (value, result) in enumerate(zip(left, rows.values(), strict=True)):
        share = 100 * result["summary"]["comm_share"]
        axes.annotate(
            f"{value:.1f} ms, {share:.0f} %",
            (value, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(places, titles(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, ROOM * max(left))
    axes.legend(fontsize=8, loc="lower right")
    axes.set(xlabel="ms a step", title="Communication (defined by method: see the report)")
    return save(figure, path)


def part_of(result: Mapping[str, Any], way: str) -> float:
    """Mean seconds of a step in pulls, in pushes, or in communication that is neither."""
    epochs = result["epochs"]
    parts = [[epoch.get(f"avg_{name}_time", 0.0) for epoch in epochs] for name in ("pull", "push")]
    pull, push = (sum(part) / len(epochs) for part in parts)
    if way == "pull":
        return pull
    if way == "push":
        return push
    return 0.0 if pull or push else float(result["summary"]["avg_comm_time"])


def step_time(path: Path, rows: Results) -> Path:
    """Where a step's time goes: what storage costs stands beside what the method costs."""
    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    places = list(range(len(rows)))
    left = [0.0] * len(rows)
    for label, color in (
        ("compute", "tab:blue"),
        ("communication", "tab:orange"),
        ("data wait", "tab:red"),
    ):
        widths = [1e3 * spent_on(result["summary"], label) for result in rows.values()]
        axes.barh(places, widths, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, titles(rows))
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3)
    axes.set(xlabel="ms a step, mean over workers", title="Where the step time goes")
    axes.grid(axis="x", alpha=0.3)
    return save(figure, path)


def spent_on(summary: Mapping[str, Any], what: str) -> float:
    """Mean seconds of a step."""
    whole = float(summary["avg_batch_time"])
    shares = {"communication": summary["comm_share"], "data wait": summary["data_wait_share"]}
    shares["compute"] = max(0.0, 1 - sum(shares.values()))
    return whole * float(shares[what])
