"""What the ranks wrote down, as results; which samples were lost; whether methods agree. Pure.

Each rank of a run writes one file of JSON lines an attempt (a start of the job):

    {"kind": "start", "step": 10, "restore_s": ...}       resumed after step 10; 0: from nothing
    {"kind": "took", "step": 11, "epoch": 0, "share": 1, "ids": [...]}    samples of one step
    {"kind": "step", "step": 11, "epoch": 0, "seconds": ..., "wait": ..., "stall": ..., ...}
    {"kind": "end", "parameters": {name: [SHA-256, sum of magnitudes]}, "storage": {...}}

The end of a pipeline that hooks drive has the report of their events, too: "pipeline".
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Any below: JSON
Line = dict[str, Any]
Ranks = Mapping[int, Sequence[Line]]  # lines by rank
Result = dict[str, Any]
CLOSE = 1e-5  # relative, of sums of magnitudes, where bits cannot be the same
EPOCH_FIELDS = (
    "epoch",
    "loss",
    "accuracy",
    "time",
    "throughput",
    "avg_batch_time",
    "avg_comm_time",
    "data_wait_s",
    "data_wait_share",
    "ckpt_stall_s",
)
FIELDS: dict[str, tuple[str, ...]] = {
    "": (
        "method",
        "row",
        "world_size",
        "batch_size",
        "model",
        "device",
        "seed",
        "torch",
        "git",
        "start_time",
        "end_time",
        "epochs",
        "summary",
        "storage",
        "params_digest",
        "steps",
    ),
    "summary": (
        "total_time",
        "avg_throughput",
        "final_loss",
        "final_accuracy",
        "avg_comm_time",
        "avg_batch_time",
        "comm_share",
        "data_wait_share",
        "stall_share",
        "step_p50",
        "step_p99",
        "step_max",
    ),
    "storage": (
        "loader",
        "checkpointer",
        "cache_hit_rate",
        "prefetch_accuracy",
        "bytes_read",
        "degraded_reads",
        "ckpt_count",
        "ckpt_bytes",
        "ckpt_stall_s",
        "ckpt_hidden_share",
        "restore_s",
    ),
    "resume": (
        "killed_at_step",
        "killed_rank",
        "resumed_from",
        "samples_lost",
        "samples_repeated",
        "loss_gap",
        "same_digest",
        "same_ledger",
    ),
    "pipeline": ("steps", "step_seconds", "idle_share", "theory", "modelled", "ranks", "ledger"),
}
OPTIONAL = ("resume", "pipeline")
"""What a results file has; "resume" only where the row was killed and resumed, "pipeline" only
where hooks have driven it."""


def problems(result: Result) -> list[str]:
    """Fields that a results file lacks."""
    found = []
    for part, names in FIELDS.items():
        where = result.get(part) if part else result
        if where is None:
            found += [] if part in OPTIONAL else [part]
            continue
        found += [f"{part}.{name}" if part else name for name in names if name not in where]
    for number, epoch in enumerate(result.get("epochs", [])):
        found += [f"epochs[{number}].{name}" for name in EPOCH_FIELDS if name not in epoch]
    return found


# --- one run ------------------------------------------------------------------------------------


def of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def composed(facts: Mapping[str, Any], ranks: Ranks, servers: int) -> Result:
    """A results file of the last attempt's lines. `servers`: ranks that only serve, the first."""
    workers = [of_kind(lines, "step") for rank, lines in sorted(ranks.items()) if rank >= servers]
    ends = [of_kind(lines, "end")[0] for _, lines in sorted(ranks.items())]
    numbers = sorted({line["epoch"] for lines in workers for line in lines})
    epochs = [
        epoch_of(number, [[line for line in lines if line["epoch"] == number] for lines in workers])
        for number in numbers
    ]
    digest, total = digested([end["parameters"] for end in ends])
    return {
        **facts,
        "epochs": epochs,
        "summary": summary_of(epochs, workers),
        "storage": storage_of([end["storage"] for end in ends], ranks),
        "params_digest": digest,
        "params_abs_sum": total,
        "steps": steps_of(workers),
        **({"pipeline": ends[0]["pipeline"]} if "pipeline" in ends[0] else {}),
    }


def epoch_of(number: int, workers: Sequence[Sequence[Line]]) -> dict[str, Any]:
    """One epoch. Times of a step are means over workers; the epoch takes as long as the slowest."""
    lines = [line for steps in workers for line in steps]
    samples = sum(line["samples"] for line in lines)
    seconds = [sum(line["seconds"] for line in steps) for steps in workers]
    spent = sum(seconds)
    found = {
        "epoch": number,
        "loss": sum(line["loss"] * line["samples"] for line in lines) / max(1, samples),
        "accuracy": sum(line["right"] for line in lines) / max(1, samples),
        "time": max(seconds),
        "throughput": samples / max(seconds),
        "avg_batch_time": spent / len(lines),
        "avg_comm_time": sum(talked(line) for line in lines) / len(lines),
        "data_wait_s": sum(line["wait"] for line in lines) / len(workers),
        "data_wait_share": sum(line["wait"] for line in lines) / spent,
        "ckpt_stall_s": sum(line["stall"] for line in lines) / len(workers),
    }
    for way in ("pull", "push"):
        if any(way in line["talk"] for line in lines):
            found[f"avg_{way}_time"] = sum(line["talk"].get(way, 0.0) for line in lines) / len(
                lines
            )
    return found


def talked(line: Line) -> float:
    """Seconds of communication in a step."""
    return float(sum(line["talk"].values()))


def summary_of(
    epochs: Sequence[Mapping[str, Any]], workers: Sequence[Sequence[Line]]
) -> dict[str, Any]:
    lines = [line for steps in workers for line in steps]
    spent = sum(line["seconds"] for line in lines)
    total = sum(epoch["time"] for epoch in epochs)
    slowest: defaultdict[int, float] = defaultdict(float)
    for line in lines:
        slowest[line["step"]] = max(slowest[line["step"]], line["seconds"])
    return {
        "total_time": total,
        "avg_throughput": sum(e["throughput"] * e["time"] for e in epochs) / total,
        "final_loss": epochs[-1]["loss"],
        "final_accuracy": epochs[-1]["accuracy"],
        "avg_batch_time": spent / len(lines),
        "avg_comm_time": sum(map(talked, lines)) / len(lines),
        "comm_share": sum(map(talked, lines)) / spent,
        "data_wait_share": sum(line["wait"] for line in lines) / spent,
        "stall_share": sum(line["stall"] for line in lines) / spent,
        "step_p50": quantile(list(slowest.values()), 0.5),
        "step_p99": quantile(list(slowest.values()), 0.99),
        "step_max": max(slowest.values()),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def storage_of(ends: Sequence[Mapping[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Counters of all ranks together; shares and times are means over the ranks that have them."""
    found: dict[str, Any] = {name: ends[0][name] for name in ("loader", "checkpointer")}
    for name in ("bytes_read", "degraded_reads", "ckpt_bytes"):
        found[name] = sum(end.get(name) or 0 for end in ends)
    found["ckpt_count"] = max(end.get("ckpt_count") or 0 for end in ends)
    for name in ("cache_hit_rate", "prefetch_accuracy", "ckpt_stall_s", "ckpt_hidden_share"):
        values = [end[name] for end in ends if end.get(name) is not None]
        found[name] = statistics.fmean(values) if values else None
    restores = [of_kind(lines, "start")[0]["restore_s"] for lines in ranks.values()]
    found["restore_s"] = max(restores)
    return found


def steps_of(workers: Sequence[Sequence[Line]]) -> list[dict[str, float]]:
    """Of each step: its loss and accuracy over the whole batch, and the clock at its end, which is
    the slowest worker's.
    """
    parts: defaultdict[int, list[Line]] = defaultdict(list)
    for line in sorted((line for steps in workers for line in steps), key=lambda at: at["step"]):
        parts[line["step"]].append(line)
    found, clock = [], 0.0
    for step, lines in parts.items():
        samples = max(1, sum(line["samples"] for line in lines))
        clock += max(line["seconds"] for line in lines)
        loss = sum(line["loss"] * line["samples"] for line in lines) / samples
        right = sum(line["right"] for line in lines)
        found.append({"step": step, "loss": loss, "accuracy": right / samples, "clock": clock})
    return found


def digested(ranks: Sequence[Mapping[str, Sequence[Any]]]) -> tuple[str, float]:
    """One digest of all parameters, and the sum of their magnitudes.

    "replicas differ: NAME" when two ranks hold different values of a parameter.
    """
    whole: dict[str, Sequence[Any]] = {}
    for parameters in ranks:
        for name, found in parameters.items():
            if whole.setdefault(name, found)[0] != found[0]:
                return f"replicas differ: {name}", math.nan
    text = "\n".join(f"{name} {whole[name][0]}" for name in sorted(whole))
    return hashlib.sha256(text.encode()).hexdigest(), sum(whole[n][1] for n in sorted(whole))


# --- repeats ------------------------------------------------------------------------------------


def merged(runs: Sequence[Result]) -> Result:
    """The run of median throughput, with the spread of all of them."""
    ordered = sorted(runs, key=lambda run: run["summary"]["avg_throughput"])
    return {
        **ordered[(len(ordered) - 1) // 2],
        "repeats": {
            "count": len(runs),
            **{
                name: spread([run["summary"][name] for run in runs])
                for name in (
                    "avg_throughput",
                    "total_time",
                    "avg_comm_time",
                    "step_p50",
                    "data_wait_share",
                    "stall_share",
                )
            },
            "digests": sorted({run["params_digest"] for run in runs}),
        },
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


# --- the ledger ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Samples of all epochs, counted over what counts of each attempt."""

    lost: int
    repeated: int
    differing: int  # steps of which two stages took different samples for the same share


def counting(attempts: Sequence[Ranks]) -> Iterator[Line]:
    """ "took" lines of the steps that no later attempt did again, of all ranks."""
    starts = [
        min(of_kind(lines, "start")[0]["step"] for lines in ranks.values()) for ranks in attempts
    ]
    for number, ranks in enumerate(attempts):
        last = starts[number + 1] if number + 1 < len(starts) else math.inf
        for lines in ranks.values():
            yield from (line for line in of_kind(lines, "took") if line["step"] <= last)


def account(attempts: Sequence[Ranks], samples: int, epochs: int) -> Account:
    """Every sample belongs into every epoch once."""
    shares: dict[tuple[int, int], Line] = {}
    repeated = differing = 0
    for line in counting(attempts):
        first = shares.setdefault((line["step"], line["share"]), line)
        differing += first["ids"] != line["ids"]
    taken: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for line in shares.values():
        taken[line["epoch"]].update(line["ids"])
    lost = 0
    for epoch in range(epochs):
        lost += sum(1 for sample in range(samples) if not taken[epoch][sample])
    for epoch, counts in taken.items():
        extra = sum(count - 1 for count in counts.values())
        repeated += extra if epoch < epochs else extra + len(counts)
    return Account(lost=lost, repeated=repeated, differing=differing)


def resume_of(
    baseline: Result, resumed: Result, attempts: Sequence[Ranks], killed: tuple[int, int]
) -> dict[str, Any]:
    """How a run that was killed at (step, rank) compares with one that was not."""
    found = account(attempts, baseline["samples"], baseline["epoch_count"])
    wanted = {step["step"]: step["loss"] for step in baseline["steps"]}
    gaps = [abs(step["loss"] - wanted[step["step"]]) for step in resumed["steps"]]
    starts = [of_kind(lines, "start")[0]["step"] for lines in attempts[-1].values()]
    step, rank = killed
    return {
        "killed_at_step": step,
        "killed_rank": rank,
        "resumed_from": min(starts),
        "starts": len(attempts),
        "samples_lost": found.lost,
        "samples_repeated": found.repeated,
        "stages_differ": found.differing,
        "loss_gap": max(gaps, default=math.nan),
        "same_digest": resumed["params_digest"] == baseline["params_digest"],
        "same_ledger": ledger_in(resumed) == ledger_in(baseline),
        "restore_s": resumed["storage"]["restore_s"],
    }


# --- the gate -----------------------------------------------------------------------------------


def gate(results: Mapping[str, Result]) -> list[str]:
    """Why the rows do not show the same training; nothing when they do.

    Bits are compared where they can be equal (`exact`), sums of magnitudes elsewhere.
    """
    found = []
    if not results:
        return ["no results"]
    first = "ddp" if "ddp" in results else min(results)
    wanted = results[first]
    for row, result in results.items():
        digests = result.get("repeats", {}).get("digests", [result["params_digest"]])
        if len(digests) > 1:
            found.append(f"{row}: its repeats end with {len(digests)} different digests")
        if result["params_digest"].startswith("replicas differ"):
            found.append(f"{row}: {result['params_digest']}")
        elif result["exact"] and wanted["exact"]:
            if result["params_digest"] != wanted["params_digest"]:
                found.append(
                    f"{row}: digest {result['params_digest'][:12]}, that of {first} is "
                    f"{wanted['params_digest'][:12]}"
                )
        elif not math.isclose(result["params_abs_sum"], wanted["params_abs_sum"], rel_tol=CLOSE):
            found.append(
                f"{row}: sum of magnitudes {result['params_abs_sum']:.8g}, that of {first} is "
                f"{wanted['params_abs_sum']:.8g}"
            )
        found += [f"{row}: {text}" for text in resume_problems(result)]
        found += [f"{row}: {text}" for text in ledger_problems(result)]
    return found


def ledger_in(result: Result) -> Any:
    """Of the hooks that drove a pipeline: samples, and a sum of their hashes; None without."""
    return result.get("pipeline", {}).get("ledger")


def ledger_problems(result: Result) -> list[str]:
    """What the ledger of a pipeline's hooks says, against what was to be read."""
    ledger = ledger_in(result)
    wanted = result["samples"] * result["epoch_count"]
    if ledger is None or ledger["samples"] == wanted:
        return []
    return [f"its ledger has {ledger['samples']} samples, not {wanted}"]


def resume_problems(result: Result) -> list[str]:
    """What a kill has cost that it must not."""
    resume = result.get("resume")
    if resume is None:
        return []
    found = []
    for name in ("samples_lost", "samples_repeated", "stages_differ"):
        if resume[name]:
            found.append(f"after a kill {name.replace('_', ' ')}: {resume[name]}")
    if not resume["same_ledger"]:
        found.append("after a kill the ledger has other samples")
    if not 0 < resume["resumed_from"] <= resume["killed_at_step"]:
        found.append(f"resumed from step {resume['resumed_from']}, no committed one")
    if result["exact"] and not (resume["same_digest"] and resume["loss_gap"] == 0):
        found.append(f"resumed, it ends elsewhere (losses differ by {resume['loss_gap']:.3g})")
    elif not result["exact"] and not resume["loss_gap"] <= CLOSE:
        found.append(f"resumed, losses differ by {resume['loss_gap']:.3g}")
    return found
