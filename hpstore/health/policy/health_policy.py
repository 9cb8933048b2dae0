"""What becomes of devices: states and transitions, hysteresis, guards (PROTOCOL 16, 17). Pure.

`decide` is called every few seconds. It gives a new state, actions and log lines; the caller
persists the state before it acts. A process decides on its own reads: it reports, and never drains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hpstore.format.records import DeviceState
from hpstore.health.detect.verdicts import DeviceVerdict, HealthState, worst_of
from hpstore.health.policy.device_history import (
    ABSENT,
    drain_reason,
    entered,
    observed,
    release_seconds,
    sitout_seconds,
)
from hpstore.health.policy.guards import (
    DAY_SECONDS,
    HOUR_SECONDS,
    kept_off,
    may_be_kept_off,
    refusal,
    silent,
    too_many,
    too_soon,
    weight,
)
from hpstore.health.policy.states import (
    EXPECTED,
    Action,
    ActionKind,
    Decision,
    DeviceFacts,
    DeviceHealth,
    ForecastOutlook,
    PolicyConfig,
    PolicyOutcome,
    PolicyState,
    PoolFacts,
    Role,
)

_GONE = (HealthState.FAULTED, HealthState.REMOVED, HealthState.EVICTED)
_SPARED = (HealthState.SITOUT, HealthState.PROBATION)
_ASKED = (HealthState.ONLINE, HealthState.SUSPECT, *_SPARED)  # what becomes of it is decided here


def decide(
    state: PolicyState,
    verdicts: Iterable[DeviceVerdict],
    facts: PoolFacts,
    now_seconds: float,
    config: PolicyConfig,
) -> PolicyOutcome:
    """One round over all devices of `facts`; others are forgotten.

    `now_seconds` since 1970. If the clock goes back by up to an hour, time stands still here; if it
    goes back by more, remembered times move with it (PolicyState.as_of). Callers that see the clock
    being set move them first (PolicyClock). Events come first: absences, faults, returns. Then
    sit-outs end that parity needs, then wishes are met, the highest score first. With
    `config.dry_run` the state goes on as if, and all actions say `dry_run`.
    """
    turn = PolicyTurn(state, facts, now_seconds, config)
    worst = worst_of(verdicts)
    order = sorted(facts.devices, key=lambda d: (-worst[d].score if d in worst else 0.0, d))
    for device in order:
        turn.note(device, worst.get(device))
        turn.involuntary(device, worst.get(device))
    turn.recall()
    for device in order:
        turn.voluntary(device, worst.get(device))
    for device in order:
        turn.heal(device)
    turn.watch()
    return turn.outcome()


class PolicyTurn:
    """One round under way: the state being made, and what is to be done."""

    def __init__(
        self, state: PolicyState, facts: PoolFacts, now_seconds: float, config: PolicyConfig
    ) -> None:
        if state.now_seconds - now_seconds > HOUR_SECONDS:
            state = state.as_of(now_seconds)
        self.now = max(now_seconds, state.now_seconds)
        self.facts, self.config = facts, config
        self.devices = {d: state.health(d) for d in sorted(facts.devices)}
        recent = tuple(at for at in state.removals if self.now - at < HOUR_SECONDS)
        self.state = replace(state, now_seconds=self.now, removals=recent)
        self.actions: list[Action] = []
        self.decisions: list[Decision] = []

    def outcome(self) -> PolicyOutcome:
        """What has become of it."""
        state = replace(self.state, devices=dict(self.devices))
        return PolicyOutcome(
            state=state, actions=tuple(self.actions), decisions=tuple(self.decisions)
        )

    # -- small steps

    def set(self, device: str, **changes: object) -> DeviceHealth:
        """Change what is remembered of a device."""
        self.devices[device] = replace(self.devices[device], **changes)  # type: ignore[arg-type]
        return self.devices[device]

    def act(self, kind: ActionKind, device: str, reason: str) -> None:
        """Ask the caller for something."""
        self.actions.append(
            Action(kind=kind, device=device, reason=reason, dry_run=self.config.dry_run)
        )

    def log(self, device: str, was: HealthState, becomes: HealthState, reason: str) -> None:
        """Write a line."""
        self.decisions.append(
            Decision(
                at_seconds=self.now,
                device=device,
                was=was,
                becomes=becomes,
                reason=reason,
                role=self.config.role,
                dry_run=self.config.dry_run,
            )
        )

    def enter(self, device: str, state: HealthState, reason: str, **changes: object) -> None:
        """Move a device to another state, and write why."""
        health = self.devices[device]
        self.devices[device] = entered(health, state, self.now, **changes)
        self.log(device, health.state, state, reason)

    def refuse(self, device: str, wish: str, why: str) -> None:
        """Write once why a wish was not granted."""
        health = self.devices[device]
        kind = why.split(";")[0]  # waiting times change at each round
        if health.refused != kind:
            self.set(device, refused=kind)
            self.log(device, health.state, health.state, f"{wish}, but {why}")

    def refusal(self, device: str) -> str:
        """Why a device may not be removed by choice now."""
        return refusal(self.devices, self.state, self.facts, self.now, self.config, device)

    def ask(self, device: str, kind: ActionKind, reason: str) -> bool:
        """Ask for an action now, and again each `retry_seconds` while the state lasts; whether it
        was asked for in this round."""
        health = self.devices[device]
        late = self.now - health.asked_seconds >= self.config.retry_seconds
        due = late or not health.asked_seconds
        if due:
            self.set(device, asked_seconds=self.now, asked=reason)
            self.act(kind, device, reason)
        return due

    # -- what nobody chose

    def note(self, device: str, verdict: DeviceVerdict | None) -> None:
        """Remember since when a device has been quiet or away; let what is old go."""
        fact = self.facts.devices[device]
        self.devices[device] = observed(self.devices[device], fact, verdict, self.now)

    def involuntary(self, device: str, verdict: DeviceVerdict | None) -> None:
        """Absence, faults, evictions by others, and what returns from them."""
        health, fact = self.devices[device], self.facts.devices[device]
        left = fact.pool_state in (DeviceState.EVICTED, DeviceState.HEALED)
        if left:
            if health.state is not HealthState.EVICTED:
                why = f": {health.asked}" if health.asked else ""
                self.enter(device, HealthState.EVICTED, f"the pool has evicted it{why}")
            self._lapsed(device)
            return
        if health.state is HealthState.MAINTENANCE:
            return
        gone = health.gone_since_seconds
        if gone is not None:
            # a little while is no absence: a cable, a remount. One that is remembered as evicted
            # is a member again: it was taken back while no agent ran
            away = self.now - gone >= self.config.removed_seconds
            if health.state is not HealthState.REMOVED and away:
                self.enter(device, HealthState.REMOVED, "it does not answer", lapsed=False)
            return
        if health.lapsed and fact.pool_state is DeviceState.DRAINING:
            self._cut_short(device)
            return
        returns = health.state in ABSENT  # what it failed while it was away is forgiven
        if verdict is not None and verdict.state is HealthState.FAULTED and not returns:
            if health.state is not HealthState.FAULTED:
                self.enter(device, HealthState.FAULTED, verdict.reason)
            return
        self._follow_the_pool(device, fact)
        self._return(device, fact)
        self._writes(device, fact)

    def _writes(self, device: str, fact: DeviceFacts) -> None:
        """Whether it takes writes is told by the device, not judged."""
        health = self.devices[device]
        if health.state is HealthState.READ_ONLY and not fact.read_only:
            self.enter(device, HealthState.ONLINE, "it can be written again")
        elif fact.read_only and health.state in _ASKED and not health.manual:
            self.enter(device, HealthState.READ_ONLY, "it has become read-only")

    def _lapsed(self, device: str) -> None:
        """Take back what was healed only because it was away, once it answers for a while."""
        health = self.devices[device]
        here = health.here_since_seconds
        if self.config.role is not Role.AGENT or not health.lapsed or here is None:
            return
        if self.now - here >= self.config.return_seconds:
            self.ask(device, ActionKind.READMIT, "it was healed while it was away, and is back")

    def _cut_short(self, device: str) -> None:
        """Take back what is closed for an eviction that a kill has cut short: it is no drain."""
        reason = "its eviction was cut short, and it is back"
        if self.devices[device].state is not HealthState.REMOVED:
            self.enter(device, HealthState.REMOVED, reason)
        self.ask(device, ActionKind.READMIT, reason)

    def _follow_the_pool(self, device: str, fact: DeviceFacts) -> None:
        """Draining is the pool's word (PROTOCOL 16), whoever gave it."""
        health = self.devices[device]
        draining = fact.pool_state is DeviceState.DRAINING
        if draining and health.state is HealthState.DRAINING:
            if not health.confirmed:
                self.set(device, confirmed=True, asked_seconds=0.0)  # what comes next may be asked
        elif draining and health.state not in _GONE:
            self.enter(device, HealthState.DRAINING, "the pool drains it", confirmed=True)
        elif health.state is HealthState.DRAINING and health.confirmed:
            self._try_again(device, "it is drained no longer")

    def _return(self, device: str, fact: DeviceFacts) -> None:
        """A device that was away serves nothing before its columns are judged (PROTOCOL 12)."""
        health = self.devices[device]
        if health.state is HealthState.FAULTED:
            quiet = health.quiet_since_seconds
            if quiet is not None and self.now - quiet >= self.config.fault_quiet_seconds:
                self.enter(device, HealthState.REBUILDING, "no fault for a while")
        elif health.state in _GONE:
            lapsed = health.lapsed and health.state is not HealthState.EVICTED
            self.enter(device, HealthState.REBUILDING, "it is back", lapsed=lapsed)
            self.act(ActionKind.FORGIVE, device, "it is back")
        elif health.state is HealthState.REBUILDING and fact.reconciled:
            self._try_again(device, "its columns are reconciled")
        if self.devices[device].state is HealthState.REBUILDING:
            self.ask(device, ActionKind.RECONCILE, "it came back")

    def _try_again(self, device: str, reason: str) -> None:
        """Probation from its first share, with a clean score."""
        self.enter(
            device, HealthState.PROBATION, reason, stage=0, pardoned_seconds=self.now, lapsed=False
        )
        self.act(ActionKind.FORGIVE, device, reason)

    def recall(self) -> None:
        """End sit-outs that parity needs since other devices were lost; the least slow first.

        An operator's own goes last, when not even the bare parity is left.
        """
        for reserve, manual in ((max(1, self.config.reserve), False), (0, True)):
            while len(kept_off(self.devices, self.facts)) > may_be_kept_off(
                self.devices, self.facts, reserve
            ):
                spared = [
                    d
                    for d in kept_off(self.devices, self.facts)
                    if self.devices[d].state in _SPARED and (manual or not self.devices[d].manual)
                ]
                if not spared:
                    break
                least = min(spared, key=lambda d: (self.devices[d].score, d))
                self.enter(least, HealthState.SUSPECT, "parity is needed: other devices are lost")

    # -- by choice

    def voluntary(self, device: str, verdict: DeviceVerdict | None) -> None:
        """One device's next step, if it has one."""
        health, fact = self.devices[device], self.facts.devices[device]
        if not fact.present or health.pinned:
            return
        if health.ignored:
            verdict = None
        elif self._reported(device):
            return
        if health.state in (HealthState.ONLINE, HealthState.SUSPECT) and self._forecast(device):
            return
        if health.state is HealthState.ONLINE and verdict is not None:
            self._change(device, HealthState.SUSPECT, verdict.reason)
        elif health.state is HealthState.SUSPECT:
            self._suspect(device, verdict)
        elif health.state is HealthState.SITOUT:
            self._sitout(device)
        elif health.state is HealthState.PROBATION:
            self._probation(device, verdict)
        elif self.config.role is Role.AGENT and health.state is HealthState.DRAINING:
            self._draining(device)
        elif self.config.role is Role.AGENT and health.state is HealthState.READ_ONLY:
            self._read_only(device)

    def _reported(self, device: str) -> bool:
        """Drain what another process has given up, if the guards allow; whether they do."""
        reason = self.facts.devices[device].reported
        if not reason or self.config.role is not Role.AGENT:
            return False
        return self.devices[device].state in _ASKED and self._drain(device, reason)

    def _often(self, device: str) -> int:
        """Changes of a device within the hour, when they are too many."""
        recent = sum(self.now - at < HOUR_SECONDS for at in self.devices[device].changes)
        return recent if recent >= self.config.changes_per_hour else 0

    def _change(self, device: str, state: HealthState, reason: str) -> None:
        """Enter a state, unless the device changes too often."""
        if self._often(device):
            self._pin(device)
        else:
            self.enter(device, state, reason)

    def _pin(self, device: str) -> None:
        """Keep a device that flaps off, or suspect where parity does not allow that."""
        why = f"{self._often(device)} changes within the hour: pinned until it is readmitted"
        if device in kept_off(self.devices, self.facts):
            self.enter(device, HealthState.SITOUT, why, pinned=True)
        elif self.refusal(device):
            self.enter(device, HealthState.SUSPECT, why, pinned=True)
        else:
            self._remove(device, why, pinned=True)
        self.act(ActionKind.ALARM, device, why)

    def _remove(self, device: str, reason: str, **changes: object) -> None:
        """Begin a sit-out; `refusal` was asked."""
        health = self.devices[device]
        if device not in kept_off(self.devices, self.facts):
            self.state = replace(self.state, removals=(*self.state.removals, self.now))
        until = self.now + sitout_seconds(health, self.config)
        changes = {"until_seconds": until, "sitouts": (*health.sitouts, self.now), **changes}
        self.enter(device, HealthState.SITOUT, reason, **changes)

    def _suspect(self, device: str, verdict: DeviceVerdict | None) -> None:
        health = self.devices[device]
        quiet = health.quiet_since_seconds
        if verdict is None:
            if health.ignored or (
                quiet is not None and self.now - quiet >= release_seconds(health, self.config)
            ):
                self._change(device, HealthState.ONLINE, "quiet again")
        elif verdict.state is HealthState.SITOUT:
            if why := self.refusal(device):
                self.refuse(device, "it should sit out", why)
            elif self._often(device):
                self._pin(device)
            else:
                self._remove(device, verdict.reason)

    def _sitout(self, device: str) -> None:
        health, fact, config = self.devices[device], self.facts.devices[device], self.config
        if health.manual:
            return
        reason = drain_reason(health, fact, self.now, config)
        if reason and self._drain(device, reason):
            return
        early = fact.load_low and not health.level  # a first one, when a mistake costs little
        least = config.idle_probes_least if early else config.probes_least
        well = fact.probes >= least and fact.probe_ratio < config.probe_ratio_most
        if well and (early or self.now >= health.until_seconds):
            why = f"{fact.probes} probes took {fact.probe_ratio:.2f} x their peers' time"
            self._try_again(device, why)

    def _probation(self, device: str, verdict: DeviceVerdict | None) -> None:
        health, config = self.devices[device], self.config
        if verdict is not None:
            self.set(device, level=health.level + 1, level_since_seconds=self.now)
            if why := self.refusal(device):
                self.refuse(device, "it should sit out again", why)
                self._change(device, HealthState.SUSPECT, f"on probation: {verdict.reason}")
            else:
                self._remove(device, f"on probation: {verdict.reason}")
        elif self.now - health.since_seconds >= config.probation_seconds * (health.stage + 1):
            if health.stage + 1 < len(config.probation_shares):
                self.set(device, stage=health.stage + 1)
            else:
                self.enter(device, HealthState.ONLINE, "passed its probation")

    def _forecast(self, device: str) -> bool:
        """Warn of a device that is expected to fail; drain it if that is wanted."""
        health, fact, config = self.devices[device], self.facts.devices[device], self.config
        if fact.forecast is ForecastOutlook.NONE:
            return False
        reason = EXPECTED[fact.forecast]
        if not health.warned_seconds or self.now - health.warned_seconds >= DAY_SECONDS:
            self.set(device, warned_seconds=self.now)
            self.act(ActionKind.WARN, device, reason)
        if not config.forecast_drains or config.role is not Role.AGENT:
            return False
        same = [
            d
            for d, other in self.facts.devices.items()
            if other.domain == fact.domain and self.devices[d].state is HealthState.DRAINING
        ]
        if not self.facts.spare_capacity or same:
            why = f"{same[0]} of its failure domain drains" if same else "there is no room for it"
            self.refuse(device, "it should be drained", why)
            return False
        return self._drain(device, reason)

    def _drain(self, device: str, reason: str) -> bool:
        """Drain a device, or report that it should be; whether its state has changed."""
        if self.config.role is not Role.AGENT:
            self.ask(device, ActionKind.REPORT, reason)
            return False
        if why := self.refusal(device):
            self.refuse(device, "it should be drained", why)
            return False
        self._begin_drain(device, reason)
        return True

    def _begin_drain(self, device: str, reason: str) -> None:
        """The guards were asked."""
        if device not in kept_off(self.devices, self.facts):
            self.state = replace(self.state, removals=(*self.state.removals, self.now))
        self.enter(device, HealthState.DRAINING, reason)
        self.ask(device, ActionKind.DRAIN, reason)

    def _read_only(self, device: str) -> None:
        """Move everything off once it had its time to be mounted anew.

        Parity does not gate that: it is read until the last column is elsewhere.
        """
        if self.now - self.devices[device].since_seconds < self.config.grace_seconds:
            return
        why = too_soon(self.devices, self.state, self.facts, self.now, self.config, device)
        if why:
            self.refuse(device, "it should be drained", why)
        else:
            self._begin_drain(device, "it is read-only")

    def _draining(self, device: str) -> None:
        """Ask for the drain until the pool does it; evict what is empty."""
        health, fact = self.devices[device], self.facts.devices[device]
        if not health.confirmed:
            self.ask(device, ActionKind.DRAIN, "the pool does not drain it yet")
        elif fact.empty and not fact.evictable:
            self.refuse(device, "it should be evicted", "an object would lose its last columns")
        elif fact.empty:
            self.ask(device, ActionKind.EVICT, "it is drained")

    # -- never gated

    def heal(self, device: str) -> None:
        """Make up for what is gone: after the grace, or at once when no parity is left."""
        health = self.devices[device]
        back = health.state is HealthState.REMOVED and health.gone_since_seconds is None
        if self.config.role is not Role.AGENT or health.state not in _GONE or back:
            return  # what is back is taken back (_cut_short)
        fact, known = self.facts.devices[device], self.facts.losses_tolerated
        lost = weight(silent(self.devices, self.facts), self.facts)
        spare = self.facts.parity - lost if known is None else known
        waited = self.now - health.since_seconds >= self.config.grace_seconds
        if health.state is HealthState.EVICTED:
            owed = fact.pool_state is DeviceState.EVICTED
            if owed and not (health.lapsed and health.here_since_seconds is not None):
                self.ask(device, ActionKind.HEAL, "it was evicted")
        elif fact.waited_for:
            return  # also while no parity is left: a host that restarts needs no rebuild
        elif self.facts.too_much_away:
            self.refuse(device, "it should be evicted", self.facts.too_much_away)
        elif spare <= 0 or waited or fact.host_gone:
            why = "no parity is left" if spare <= 0 else "it has not come back"
            if self.ask(device, ActionKind.HEAL, why):
                drained = fact.pool_state is DeviceState.DRAINING and not health.lapsed
                away = health.gone_since_seconds is not None
                self.set(device, lapsed=away and not drained)  # what was drained stays out

    def watch(self) -> None:
        """Sound the alarm of too many bad devices, once; and its end."""
        alarm = too_many(self.devices, self.facts, self.config)
        if alarm and not self.state.alarm:
            self.act(ActionKind.ALARM, "", alarm)
        self.state = replace(self.state, alarm=alarm)
