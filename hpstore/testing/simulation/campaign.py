"""Run many seeds side by side, and print what was found and what was covered."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path

from hpstore.testing.simulation.draw import draw
from hpstore.testing.simulation.host_draw import draw_hosts
from hpstore.testing.simulation.machinery import installed
from hpstore.testing.simulation.mutations import MUTATIONS, mutated
from hpstore.testing.simulation.schedule import Schedule
from hpstore.testing.simulation.shrink import shrink
from hpstore.testing.simulation.simulator import SimulationOutcome, run

COLLECT = 10  # seeds between two collections of garbage
BATCH = 50  # seeds that a worker takes at a time
SHRUNK = 6  # findings that are made small; others are named only


@dataclass(slots=True)
class CampaignResult:
    """What some seeds gave."""

    seeds: int = 0
    steps: int = 0
    findings: list[tuple[int, str, str]] = field(default_factory=list)  # seed, kind, text
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: CampaignResult) -> None:
        """Sum up."""
        self.seeds += other.seeds
        self.steps += other.steps
        self.findings += other.findings
        self.pairs += other.pairs


def drawn(seed: int, processes: int, *, hosts: bool) -> Schedule:
    """The schedule of a seed. `hosts`: over several, of which the seed says how many."""
    return draw_hosts(seed) if hosts else draw(seed, processes)


def run_batch(
    first: int, last: int, mutation: str, processes: int, hosts: bool = False
) -> CampaignResult:
    """Run seeds [first, last). In a worker."""
    found = CampaignResult()
    with installed(), mutated(mutation):
        gc.collect()
        gc.freeze()  # modules, torch's too: a collection then looks at simulations only
        for seed in range(first, last):
            if seed % COLLECT == 0:
                gc.collect()  # worlds are few objects in cycles, and megabytes each
            outcome = run(drawn(seed, processes, hosts=hosts))
            found.seeds += 1
            found.steps += outcome.steps
            found.pairs += outcome.pairs
            found.findings += [(seed, f.kind, f.text) for f in outcome.findings[:1]]
    if mutation:  # what is found without it, too, says nothing of it
        with installed():
            new = [
                f for f in found.findings if not run(drawn(f[0], processes, hosts=hosts)).findings
            ]
            found.findings = new
    return found


def search(options: argparse.Namespace) -> CampaignResult:
    """Run batches side by side until the seeds, the minutes or the patience end."""
    total, began, told = CampaignResult(), time.monotonic(), time.monotonic()
    batches = _batches(options)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as workers:
        running: set[Future[CampaignResult]] = set()
        more = True
        try:
            while more or running:
                while more and len(running) < options.workers + 1:
                    batch = next(batches, None)
                    late = options.minutes and time.monotonic() - began > options.minutes * 60
                    more = batch is not None and not late
                    more &= not (options.first and total.findings)
                    if more and batch is not None:
                        args = (*batch, options.mutation, options.processes, options.hosts)
                        running.add(workers.submit(run_batch, *args))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    total.add(future.result())
                if time.monotonic() - told >= 10 and not options.json:
                    told = time.monotonic()
                    _say(_progress(total, told - began))
        except KeyboardInterrupt:
            for future in running:
                future.cancel()
    if not options.json:
        _say(_progress(total, time.monotonic() - began))
    return total


def _batches(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    end = None if options.seeds is None else options.start + options.seeds
    for first in count(options.start, BATCH):
        if end is not None and first >= end:
            return
        yield first, first + BATCH if end is None else min(first + BATCH, end)


def _progress(found: CampaignResult, seconds: float) -> str:
    rate = found.seeds / max(seconds, 1e-9)
    return (
        f"{found.seeds} seeds, {rate:.1f} seeds/s, {found.steps} device operations, "
        f"{len(found.findings)} findings"
    )


def table(pairs: Counter[tuple[str, str]]) -> str:
    """Actions against the faults that they met."""
    actions = sorted({action for action, _ in pairs if action != "environment"})
    faults = sorted({fault for action, fault in pairs if action != "environment"})
    lines = ["", "operation".ljust(14) + "".join(f[:11].rjust(12) for f in faults)]
    for action in actions:
        counts = "".join(str(pairs[action, fault] or ".").rjust(12) for fault in faults)
        lines.append(action.ljust(14) + counts)
    events = sorted((fault, n) for (action, fault), n in pairs.items() if action == "environment")
    return "\n".join([*lines, "", "environment: " + ", ".join(f"{f} {n}" for f, n in events)])


def small(outcome: SimulationOutcome) -> SimulationOutcome:
    """The smallest schedule that gives the same kind of finding. Within installed()."""
    kind = outcome.findings[0].kind
    return run(shrink(outcome.schedule, lambda s: any(f.kind == kind for f in run(s).findings)))


def _explain(options: argparse.Namespace, found: CampaignResult) -> None:
    """Print findings, the first of them made small."""
    for seed, kind, text in sorted(found.findings):
        _say(f"seed {seed}: {kind}: {text[:300]}")
    with installed(), mutated(options.mutation):
        for seed, _, _ in sorted(found.findings)[: SHRUNK if options.shrink else 0]:
            outcome = small(run(drawn(seed, options.processes, hosts=options.hosts)))
            _say(f"\n{outcome.schedule}")
            _say("\n".join(f"  {finding}" for finding in outcome.findings))
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                path = options.keep / f"seed-{seed}.json"
                path.write_text(outcome.schedule.to_json())
                _say(f"  kept as {path}")


def replay(path: Path, options: argparse.Namespace) -> int:
    """Run a kept schedule and print its name and its trace."""
    _say(f"{path.name}:")
    schedule = Schedule.from_json(path.read_text(encoding="utf-8"))
    with installed(checkpoints=schedule.saves), mutated(options.mutation):
        outcome = run(schedule)
    _say(f"{outcome.schedule}\n\n" + "\n".join(outcome.trace))
    _say("\n".join(map(str, outcome.findings)) or "no finding")
    return 1 if outcome.findings else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hpstore.testing.simulation",
        description="Search for schedules that break the rules of docs/protocol.md.",
    )
    parser.add_argument("--seeds", type=int, help="how many; until stopped unless given")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many")
    parser.add_argument("--processes", type=int, default=0, help="of a simulation; 0: drawn")
    parser.add_argument("--hosts", action="store_true", help="over several hosts, with agents")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    parser.add_argument("--keep", type=Path, help="write minimal schedules here")
    parser.add_argument("--replay", type=Path, nargs="+", help="run schedules that were kept")
    parser.add_argument("--mutation", default="", choices=["", *MUTATIONS], help="break a rule")
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0 when nothing was found, else 1."""
    options = parse(arguments)
    if options.replay:
        return max([replay(path, options) for path in options.replay])
    if options.seed is not None:
        with installed(), mutated(options.mutation):
            outcome = run(drawn(options.seed, options.processes, hosts=options.hosts))
            outcome = small(outcome) if outcome.findings and options.shrink else outcome
        _say(f"{outcome.schedule}\n\n" + "\n".join(outcome.trace))
        _say("\n".join(map(str, outcome.findings)) or "no finding")
        return 1 if outcome.findings else 0
    found = search(options)
    if options.json:
        pairs = [[*pair, n] for pair, n in sorted(found.pairs.items())]
        _say(
            json.dumps(
                {
                    "seeds": found.seeds,
                    "steps": found.steps,
                    "pairs": pairs,
                    "findings": sorted(found.findings),
                }
            )
        )
    else:
        _say(table(found.pairs))
        _explain(options, found)
    return 1 if found.findings else 0
