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

from hpstore.agent.absent_hosts import AbsentHosts
from hpstore.agent.agent_config import AgentConfig
from hpstore.agent.agent_status import AgentStatus, make_status, publish, withdraw
from hpstore.agent.background_jobs import BackgroundJob, Effort, JobKind, Jobs
from hpstore.agent.background_rate import scrub_rate
from hpstore.agent.disk_load import Foreground
from hpstore.agent.due_work import DueWork
from hpstore.agent.monitor_watch import HealthWatch, MonitorWatch
from hpstore.agent.observer import Observer
from hpstore.agent.operator_requests import OperatorRequest, read_orders, settle_orders
from hpstore.agent.own_devices import OwnDevices
from hpstore.agent.policy_facts import Sighting, leaving, pool_facts, reports_in
from hpstore.agent.pool_keeper import PoolKeeper
from hpstore.agent.run_files import RunFiles
from hpstore.agent.saved_state import load_memory, save_memory
from hpstore.agent.smart_watch import DiskWatch, worst
from hpstore.agreement.registers import AGENT, HeldRegister, NothingToKeep
from hpstore.config import private_directory
from hpstore.errors import DeviceDenied, HpstoreError, MembershipError
from hpstore.health.decision_log import history_path
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.forecast.forecast_model import load_model
from hpstore.health.forecast.forecaster import FailureForecaster
from hpstore.health.history import History
from hpstore.health.policy.device_history import fresh_absences
from hpstore.health.policy.health_policy import decide
from hpstore.health.policy.operator_commands import command
from hpstore.health.policy.policy_clock import PolicyClock
from hpstore.health.policy.states import Action, ActionKind, Decision, PolicyOutcome, PoolFacts
from hpstore.locks import file_lock
from hpstore.membership.host_names import host_domains, over_several_hosts
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing

_log = logging.getLogger(__name__)
_HOLD_SECONDS = 1.0
_LOCK = "agent.lock"  # in the run directory
_FOLLOW_SECONDS = 2.0  # between two looks at what others made of the membership
_READ = 200  # decisions of other processes

_JOBS = {
    ActionKind.DRAIN: JobKind.DRAIN,
    ActionKind.EVICT: JobKind.EVICT,
    ActionKind.READMIT: JobKind.READMIT,
    ActionKind.HEAL: JobKind.HEAL,
}
_BY_CHOICE = (ActionKind.DRAIN, ActionKind.EVICT, ActionKind.READMIT)  # never unremembered
_UNSAVED = (
    "the agent cannot write its memory to {path}: {error}. Lost columns are rebuilt all the same; "
    "drains, readmissions, evictions by choice and orders wait. Free space in that directory."
)
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
        self.keeper = PoolKeeper(
            self._admin,
            host=config.host,
            dry_run=self.dry_run,
            ttl_seconds=config.keeper_seconds,
        )
        gap_seconds = max(60.0, 4 * config.tick_seconds)
        self.hosts = AbsentHosts(config.host_wait_seconds, gap_seconds)
        self._policy_clock = PolicyClock(gap_seconds)
        self._own, self._decided = OwnDevices(config.host), True
        self.watch = watch or MonitorWatch(self._admin.health)
        self.eyes = Observer(
            pool,
            config,
            disks,
            foreground or Foreground(),
            lambda text: self.jobs.note(text, ok=False),
            threads=threads,
            scope=lambda: None if self._decided else self._own_devices(),
        )
        self.present: frozenset[str] = frozenset()
        self.orders_problem = ""  # why orders cannot be read
        self.memory_problem = ""  # why what it remembers is not durable
        self._run_files = RunFiles(self.run_directory)
        self.ticks, self.began_ms = 0, self._clock.wall_ms()
        self.due = DueWork(self, self._admin, self._save)
        self.jobs: Jobs = Jobs(
            pool, self._effort(), started=self.due.started, finished=self.due.finished
        )
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
            own=lambda: self._own_devices() if self.keeper.shared else None,
            scrub_began_ms=lambda: self.memory.scrub_began_ms,
            decides=lambda: self.keeper.decides,
            repairs=lambda: self.keeper.repairs,
            confirm=self.keeper.confirm,
            closing=lambda member, whole: self.keeper.closing(member, whole_host=whole),
            reopen=self._reopen,
        )

    def _own_devices(self) -> frozenset[str]:
        """Open devices that this agent observes and scrubs: those of its host; for the keeper also
        those that are on no host."""
        places = self._admin.devices.places
        own = self._own.among(places, self._admin.record)
        return own | self._own.stores(places) if self._decided else own

    def _reopen(self) -> None:
        """Open what an eviction has closed that was cut short, here or by the keeper before. Called
        by the thread of jobs, which makes evictions."""
        for member in self.keeper.cut_short():
            self.jobs.note(f"{member.url}: its eviction was cut short, it takes columns again")
            self.pool.readmit(member.device_id, reason="its eviction was cut short")
        self.keeper.forget_closed()

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
                self.keeper.renew()
                if self.eyes.moved(self._clock.monotonic()):
                    return
            except Exception:  # noqa: BLE001 (the round that follows says what is wrong)
                return

    def _take_hold(self, stack: ExitStack) -> HeldRegister:
        """One agent looks after a pool, over several hosts one on each: it has their run directory.
        A dry run changes nothing, and needs not be the one."""
        if self.dry_run:
            return NothingToKeep()
        private_directory(self.run_directory)
        what = f"agent of pool {self.pool.config.name!r}"
        if over_several_hosts(self._admin.record):
            lock = file_lock(self.run_directory, _LOCK, self._clock, _HOLD_SECONDS, what)
            stack.enter_context(lock)
            return NothingToKeep()
        return stack.enter_context(
            self._admin.registers.hold(AGENT, what, deadline_seconds=_HOLD_SECONDS)
        )

    def tick(self) -> AgentStatus:
        """One round. Raises LockTimeout when another agent has taken over meanwhile, as it may when
        the devices that this one holds have been replaced one by one while it was stopped."""
        self._held.keep()
        now, at = self._clock.monotonic(), self._clock.wall_ms() / 1000
        policy = self._policy_clock.follow(
            self.memory.policy, monotonic_seconds=now, wall_seconds=at
        )
        self.memory = replace(self.memory, policy=policy)
        decides = self._take_turn()  # first: it says which devices are looked at
        self.eyes.look(now)
        facts = pool_facts(self._sighting(at), self.config.policy)
        self.present = frozenset(d for d, fact in facts.devices.items() if fact.present)
        self.due.reconciled(self.present)
        if decides:
            self.hosts.look(now, host_domains(self._admin.record), self.present)
            self._decide(pool_facts(self._sighting(at), self.config.policy), at)
        else:
            self._pass_on_orders()
        if not self.dry_run:
            self._settle_orders()
            self.due.look(now)
            self._run_files.keep(now)
        self.ticks += 1
        status = make_status(self, self._decisions(_READ))
        if not self.dry_run:
            publish(self.run_directory, status)
        return status

    def _take_turn(self) -> bool:
        """Return whether this agent is the keeper in this round. A new keeper forgets the absences
        that it saw before, because it did not watch them throughout."""
        decides = self.keeper.look()
        if decides and not self._decided:
            self.hosts.forget()
            policy = fresh_absences(self.memory.policy, self._clock.wall_ms() / 1000)
            self.memory = replace(self.memory, policy=policy)
            self.jobs.note(f"this agent decides for the pool now: {self.keeper.sight()}")
        elif self._decided and not decides:
            self.jobs.withdraw()
            self.jobs.note(f"another agent decides for the pool: {self.keeper.sight()}")
        self._decided = decides
        running = self.jobs.running
        if decides and self.keeper.left_closed and (running is None or not running.device):
            self.jobs.submit(BackgroundJob(kind=JobKind.REOPEN, reason="an eviction was cut short"))
        return decides

    def _decide(self, facts: PoolFacts, at: float) -> None:
        """What the policy and operators want; remembered before it is done."""
        obeyed = self._obey(facts, at)
        if obeyed:  # what was said before an order counts no more
            facts = pool_facts(self._sighting(at), self.config.policy)
        verdicts = self.watch.verdicts()
        outcome = decide(self.memory.policy, verdicts, facts, at, self.config.policy)
        remembered = self._remember(outcome)
        for action in (action for done in obeyed for action in done.actions):
            self._act(action)
        for action in outcome.actions:
            if remembered or action.kind not in _BY_CHOICE:  # it is asked for again later
                self._act(action)

    def _pass_on_orders(self) -> None:
        """Refuse new orders of operators: the keeper obeys those of its own host."""
        for order in self._new_orders():
            self.memory = replace(self.memory, orders_done=order.number)
            try:
                self.keeper.require_keeper(order.word)
            except MembershipError as error:
                self.jobs.note(f"order {order.number}, {order.word}: refused: {error}", ok=False)
            self._save()

    def finish_jobs(self) -> None:
        """Work off what is queued, on this thread. For agents without threads."""
        self.jobs.run_all()

    def _sighting(self, at: float) -> Sighting:
        # jobs before the record, which then has what came of them; and what waits before what runs,
        # so that a job which is taken meanwhile is found
        jobs = [*self.jobs.waiting(), self.jobs.running]
        return Sighting(
            leaving=leaving(filter(None, jobs), self._admin.record),
            record=self._admin.record,
            open=self._admin.devices.places.keys(),
            seen=self.eyes.seen(),
            back=self.eyes.presence.back,
            denied=self.eyes.presence.denied,
            reconciled=self.due.reconciled(),
            condition=self.eyes.condition(),
            outlooks={d: worst(sights) for d, sights in self.eyes.disks.items()},
            watched=self.watch.devices(),
            reports=reports_in(self._decisions(_READ), self.memory.policy, at),
            busy=self.jobs.busy(),
            waited_for=self.hosts.devices_waited_for(),
            gone=frozenset().union(*self.hosts.gone().values()),
        )

    def _decisions(self, count: int) -> list[Decision]:
        if not os.path.exists(self.history.path):
            return []
        return self.history.decisions(count, until_seconds=self._clock.wall_ms() / 1000)

    # -- deciding and remembering

    def _obey(self, facts: PoolFacts, at: float) -> list[PolicyOutcome]:
        """Take new orders of operators; a refused one is reported. One that cannot be remembered
        waits."""
        done: list[PolicyOutcome] = []
        for order in self._new_orders():
            before, refused = self.memory, ""
            outcome: PolicyOutcome | None = None
            try:
                outcome = command(
                    before.policy, order.word, order.device, facts, at, self.config.policy
                )
            except MembershipError as error:
                refused = f"order {order.number}, {order.word}: refused: {error}"
            policy = before.policy if outcome is None else outcome.state
            self.memory = replace(before, policy=policy, orders_done=order.number)
            if not self._save():
                self.memory = before
                break
            if outcome is None:
                self.jobs.note(refused, ok=False)
            else:
                self._write_down(outcome)
                done.append(outcome)
        return done

    def _new_orders(self) -> list[OperatorRequest]:
        try:
            orders, self.orders_problem = read_orders(self._directory), ""
        except (HpstoreError, OSError) as error:
            self.orders_problem = f"orders cannot be read: {error}"
            return []
        return [order for order in orders if order.number > self.memory.orders_done]

    def _settle_orders(self) -> None:
        """Take orders that were obeyed out of their file, so that an agent that begins without
        memory does not obey them again."""
        done = self._saved.orders_done
        try:
            if any(order.number <= done for order in read_orders(self._directory)):
                settle_orders(self._directory, done, self._clock)
        except (HpstoreError, OSError) as error:
            problem = f"orders that were obeyed are still in their file: {error}"
            self.orders_problem = self.orders_problem or problem

    def _remember(self, outcome: PolicyOutcome) -> bool:
        """Make the state durable before it is acted on; write the decisions down. Return whether it
        is durable: what cannot be written is kept in memory, as rebuilding goes on (rule 17)."""
        self.memory = replace(self.memory, policy=outcome.state)
        saved = self._save()
        self._write_down(outcome)
        return saved

    def _write_down(self, outcome: PolicyOutcome) -> None:
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

    def _save(self) -> bool:
        """Return whether the memory is durable. That it cannot be written is counted, and noted
        once; each round tries again."""
        if self.dry_run or self.memory.lasting() == self._saved.lasting():
            return True
        try:
            save_memory(self._directory, self.memory)
        except (HpstoreError, OSError) as error:
            self.pool.metrics.count("agent_memory_error_total")
            if not self.memory_problem:
                self.jobs.note(_UNSAVED.format(path=self._directory, error=error), ok=False)
            self.memory_problem = f"the agent cannot write its memory: {error}"
            return False
        self._saved, self.memory_problem = self.memory, ""
        return True

    # -- acting

    def _act(self, action: Action) -> None:
        where = self.url(action.device) if action.device else "the pool"
        if action.dry_run:
            self.jobs.note(f"dry run: would {action.kind} {where}: {action.reason}")
        elif action.kind is ActionKind.HEAL and self._admin.record.member(action.device) is None:
            self.jobs.submit(BackgroundJob(kind=JobKind.REBUILD, reason=f"{where} has left"))
        elif action.kind in _JOBS:
            self.jobs.submit(self._job(action))
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

    def _job(self, action: Action) -> BackgroundJob:
        """What an action asks for; devices of a host that is gone leave as one."""
        kind, device, domain = _JOBS[action.kind], action.device, ""
        for host, devices in self.hosts.gone().items():
            if kind is JobKind.HEAL and device in devices:
                device, domain = min(devices), host
        return BackgroundJob(kind=kind, device=device, reason=action.reason, domain=domain)

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
        self.keeper.close()
        self.watch.close()
        if not self.dry_run:
            withdraw(self.run_directory)
        self._stack.close()
