"""From rates to verdicts: ratios of pairs taken in the same repetition, against issue 4's bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from hpstore.benchmarks.harness.bench_verdicts import Verdict, pairs, skipped, verdict
from hpstore.benchmarks.harness.sessions import Found
from hpstore.units import MIB

Figures = Mapping[str, Sequence[Found]]  # by contender, one a repetition

RESIDENT, WINDOW = "hpstore", "hpstore window"
RECORDS, WINDOWS = "hpstore global, no cache", "hpstore window, no cache"
FANCY, FANCY_WORKERS = "torch memmap getitems", "torch memmap getitems 2 workers"
MEMMAP, WORKERS, FILES = "torch memmap", "torch memmap 2 workers", "torch files"
KEPT, NEW = "hpstore, kept loader", "hpstore, new process"
GROWTH_BYTES = 8 * MIB


def rates(found: Figures, key: str = "rate") -> dict[str, list[float]]:
    """Return samples per second of each contender."""
    return {name: [session[key] for session in sessions] for name, sessions in found.items()}


def to_one(found: Figures, ours: str, theirs: str, bar: float | None) -> Verdict:
    """One of ours against one peer, whole epochs."""
    for name in (ours, theirs):
        if not found.get(name):
            return skipped(f"{name} was not measured")
    rows = rates(found)
    facts = {"cut": True} if any(session["cut"] for session in found[theirs]) else {}
    mine = rows[ours][: len(rows[theirs])]  # who was cut is measured once
    return verdict(pairs(mine, rows[theirs]), bar, least=True, against=theirs, **facts)


def to_best(found: Figures, ours: str, bar: float | None) -> Verdict:
    """One of ours against the fastest peer."""
    medians = {
        name: statistics.median(values)
        for name, values in rates(found).items()
        if values and not name.startswith("hpstore")
    }
    if not medians:
        return skipped("no peers were asked for, or all failed")
    return to_one(found, ours, max(medians, key=lambda name: medians[name]), bar)


def warm_verdicts(kind: str, found: Figures) -> dict[str, Verdict]:
    """Data in memory."""
    if kind == "B":
        return {
            "warm_to_memmap": to_one(found, RESIDENT, MEMMAP, 1.5),
            "warm_to_best_peer": to_best(found, RESIDENT, None),
        }
    rows = {
        "warm_to_memmap_getitems": to_one(found, RESIDENT, FANCY, 1.2),
        "warm_to_memmap_2_workers": to_one(found, RESIDENT, WORKERS, 4.0),
        "warm_to_memmap_getitems_2_workers": to_one(found, RESIDENT, FANCY_WORKERS, 4.0),
        "warm_to_best_peer": to_best(found, RESIDENT, None),
    }
    if found.get(RESIDENT):
        busy = [session["main_us"] for session in found[RESIDENT]]
        rows["main_thread_us_a_sample"] = verdict(busy, 2.0, least=False)
    return rows


def cold_verdicts(found: Figures, raw: Sequence[Found]) -> dict[str, Verdict]:
    """Nothing in memory at first, room for everything."""
    rows = {
        "cold_to_best_peer": to_best(found, WINDOW, 1.2),
        "cold_global_to_best_peer": to_best(found, RESIDENT, None),
    }
    return rows | to_raw("cold", found, raw, RECORDS, WINDOWS, (None, None))


def limited_verdicts(found: Figures, raw: Sequence[Found]) -> dict[str, Verdict]:
    """Data larger than memory."""
    return {
        **to_raw("limited", found, raw, RESIDENT, WINDOW, (0.8, 0.75)),
        "limited_global_to_files": to_one(found, RESIDENT, FILES, 4.0),
        "limited_window_to_litdata": to_one(found, WINDOW, "litdata", 3.0),
        "limited_window_to_best_peer": to_best(found, WINDOW, None),
    }


def restart_verdicts(found: Figures) -> dict[str, Verdict]:
    """A new process against the loader that left it the data, whole epochs."""
    rows = {"new_process_to_kept_loader": to_one(found, NEW, KEPT, 0.8)}
    if found.get(NEW):
        read = [session["stats"]["records_read"] for session in found[NEW]]
        rows["records_read_by_a_new_process"] = verdict(read, 0, least=False)
    return rows


def to_raw(
    case: str,
    found: Figures,
    raw: Sequence[Found],
    chosen: str,
    window: str,
    bars: tuple[float | None, float | None],
) -> dict[str, Verdict]:
    """Random reads against fio (or threads), windows against sequential reads; steady rates."""
    rows: dict[str, Verdict] = {}
    steady = rates(found, "steady_rate")
    for name, ours, key, bar in (
        ("global", chosen, "random_reads", bars[0]),
        ("window", window, "sequential_rows", bars[1]),
    ):
        if steady.get(ours):
            against = [session[key] for session in raw]
            rows[f"{case}_{name}_to_raw"] = verdict(
                pairs(steady[ours], against), bar, least=True, against=raw[0][f"{key}_by"]
            )
        else:
            rows[f"{case}_{name}_to_raw"] = skipped(f"{ours} was not measured")
    return rows


def degraded_verdicts(
    found: Mapping[int, Mapping[str, Figures]], allowed: Mapping[int, float]
) -> dict[str, Verdict]:
    """By devices missing, case ("warm", "cold") and contender; `allowed`: what arithmetic leaves of
    the rate of random reads.
    """
    rows: dict[str, Verdict] = {}
    healthy = found.get(0, {})
    for lost in sorted(found.keys() - {0}):
        cases = found[lost]
        for case, name, bar, label in (
            ("warm", RESIDENT, 0.85, "in_memory"),
            ("cold", WINDOWS, 0.85, "window"),
            ("cold", RECORDS, 0.9, "global"),
        ):
            ours, usual = cases.get(case, {}).get(name), healthy.get(case, {}).get(name)
            title = f"degraded_{lost}_{label}_to_healthy"
            if not ours or not usual:
                rows[title] = skipped("not measured")
                continue
            ratio = pairs([s["rate"] for s in ours], [s["rate"] for s in usual])
            if label == "global":
                title = f"degraded_{lost}_{label}_to_what_arithmetic_allows"
                ratio = [value / allowed[lost] for value in ratio]
                rows[title] = verdict(ratio, bar, least=True, allowed=round(allowed[lost], 3))
            else:
                rows[title] = verdict(ratio, bar, least=True)
    return rows


def special_verdicts(found: Mapping[str, Found]) -> dict[str, Verdict]:
    """Figures without peers; the worst mode decides, except that each is listed."""
    rows: dict[str, Verdict] = {}
    for mode, places in found.get("first batch", {}).items():
        for place, seconds in places.items():
            bar = None if place.endswith("open") else 150.0
            rows[f"first_batch_ms, {mode}, {place}"] = verdict(
                [value * 1e3 for value in seconds], bar, least=False
            )
    for mode, gaps in found.get("epoch boundary", {}).items():
        rows[f"boundary_gap_in_batches, {mode}"] = verdict(
            gaps["gaps_in_batches"], 2.0, least=False
        )
    for mode, ready in found.get("ready batch", {}).items():
        values = [seconds * 1e6 for seconds in ready["seconds"]]
        rows[f"ready_next_us, {mode}"] = (
            verdict(values, 200.0, least=False) if values else skipped("too few batches")
        )
    for which, states in found.get("state", {}).items():
        values = [seconds * 1e6 for seconds in states["seconds"]]
        rows[f"state_dict_us, {which}"] = verdict(values, 50.0, least=False)
    for mode, grown in found.get("growth", {}).items():
        values = [grown["growth_bytes"] / MIB]
        rows[f"growth_MiB_50_epochs, {mode}"] = verdict(values, GROWTH_BYTES / MIB, least=False)
        rows[f"memory_MiB_50_epochs, {mode}"] = verdict(
            [grown["taken_bytes"] / MIB], grown["budget_bytes"] / MIB, least=False
        )
    kill = found.get("kill", {})
    if "left" in kill:
        rows["names_in_shared_memory_after_kill"] = verdict([len(kill["left"])], 0, least=False)
    elif kill:
        rows["names_in_shared_memory_after_kill"] = kill
    return rows
