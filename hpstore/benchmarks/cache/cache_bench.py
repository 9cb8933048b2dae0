"""The cache: hit ratios against Belady's MIN and other policies, its own cost, loaders with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from hpstore.benchmarks.cache.cache_bars import CAPACITIES, share_of_min, to_best_peer
from hpstore.benchmarks.cache.cache_cost import BLOCKS as COST_BLOCKS
from hpstore.benchmarks.cache.cache_cost import measure_cost
from hpstore.benchmarks.cache.cache_end_to_end import QUICK, CacheScale, measure_end_to_end
from hpstore.benchmarks.cache.cache_families import measure_families
from hpstore.benchmarks.cache.cache_peers import PeerRun, missing, packages_named
from hpstore.benchmarks.cache.cache_plots import plot_workload
from hpstore.benchmarks.cache.cache_traces import BLOCKS, TRACES, CacheTrace, trace_named
from hpstore.benchmarks.harness.measure import Options, unmet
from hpstore.benchmarks.harness.sessions import progress
from hpstore.errors import ConfigError
from hpstore.loaders.policy import CacheReport, most_hits, simulate

_log = logging.getLogger(__name__)

SEED = 20261121
BATCH = 64
DRAWN_BATCHES = 12  # of the 16 that a loader has drawn, those which nobody makes yet
COST, END_TO_END, FAMILY_ROWS = "cost", "end-to-end", "families"
QUICK_BLOCKS, QUICK_COST_BLOCKS = 2000, 500_000
MOST_REPEATS = 3  # of end to end: half a minute each
_REQUEST_COST = 1 << 40  # of "by count": every request costs the same, whatever its size
# Any: JSON
Found = dict[str, Any]


def bench_cache(options: Options) -> dict[str, object]:
    """Every workload at 10, 20 and 40 %, order unknown and known; the cost of a sample; loaders.

    `options.cases`: names of workloads, "families", "cost" or "end-to-end"; all unless given.
    `quick`: little data, which shows that all works; the bars are meant for the whole. Results are
    handed to `options.keep` after each workload and repetition: a run that is cut leaves them.
    """
    chosen = _cases(options.cases)
    packages = packages_named(options.peers)
    absent = missing(packages)
    present = [name for name in packages if name not in absent]
    blocks = QUICK_BLOCKS if options.quick else BLOCKS
    workloads: Found = {}
    failed: dict[str, str] = dict(absent)
    results: dict[str, object] = {
        "configuration": _configuration(options, blocks, present),
        "workloads": workloads,
        "failed": failed,
    }

    def keep(part: str, found: Found) -> None:
        results[part] = found
        results["not_met"] = list(unmet(results))
        options.keep(results)

    with progress(len(chosen)) as bar:
        for name in chosen:
            say = partial(_say, bar, name)
            say("")
            if name == COST:
                measure_cost(
                    blocks=QUICK_COST_BLOCKS if options.quick else COST_BLOCKS,
                    repeats=options.repeats,
                    keep=partial(keep, name),
                    say=say,
                )
            elif name == FAMILY_ROWS:
                shown = partial(keep, name)
                measure_families(batch=BATCH, quick=options.quick, keep=shown, say=say)
            elif name == END_TO_END:
                measure_end_to_end(
                    scale=QUICK if options.quick else CacheScale(),
                    repeats=min(options.repeats, MOST_REPEATS),
                    directory=options.directory,
                    keep=partial(keep, name),
                    say=say,
                )
            else:
                workloads[name], problems = _workload(name, blocks, present)
                failed |= {f"{name}: {who}": why for who, why in problems.items()}
                if options.plots is not None:
                    failed |= _plotted(options.plots, name, workloads[name])
                keep("workloads", workloads)
            bar.advance(bar.task_ids[0])
            _log.info("bench cache: %s done", name)
    return results


def _configuration(options: Options, blocks: int, peers: list[str]) -> Found:
    return {
        "seed": SEED,
        "blocks": blocks,
        "batch": BATCH,
        "peers": peers,
        "quick": options.quick,
    }


def _say(bar: Progress, name: str, part: str) -> None:
    bar.update(bar.task_ids[0], description=f"{name} {part}".strip())


def _cases(named: str) -> list[str]:
    known = [*TRACES, FAMILY_ROWS, COST, END_TO_END]
    chosen = [name.strip() for name in named.split(",") if name.strip()] or known
    for name in chosen:
        if name not in known:
            raise ConfigError(f"no case is called {name!r}; there are {', '.join(known)}")
    return chosen


def _workload(name: str, blocks: int, packages: list[str]) -> tuple[Found, dict[str, str]]:
    """One trace at all capacities. Peers run beside ours: neither is timed."""
    trace = trace_named(name, SEED, blocks)
    whole = trace.blocks if trace.sizes is None else int(trace.sizes.sum())
    rooms = [int(share * whole) for share in CAPACITIES]
    peers = PeerRun(trace, rooms, packages)
    try:
        ours = [_ours(trace, at, room) for at, room in enumerate(rooms)]
        theirs, failed = peers.collect()
    finally:
        peers.close()
    ratio = "hit_ratio" if trace.sizes is None else "byte_hit_ratio"
    rows: Found = {}
    for at, (share, room) in enumerate(zip(CAPACITIES, rooms, strict=True)):
        rivals = theirs.get(room, {})
        rows[f"{100 * share:g}"] = _row(name, trace, at, ours[at], rivals, ratio)
    return rows, failed


def _ours(trace: CacheTrace, at: int, room: int) -> dict[str, CacheReport]:
    """Return the simulations by name.

    If the order is unknown, the cache gets no information about the order of one job. "Drawn
    ahead" is what a loader passes to the cache for an unknown sampler.
    """
    sized: Found = {"sizes": trace.sizes, "capacity_bytes": room} if trace.sizes is not None else {}
    facts: Found = {"batch": BATCH, "jobs": trace.jobs, "blocks": trace.blocks, **sized}
    starts = trace.starts
    horizon = trace.horizons[at]
    found = {
        "hpstore": simulate(
            trace.requests, room, epoch_starts=starts if trace.jobs is not None else None, **facts
        ),
        "hpstore, drawn ahead": simulate(
            trace.requests, room, drawn_batches=DRAWN_BATCHES, epoch_starts=starts, **facts
        ),
        "hpstore, order known": simulate(
            trace.requests,
            room,
            known_order=True,
            horizon_epochs=horizon,
            epoch_starts=starts,
            **facts,
        ),
    }
    if trace.sizes is not None:
        found["hpstore, by count"] = simulate(
            trace.requests, room, request_cost_bytes=_REQUEST_COST, **facts
        )
    return found


def _row(
    name: str,
    trace: CacheTrace,
    at: int,
    ours: Mapping[str, CacheReport],
    rivals: Mapping[str, Mapping[str, float]],
    ratio: str,
) -> Found:
    ratios: dict[str, dict[str, float]] = {}
    row: Found = {}
    if trace.sizes is None:
        best = most_hits(
            trace.requests,
            ours["hpstore"].capacity_bytes,
            *(report.hit for report in ours.values()),
            counted=trace.counted,
        )
        ratios["MIN"] = {"hit_ratio": best / (len(trace.requests) - trace.counted)}
    for who, report in ours.items():
        ratios[who] = _ratios(trace, report)
    ratios |= {who: dict(found) for who, found in rivals.items()}
    if trace.sizes is None:
        for mode, who in (("unknown", "hpstore"), ("known", "hpstore, order known")):
            row[f"{mode} to MIN"] = share_of_min(
                name, mode, at, ratios[who]["hit_ratio"], ratios["MIN"]["hit_ratio"]
            )
    row["unknown to best peer"] = to_best_peer(ratios["hpstore"][ratio], rivals, ratio)
    row["drawn ahead to unknown"] = to_best_peer(
        ratios["hpstore, drawn ahead"][ratio], {"hpstore": ratios["hpstore"]}, ratio
    )
    row["known to best peer"] = to_best_peer(ratios["hpstore, order known"][ratio], rivals, ratio)
    if trace.sizes is not None:
        row["by count to best peer"] = to_best_peer(
            ratios["hpstore, by count"]["hit_ratio"], rivals, "hit_ratio"
        )
    row["expert"] = ours["hpstore"].expert
    row["hit_ratios"] = {
        who: {key: round(value, 4) for key, value in found.items()} for who, found in ratios.items()
    }
    return row


def _ratios(trace: CacheTrace, report: CacheReport) -> dict[str, float]:
    hits = report.hit[trace.counted :]
    found = {"hit_ratio": float(hits.mean())}
    if trace.sizes is not None:
        weights = trace.sizes[trace.requests[trace.counted :]].astype(np.float64)
        found["byte_hit_ratio"] = float(weights @ hits / weights.sum())
    return found


def _plotted(directory: Path, name: str, rows: Mapping[str, Any]) -> dict[str, str]:
    """Draws a workload; what failed, with its reason."""
    ratio = "byte_hit_ratio" if name == "sizes" else "hit_ratio"
    try:
        plot_workload(directory, name, rows, ratio)
    except ImportError as error:
        return {"plots": f"matplotlib cannot be used here: {error}; pip install 'hpstore[bench]'"}
    return {}
