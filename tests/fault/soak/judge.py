"""Holds what the processes of a soak wrote down against what must be so. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Any: JSON rows of journals
from typing import Any

from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import Decision, Role
from tests.fault.kills.ledger import ABSENT
from tests.fault.soak.crew import Life
from tests.fault.soak.load import SAMPLES, STEPS_AN_EPOCH, WORK_SECONDS, digest_of, new_state

Rows = Sequence[Mapping[str, Any]]
PROBLEMS_MOST = 10  # of one kind
REFUSED_SHOWN = 5
GRACE_SLACK = 0.2  # seconds, of clocks that are read one after the other


@dataclass
class Verdict:
    """Figures, and what is wrong."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        """Note a problem; no more than a few of a kind."""
        if sum(found.split()[0] == text.split()[0] for found in self.problems) < PROBLEMS_MOST:
            self.problems.append(text)


def judge_trainer(rows: Rows, lives: Iterable[Life]) -> Verdict:
    """Batches, resumption, and how its time was spent."""
    verdict, saved, steps = Verdict(), 0, 0
    digests: dict[int, str] = {0: digest_of(new_state())}
    numbers: dict[int, list[int]] = {}
    wrong_samples = 0
    for row in rows:
        step = int(row.get("step", 0))
        if row["event"] == "step":
            steps += 1
            wrong_samples += row["wrong"]
            if numbers.setdefault(step, row["numbers"]) != row["numbers"]:
                verdict.wrong(f"trainer: step {step} got other samples when it came again")
        elif "digest" in row and digests.setdefault(step, row["digest"]) != row["digest"]:
            verdict.wrong(f"trainer: {row['event']} step {step} with other bytes than before")
        if row["event"] == "restored" and step < saved:
            verdict.wrong(f"trainer: restored step {step}, {saved} had been acknowledged")
        if row["event"] == "saved":
            saved = max(saved, step)
    if wrong_samples:
        verdict.wrong(f"trainer: {wrong_samples} samples with wrong bytes")
    _judge_epochs(numbers, verdict)
    verdict.figures = {
        "steps": steps,
        "distinct_steps": len(numbers),
        "samples_wrong": wrong_samples,
        "newest_step_saved": saved,
        "batches_checked": steps,
        **_times(rows, lives),
    }
    return verdict


def _judge_epochs(numbers: Mapping[int, list[int]], verdict: Verdict) -> None:
    """Every sample once in each epoch that was seen whole."""
    for epoch in range(max(numbers, default=0) // STEPS_AN_EPOCH):
        first = epoch * STEPS_AN_EPOCH + 1
        steps = range(first, first + STEPS_AN_EPOCH)
        if all(step in numbers for step in steps):
            seen = Counter(number for step in steps for number in numbers[step])
            if len(seen) != SAMPLES or set(seen.values()) != {1}:
                verdict.wrong(f"trainer: epoch {epoch} has not every sample once")


def _times(rows: Rows, lives: Iterable[Life]) -> dict[str, float]:
    """Goodput: the time in the work of steps, to the time alive without what the rig stopped."""
    work = alive = started = restoring = waited = stalled = 0.0
    for life in lives:
        ends = [at for at in (life.killed_at, life.ended) if at is not None]
        until = min(ends, default=math.inf)  # a killed one does not live, though it may not end yet
        mine = [  # process ids come again
            row for row in rows if row["pid"] == life.pid and life.began <= row["at"] <= until
        ]
        steps = [row for row in mine if row["event"] == "step"]
        paused = sum(on - off for off, on in life.pauses)
        end = until if until < math.inf else (mine[-1]["at"] if mine else life.began)
        started += end - life.began - paused
        if mine:  # it lives from its first line on: what comes before is Python's imports
            alive += end - mine[0]["at"] - paused
        work += sum(min(row["worked"], 2 * WORK_SECONDS) for row in steps)
        restoring += next((row["at"] for row in mine if row["event"] == "restored"), end) - (
            mine[0]["at"] if mine else end
        )
        waited += sum(row["waited"] for row in steps)
        stalled += sum(row["saved"] for row in steps)
    return {
        "goodput": work / alive if alive else 0.0,
        "goodput_from_process_start": work / started if started else 0.0,
        "alive_seconds": alive,
        "work_seconds": work,
        "seconds_to_restored": restoring,
        "batch_wait_seconds": waited,
        "save_stall_seconds": stalled,
    }


def judge_evaluator(rows: Rows, trainer: Rows) -> Verdict:
    """Each restore is whole, is no older than what was acknowledged, and none goes back."""
    verdict = Verdict()
    digests = {int(row["step"]): row["digest"] for row in trainer if row["event"] == "saving"}
    digests[0] = digest_of(new_state())
    saved = [(row["at"], int(row["step"])) for row in trainer if row["event"] == "saved"]
    looks = [row for row in rows if row["event"] == "look"]
    for before, row in pairwise([{"step": 0}, *looks]):
        step = int(row["step"])
        if step < int(before["step"]):
            verdict.wrong(f"evaluator: step {step} after step {before['step']}")
        if row["digest"] != digests.get(step):
            verdict.wrong(f"evaluator: step {step} has wrong bytes")
        newest = max((s for at, s in saved if at < row["began"]), default=0)
        if step < newest:
            verdict.wrong(f"evaluator: step {step}, {newest} had been acknowledged")
    verdict.figures = {"looks": len(looks), **_refusals(rows)}
    return verdict


@dataclass
class Expected:
    """What the keys of the ingest must hold now: what was acknowledged, or else what may be."""

    acknowledged: dict[str, str]
    maybe: dict[str, set[str]]

    def allows(self, key: str, what: str) -> bool:
        """Whether a key may hold this."""
        return what == self.acknowledged.get(key, ABSENT) or what in self.maybe.get(key, ())


def judge_ingest(rows: Rows) -> tuple[Verdict, Expected]:
    """Every object that was read back held what it must, and what is expected at the end."""
    verdict, now, reads = Verdict(), Expected({}, {}), 0
    for row in rows:
        key, what = str(row.get("key")), str(row.get("what"))
        if row["event"] == "begin":
            now.maybe.setdefault(key, set()).add(what)
        elif row["event"] == "done":
            now.acknowledged[key] = what
            now.maybe.pop(key, None)
        elif row["event"] == "read":
            reads += 1
            if not now.allows(key, what):
                verdict.wrong(f"ingest: {key} held {what}, not {now.acknowledged.get(key)}")
            elif what in now.maybe.get(key, ()):  # what a read has seen stays
                now.acknowledged[key] = what
                now.maybe.pop(key)
    verdict.figures = {
        "acknowledged": sum(row["event"] == "done" for row in rows),
        "reads": reads,
        "keys": len(now.acknowledged),
        **_refusals(rows),
    }
    return verdict, now


def judge_operator(rows: Rows) -> Verdict:
    """Nothing was unreadable for a scrub."""
    verdict = Verdict()
    for row in rows:
        if row["event"] == "did" and row.get("unreadable"):
            verdict.wrong(f"operator: a scrub found unreadable: {row['unreadable'][:3]}")
    did = Counter(row["order"].split()[0] for row in rows if row["event"] == "did")
    verdict.figures = {"did": dict(did), **_refusals(rows)}
    return verdict


def _refusals(rows: Rows) -> dict[str, Any]:
    """Errors of hpstore that a process wrote down and went on after."""
    refused = [row for row in rows if row["event"] == "refused"]
    kinds = Counter(f"{row['what'].split()[0]}: {row['error'].split(':')[0]}" for row in refused)
    texts = [f"{row['what'][:60]}: {row['error'][:200]}" for row in refused[:REFUSED_SHOWN]]
    return {"refused": len(refused), "refused_kinds": dict(kinds), "refused_first": texts}


def judge_evictions(decisions: Iterable[Decision], grace_seconds: float) -> Verdict:
    """Every eviction of an agent came after its grace, or, by its own word, because no parity was
    left."""
    verdict, since, counts = Verdict(), dict[str, float](), Counter[str]()
    for decision in sorted(decisions, key=lambda found: found.at_seconds):
        if decision.role is not Role.AGENT:
            continue
        device, at = decision.device, decision.at_seconds
        if decision.becomes in (HealthState.REMOVED, HealthState.FAULTED):
            since[device] = at
        elif decision.becomes is HealthState.EVICTED:
            waited = at - since.get(device, at)
            if decision.was not in (HealthState.REMOVED, HealthState.FAULTED):
                counts["by the operator, or drained"] += 1
            elif waited >= grace_seconds - GRACE_SLACK:
                counts["after the grace"] += 1
            elif "no parity is left" in decision.reason:
                counts["at once, no parity was left"] += 1
            else:
                counts["too early"] += 1
                verdict.wrong(f"agent: {device[:8]} was evicted {waited:.1f} s after it was gone")
    verdict.figures = {"evictions": dict(counts)}
    return verdict
