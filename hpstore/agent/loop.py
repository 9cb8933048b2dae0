"""The agent's round: see, decide, remember, act.

Seeing never waits for a device, and what is not known is not acted on. The policy decides (pure);
its state is durable before anything is done. Jobs that take long or change the pool run one at a
time beside the rounds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from hpstore.agent.agent_config import AgentConfig
from hpstore.agent.agent_status import AgentStatus, make_status, publish, withdraw
from hpstore.agent.background_jobs import BackgroundJob, Effort, JobKind, Jobs, Report
from hpstore.agent.background_rate import scrub_rate
from hpstore.agent.disk_load import Foreground
from hpstore.agent.monitor_watch import HealthWatch, MonitorWatch
from hpstore.agent.observer import Observer, WalkShape
from hpstore.agent.operator_requests import read_orders
from hpstore.agent.policy_facts import Sighting, pool_facts, reports_in
from hpstore.agent.saved_state import load_memory, save_memory
from hpstore.agent.smart_watch import DiskWatch, worst
from hpstore.agreement.registers import AGENT, HeldRegister, NothingToKeep
from hpstore.config import private_directory
from hpstore.errors import DeviceDenied, HpstoreError, MembershipError
from hpstore.format.records import DeviceState
from hpstore.health.decision_log import history_path
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.forecast.forecast_model import load_model
from hpstore.health.forecast.forecaster import FailureForecaster
from hpstore.health.history import History
from hpstore.health.policy.health_policy import decide
from hpstore.health.policy.operator_commands import command
from hpstore.health.policy.states import Action, ActionKind, Decision, PolicyOutcome, PoolFacts
from hpstore.maintenance.rebalance import RebalanceReport
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing

_log = logging.getLogger(__name__)
_HOLD_SECONDS = 1.0
_DAY_MS = 86_400_000
_FOLLOW_SECONDS = 2.0  # between two looks at what others made of the membership
_READ = 200  # decisions of other processes

_JOBS = {
    ActionKind.DRAIN: JobKind.DRAIN,
    ActionKind.EVICT: JobKind.EVICT,
    ActionKind.READMIT: JobKind.READMIT,
    ActionKind.HEAL: JobKind.HEAL,
}
# before its columns are reconciled; REMOVED: until the round that finds it has ended
_RETURNING = (HealthState.REMOVED, HealthState.REBUILDING, HealthState.PROBATION)


class Agent(Closing):
    """Looks after one pool on this node; holds the pool for that until `close`.

    `tick` is one round; `run` makes rounds until its event is set. One thread calls them, and makes
    and closes the agent. With `threads=False` nothing runs beside them: `finish_jobs` works off the
    jobs. For a dry run the pool is open read only: nothing is changed, nothing remembered.

    Raises LockTimeout when another agent looks after the pool, DeviceDenied where its user has no
    rights on a device, ConfigError for a memory that is
    damaged or a run directory that others can write, ForecastError for a model that cannot be used.
    """

    def __init__(
        self,
        pool: Pool,
        config: AgentConfig,
        *,
        threads: bool = True,
        watch: HealthWatch | None = None,
        disks: DiskWatch | None = None,
        foreground: Foreground | None = None,
    ) -> None:
        self.pool, self.config = pool, config
        self._admin = pool.admin
        self.dry_run = config.policy.dry_run
        self._directory, self.run_directory = self._admin.state_directory, self._admin.run_directory
        self._clock, self._closed = self._admin.clock, False
        self._require_rights()
        with ExitStack() as stack:
            self._held = self._take_hold(stack)
            self.memory = self._saved = load_memory(self._directory)
            disks = disks or self._make_disks()
            path = history_path(pool.config.settings, self._admin.record.pool_id)
            self.history = History(path, pool.metrics, read_only=self.dry_run)
            stack.callback(self.history.close)
            self._stack = stack.pop_all()
        self.watch = watch or MonitorWatch(self._admin.health)
        self.eyes = Observer(
            pool,
            config,
            disks,
            foreground or Foreground(),
            lambda text: self.jobs.note(text, ok=False),
            threads=threads,
        )
        self._lock = threading.Lock()  # guards what jobs tell: down to `present`
        self.put_off: dict[str, int] = {}  # why -> objects, of the last rebuild
        self._put_off_until_ms = 0
        self._reconciled: set[str] = set()
        self._rebuild_saw: frozenset[str] = frozenset()  # who answered when it began
        self._rebuilt_shape: WalkShape | None = None  # of the pool when one had ended
        self._fruitless: int | None = None  # what it could do nothing about, as Condition has it
        self._rebuild_todo: int | None = None  # what there was to be done when one began
        self._rebuilt_seconds = -1e18
        self._evened_seconds, self._evened_columns = -1e18, 0  # of the last rebalance
        self._evened_shape: WalkShape | None = None
        self._scrubbed_ms = 0
        self._scrub_failed_seconds = -1e18
        self.present: frozenset[str] = frozenset()
        self.orders_problem = ""  # why orders cannot be read
        self.ticks, self.began_ms = 0, self._clock.wall_ms()
        self.jobs = Jobs(pool, self._effort(), started=self._started, finished=self._finished)
        if threads:
            self.jobs.start()

    def _require_rights(self) -> None:
        """Raise DeviceDenied where the user of the agent may not write on a device."""
        denied = self._admin.denied
        if denied:
            raise DeviceDenied(
                f"the agent of pool {self.pool.config.name!r} would take devices for lost on which "
                f"its user has no rights: {', '.join(sorted(denied))}. Nothing was changed. Run it "
                "as a user who may write on all devices (`hpstore status` shows whose they are)."
            )

    def _effort(self) -> Effort:
        """How fast jobs may go, and what they must know of the devices."""
        config = self.config
        return Effort(
            share=self._share,
            answers=lambda device: device in self.present,
            returned=self._returned,
            heal_bytes_per_second=lambda: float(config.heal_bytes_per_second) or None,
            scrub_bytes_per_second=self._scrub_rate,
            spread=config.rebalance_spread or 1.0,
        )

    def _make_disks(self) -> DiskWatch:
        config = self.config
        model = load_model(config.forecast_model) if config.forecast_model else None
        return DiskWatch(
            self._directory,
            FailureForecaster(model, far=config.forecast_far),
            timeout_seconds=config.smart_timeout_seconds,
        )

    # -- rounds

    def run(self, stop: threading.Event, each: Callable[[AgentStatus], None]) -> None:
        """Rounds until `stop` is set; `each` gets the status after every one.

        A round that fails is logged and counted, and the next one is tried. An exception of `each`
        ends the loop.
        """
        while not stop.is_set():
            status = None
            try:
                status = self.tick()
            except (HpstoreError, OSError) as error:
                self.pool.metrics.count("agent_round_error_total")
                self.jobs.note(f"a round failed: {error}", ok=False)
            except Exception as error:  # noqa: BLE001 (one disk's odd answer: others need it)
                self.pool.metrics.count("agent_round_error_total")
                self.jobs.note(f"a round failed: {type(error).__name__}: {error}", ok=False)
                _log.exception("a round of the agent failed")
            if status is not None:
                each(status)
            self._rest(stop)

    def _rest(self, stop: threading.Event) -> None:
        """Until the next round, or until another process has changed the membership: the round that
        follows is one of what there is now."""
        left = self.config.tick_seconds
        while left > 0 and not stop.wait(min(_FOLLOW_SECONDS, left)):
            left -= _FOLLOW_SECONDS
            try:
                if self.eyes.moved(self._clock.monotonic()):
                    return
            except Exception:  # noqa: BLE001 (the round that follows says what is wrong)
                return

    def _take_hold(self, stack: ExitStack) -> HeldRegister:
        """One agent looks after a pool; a dry run changes nothing, and needs not be the one."""
        if self.dry_run:
            return NothingToKeep()
        private_directory(self.run_directory)
        what = f"agent of pool {self.pool.config.name!r}"
        return stack.enter_context(
            self._admin.registers.hold(AGENT, what, deadline_seconds=_HOLD_SECONDS)
        )

    def tick(self) -> AgentStatus:
        """One round. Raises LockTimeout when another agent has taken over meanwhile, as it may when
        the devices that this one holds have been replaced one by one while it was stopped."""
        self._held.keep()
        now, at = self._clock.monotonic(), self._clock.wall_ms() / 1000
        self.eyes.look(now)
        facts = pool_facts(self._sighting(at), self.config.policy)
        self.present = frozenset(d for d, fact in facts.devices.items() if fact.present)
        with self._lock:
            self._reconciled &= self.present
        outcomes = self._obey(facts, at)
        if outcomes:  # what was said before an order counts no more
            facts = pool_facts(self._sighting(at), self.config.policy)
        verdicts = self.watch.verdicts()
        outcomes.append(decide(self.memory.policy, verdicts, facts, at, self.config.policy))
        self._remember(outcomes[-1])
        for outcome in outcomes:
            for action in outcome.actions:
                self._act(action)
        if not self.dry_run:
            self._look_for_work(now)
        self.ticks += 1
        status = make_status(self, self._decisions(_READ))
        if not self.dry_run:
            publish(self.run_directory, status)
        return status

    def finish_jobs(self) -> None:
        """Work off what is queued, on this thread. For agents without threads."""
        self.jobs.run_all()

    def _sighting(self, at: float) -> Sighting:
        with self._lock:
            reconciled = frozenset(self._reconciled)
        return Sighting(
            record=self._admin.record,
            open=self._admin.devices.places.keys(),
            seen=self.eyes.seen(),
            back=self.eyes.presence.back,
            denied=self.eyes.presence.denied,
            reconciled=reconciled,
            condition=self.eyes.condition(),
            outlooks={d: worst(sights) for d, sights in self.eyes.disks.items()},
            watched=self.watch.devices(),
            reports=reports_in(self._decisions(_READ), self.memory.policy, at),
            busy=self.jobs.busy(),
        )

    def _decisions(self, count: int) -> list[Decision]:
        return self.history.decisions(count) if os.path.exists(self.history.path) else []

    # -- deciding and remembering

    def _obey(self, facts: PoolFacts, at: float) -> list[PolicyOutcome]:
        """Take new orders of operators; a refused one is reported."""
        try:
            orders, self.orders_problem = read_orders(self._directory), ""
        except (HpstoreError, OSError) as error:
            self.orders_problem = f"orders cannot be read: {error}"
            return []
        done = []
        for order in orders:
            if order.number <= self.memory.orders_done:
                continue
            policy = self.memory.policy
            self.memory = replace(self.memory, orders_done=order.number)
            try:
                outcome = command(policy, order.word, order.device, facts, at, self.config.policy)
            except MembershipError as error:
                self.jobs.note(f"order {order.number}, {order.word}: refused: {error}", ok=False)
                self._save()
                continue
            self._remember(outcome)
            done.append(outcome)
        return done

    def _remember(self, outcome: PolicyOutcome) -> None:
        """Make the state durable before it is acted on; write the decisions down."""
        self.memory = replace(self.memory, policy=outcome.state)
        self._save()
        for decision in outcome.decisions:
            change = (
                decision.was
                if decision.was is decision.becomes
                else (f"{decision.was} -> {decision.becomes}")
            )
            _log.info(
                "%s%s: %s: %s",
                "dry run: " if decision.dry_run else "",
                self.url(decision.device),
                change,
                decision.reason,
            )
        if self.dry_run:
            for decision in outcome.decisions:
                self.jobs.note(
                    f"dry run: {self.url(decision.device)} would be {decision.becomes}: "
                    f"{decision.reason}"
                )
        else:
            self.history.add_decisions(outcome.decisions)

    def _save(self) -> None:
        if self.dry_run or self.memory.lasting() == self._saved.lasting():
            return
        save_memory(self._directory, self.memory)
        self._saved = self.memory

    # -- acting

    def _act(self, action: Action) -> None:
        where = self.url(action.device) if action.device else "the pool"
        if action.dry_run:
            self.jobs.note(f"dry run: would {action.kind} {where}: {action.reason}")
        elif action.kind is ActionKind.HEAL and self._admin.record.member(action.device) is None:
            self.jobs.submit(BackgroundJob(kind=JobKind.REBUILD, reason=f"{where} has left"))
        elif action.kind in _JOBS:
            kind = _JOBS[action.kind]
            self.jobs.submit(BackgroundJob(kind=kind, device=action.device, reason=action.reason))
        elif action.kind is ActionKind.RECONCILE:
            # a member never left: its old versions lose to newer ones and deletes wait for it; a
            # rebuild drops what is superseded and brings what it missed
            self.jobs.submit(BackgroundJob(kind=JobKind.REBUILD, reason=f"{where} is back"))
        elif action.kind is ActionKind.FORGIVE:
            self.watch.forgive(action.device, action.reason)
        elif action.kind is ActionKind.ACCEPT:
            self.watch.accept(action.device)
        elif action.kind in (ActionKind.WARN, ActionKind.ALARM):
            self.jobs.note(f"{action.kind}: {where}: {action.reason}", ok=False)

    def _look_for_work(self, now: float) -> None:
        """Rebuild what can be completed or widened; scrub when it is time."""
        condition, shape = self.eyes.condition(), self.eyes.shape()
        with self._lock:
            waited, before = now - self._rebuilt_seconds, self._rebuilt_shape
            fruitless, until_ms = self._fruitless, self._put_off_until_ms
        if condition is not None and (condition.todo or self._unmarked()):
            config = self.config
            same = fruitless == condition.todo_identity
            patience = config.again_seconds if same else config.survey_seconds
            over = 0 < until_ms < self._clock.wall_ms()  # what was put off was not deleted
            if shape != before or waited >= patience or over:
                reason = (
                    f"{condition.todo} objects are not as they should be"
                    if condition.todo
                    else "no rebuild has confirmed yet that evicted devices are made up for"
                )
                self.jobs.submit(BackgroundJob(kind=JobKind.REBUILD, reason=reason))
        if condition is not None and not condition.todo:
            with self._lock:  # what was put off has been deleted
                self.put_off, self._put_off_until_ms = {}, 0
            if self.config.rebalance_spread:
                self._look_at_fullness(now, shape)
        if self.config.scrub_days:
            self._look_for_scrub(now)

    def _unmarked(self) -> bool:
        """Whether evicted devices count as lost although a rebuild could confirm that their columns
        are rebuilt: it does so only when all members answer."""
        record = self._admin.record
        there = all(member.device_id in self.present for member in record.members)
        return there and bool(record.unhealed())

    def _look_at_fullness(self, now: float, shape: WalkShape) -> None:
        """Even out how full devices are, once every object is whole and every member is there."""
        seen, record = self.eyes.seen(), self._admin.record
        calm = all(
            m.state is DeviceState.ONLINE and m.device_id in self.present for m in record.members
        )
        shares = [
            1 - s.free_bytes / s.total_bytes
            for s in seen.values()
            if s.total_bytes and not s.read_only
        ]
        spread = max(shares, default=0.0) - min(shares, default=0.0)
        if not calm or spread <= self.config.rebalance_spread:
            return
        with self._lock:
            before, moved = self._evened_shape, self._evened_columns
            waited = now - self._evened_seconds
        patience = self.config.survey_seconds if moved else self.config.again_seconds
        if shape != before or waited >= patience:
            reason = f"the fullest device is {max(shares):.0%} full, the emptiest {min(shares):.0%}"
            self.jobs.submit(BackgroundJob(kind=JobKind.REBALANCE, reason=reason))

    def _look_for_scrub(self, now: float) -> None:
        began, wall = self.memory.scrub_began_ms, self._clock.wall_ms()
        seen, running = self.eyes.scrub_ended_ms, self.jobs.running
        scrubs = running is not None and running.kind is JobKind.SCRUB
        with self._lock:
            ended = max(self._scrubbed_ms, self.memory.scrub_ended_ms)
            if ended < seen <= wall and not scrubs:  # of another process: it counts
                began, ended = max(began, seen), seen
            rested = now - self._scrub_failed_seconds >= self.config.survey_seconds
            if max(began, ended) > wall:  # by a clock that was ahead
                began = ended = self._scrubbed_ms = 0
        if ended < began or wall - began >= self.config.scrub_days * _DAY_MS:
            if rested and not scrubs:
                self.jobs.submit(BackgroundJob(kind=JobKind.SCRUB, reason="it is time"))
            began = began if ended < began else wall
        self.memory = replace(self.memory, scrub_began_ms=began, scrub_ended_ms=ended)
        self._save()

    def _started(self, job: BackgroundJob) -> None:
        """Called by the thread of jobs."""
        condition = self.eyes.condition()
        with self._lock:
            if job.kind is JobKind.REBUILD:
                self._rebuild_saw = self.present
                self._rebuild_todo = None if condition is None else condition.todo_identity

    def _finished(self, job: BackgroundJob, report: Report | None) -> None:
        """Called by the thread of jobs."""
        shape = self.eyes.shape()
        with self._lock:
            if job.kind is JobKind.READMIT and self._admin.record.member(job.device) is not None:
                self._reconciled.add(job.device)
            elif job.kind is JobKind.REBUILD:
                self._rebuilt_seconds, self._rebuilt_shape = self._clock.monotonic(), shape
                if isinstance(report, RebuildReport):
                    self._reconciled |= self._rebuild_saw
                    self.put_off, self._put_off_until_ms = report.put_off, report.put_off_until_ms
                written = isinstance(report, RebuildReport) and report.columns_written
                # what has come since it began, it has not looked at
                self._fruitless = None if written else self._rebuild_todo
            elif job.kind is JobKind.REBALANCE:
                self._evened_seconds, self._evened_shape = self._clock.monotonic(), shape
                moved = isinstance(report, RebalanceReport) and report.columns_moved
                self._evened_columns = moved or 0
            elif job.kind is JobKind.SCRUB and report is not None:
                self._scrubbed_ms = self._clock.wall_ms()
            elif job.kind is JobKind.SCRUB:  # somebody else scrubs or rebuilds
                self._scrub_failed_seconds = self._clock.monotonic()
        if job.kind is not JobKind.SCRUB:
            self.eyes.disturb()

    def _returned(self, device: str) -> bool:
        """Whether it was away, and answers again. Called by the thread of jobs."""
        state = self.memory.policy.health(device).state
        return device in self.present and state in _RETURNING

    def _share(self) -> float:
        """Return the share of the time that a rebuild may take."""
        others, config = self.eyes.foreground, self.config
        calm = others.known and others.bytes_per_second <= config.foreground_bytes_per_second
        return config.heal_share_idle if calm else config.heal_share_busy

    def _scrub_rate(self) -> float:
        used = sum(found.total_bytes - found.free_bytes for found in self.eyes.seen().values())
        return scrub_rate(used, self.config.scrub_days)

    def url(self, device: str) -> str:
        """Where a device is or was, by its id."""
        record = self._admin.record
        known = {m.device_id: m.url for m in (*record.members, *record.evicted)}
        return self._admin.devices.places.get(device, known.get(device, device))

    def close(self) -> None:
        """Stop jobs after the object under way, and let the lock go. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.jobs.close()
        self.watch.close()
        if not self.dry_run:
            withdraw(self.run_directory)
        self._stack.close()
