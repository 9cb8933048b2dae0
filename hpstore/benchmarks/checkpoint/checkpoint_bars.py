"""From times to verdicts: every figure as a ratio of pairs taken in the same repetition."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from hpstore.benchmarks.harness.bench_verdicts import Verdict, pairs, spread, verdict
from hpstore.benchmarks.harness.sessions import Found
from hpstore.units import MIB

OURS = "hpstore"
SPARE_BYTES = 64 * MIB
SLICE_LIMIT_BYTES = 4.2 * MIB
DURABLE_STEADY_BAR, DURABLE_FIRST_BAR, LOAD_COLD_BAR = 0.7, 1.1, 0.9
FROZEN_BAR = 0.15  # nine tensors of ten are as they were
DEDUPLICATED_BAR = 1.05  # what all ranks hold is stored once; parity is not counted


Series = dict[str, list[float]]  # seconds by contender, one a repetition


def fastest(times: Series) -> str | None:
    """The peer with the lowest median; None without peers."""
    peers = {name: statistics.median(t) for name, t in times.items() if not name.startswith(OURS)}
    return min(peers, key=lambda name: peers[name]) if peers else None


def to_best(times: Series, bar: float) -> Verdict:
    """Ours against the fastest peer."""
    best = fastest(times)
    if best is None:
        return {"skipped": "no peers were asked for, or all failed"}
    return verdict(pairs(times[OURS], times[best]), bar, against=best)


def series(found: Mapping[str, Sequence[Found]], pick: Callable[[Found], float]) -> Series:
    """One figure of every contender."""
    return {name: [pick(session) for session in sessions] for name, sessions in found.items()}


def load_series(found: Mapping[str, Sequence[Found]], kind: str) -> Series:
    """Every way to load of every contender; hpstore has one, which is called hpstore."""
    rows: Series = {}
    for name, sessions in found.items():
        for way in sessions[0][kind]:
            rows[name if name == OURS else f"{name}: {way}"] = [
                session[kind][way] for session in sessions
            ]
    return rows


def save_verdicts(saves: Mapping[str, Sequence[Found]]) -> dict[str, Verdict]:
    """Stall, durability, memory, first against steady, warm loads."""
    blocked = series(saves, lambda s: s["steady"]["blocked_seconds"])
    durable = series(saves, lambda s: s["steady"]["durable_seconds"])
    first = series(saves, lambda s: s["first"]["durable_seconds"])
    first_blocked = [s["first"]["blocked_seconds"] for s in saves[OURS]]
    copies = [s["copy_seconds"] for s in saves[OURS]]
    warm = load_series(saves, "load_warm_seconds")
    memory = [s["memory_bytes"] / (s["state_bytes"] + SPARE_BYTES) for s in saves[OURS]]
    return {
        "stall_to_copy": verdict(pairs(blocked[OURS], copies), 1.2),
        "stall_to_best_peer": to_best(blocked, 1.0),
        "durable_steady_to_best_peer": to_best(durable, DURABLE_STEADY_BAR),
        "durable_first_to_best_peer": to_best(first, DURABLE_FIRST_BAR),
        "first_stall_to_steady_stall": verdict(pairs(first_blocked, blocked[OURS]), 2.0),
        "first_durable_to_steady_durable": verdict(pairs(first[OURS], durable[OURS]), 2.0),
        "load_warm": warm_verdict(warm, copies),
        "memory_to_state_and_64MiB": verdict(memory, 1.0),
    }


def warm_verdict(warm: Series, copies: Sequence[float]) -> Verdict:
    """Either of two bars is enough: 1.5 times safetensors, or 1.5 times one copy."""
    found: Verdict = {"to_copy": verdict(pairs(warm[OURS], copies), 1.5)}
    safetensors = next((t for name, t in warm.items() if name.startswith("safetensors")), None)
    if safetensors is not None:
        found["to_safetensors"] = verdict(pairs(warm[OURS], safetensors), 1.5)
    best = fastest(warm)
    if best is not None:
        found["to_best_peer"] = verdict(pairs(warm[OURS], warm[best]), None, against=best)
    judged = [row["met"] for row in found.values() if "met" in row]
    return found | {"bar": "either 1.5", "met": any(judged)}


def load_verdicts(loads: Mapping[str, Sequence[Found]]) -> dict[str, Verdict]:
    """Cold loads, whole and with m directories gone."""
    cold = load_series(loads, "load_cold_seconds")
    degraded = [session["load_degraded_seconds"] for session in loads[OURS]]
    return {
        "load_cold_to_best_peer": to_best(cold, LOAD_COLD_BAR),
        "load_degraded_to_healthy": verdict(pairs(degraded, cold[OURS]), 1.25),
    }


def raw_verdicts(
    saves: Sequence[Found], loads: Sequence[Found], raw: Sequence[Found]
) -> dict[str, Verdict]:
    """hpstore against what the same directories take raw; no bars, for reading the others."""
    cold = [next(iter(s["load_cold_seconds"].values())) for s in loads]

    def row(ours: list[float], name: str) -> Verdict:
        return verdict(pairs(ours, [r[name] for r in raw]), None)

    return {
        "durable_first_to_raw_new_files": row(
            [s["first"]["durable_seconds"] for s in saves], "write_new_seconds"
        ),
        "durable_steady_to_raw_overwrite": row(
            [s["steady"]["durable_seconds"] for s in saves], "write_over_seconds"
        ),
        "load_cold_to_raw_read": row(cold, "read_seconds"),
    }


def floor_verdicts(
    saves: Mapping[str, Sequence[Found]],
    loads: Mapping[str, Sequence[Found]],
    raw: Sequence[Found],
) -> dict[str, Verdict]:
    """What these directories need raw for what hpstore moves (k + m columns written, k read), over
    the fastest peer. A floor above its bar: the devices cannot do it, whoever writes to them.
    """
    steady = series(saves, lambda s: s["steady"]["durable_seconds"])
    first = series(saves, lambda s: s["first"]["durable_seconds"])
    cold = load_series(loads, "load_cold_seconds")

    def row(times: Series, name: str, bar: float) -> Verdict:
        best = fastest(times)
        if best is None:
            return {"skipped": "no peers were asked for, or all failed"}
        floor = pairs([session[name] for session in raw], times[best])
        within = statistics.median(floor) <= bar
        return verdict(floor, None, against=best, of_bar=bar, devices_can=within)

    return {
        "durable_steady_floor": row(steady, "write_over_seconds", DURABLE_STEADY_BAR),
        "durable_first_floor": row(first, "write_new_seconds", DURABLE_FIRST_BAR),
        "load_cold_floor": row(cold, "read_seconds", LOAD_COLD_BAR),
    }


def special_verdicts(found: Mapping[str, Sequence[Found]]) -> dict[str, Verdict]:
    """Figures without peers."""
    rows: dict[str, Verdict] = {
        "many_small_to_few_big": _row(
            found["many_small"], lambda s: pairs(s["many_seconds"], s["few_seconds"]), 2.0
        ),
        "memory_growth_MiB_50_saves": _row(
            found["growth"], lambda s: [s["growth_bytes"] / MIB], None
        ),
        "slice_bytes_to_4.2_MiB": _row(
            found["slice"], lambda s: [s["read_bytes"] / SLICE_LIMIT_BYTES], 1.0
        ),
        "overlap_visible_to_copy": _row(
            found["overlap"],
            lambda s: [seconds / s["copy_seconds"] for seconds in s["visible_seconds"]],
            0.1,
        ),
    }
    return (
        rows
        | _disturbances(found["disturbance"])
        | _python_steps(found["background"])
        | _shapes(found)
        | _ranks(found["ranks"], found["resharding"])
    )


def _shapes(found: Mapping[str, Sequence[Found]]) -> dict[str, Verdict]:
    """States of other shapes, to torch.save where it saved the same."""
    rows: dict[str, Verdict] = {}
    for name in ("tiny_tensors", "python_leaves"):
        for session in found[name]:
            for what in ("stall", "durable", "load"):
                ours, theirs = (session[f"{who}_{what}_seconds"] for who in ("ours", "theirs"))
                rows[f"{name}_{what}_to_torch_save"] = verdict(
                    pairs(ours, theirs),
                    1.0,
                    leaves=session["leaves"],
                    seconds=statistics.median(ours),
                )
    rows["frozen_bytes_to_full"] = _row(
        found["frozen"], lambda s: [n / s["full_bytes"] for n in s["changed_bytes"]], FROZEN_BAR
    )
    for session in found["stand_ins"]:
        for what in ("stall", "durable", "listing", "restore"):
            rows[f"stand_ins_{what}_seconds"] = verdict(
                session[f"{what}_seconds"], None, tensors=session["tensors"]
            )
    return rows


def _ranks(saves: Sequence[Found], loads: Sequence[Found]) -> dict[str, Verdict]:
    """Several ranks, the slowest of them: to a copy of the state, and to DCP."""
    rows: dict[str, Verdict] = {}
    for world, found in (saves[0] if saves else {}).items():
        at = f"ranks_{world}"
        stall, durable = found["stall_seconds"], found["durable_seconds"]
        rows[f"{at}_stall_to_copy"] = verdict(pairs(stall, found["copy_seconds"]), None)
        rows[f"{at}_durable_to_dcp"] = verdict(pairs(durable, found["dcp_seconds"]), 1.0)
        rows[f"{at}_bytes_to_state"] = verdict(found["bytes_to_state"], DEDUPLICATED_BAR)
    for world, found in (loads[0] if loads else {}).items():
        rows[f"resharding_4_to_{world}_to_dcp"] = verdict(
            pairs(found["ours_seconds"], found["dcp_seconds"]), 1.0
        )
    return rows


def _disturbances(sessions: Sequence[Found]) -> dict[str, Verdict]:
    rows: dict[str, Verdict] = {}
    for mode, samples in (sessions[0] if sessions else {}).items():
        rows[f"step_disturbance_{mode}"] = verdict(
            [s["disturbed_seconds"] / s["quiet_seconds"] for s in samples],
            1.05 if mode == "gentle" else None,
            steps=sum(s["steps"] for s in samples),
            lost_seconds_a_save=spread([s["lost_seconds"] for s in samples])["median"],
            quiet_step_seconds=spread([s["quiet_seconds"] for s in samples])["median"],
        )
    return rows or {"step_disturbance_gentle": {"skipped": "not run"}}


def _python_steps(sessions: Sequence[Found]) -> dict[str, Verdict]:
    """Steps of pure Python beside saves by threads and by a process: to quiet ones."""
    rows: dict[str, Verdict] = {}
    for background, samples in (sessions[0] if sessions else {}).items():
        rows[f"python_step_beside_{background}"] = verdict(
            [s["mean_seconds"] / s["quiet_seconds"] for s in samples],
            None,
            steps=sum(s["steps"] for s in samples),
            p99=spread([s["worst_seconds"] / s["quiet_seconds"] for s in samples])["median"],
            durable_seconds=spread([s["durable_seconds"] for s in samples])["median"],
        )
    return rows or {"python_step_beside_process": {"skipped": "not run"}}


def _row(
    sessions: Sequence[Found], pick: Callable[[Found], list[float]], bar: float | None
) -> Verdict:
    if not sessions:
        return {"skipped": "not run"}
    if "skipped" in sessions[0]:
        return {"skipped": sessions[0]["skipped"]}
    return verdict([value for session in sessions for value in pick(session)], bar)
