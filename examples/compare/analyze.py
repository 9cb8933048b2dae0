"""Table, report and plots of what run_all.py measured.

    python examples/compare/analyze.py compare-results

Writes performance_report.txt, verdict.json and six PNGs; these need matplotlib (`pip install
'hpstore[bench]'`), without which the report says so. Exit code 1 when it says MISMATCH or FAILED.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accounts import gate, problems

# Any below: JSON
Result = dict[str, Any]
Results = Mapping[str, Result]
REPORT, VERDICT = "performance_report.txt", "verdict.json"
PAUSE = 20  # times the median step
HONESTY = (
    "CPU and gloo with a small model: the order of the rows says nothing about GPUs.\n"
    "A speed-up below 1 is printed as it is. More processes than cores share them.\n"
)


def load(directory: Path) -> tuple[dict[str, Result], dict[str, str]]:
    """Results by row, in the order in which they were run, and rows that failed.

    Raises ValueError naming what a file lacks.
    """
    found: dict[str, Result] = {}
    for path in sorted(directory.glob("results_*.json")):
        result = json.loads(path.read_text())
        missing = problems(result)
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        found[result["row"]] = result
    failed = directory / "failed.json"
    ordered = sorted(found, key=lambda row: (row.count("."), found[row]["start_time"]))
    return (
        {row: found[row] for row in ordered},
        json.loads(failed.read_text()) if failed.exists() else {},
    )


def report(directory: Path) -> int:
    """Write everything; the exit code."""
    results, failed = load(directory)
    wrong = gate(results)
    text = written(results, failed, wrong)
    try:
        from plots import plot_all
    except ImportError as error:
        text += f"\nNo plots: {error}; pip install 'hpstore[bench]'\n"
    else:
        plot_all(directory, main_rows(results))
    (directory / REPORT).write_text(text)
    found = {
        "agree": not wrong,
        "problems": wrong,
        "failed": failed,
        "speed_up": speed_ups(main_rows(results)),
    }
    (directory / VERDICT).write_text(json.dumps(found, indent=1) + "\n")
    print(text)
    return 1 if wrong or failed else 0


def main_rows(results: Results) -> dict[str, Result]:
    """The methods, from hpstore and without saves."""
    return {row: result for row, result in results.items() if "." not in row}


def written(results: Results, failed: Mapping[str, str], wrong: Sequence[str]) -> str:
    """The report."""
    parts = [heading(results)]
    rows = main_rows(results)
    if rows:
        parts += [methods_table(rows), "\n".join(notes(rows))]
    driven = {row: result for row, result in results.items() if "pipeline" in result}
    if driven:
        parts.append(pipeline_table(driven))
    for method in sorted({row.split(".")[0] for row in results if "." in row}):
        parts += variants(results, method)
    killed = {row: result for row, result in results.items() if "resume" in result}
    if killed:
        parts.append(resume_table(killed))
    parts += [*pauses(results), verdict(results, failed, wrong)]
    return "\n\n".join(parts) + "\n"


def heading(results: Results) -> str:
    first = next(iter(results.values()), None)
    if first is None:
        return "No results."
    loads = [result["load"] for result in results.values()]
    count = first.get("repeats", {}).get("count", 1)
    return (
        f"Eight ways of training on hpstore, {first['start_time']}, commit {first['git']}, "
        f"torch {first['torch']}\n"
        f"{first['cpus']} cores, load {min(loads)} to {max(loads)}; device {first['device']}, "
        f"model {first['model']}, batch {first['batch_size']}, {first['samples']} samples, "
        f"{first['epoch_count']} epochs, seed {first['seed']}\n"
        f"medians of {count} run{'s' if count > 1 else ''} (lowest to highest); a checkpoint every "
        f"{first['checkpoint_every']} steps; pipelines in {first['micro_batches']} micro-batches\n"
        + HONESTY
    ).rstrip()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, numbers to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(w) if at == 0 else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def spread_of(result: Result, name: str, digits: int) -> str:
    """Median (lowest to highest), where there were repeats."""
    found = result.get("repeats", {}).get(name)
    if found is None or result["repeats"]["count"] == 1:
        return f"{result['summary'][name]:.{digits}f}"
    low, high = found["lowest"], found["highest"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def speed(result: Result) -> float:
    """Median samples a second."""
    found = result.get("repeats", {}).get("avg_throughput", {})
    return float(found.get("median", result["summary"]["avg_throughput"]))


def speed_ups(rows: Results) -> dict[str, float]:
    """Throughput to that of DDP; nan without it."""
    base = speed(rows["ddp"]) if "ddp" in rows else math.nan
    return {row: speed(result) / base for row, result in rows.items()}


def methods_table(rows: Results) -> str:
    table = [
        [
            "method",
            "processes",
            "samples/s",
            "x DDP",
            "time s",
            "step p50 ms",
            "loss",
            "accuracy",
            "comm ms/step",
            "comm %",
            "wait %",
            "digest",
        ]
    ]
    ups = speed_ups(rows)
    for row, result in rows.items():
        summary = result["summary"]
        table.append(
            [
                result["title"],
                str(result["world_size"]),
                spread_of(result, "avg_throughput", 1),
                f"{ups[row]:.2f}",
                spread_of(result, "total_time", 2),
                f"{1e3 * summary['step_p50']:.1f}",
                f"{summary['final_loss']:.4f}",
                f"{summary['final_accuracy']:.3f}",
                f"{1e3 * summary['avg_comm_time']:.1f}",
                f"{100 * summary['comm_share']:.1f}",
                f"{100 * summary['data_wait_share']:.1f}",
                result["params_digest"][:8],
            ]
        )
    return "Methods, without saves\n\n" + columns(table)


def notes(rows: Results) -> Iterator[str]:
    """What communication means, method by method; pulls and pushes apart."""
    for result in rows.values():
        line = f"comm of {result['title']}: {result['communication']}"
        ways = {way: mean_of(result, f"avg_{way}_time") for way in ("pull", "push")}
        if all(value is not None for value in ways.values()):
            line += "; " + ", ".join(f"{way} {1e3 * (s or 0):.1f} ms" for way, s in ways.items())
        yield line
    yield "accuracy: of the training batches, before their update; loss and accuracy: last epoch"


def pipeline_table(rows: Results) -> str:
    """What the hooks have seen: idle shares of the step, means over the ranks."""
    table = [
        [
            "pipelines, by their hooks",
            "idle %",
            "in theory %",
            "as measured %",
            "wait %",
            "MB copied idle",
            "and computing",
            "us an event",
        ]
    ]
    for row, result in rows.items():
        seen = result["pipeline"]
        ranks = seen["ranks"]
        table.append(
            [
                row,
                percent(seen["idle_share"]),
                percent(seen["theory"]),
                percent(seen["modelled"]),
                percent(max(rank["data_wait_share"] for rank in ranks)),
                f"{sum(rank['idle_bytes'] for rank in ranks) / 1e6:.1f}",
                f"{sum(rank['busy_bytes'] for rank in ranks) / 1e6:.1f}",
                f"{1e6 * max(rank['hook_seconds_per_event'] for rank in ranks):.0f}",
            ]
        )
    return columns(table)


def pauses(results: Results) -> list[str]:
    """Rows in which the machine, or something in the row, stood still."""
    still = [
        f"{row} ({result['summary']['step_max']:.1f} s)"
        for row, result in results.items()
        if result["summary"]["step_max"] > PAUSE * result["summary"]["step_p50"]
    ]
    if not still:
        return []
    return [
        f"a step took more than {PAUSE} times the median step in {', '.join(still)}: read the "
        "step p50 of these rows, not their rates, and run them again"
    ]


def mean_of(result: Result, name: str) -> float | None:
    """Of a field that epochs may have."""
    values = [epoch[name] for epoch in result["epochs"] if name in epoch]
    return sum(values) / len(values) if values else None


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def variants(results: Results, method: str) -> list[str]:
    """The same row from other storages, and with other checkpointers."""
    family = {row: r for row, r in results.items() if row.split(".")[0] == method}
    if method not in family:
        return []
    stored = {row: r for row, r in family.items() if r["storage"]["checkpointer"] == "none"}
    saved = {row: r for row, r in family.items() if r["storage"]["loader"] == "hpstore"}
    found = []
    if len(stored) > 1:
        found.append(storage_table(stored, method))
    if len(saved) > 1:
        found.append(saver_table(saved, method))
    return found


def storage_table(rows: Results, method: str) -> str:
    table = [
        [
            "samples from",
            "samples/s",
            "wait %",
            "step p50 ms",
            "step p99 ms",
            "cache hits %",
            "prefetch used %",
            "MB read",
            "degraded reads",
        ]
    ]
    for result in rows.values():
        summary, storage = result["summary"], result["storage"]
        table.append(
            [
                storage["loader"],
                spread_of(result, "avg_throughput", 1),
                percent(summary["data_wait_share"]),
                f"{1e3 * summary['step_p50']:.1f}",
                f"{1e3 * summary['step_p99']:.1f}",
                percent(storage["cache_hit_rate"]),
                percent(storage["prefetch_accuracy"]),
                f"{storage['bytes_read'] / 1e6:.1f}",
                str(storage["degraded_reads"]),
            ]
        )
    return f"{rows[method]['title']} from four storages\n\n" + columns(table)


def saver_table(rows: Results, method: str) -> str:
    """The last column: time for the same samples, to that without checkpoints."""
    base = rows.get(method)
    table = [
        [
            "checkpoints",
            "samples/s",
            "saves",
            "MB each",
            "stall ms each",
            "stall %",
            "step p99 ms",
            "time to none",
        ]
    ]
    for result in rows.values():
        summary, storage = result["summary"], result["storage"]
        saves = storage["ckpt_count"]
        stall = (storage["ckpt_stall_s"] or 0) / saves if saves else 0.0
        table.append(
            [
                storage["checkpointer"],
                spread_of(result, "avg_throughput", 1),
                str(saves),
                f"{storage['ckpt_bytes'] / max(1, saves) / 1e6:.2f}",
                f"{1e3 * stall:.2f}",
                percent(summary["stall_share"]),
                f"{1e3 * summary['step_p99']:.1f}",
                "-" if base is None else f"{speed(base) / speed(result):.3f}",
            ]
        )
    return f"{rows[method]['title']} with four checkpointers\n\n" + columns(table)


def resume_table(rows: Results) -> str:
    table = [
        [
            "killed",
            "rank",
            "after step",
            "resumed from",
            "restore ms",
            "samples lost",
            "repeated",
            "loss gap",
            "same digest",
        ]
    ]
    for result in rows.values():
        resume = result["resume"]
        table.append(
            [
                result["title"],
                str(resume["killed_rank"]),
                str(resume["killed_at_step"]),
                str(resume["resumed_from"]),
                f"{1e3 * resume['restore_s']:.0f}",
                str(resume["samples_lost"]),
                str(resume["samples_repeated"]),
                f"{resume['loss_gap']:.1g}",
                "yes" if resume["same_digest"] else "NO",
            ]
        )
    return "Killed (SIGKILL of one rank) and resumed by torchrun\n\n" + columns(table)


def verdict(results: Results, failed: Mapping[str, str], wrong: Sequence[str]) -> str:
    """MISMATCH with every reason, or what agrees."""
    lines = [f"FAILED {row}: {reason}" for row, reason in failed.items()]
    if wrong:
        lines.append("MISMATCH: these rows did not do the same training; read no speed off them")
        lines += [f"  {reason}" for reason in wrong]
    else:
        exact = [row for row, result in results.items() if result["exact"]]
        lines.append(
            f"AGREE: {len(results)} rows end with the same parameters, {len(exact)} of them bit by "
            "bit"
        )
    return "\n".join(lines)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    try:
        return report(Path(sys.argv[1]))
    except (OSError, ValueError) as error:
        sys.exit(f"analyze.py: {error}")


if __name__ == "__main__":
    sys.exit(main())
