"""From what ranks of a pipeline have measured to verdicts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hpstore.benchmarks.harness.bench_verdicts import Verdict, spread, verdict

# Any: JSON
Row = dict[str, Any]
IDLE_BAR = 0.10  # between the measured idle share and (K - 1) / (M + K - 1)
FORWARD_SECONDS = 0.05  # the least forward for which the idle bar stands
CHECKPOINT_BAR = 0.03  # of a step, for a checkpoint every 5 steps
WAIT_BAR = 0.02  # of a step, for data
HOOK_BAR = 20.0  # microseconds an event
OURS = "free"  # the snapshot that users get


def bubble(stages: int, microbatches: int) -> float:
    """Idle share of GPipe and 1F1B: (K - 1) / (M + K - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def idle_rows(ranks: Sequence[Sequence[Row]], stages: int) -> dict[str, Row]:
    """By number of micro-batches, from the rounds of all ranks (pipeline_rank.idle_round). Each
    rank has the same report and its own forwards."""
    counts = dict.fromkeys(row["microbatches"] for row in ranks[0])
    return {f"M={count}": _idle_row(ranks, count, stages) for count in counts}


def _idle_row(ranks: Sequence[Sequence[Row]], count: int, stages: int) -> Row:
    rounds = [row for row in ranks[0] if row["microbatches"] == count]
    forwards = [
        row["forward_seconds"] for rank in ranks for row in rank if row["microbatches"] == count
    ]
    return {
        "theory": round(bubble(stages, count), 4),
        "idle_share": spread([row["idle_share"] for row in rounds]),
        "as_measured": spread([row["modelled"] for row in rounds]),
        "by_rank": [
            round(statistics.median(row["ranks"][n]["idle_share"] for row in rounds), 4)
            for n in range(stages)
        ],
        "forward_ms": round(1e3 * min(forwards), 1),  # the least of the ranks' medians
        "step_ms": round(1e3 * statistics.median(row["step_seconds"] for row in rounds), 1),
        "us_an_event": spread(
            [1e6 * max(rank["hook_seconds_per_event"] for rank in row["ranks"]) for row in rounds]
        ),
    }


def cost_rows(ranks: Sequence[Mapping[str, Row]]) -> dict[str, Row]:
    """By way of saving, from the rounds of all ranks (pipeline_rank.cost_rank). A step takes as
    long as on the slowest rank; `overhead` is its ratio to that without checkpoints, less 1, round
    by round."""
    plain = slowest(ranks, "none", "seconds")
    rows: dict[str, Row] = {}
    for way in ranks[0]:
        seconds = slowest(ranks, way, "seconds")
        rows[way] = {
            "step_ms": spread([1e3 * value for value in seconds]),
            "overhead": spread([a / b - 1 for a, b in zip(seconds, plain, strict=True)]),
            "data_wait": spread(slowest(ranks, way, "wait")),
            "still_written_ms": round(1e3 * max(slowest(ranks, way, "tail")), 1),
            "idle_mb": sum(rank[way]["idle_bytes"] for rank in ranks) // 1_000_000,
            "busy_mb": sum(rank[way]["busy_bytes"] for rank in ranks) // 1_000_000,
        }
    return rows


def slowest(ranks: Sequence[Mapping[str, Row]], way: str, name: str) -> list[float]:
    """The largest of the ranks, by round."""
    return [max(values) for values in zip(*(rank[way][name] for rank in ranks), strict=True)]


def bars(
    idle: Mapping[str, Row], cost: Mapping[str, Row], hook_us: Sequence[float]
) -> dict[str, Verdict]:
    """Every figure that has a bar, with the median of its rounds; of inline torch.save beside.

    What hooks cost has it twice: all they add to a call in a loop (`hook_us`), and what they count
    themselves while a schedule runs, where computations have emptied the caches in between.
    """
    found = {f"idle_gap_{name}": idle_verdict(row) for name, row in idle.items()}
    found["checkpoint_every_5_steps"] = verdict(
        cost[OURS]["overhead"]["values"],
        CHECKPOINT_BAR,
        torch_save=cost["torch.save"]["overhead"]["median"],
    )
    found["data_wait"] = verdict(cost[OURS]["data_wait"]["values"], WAIT_BAR)
    found["hook_us_an_event"] = verdict(hook_us, HOOK_BAR)
    for name, row in idle.items():
        found[f"hook_us_in_schedule_{name}"] = verdict(row["us_an_event"]["values"], HOOK_BAR)
    return found


def idle_verdict(row: Row) -> Verdict:
    """The distance to theory; not met with forwards that are too short to stand for any."""
    gaps = [abs(share - row["theory"]) for share in row["idle_share"]["values"]]
    found = verdict(gaps, IDLE_BAR, idle=row["idle_share"]["median"], theory=row["theory"])
    if row["forward_ms"] < 1e3 * FORWARD_SECONDS:
        found |= {"met": False, "why": f"forwards of {row['forward_ms']} ms are too short"}
    return found


def told(found: Mapping[str, Verdict]) -> list[str]:
    """A line for each bar: met, or not."""
    return [
        f"{'met    ' if row['met'] else 'NOT MET'}  {name}: {row['median']} "
        f"({row['lowest']} to {row['highest']}), bar {row['bar']}"
        + "".join(
            f", {key} {row[key]}" for key in ("idle", "theory", "torch_save", "why") if key in row
        )
        for name, row in found.items()
    ]
