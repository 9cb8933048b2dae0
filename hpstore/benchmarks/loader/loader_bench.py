"""Data loaders against peers: same bytes, one run, interleaved, in memory and not.

`hpstore bench loader --peers torch,litdata,...` writes the same samples in every contender's format
into one directory, first of dataset A, then of B (loader_data.py), and reads whole shuffled epochs
in processes of their own (sessions.py, loader_sessions.py), contender after contender, repetition
after repetition, each time with another one first. Cases:

warm      from the second epoch of a process on, for a second or five epochs at most; its files are
          in the page cache, hpstore keeps pages itself
cold      the first epoch, caches dropped
limited   the same in a control group of 800 MB, for data three times larger at least
degraded  hpstore with no, one and two devices missing by turns, warm and cold
restart   the first epoch of a new process whose data a loader before it left in the node's memory,
          against the epochs of that loader
special   first batches, epoch boundary, ready batch, state, memory, a kill (loader_special.py)

To a GPU the stages of docs/gpu.md come first (gpu_stages.py): what it and its way there can do.

Raw figures are taken in each repetition. Ratios are pairs of one repetition; medians are held
against the bars (loader_bars.py).
"""

from __future__ import annotations

import logging
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress

from hpstore.benchmarks.gpu.gpu_stages import PLAN, run_stage
from hpstore.benchmarks.harness.bench_verdicts import spread
from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.harness.memory_ballast import MemoryBallast, ballast_bytes, memory_bytes
from hpstore.benchmarks.harness.peer_packages import installed
from hpstore.benchmarks.harness.raw_devices import workspace
from hpstore.benchmarks.harness.sessions import Found, Session, SessionFailed, Sessions, progress
from hpstore.benchmarks.loader import loader_bars as bars
from hpstore.benchmarks.loader.loader_contenders import kind_of, not_installed, peers_named
from hpstore.benchmarks.loader.loader_data import Data
from hpstore.benchmarks.loader.loader_limits import LIMIT_BYTES, MemoryLimit
from hpstore.benchmarks.loader.loader_ours import (
    LOST,
    OURS,
    HpstoreLoader,
    OursKept,
    OursNew,
    OursRecords,
    OursWindow,
    lost_share,
)
from hpstore.benchmarks.loader.loader_sessions import (
    LoaderSpec,
    epoch_session,
    free_session,
    new_process_session,
    raw_session,
    write_session,
)
from hpstore.benchmarks.loader.loader_special import PROCESSES, SEVERAL, SPECIAL, joined
from hpstore.errors import ConfigError

_log = logging.getLogger(__name__)
CASES = ("warm", "cold", "limited", "degraded", "restart", "special")
OURS_BY_CASE = {
    "warm": (HpstoreLoader.name,),
    "cold": tuple(kind.name for kind in OURS),
    "limited": tuple(kind.name for kind in OURS[:2]),
}
DEGRADED = (("warm", HpstoreLoader.name), ("cold", OursRecords.name), ("cold", OursWindow.name))
NOT_WARM = ("ffcv quasi-random",)
SILENT_SECONDS = 300.0
FAR_BEHIND = 10
LIMITED_SECONDS = 30.0  # an epoch in too little memory that takes longer is cut
Turn = TypeVar("Turn")
Figures = defaultdict[str, list[Found]]  # by contender, one a repetition


def _figures() -> Figures:
    return defaultdict(list)


@dataclass(slots=True)
class LoaderFindings:
    """What the sessions found about one dataset."""

    cases: defaultdict[str, Figures] = field(default_factory=lambda: defaultdict(_figures))
    lost: defaultdict[int, defaultdict[str, Figures]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(_figures))
    )
    allowed: dict[int, float] = field(default_factory=dict)  # share of the rate, devices missing
    raw: list[Found] = field(default_factory=list)
    special: dict[str, Found] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # peers or cases, and why


class LoaderRunner:
    """Runs the sessions of one dataset in one directory."""

    def __init__(
        self,
        spec: LoaderSpec,
        sessions: Sessions,
        bar: Progress,
        peers: Sequence[str],
        cases: Sequence[str],
    ) -> None:
        self.found = LoaderFindings()
        self._spec, self._sessions, self._bar = spec, sessions, bar
        self._cases = [case for case in cases if spec.data.kind == "A" or case != "limited"]
        self._peers = []
        for name in peers:
            why = not_installed(name)
            if why:
                self.found.failed[name] = why
            else:
                self._peers.append(name)

    def write(self) -> None:
        """All stores."""
        self._spec.directory.mkdir()
        for name in (HpstoreLoader.name, *self._peers):
            if (self._spec.directory / kind_of(name).store).exists():
                continue
            self._one(name, write_session, self._spec)
        for lost in LOST:
            share = lost_share(self._spec.directory / HpstoreLoader.store, lost)
            self.found.allowed[lost] = 1 / (1 + 3 * share)  # k reads, not one, for what is lost

    def repetition(self) -> None:
        """Run each contender once in every case."""
        self.found.raw.append(self._sessions.run(raw_session, self._spec))
        for case in self._cases:
            if case in ("warm", "cold"):
                self._case(case, replace(self._spec, cold=case == "cold"))
            elif case == "limited":
                self._limited()
            elif case == "degraded":
                self._degraded()
            elif case == "restart":
                self._restart()

    def _case(self, case: str, spec: LoaderSpec) -> None:
        names = [
            name
            for name in (*OURS_BY_CASE[case], *self._peers)
            if not ((case == "warm" and name in NOT_WARM) or self._far_behind(case, name))
        ]
        for name in in_turn(names, len(self.found.raw) - 1):
            found = self._one(name, epoch_session, spec, case)
            if found is not None:
                self.found.cases[case][name].append(found)

    def _far_behind(self, case: str, name: str) -> bool:
        """Who does not finish, or takes ten times as long as hpstore, is measured once."""
        before = self.found.cases[case].get(name, [])
        ours = self.found.cases[case].get(OURS_BY_CASE[case][0], [])
        if not before or not ours or name in OURS_BY_CASE[case]:
            return False
        return bool(before[-1]["cut"] or FAR_BEHIND * before[-1]["rate"] < ours[-1]["rate"])

    def _limited(self) -> None:
        if self._spec.data.nbytes < 3 * LIMIT_BYTES * 0.95:
            self.found.failed["limited"] = "the data are not three times larger than the limit"
            return
        with closing(MemoryLimit()) as limit:
            if limit.problem:
                self.found.failed["limited"] = limit.problem
                return
            limited = replace(self._spec, group=limit.path, epoch_seconds=LIMITED_SECONDS)
            self._case("limited", limited)

    def _degraded(self) -> None:
        """By turns with all devices there: minutes later the machine may be half as fast."""
        for case, name in DEGRADED:
            for lost in in_turn(tuple(LOST), len(self.found.raw) - 1):
                spec = replace(self._spec, lost=lost, cold=case == "cold")
                found = self._one(name, epoch_session, spec)
                if found is not None:
                    self.found.lost[lost][case][name].append(found)

    def _restart(self) -> None:
        """A loader that fills the node's memory and reads on, then a new process."""
        warm = replace(self._spec, cold=False)
        try:
            for name, session in (
                (OursKept.name, epoch_session),
                (OursNew.name, new_process_session),
            ):
                found = self._one(name, session, warm, "restart")
                if found is not None:
                    self.found.cases["restart"][name].append(found)
        finally:
            self._sessions.run(free_session, replace(warm, contender=OursKept.name))

    def special(self) -> None:
        """The figures without peers."""
        for name, session in SPECIAL.items():
            count = PROCESSES if name in SEVERAL else 1
            runs = [self._sessions.run(session, self._spec) for _ in range(count)]
            self.found.special[name] = joined(runs) if name in SEVERAL else runs[0]

    def _one(self, name: str, session: Session, spec: LoaderSpec, case: str = "") -> Found | None:
        """What a session found; None when a peer failed, which is left out of that case."""
        key = f"{name}, {case}" if case else name
        if key in self.found.failed or name in self.found.failed:
            return None
        label = f"{spec.data.kind} {case} {name}"
        self._bar.update(self._bar.task_ids[0], description=label)
        try:
            found = self._sessions.run(session, replace(spec, contender=name))
        except SessionFailed as error:
            if issubclass(kind_of(name), HpstoreLoader) and case != "limited":
                raise
            self.found.failed[key] = str(error).splitlines()[0]
            _log.warning("%s is left out: %s", key, self.found.failed[key])
            self.found.cases[case].pop(name, None)
            if not case:
                self._peers.remove(name)
            return None
        _log.info("%s: %s", label, {k: v for k, v in found.items() if k != "stats"})
        self._bar.advance(self._bar.task_ids[0])
        return found


def in_turn(who: Sequence[Turn], repetition: int) -> list[Turn]:
    """Return the contenders in the order of one repetition (0, 1, ...).

    The last one moves to the front from one repetition to the next, so neighbours stay neighbours,
    and no contender is always behind the raw figures, which empty the page cache.
    """
    last = -repetition % len(who) if who else 0
    return [*who[last:], *who[:last]]


def bench_loader(options: Options) -> dict[str, object]:
    """Rates, latencies and memory of data loaders, with verdicts."""
    peers, cases = peers_named(options.peers), cases_named(options.cases)
    check_device(options.device)
    if options.stages and options.device == "cpu":
        raise ConfigError("--stages is about a GPU: give --device cuda, or leave --stages out")
    found: dict[str, object] = {}
    with workspace(options) as root, progress(0) as bar:
        if options.device != "cpu" and options.stages is not False:
            found["stages"] = stages = dict[str, Found]()
            for name, row in stage_rows(root, options.device, bar):
                stages[name] = row
                options.keep(found)
        for kind in ("A", "B"):
            data = Data(kind, options.size_bytes)
            spec = LoaderSpec(contender="", directory=root / kind, data=data, device=options.device)
            held = ballast_bytes(data.nbytes, memory_bytes("MemAvailable"))
            with closing(MemoryBallast(held)) as ballast:
                sessions = Sessions(
                    ballast,
                    preload="hpstore.benchmarks.loader.loader_sessions",
                    silent_seconds=SILENT_SECONDS,
                )
                runner = LoaderRunner(spec, sessions, bar, peers, cases)
                runner.write()
                for done in range(1, options.repeats + 1):
                    runner.repetition()
                    so_far = report(runner.found, data, replace(options, repeats=done), ballast)
                    options.keep({**found, kind: so_far})
                if "special" in cases:
                    runner.special()
            found[kind] = report(runner.found, data, options, ballast)
            options.keep(found)
            shutil.rmtree(spec.directory)
    return found


def cases_named(names: str) -> list[str]:
    """Cases of a comma-separated list; all of them when it is empty. Raises ConfigError."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(CASES)
    for name in wanted:
        if name not in CASES:
            raise ConfigError(f"no case is called {name!r}; there are {', '.join(CASES)}")
    return [case for case in CASES if case in wanted]


def check_device(device: str) -> None:
    """ConfigError for one that is not here."""
    import torch

    if device == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cuda", *(f"cuda:{index}" for index in range(count))] if count else []
    if device not in here:
        raise ConfigError(f"device {device!r} is not here: give {' or '.join(['cpu', *here])}")


def stage_rows(root: Path, device: str, bar: Progress) -> Iterator[tuple[str, Found]]:
    """Stages of the GPU as they end, by number and name. A child's GPU is the one of `device`."""
    for stage in PLAN:
        bar.update(bar.task_ids[0], description=f"stage {stage.number} {stage.what}")
        ended = run_stage(stage, root, int(device.partition(":")[2] or 0))
        _log.info("%s", ended.verdict())
        yield f"{stage.number} {stage.what}", ended.as_dict()


def report(
    found: LoaderFindings, data: Data, options: Options, ballast: MemoryBallast
) -> dict[str, object]:
    """Return the JSON of one dataset."""
    ratios: dict[str, Any] = {}
    if "warm" in found.cases:
        ratios |= bars.warm_verdicts(data.kind, found.cases["warm"])
    if "cold" in found.cases:
        ratios |= bars.cold_verdicts(found.cases["cold"], found.raw)
    if "limited" in found.cases:
        ratios |= bars.limited_verdicts(found.cases["limited"], found.raw)
    if "restart" in found.cases:
        ratios |= bars.restart_verdicts(found.cases["restart"])
    ratios |= bars.degraded_verdicts(found.lost, found.allowed)
    ratios |= bars.special_verdicts(found.special)
    lost = {
        f"{case}, {lost} missing": figures
        for lost, cases in found.lost.items()
        for case, figures in cases.items()
    }
    return {
        "samples": data.rows,
        "bytes": data.nbytes,
        "repeats": options.repeats,
        "device": options.device,
        "ballast": {"bytes": ballast.nbytes, "problem": ballast.problem},
        "contenders": contenders({**found.cases, **lost}),
        "raw": raw_figures(found.raw),
        "failed": found.failed,
        "ratios": ratios,
    }


def contenders(cases: dict[str, Figures]) -> dict[str, Any]:
    """By contender: its configuration, and its figures by case."""
    rows: dict[str, Any] = {}
    for case, figures in cases.items():
        for name, sessions in figures.items():
            kind = kind_of(name)
            row = rows.setdefault(
                name, {"configuration": kind.configuration, "version": installed(kind.package)}
            )
            row[case] = {
                "samples_per_second": spread([s["rate"] for s in sessions]),
                "steady_samples_per_second": middle(sessions, "steady_rate", 0),
                "first_batch_seconds": middle(sessions, "first_seconds", 4),
                "main_thread_us": middle(sessions, "main_us", 2),
                "memory_bytes": middle(sessions, "memory_bytes", 0),
                "cut": any(s["cut"] for s in sessions),
            }
            if "first_epoch" in sessions[0]:
                rate = statistics.median(s["first_epoch"]["rate"] for s in sessions)
                row[case]["first_epoch_samples_per_second"] = round(rate)
                row[case]["second_epoch_samples_per_second"] = middle(
                    sessions, "second_epoch_rate", 0
                )
                row[case]["epochs"] = [session["epochs"] for session in sessions]
                row[case]["settle_seconds"] = middle(sessions, "settle_seconds", 3)
            if "stats" in sessions[0]:
                row[case]["stats"] = sessions[-1]["stats"]
    return rows


def middle(sessions: Sequence[Found], key: str, digits: int) -> float:
    """Median of a figure."""
    return round(float(statistics.median(session[key] for session in sessions)), digits)


def raw_figures(raw: Sequence[Found]) -> dict[str, Any]:
    """What the device gives without a loader."""
    return {
        name: spread([session[name] for session in raw]) if isinstance(value, float) else value
        for name, value in raw[0].items()
    }
