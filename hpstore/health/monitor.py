"""Looks at a pool's devices once a second, in each process for its own reads (PROTOCOL 16).

Ticks of the telemetry go to the detector, its verdicts to the policy, and the policy's states to
the routing: what reads and new columns keep off. No agent is needed. Draining, evicting and healing
are the agent's or an operator's; a process writes what it would want into the node's history.

The thread starts at the first call on a device, ends with the pool, and is made anew in the child
of a fork (PROTOCOL 22). A child judges for itself: it begins with all devices online.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from statistics import median

from hpstore.devices.base import Device
from hpstore.errors import ThreadsExhausted
from hpstore.health.decision_log import write_down
from hpstore.health.detect.evidence import Traits
from hpstore.health.detect.io_recorder import Operation
from hpstore.health.detect.media import traits_of
from hpstore.health.detect.metered_device import DeviceMeter, MeteredDevice
from hpstore.health.detect.slow import SlowDetector
from hpstore.health.detect.stall_filter import Stalls
from hpstore.health.detect.telemetry import Telemetry, Tick, size_class
from hpstore.health.detect.tick_window import Gathering
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState
from hpstore.health.policy.health_policy import decide
from hpstore.health.policy.operator_commands import Command, command
from hpstore.health.policy.policy_clock import PolicyClock
from hpstore.health.policy.read_shares import no_new_columns, read_shares
from hpstore.health.policy.states import (
    Action,
    ActionKind,
    Decision,
    DeviceFacts,
    PolicyConfig,
    PolicyState,
    PoolFacts,
)
from hpstore.health.probe_scores import ProbeScores
from hpstore.health.process_memory import ProcessMemory
from hpstore.health.snapshot import DeviceSight, HealthSnapshot, Round
from hpstore.objects.context import PoolContext
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
TICK_SECONDS = 1.0
HEDGE_SHARE = 0.95  # a read later than so many of the faster peers' may be late
_TIMED_SECONDS = 0.02  # between batches of reads that are timed
_PROBE_SECONDS = 0.25  # between two probes of a device
_IDLE_PROBE_SECONDS = 5.0  # without one by a reader, until the monitor probes
_LOW_PROBE_SECONDS = 0.5  # while hardly anything is read
_LATENCIES, _DECISIONS = 60, 100  # that a snapshot has
_CLOSE_SECONDS = 5.0
_LEARNT_TICKS = 10  # of a process whose times are worth remembering
_LOW_BUSY_SHARE = 0.2  # of the time; a device that is tried again then keeps hardly anyone waiting


class Monitor:
    """The health of one pool's devices, as this process sees it.

    All methods are for any thread. Not `enabled`, it does nothing: no device is metered, no read is
    planned round any. `pause()` leaves ticks to the caller.
    """

    def __init__(self, store: PoolContext, *, enabled: bool) -> None:
        self.enabled, self.telemetry = enabled, Telemetry()
        self._store, self._automatic = store, enabled
        self._listeners: list[Callable[[Round], None]] = []
        self._meters: dict[str, DeviceMeter] = {}
        self._timed_until = 0.0
        self._begin_anew()
        if enabled:
            routing = store.routing
            routing.meter, routing.size_class = self._meters.get, size_class
            routing.timed, routing.probe, routing.probed = self._timed, self._probe, self._probed

    def _begin_anew(self) -> None:
        """Know nothing; also of threads and locks, which may be another process'."""
        self._ticking = threading.Lock()  # guards all below but for the thread
        self._starting = threading.Lock()  # guards _thread and _stop
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._detector, self._writes = SlowDetector(), SlowDetector()
        self._policy, self._config = PolicyState(), PolicyConfig()
        self._policy_clock = PolicyClock()
        self._stalls, self._gathering = Stalls(TICK_SECONDS), Gathering()
        self._traits: dict[str, Future[Traits]] = {}
        self._probing: dict[str, float] = {}  # device -> when its probe began
        self._next_probe: dict[str, float] = {}
        self._probes: Counter[str] = Counter()  # that went well, since a sit-out began
        self._probe_scores = ProbeScores()
        store = self._store
        self._memory = ProcessMemory(
            store.settings.run_path(store.view.record.pool_id), store.metrics
        )
        self._counts: dict[str, Counter[str]] = {}
        self._latencies: dict[str, deque[float]] = {}
        self._verdicts: dict[str, DeviceVerdict] = {}
        self._decisions: deque[Decision] = deque(maxlen=_DECISIONS)
        self._members: Set[str] | None = None  # at the last tick
        self._ticks, self._at_seconds, self._ticked = 0, 0.0, 0.0
        self._load_low = False

    # --- devices ----------------------------------------------------------------------------

    def metered(self, devices: Mapping[str, Device]) -> dict[str, Device]:
        """The devices with their calls noted, by device id."""
        if not self.enabled:
            return dict(devices)
        return {device_id: self._metered(device_id, x) for device_id, x in devices.items()}

    def _metered(self, device_id: str, device: Device) -> Device:
        if isinstance(device, MeteredDevice):
            return device
        # what a page cache answers is not the device's work
        recorder = self.telemetry.recorder(device_id, judge_reads=device.mode != "buffered")
        meter = DeviceMeter(recorder, self._store.clock.monotonic, self._wake)
        self._meters[device_id] = meter
        return MeteredDevice(device, meter)

    # --- the thread -------------------------------------------------------------------------

    def _wake(self) -> None:
        """The first call on a device, in this process."""
        self.start()
        if self._automatic and self._thread is None:
            return  # there was no thread for it: the next call tries again
        for meter in list(self._meters.values()):
            meter.asleep = False

    def start(self) -> None:
        """Begin to tick; otherwise the first call on a device does."""
        with self._starting:
            if self._thread is None and self._automatic:
                self._stop = threading.Event()
                thread = threading.Thread(
                    target=_run,
                    args=(weakref.ref(self), self._stop),
                    name="hpstore-health",
                    daemon=True,
                )
                with suppress(ThreadsExhausted):  # the calls that are measured go on
                    self._thread = start_thread(thread)

    def pause(self) -> None:
        """Tick no more but by `tick_now`. Joins the thread."""
        self._automatic = False
        with self._starting:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
            if thread.is_alive():
                _log.warning("the health monitor's thread has not ended")

    def close(self) -> None:
        """End, and leave what was learnt to later processes."""
        self.pause()
        if self._ticks >= _LEARNT_TICKS:
            now = self._store.clock.monotonic()
            self._memory.save(self.telemetry, self._well(), now, last=True)

    def after_fork(self) -> None:
        """In the child: nothing is known, no thread runs. Takes no lock, does no I/O."""
        self.telemetry.after_fork()
        self._begin_anew()
        for meter in list(self._meters.values()):
            meter.asleep = True
        self._store.routing.after_fork()

    # --- ticks ------------------------------------------------------------------------------

    def listen(self, callback: Callable[[Round], None]) -> Callable[[], None]:
        """Have `callback` called after each tick, on its thread; returns what ends that."""
        self._listeners.append(callback)

        def stop() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return stop

    def tick_now(self) -> Round:
        """One round: judge, decide, route, tell. Waits for no device."""
        self._memory.begin(self.telemetry, self._store.clock.monotonic())
        pardoned = self._memory.pardoned()  # files are read and written without the lock
        with self._ticking:
            found, decisions = self._tick(pardoned)
            well = self._well()
        self._store.metrics.count("health_tick_total")
        self._memory.save(self.telemetry, well, found.now_seconds)
        self._tell(decisions)
        for callback in list(self._listeners):
            callback(found)
        return found

    def _tick(self, pardoned: Sequence[str]) -> tuple[Round, list[Decision]]:
        clock, said = self._store.clock, list[Decision]()
        now, wall = clock.monotonic(), clock.wall_ms() / 1000
        self._policy = self._policy_clock.follow(
            self._policy, monotonic_seconds=now, wall_seconds=wall
        )
        self._forget_left()
        self._learn_traits()
        for device in pardoned:
            self._detector.forgive(device)
            self._writes.forgive(device)
            said.extend(self._obey_operator(Command.READMIT, device, ""))
        tick = self.telemetry.tick(now)
        self._stalls.note(now)
        members = self._store.view.record.members
        returned = self._returned({member.device_id for member in members})
        signs = self._stalls.excused(tick.signs, now, len(members), self._store.view.record.parity)
        signs = {device: sign for device, sign in signs.items() if device not in returned}
        watched = self._in_state(HealthState.PROBATION)
        judged = self._gathering.add(tick)
        means = {} if judged is None else judged.means()
        writes = {} if judged is None else judged.means((Operation.WRITE, Operation.SYNC))
        verdicts = self._detector.tick(now, means, signs=signs, watched=watched)
        slow_writes = self._writes.tick(now, writes)
        self._keep(tick, verdicts)
        facts = self._facts({verdict.device for verdict in slow_writes})
        outcome = decide(self._policy, verdicts, facts, wall, self._config)
        self._policy = outcome.state
        decisions = [*said, *outcome.decisions, *self._obey(outcome.actions, wall)]
        self._route()
        if tick.samples:
            fastest = max(1, len(members) - self._store.view.record.parity)
            self._store.routing.deadlines = self.telemetry.deadlines(HEDGE_SHARE, fastest)
        self._probe_idle(now)
        self._decisions.extend(decisions)
        self._ticks, self._at_seconds, self._ticked = self._ticks + 1, wall, now
        found = Round(tick=tick, verdicts=tuple(verdicts), now_seconds=now, at_seconds=wall)
        return found, decisions

    def _returned(self, members: Set[str]) -> Set[str]:
        """Devices that have become members since the last tick. They start anew: what they failed
        before they left, and while they were away, is forgiven."""
        known = members if self._members is None else self._members
        returned, self._members = members - known, members
        for device in returned:
            self._detector.forget(device)
            self._writes.forget(device)
        return returned

    def _well(self) -> list[str]:
        """Devices whose times are worth remembering: those that nothing speaks against."""
        return [
            member.device_id
            for member in self._store.view.record.members
            if self._policy.health(member.device_id).state is HealthState.ONLINE
            and not self._detector.score(member.device_id)
        ]

    def _in_state(self, *states: HealthState) -> list[str]:
        return [d for d, health in self._policy.devices.items() if health.state in states]

    def _forget_left(self) -> None:
        """Devices that are members no more accuse nobody, and excuse nobody."""
        members = {member.device_id for member in self._store.view.record.members}
        for device in self._meters.keys() - members:
            self.telemetry.forget(device)
            self._detector.forget(device)
            self._writes.forget(device)
            for known in (self._meters, self._traits, self._counts, self._latencies):
                known.pop(device, None)

    def _learn_traits(self) -> None:
        """What kinds of device there are; asked on their lanes, as it may wait for them."""
        for device_id, device in self._store.view.devices.items():
            asked = self._traits.get(device_id)
            if asked is None:
                ask = partial(traits_of, device.url)
                self._traits[device_id] = self._store.scheduler.submit(device_id, ask, bulk=True)
            elif asked.done() and asked.exception() is None:
                traits = asked.result()
                self._detector.traits[device_id] = self._writes.traits[device_id] = traits
                self.telemetry.classify(device_id, traits.media)

    def _keep(self, tick: Tick, verdicts: Iterable[DeviceVerdict]) -> None:
        """Remember what snapshots and the policy ask for."""
        self._verdicts = {verdict.device: verdict for verdict in verdicts}
        for device, mean in tick.means().items():
            self._latencies.setdefault(device, deque(maxlen=_LATENCIES)).append(mean)
        sitting = self._in_state(HealthState.SITOUT)
        busy = [signs.busy_share for signs in tick.signs.values()]
        self._load_low = bool(busy) and median(busy) < _LOW_BUSY_SHARE
        for device, signs in tick.signs.items():
            counts = self._counts.setdefault(device, Counter())
            counts["io_errors"] += signs.io_errors
            counts["checksum_errors"] += signs.checksum_errors
            if device not in sitting:
                self._probes.pop(device, None)
        self._probe_scores.keep_only(sitting)
        for device, sample in tick.samples.items():
            self._counts[device]["ios"] += sample.ios
            reads = sample.counts.get(Operation.READ, 0)
            if reads and device in sitting:
                score = sample.scores[Operation.READ]
                self._probe_scores.note(device, score, reads, tick.now_seconds)

    def _facts(self, slow_writers: set[str]) -> PoolFacts:
        view, now = self._store.view, self._store.clock.monotonic()
        devices = {}
        for member in view.record.members:
            device = member.device_id
            devices[device] = DeviceFacts(
                present=device in view.devices,
                domain=member.domain,
                pool_state=member.state,
                probes=self._probes[device],
                probe_ratio=self._probe_scores.ratio(device, now),
                load_low=self._load_low,
                writes_slow=device in slow_writers,
                reconciled=True,  # it never left: each read is judged by its checksums
            )
        return PoolFacts(parity=view.record.parity, devices=devices)

    def _obey(self, actions: Iterable[Action], wall: float) -> list[Decision]:
        """What the policy asks of a process; what it asks of the agent is written down."""
        reports = []
        for action in actions:
            if action.kind is ActionKind.FORGIVE:
                self._detector.forgive(action.device)
                self._writes.forgive(action.device)
            elif action.kind is ActionKind.ACCEPT:
                self._detector.accept(action.device)
            elif action.kind is not ActionKind.RECONCILE and action.device:
                state = self._policy.health(action.device).state
                reason = f"{action.kind}: {action.reason}"
                reports.append(
                    Decision(
                        at_seconds=wall,
                        device=action.device,
                        was=state,
                        becomes=state,
                        reason=reason,
                        role=self._config.role,
                    )
                )
            elif action.kind is ActionKind.ALARM:
                _log.warning("pool health: %s", action.reason)
        return reports

    def _route(self) -> None:
        routing, shares = self._store.routing, self._config.probation_shares
        routing.set_avoided(read_shares(self._policy, shares))
        routing.no_new = no_new_columns(self._policy)

    def _tell(self, decisions: list[Decision]) -> None:
        """Log, count, and write into the node's history. What fails there is counted and logged."""
        if decisions:
            write_down(self._store, decisions)

    # --- probes -----------------------------------------------------------------------------

    def _timed(self) -> bool:
        """Whether to time a batch of reads now."""
        now = self._store.clock.monotonic()
        if now < self._timed_until:
            return False
        self._timed_until = now + _TIMED_SECONDS
        return True

    def _probe(self, device: str) -> bool:
        """Whether a probe of a device is due; then it is under way until `_probed`."""
        now = self._store.clock.monotonic()
        if now < self._next_probe.get(device, 0.0):
            return False
        # setdefault is one step: of two threads one probes
        if self._probing.setdefault(device, now) != now:
            return False
        self._next_probe[device] = now + _PROBE_SECONDS
        return True

    def _probed(self, device: str, well: bool) -> None:
        self._probing.pop(device, None)
        self._probes[device] += well

    def _probe_idle(self, now: float) -> None:
        """Probe devices that no reader has probed: where nothing is read, sit-outs end, too."""
        store = self._store
        for device_id in self._in_state(HealthState.SITOUT):
            device = store.view.devices.get(device_id)
            wait = _LOW_PROBE_SECONDS if self._load_low else _IDLE_PROBE_SECONDS
            if device is None or now < self._next_probe.get(device_id, now) + wait:
                self._next_probe.setdefault(device_id, now)
                continue
            if not self._probe(device_id):
                continue
            probe = partial(device.probe, write=not store.read_only)
            future = store.scheduler.submit(device_id, probe, bulk=True)
            future.add_done_callback(partial(self._idle_probed, device_id))

    def _idle_probed(self, device: str, future: Future[None]) -> None:
        self._probed(device, future.exception() is None)

    # --- people -----------------------------------------------------------------------------

    def snapshot(self) -> HealthSnapshot:
        """What is known now. No I/O."""
        with self._ticking:
            devices = {
                member.device_id: self._sight(member.device_id)
                for member in self._store.view.record.members
            }
            return HealthSnapshot(
                at_seconds=self._at_seconds,
                ticks=self._ticks,
                devices=devices,
                shared_slow=self._detector.shared_slow + self._stalls.shared,
                decisions=tuple(self._decisions),
            )

    def _sight(self, device: str) -> DeviceSight:
        health, verdict = self._policy.health(device), self._verdicts.get(device)
        counts = self._counts.get(device, Counter())
        reads = self.telemetry.histogram(device, Operation.READ)
        return DeviceSight(
            device=device,
            state=health.state,
            since_seconds=health.since_seconds,
            until_seconds=health.until_seconds if health.state is HealthState.SITOUT else 0.0,
            score=self._detector.score(device),
            reason=verdict.reason if verdict is not None else "",
            read_share=self._store.routing.avoided.get(device, 1.0),
            ios=counts["ios"],
            io_errors=counts["io_errors"],
            checksum_errors=counts["checksum_errors"],
            read_seconds_p50=reads.quantile(0.5),
            read_seconds_p99=reads.quantile(0.99),
            write_seconds_p99=self.telemetry.histogram(device, Operation.WRITE).quantile(0.99),
            sync_seconds_p99=self.telemetry.histogram(device, Operation.SYNC).quantile(0.99),
            latency_seconds=tuple(self._latencies.get(device, ())),
            evidence=self._detector.evidence(device),
        )

    def forgive(self, device: str, reason: str = "", *, everywhere: bool = False) -> None:
        """A device is taken back, by an operator or for a reason that is given: it starts anew.

        Nothing for one that is not known. `everywhere`: by other processes of this node, too.
        """
        if everywhere and self.enabled:
            self._memory.pardon(device, self._store.clock)
        self._say(Command.READMIT, device, reason)

    def accept(self, device: str) -> None:
        """An operator says that what a device does now is normal for it."""
        self._say(Command.ACCEPT, device)

    def _say(self, word: Command, device: str, reason: str = "") -> None:
        if not self.enabled:
            return
        with self._ticking:
            if word is Command.READMIT:  # also of one that is no member yet: it is about to be
                self._detector.forgive(device)
                self._writes.forgive(device)
            decisions = self._obey_operator(word, device, reason)
            self._route()
            self._decisions.extend(decisions)
        self._tell(decisions)

    def _obey_operator(self, word: Command, device: str, reason: str) -> list[Decision]:
        """Do as an operator says, if the device is known. Under the lock."""
        facts = self._facts(set())
        if device not in facts.devices or device not in self._policy.devices:
            return []
        wall = self._store.clock.wall_ms() / 1000
        outcome = command(self._policy, word, device, facts, wall, self._config, reason=reason)
        self._policy = outcome.state
        mine = (ActionKind.FORGIVE, ActionKind.ACCEPT)
        self._obey([a for a in outcome.actions if a.kind in mine], wall)
        return list(outcome.decisions)


def _run(reference: weakref.ref[Monitor], stop: threading.Event) -> None:
    """Tick until the monitor is closed or gone."""
    told = False
    while not stop.wait(TICK_SECONDS):
        monitor = reference()
        if monitor is None:
            return
        try:
            monitor.tick_now()
        except Exception:  # noqa: BLE001 (health must not end with one bad tick; it is counted)
            monitor._store.metrics.count("health_tick_error_total")
            if not told:
                _log.exception("a tick of the health monitor failed; it goes on")
            told = True
        del monitor
