"""Checkpoints against peers: same state, same durability, one run, interleaved.

`hpstore bench checkpoint` measures hpstore against one copy of the state and the raw directories;
`--peers` adds others. All files lie on one filesystem, in one directory that is removed afterwards.
In every repetition each contender saves and loads in processes of its own (sessions.py), in turn;
see checkpoint_sessions.py for what is warm and what was dropped. Ratios are taken between pairs of
one repetition, and their median is held against the bar. Figures without peers, and of compression
(`--compression`), are taken once, after all repetitions.
"""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from rich.progress import Progress

from hpstore.benchmarks.checkpoint import checkpoint_shapes as shapes
from hpstore.benchmarks.checkpoint import checkpoint_special as special
from hpstore.benchmarks.checkpoint.checkpoint_background import background_session
from hpstore.benchmarks.checkpoint.checkpoint_bars import (
    OURS,
    floor_verdicts,
    load_series,
    load_verdicts,
    raw_verdicts,
    save_verdicts,
    series,
    special_verdicts,
)
from hpstore.benchmarks.checkpoint.checkpoint_compression import (
    CONTENTS,
    compression_report,
    compression_session,
)
from hpstore.benchmarks.checkpoint.checkpoint_contenders import kind_of, not_installed, peers_named
from hpstore.benchmarks.checkpoint.checkpoint_ranks import ranks_session, resharding_session
from hpstore.benchmarks.checkpoint.checkpoint_sessions import (
    CheckpointSpec,
    load_session,
    raw_session,
    save_session,
)
from hpstore.benchmarks.checkpoint.checkpoint_state import SharedState, TensorContents, map_state
from hpstore.benchmarks.harness.bench_verdicts import spread
from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.harness.memory_ballast import MemoryBallast, ballast_bytes, memory_bytes
from hpstore.benchmarks.harness.raw_devices import workspace
from hpstore.benchmarks.harness.sessions import Found, Session, SessionFailed, Sessions, progress

_log = logging.getLogger(__name__)
RAW = "raw"
CACHED = (
    "first and steady saves: free memory populated just before (ballast.py), which lasts for a "
    "second or two where the host takes pages back; saves between them are not warmed. Cold loads: "
    "a new process, page cache of the files dropped; hpstore reads O_DIRECT. Warm loads: the "
    "process that saved, nothing dropped, one unmeasured load before. Figures without peers: "
    "nothing is dropped; compression: loads from a pool opened anew."
)
SPECIAL: dict[str, Session] = {
    "many_small": special.many_small_session,
    "growth": special.growth_session,
    "slice": special.slice_session,
    "disturbance": special.disturbance_session,
    "overlap": special.overlap_session,
    "background": background_session,
    "tiny_tensors": shapes.tiny_tensors_session,
    "python_leaves": shapes.python_leaves_session,
    "frozen": shapes.frozen_session,
    "stand_ins": shapes.stand_ins_session,
    "ranks": ranks_session,
    "resharding": resharding_session,
}


@dataclass(slots=True)
class CheckpointFindings:
    """What the sessions found, by contender, one entry a repetition."""

    saves: defaultdict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    loads: defaultdict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    raw: list[Found] = field(default_factory=list)
    special: defaultdict[str, list[Found]] = field(default_factory=lambda: defaultdict(list))
    compression: dict[str, Found] = field(default_factory=dict)  # by content
    failed: dict[str, str] = field(default_factory=dict)  # peers, and why


class CheckpointRunner:
    """Runs the sessions of one benchmark in one directory."""

    def __init__(self, spec: CheckpointSpec, sessions: Sessions, bar: Progress) -> None:
        self.found = CheckpointFindings()
        self._spec, self._sessions, self._bar = spec, sessions, bar

    def repetition(self, peers: Sequence[str]) -> None:
        """Run each peer once."""
        self.found.raw.append(self._one(RAW, raw_session))
        self._clear(RAW)
        for name in (OURS, *peers):
            if name not in self.found.failed:
                self._saves_and_loads(name)
            self._clear(name)

    def _saves_and_loads(self, name: str) -> None:
        try:
            saved, loaded = self._one(name, save_session), self._one(name, load_session)
        except SessionFailed as error:
            if name == OURS:
                raise
            self.found.failed[name] = str(error).splitlines()[0]
            _log.warning("peer %s is left out: %s", name, self.found.failed[name])
            self.found.saves.pop(name, None)
            self.found.loads.pop(name, None)
            return
        self.found.saves[name].append(saved)
        self.found.loads[name].append(loaded)

    def special(self) -> None:
        """The figures without peers."""
        for name, session in SPECIAL.items():
            self.found.special[name].append(self._one(name, session))
            self._clear(name)

    def compression(self) -> None:
        """What codecs cost, by content."""
        for kind in CONTENTS:
            self.found.compression[kind] = self._one(kind, compression_session)
            self._clear(kind)

    def _one(self, name: str, session: Session) -> Found:
        self._bar.update(self._bar.task_ids[0], description=f"{name} {session.__name__}")
        found = self._sessions.run(session, replace(self._spec, contender=name))
        self._bar.advance(self._bar.task_ids[0])
        return found

    def _clear(self, name: str) -> None:
        shutil.rmtree(self._spec.directory / name, ignore_errors=True)


def bench_checkpoint(options: Options) -> dict[str, object]:
    """Stall, durability, loads, memory and disturbance of checkpoints, with verdicts."""
    peers = peers_named(options.peers)
    total = (
        options.repeats * (1 + 2 * (1 + len(peers)))
        + len(SPECIAL)
        + options.compression * len(CONTENTS)
    )
    held = ballast_bytes(options.size_bytes, memory_bytes("MemAvailable"))
    with (
        workspace(options) as root,
        closing(SharedState("state", options.size_bytes)) as state,
        closing(SharedState("target", options.size_bytes)) as target,
        progress(total) as bar,
    ):
        TensorContents().fill(map_state(state.path, options.size_bytes), 0)
        map_state(target.path, options.size_bytes)
        spec = CheckpointSpec(
            contender="",
            directory=root,
            size_bytes=options.size_bytes,
            state=state.path,
            target=target.path,
        )
        with closing(MemoryBallast(held)) as ballast:
            runner = CheckpointRunner(spec, Sessions(ballast), bar)
            runner.found.failed |= {name: why for name in peers if (why := not_installed(name))}
            for done in range(1, options.repeats + 1):
                runner.repetition(peers)
                options.keep(report(runner.found, replace(options, repeats=done), ballast))
            runner.special()
            if options.compression:
                runner.compression()
    return report(runner.found, options, ballast)


def report(
    found: CheckpointFindings, options: Options, ballast: MemoryBallast
) -> dict[str, object]:
    """The JSON."""
    ours = found.saves[OURS]
    return {
        "state_bytes": ours[0]["state_bytes"],
        "tensors": ours[0]["tensors"],
        "repeats": options.repeats,
        "cached": CACHED,
        "ballast": {"bytes": ballast.nbytes, "problem": ballast.problem},
        "contenders": {name: describe(name, found) for name in found.saves},
        "raw": {
            name: spread([session[name] for session in found.raw])
            for name in found.raw[0]
            if name.endswith("_seconds")
        },
        "failed": found.failed,
        "ratios": save_verdicts(found.saves)
        | load_verdicts(found.loads)
        | raw_verdicts(ours, found.loads[OURS], found.raw)
        | floor_verdicts(found.saves, found.loads, found.raw)
        | special_verdicts(found.special),
        "compression": compression_report(found.compression) or {"skipped": "--compression"},
    }


def describe(name: str, found: CheckpointFindings) -> dict[str, object]:
    """Seconds of one contender."""
    saves, loads = {name: found.saves[name]}, {name: found.loads[name]}
    kind = kind_of(name)
    seconds: dict[str, object] = {
        f"{what} {field_name}": spread(
            series(saves, lambda s, w=what, f=field_name: s[w][f"{f}_seconds"])[name]  # type: ignore[misc]
        )
        for what in ("first", "steady")
        for field_name in ("blocked", "durable")
    }
    for what, sessions, key in (
        ("warm", saves, "load_warm_seconds"),
        ("cold", loads, "load_cold_seconds"),
    ):
        for way, times in load_series(sessions, key).items():
            seconds[f"load {what} {way}"] = spread(times)
    if name == OURS:
        degraded = [session["load_degraded_seconds"] for session in loads[name]]
        seconds["load cold degraded"] = spread(degraded)
        seconds["copy"] = spread([session["copy_seconds"] for session in saves[name]])
    return {
        "configuration": kind.configuration,
        "version": kind.version(),
        "fsyncs_itself": kind.syncs_itself,
        "memory_extra_bytes": spread([session["memory_bytes"] for session in saves[name]]),
        "seconds": seconds,
    }
