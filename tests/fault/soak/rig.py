"""Runs a soak: starts everything, makes the faults of the schedule, judges what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import HpstoreError
from hpstore.health.decision_log import history_path
from hpstore.health.history import History
from hpstore.loaders import verify_dataset
from hpstore.pool.pool import Pool
from hpstore.runtime.metrics import Metrics
from tests.fault.kills.ledger import ABSENT, digest
from tests.fault.soak.crew import Crew
from tests.fault.soak.journal import read_journal
from tests.fault.soak.judge import (
    Expected,
    Verdict,
    judge_evaluator,
    judge_evictions,
    judge_ingest,
    judge_operator,
    judge_trainer,
)
from tests.fault.soak.load import DATA_SET, PREFIX, digest_of, new_state
from tests.fault.soak.node import GRACE_SECONDS, PARITY, Node
from tests.fault.soak.report import Happened, Report
from tests.fault.soak.schedule import DEVICES, Event
from tests.fault.soak.watcher import Look, Watcher

TICK_SECONDS = 0.1
GONE_MOST = 3  # devices under a fault at once, healed or not
PATIENCE_SECONDS = 45.0  # for which a fault of a device waits until it may come; then it is skipped
SEEN_SECONDS = 2.0  # after which a look at the pool counts for a fault
ORDER_SECONDS = 12.0  # between two orders of one kind
STRAY_SECONDS = 10.0  # for which a device is out by itself until the operator takes it back
HEAL_SECONDS = 240.0  # at the end
OUT = ("evicted", "healed", "draining")


@dataclass
class Active:
    """A fault of a device that has begun and is not healed."""

    event: Event
    number: int
    began: float
    lift_at: float
    row: int  # in the report
    lifted: float | None = None


class Soak:
    """One run. `seconds` are those of the schedule; to heal and to judge comes on top."""

    def __init__(
        self,
        root: Path,
        *,
        seed: int,
        seconds: float,
        schedule: Sequence[Event],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._root, self._seconds, self._note = root, seconds, note
        self._schedule = list(schedule)
        self.report = Report(seed=seed)
        self._active: list[Active] = []
        self._ordered: dict[str, float] = {}  # when each was given last
        self._out_since: dict[str, float] = {}
        self._stack = ExitStack()
        self._began = time.monotonic()

    def run(self) -> Report:
        """All of it; what is wrong stands in the report."""
        with self._stack:
            self.node = self._stack.enter_context(Node(self._root))
            self.crew = self._stack.enter_context(
                Crew(self._root, self.node.toml, self.report.seed)
            )
            self._stack.callback(self.node.relieve)  # else a process could not be ended
            self._began = time.monotonic()
            self.crew.start_all()
            self.watcher = self._stack.enter_context(Watcher(self.node.toml))
            self._go_through()
            self._wait_until_whole()
            self.crew.end()
            self.watcher.close()
            self._judge()
        return self.report

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def _go_through(self) -> None:
        waiting = list(self._schedule)
        while self.now < self._seconds:
            self._tick()
            for event in [event for event in waiting if event.at_seconds <= self.now]:
                if event.device is None:
                    waiting.remove(event)
                    self._disturb(event)
                elif self._begin(event):
                    waiting.remove(event)
                elif self.now > event.at_seconds + PATIENCE_SECONDS:
                    waiting.remove(event)
                    self.report.skipped.append(f"{event}".strip())
        self.report.skipped += [f"{event}".strip() for event in waiting]

    def _tick(self) -> None:
        time.sleep(TICK_SECONDS)
        self.crew.look()
        for active in self._active:
            if active.lifted is None and time.monotonic() >= active.lift_at:
                self._lift(active)
        self._active = [active for active in self._active if not self._is_over(active)]
        self._give_orders()

    # --- faults -----------------------------------------------------------------------------

    def _disturb(self, event: Event) -> None:
        """Kill or stop a process."""
        if event.fault == "kill":
            done = self.crew.kill(event.target)
        else:
            done = self.crew.stop(event.target, event.seconds)
        if done:
            self._happened(event, event.target, "")
        else:
            self.report.skipped.append(f"{event}: it did not run".strip())

    def _begin(self, event: Event) -> bool:
        """Break a device, unless more would be away than parity allows."""
        busy = {active.number for active in self._active}
        unhealed = [active for active in self._active if not self._is_made_up_for(active)]
        look = self.watcher.newest
        out = (
            set() if look is None else {u for u, state in look.states.items() if state != "online"}
        )
        strays = out - {self.node.paths[number] for number in busy}
        if (
            look is None
            or len(unhealed) + len(strays) >= PARITY
            or len(busy) + len(strays) >= GONE_MOST
        ):
            return False
        assert event.device is not None
        wanted = [(event.device + more) % DEVICES for more in range(DEVICES)]
        number = next(n for n in wanted if n not in busy and self.node.paths[n] not in strays)
        began = time.monotonic()
        if event.fault in ("evict", "drain"):
            self.crew.order(f"{event.fault} {self.node.paths[number]}")
            note = ""
        else:
            note = self.node.break_device(number, event)
        row = self._happened(event, f"device {number}", note)
        self._active.append(
            Active(event=event, number=number, began=began, lift_at=began + event.seconds, row=row)
        )
        return True

    def _happened(self, event: Event, target: str, note: str) -> int:
        self.report.happened.append(
            Happened(planned=f"{event}", at_seconds=self.now, target=target, note=note)
        )
        self._note(f"{self.now:7.1f} {event.fault} {target} {note}")
        return len(self.report.happened) - 1

    def _lift(self, active: Active) -> None:
        self.node.lift(active.number, active.event.fault)
        active.lifted = time.monotonic()
        self._note(f"{self.now:7.1f} over: {active.event.fault} device {active.number}")

    def _look_since(self, at: float) -> Look | None:
        """The newest look at the pool, if it began so much later that it must see it."""
        look = self.watcher.newest
        return look if look is not None and look.began > at + SEEN_SECONDS else None

    def _is_made_up_for(self, active: Active) -> bool:
        """Whether the pool is whole without what the fault took, or in spite of it."""
        look = self._look_since(active.began)
        out = look is not None and look.states.get(self.node.paths[active.number]) in OUT
        return look is not None and look.whole and out

    def _is_over(self, active: Active) -> bool:
        """Whether it was lifted, its device is back, and everything is whole."""
        look = None if active.lifted is None else self._look_since(active.lifted)
        if look is None or not look.whole:
            return False
        if look.states.get(self.node.paths[active.number]) != "online":
            return False
        if active.event.fault == "flip" and not self._scrubbed_since(active.began):
            return False
        assert active.lifted is not None
        row = self.report.happened[active.row]
        healed = time.monotonic() - active.lifted
        self.report.happened[active.row] = replace(row, healed_seconds=healed)
        self._note(f"{self.now:7.1f} healed: {active.event.fault} device {active.number}")
        return True

    # --- the operator -----------------------------------------------------------------------

    def _scrubbed_since(self, at: float) -> bool:
        """Whether a scrub that began after it found nothing damaged, or mended all of it."""
        return any(
            row["event"] == "did" and row["order"] == "scrub" and row["began"] > at and row["whole"]
            for row in read_journal(self.crew.journal("operator"))[-200:]
        )

    def _give_orders(self) -> None:
        """Scrubs for flipped bits; what an operator took out comes back."""
        flipped = [a for a in self._active if a.event.fault == "flip"]
        if flipped:
            self._order("scrub")
        look, now = self.watcher.newest, time.monotonic()
        held = {self.node.paths[a.number] for a in self._active if a.lifted is None}
        operated = {
            self.node.paths[a.number]
            for a in self._active
            if a.lifted is not None and a.event.fault in ("evict", "drain")
        }
        for url, state in (look.states if look is not None else {}).items():
            if state not in OUT or url in held:
                self._out_since.pop(url, None)
                continue
            since = self._out_since.setdefault(url, now)
            if url in operated or now - since > STRAY_SECONDS:
                self._order(f"readmit {url}")

    def _order(self, text: str) -> None:
        if time.monotonic() - self._ordered.get(text, 0.0) > ORDER_SECONDS:
            self._ordered[text] = time.monotonic()
            self.crew.order(text)

    # --- the end ----------------------------------------------------------------------------

    def _wait_until_whole(self) -> None:
        """End every fault; the agent and the operator make all of it whole."""
        self._note(f"{self.now:7.1f} the schedule is over")
        until = time.monotonic() + HEAL_SECONDS
        ended = time.monotonic()
        for active in self._active:
            active.lift_at = min(active.lift_at, ended)
        while time.monotonic() < until:
            self._tick()
            look = self._look_since(ended)
            online = look is not None and set(look.states.values()) == {"online"}
            if not self._active and look is not None and look.whole and online:
                self.report.end["whole_after_seconds"] = time.monotonic() - ended
                return
        look = self.watcher.newest
        left = [f"{active.event.fault} device {active.number}" for active in self._active]
        self.report.problems.append(
            f"not whole {HEAL_SECONDS:.0f} s after the last fault; left: {left}; "
            f"{'no look' if look is None else look.text}; {look and dict(look.states)}"
        )

    def _judge(self) -> None:
        report, crew = self.report, self.crew
        rows = {
            name: read_journal(crew.journal(name))
            for name in ("trainer", "evaluator", "ingest", "operator")
        }
        report.seconds, report.lives = self.now, crew.lives
        trainers = [life for life in crew.lives if life.name == "trainer"]
        ingested, expected = judge_ingest(rows["ingest"])
        verdicts = {
            "trainer": judge_trainer(rows["trainer"], trainers),
            "evaluator": judge_evaluator(rows["evaluator"], rows["trainer"]),
            "ingest": ingested,
            "operator": judge_operator(rows["operator"]),
            "agent": self._judge_agent(),
        }
        for name, verdict in verdicts.items():
            report.figures[name] = verdict.figures
            report.problems += verdict.problems
        report.problems += crew.problems + self.node.problems
        report.end["watcher_errors"] = dict(self.watcher.errors)
        digests = {row["step"]: row["digest"] for row in rows["trainer"] if "digest" in row}
        try:
            with hpstore.open(self.node.toml) as pool:
                report.problems += self._read_all(pool, expected, digests)
        except HpstoreError as error:
            report.problems.append(f"at the end: {type(error).__name__}: {error}")

    def _judge_agent(self) -> Verdict:
        config = hpstore.config.find_config(self.node.toml)
        history = History(
            history_path(config.settings, self.node.pool_id), Metrics(), read_only=True
        )
        decisions = history.decisions(100_000)
        history.close()
        return judge_evictions(decisions, GRACE_SECONDS)

    def _read_all(self, pool: Pool, expected: Expected, digests: dict[int, str]) -> list[str]:
        """Everything, by a process that has had no part in it."""
        wrong, read = [], 0
        for key in sorted({*expected.acknowledged, *expected.maybe}):
            try:
                found = digest(pool.get(key))
            except hpstore.errors.ObjectNotFound:
                found = ABSENT
            read += 1
            if not expected.allows(key, found):
                wrong.append(f"at the end: {key} holds {found}: {expected.acknowledged.get(key)}")
        listed = {key for key in pool.list() if key.startswith(("once/", "slot/"))}
        for key in listed:
            if key not in expected.acknowledged and key not in expected.maybe:
                wrong.append(f"at the end: {key} is listed and was never put")
        wrong += [
            f"at the end: {key} is not listed"
            for key, what in expected.acknowledged.items()
            if what != ABSENT and key not in expected.maybe and key not in listed
        ]
        if not verify_dataset(pool, DATA_SET).clean:
            wrong.append("at the end: the data set is damaged")
        checkpointer = Checkpointer(pool, PREFIX, rng=False, save=SaveOptions(warm=False))
        steps = checkpointer.steps()
        for step in steps:
            state = new_state()
            checkpointer.restore(state, step, strict=False)
            if digest_of(state) != digests.get(step):
                wrong.append(f"at the end: step {step} has wrong bytes")
        report = pool.scrub(resume=False)
        if not report.whole or report.damaged_columns:
            wrong.append(f"at the end: the scrub is not clean: {report}")
        self.report.end |= {"objects_read": read, "steps": steps, "scrubbed": report.objects}
        return wrong
