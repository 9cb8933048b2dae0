"""What the agent says of itself and the pool at one moment. Plain data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from hpstore.agent.absent_hosts import AbsentHosts
from hpstore.agent.background_jobs import JobEvent, Jobs, JobSight
from hpstore.agent.due_work import DueWork
from hpstore.agent.monitor_watch import HealthWatch
from hpstore.agent.observer import Observer
from hpstore.agent.policy_facts import told_by_processes
from hpstore.agent.pool_keeper import PoolKeeper
from hpstore.agent.saved_state import AgentState
from hpstore.agent.smart_watch import DiskSight, worst
from hpstore.agreement.keeper_election import KeeperSight
from hpstore.config import private_directory
from hpstore.format.records import Member, shown_members
from hpstore.health.detect.device_track import SlowEvidence
from hpstore.health.policy.states import EXPECTED, Decision
from hpstore.maintenance.survey_condition import Condition
from hpstore.membership.agent_observations import STATUS_FILE
from hpstore.pool.host_status import HostStatus
from hpstore.pool.pool import Pool
from hpstore.runtime.text_files import write_atomically

_SHOWN = 50  # decisions and events
LOOKING_AGAIN = "Devices have changed: objects are being looked at again, this is what is certain."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One member or evicted device. `state` is the agent's, `pool_state` what the pool decided."""

    device: str
    url: str
    domain: str
    state: str
    since_seconds: float  # since 1970
    pool_state: str
    present: bool
    problem: str
    read_only: bool  # it refuses writes, and can be read
    score: float
    refused: str  # why what should be done is not
    reason: str  # what this process holds against it now
    process_state: str  # where a process of this node has it; "" where it is well
    process_reason: str
    total_bytes: int
    free_bytes: int
    probe_seconds: tuple[float, ...]  # write + sync + read of the last probes, oldest first
    latency_seconds: tuple[float, ...]  # of this process, normalised means of ticks, oldest first
    read_seconds_p50: float  # of this process; 0 when there were none
    read_seconds_p99: float
    disks: tuple[DiskSight, ...]
    evidence: SlowEvidence = field(default_factory=SlowEvidence)  # of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """A host with what this agent saw of its absence, by the monotonic clock."""

    status: HostStatus
    away_seconds: float | None  # since it was seen away whole; None: it is there
    waited_seconds: float  # that are left to it before its devices are evicted

    @property
    def state(self) -> str:
        """In a word or some."""
        if self.away_seconds is None:
            count = len(self.status.devices) - self.status.answering
            return f"{count} of its devices away" if count else "online"
        left = f", waited for {self.waited_seconds:.0f} s more" if self.waited_seconds > 0 else ""
        return f"away for {self.away_seconds:.0f} s{left}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """A round. `condition` None: no walk has ended yet. Decisions and events: newest first."""

    pool: str
    pool_id: str
    process: int
    at_ms: int
    began_ms: int
    ticks: int
    dry_run: bool
    generation: int
    data: int
    parity: int
    devices: tuple[DeviceView, ...]
    condition: Condition | None
    condition_current: bool  # else what is certain of the last walk, until the next one has ended
    condition_at_ms: int  # when that walk ended
    job: JobSight | None
    waiting: tuple[str, ...]  # jobs
    put_off: dict[str, int]  # why degraded objects are left alone -> how many
    scrub_began_ms: int
    scrub_ended_ms: int
    foreground_bytes_per_second: float | None  # None: cannot be told
    warnings: tuple[str, ...]  # the alarm first
    decisions: tuple[Decision, ...]  # of all processes of this node
    events: tuple[JobEvent, ...]
    orders_done: int
    keeper: KeeperSight  # who decides for the pool
    hosts: tuple[HostView, ...]  # none for a pool on one host
    hosts_tolerated: int  # further hosts that may be lost, as far as is known
    metrics: dict[str, float]  # of the pool in this process

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        body = asdict(self)
        body["keeper"]["text"] = str(self.keeper)
        body["hosts"] = [{**asdict(host), "state": host.state} for host in self.hosts]
        if self.condition is not None:
            body["condition"] = {
                **asdict(self.condition),
                **{name: sorted(getattr(self.condition, name)) for name in ("needed", "silent")},
            }
        return body


class Looking(Protocol):
    """What an agent shows of itself."""

    pool: Pool
    eyes: Observer
    memory: AgentState
    watch: HealthWatch
    jobs: Jobs
    present: frozenset[str]
    due: DueWork
    keeper: PoolKeeper
    hosts: AbsentHosts
    orders_problem: str
    memory_problem: str
    dry_run: bool
    ticks: int
    began_ms: int

    def url(self, device: str) -> str: ...


def make_status(agent: Looking, decisions: Sequence[Decision]) -> AgentStatus:
    """Gather it; on the agent's thread, between rounds. `decisions`: newest first."""
    pool, eyes, memory, record = agent.pool, agent.eyes, agent.memory, agent.pool.admin.record
    walked, others = eyes.walked, eyes.foreground
    known = eyes.known()
    shown = pool.admin.hosts(agent.present, known.losses_tolerated if known is not None else 0)
    told = told_by_processes(decisions, memory.policy, pool.admin.clock.wall_ms() / 1000)
    return AgentStatus(
        pool=pool.config.name,
        pool_id=record.pool_id,
        process=os.getpid(),
        at_ms=pool.admin.clock.wall_ms(),
        began_ms=agent.began_ms,
        ticks=agent.ticks,
        dry_run=agent.dry_run,
        generation=record.generation,
        data=record.data,
        parity=record.parity,
        devices=tuple(
            _device(agent, m, told.get(m.device_id))
            for m in shown_members(record, pool.admin.clock.wall_ms())
        ),
        condition=known,
        condition_current=eyes.condition() is not None,
        condition_at_ms=0 if walked is None else walked.at_ms,
        job=agent.jobs.sight(),
        waiting=tuple(
            f"{job.kind} {agent.url(job.device)}".strip() for job in agent.jobs.waiting()
        ),
        put_off=agent.due.put_off,
        scrub_began_ms=memory.scrub_began_ms,
        scrub_ended_ms=memory.scrub_ended_ms,
        foreground_bytes_per_second=others.bytes_per_second if others.known else None,
        warnings=_warnings(agent),
        decisions=tuple(decisions[:_SHOWN]),
        events=tuple(reversed(agent.jobs.events()))[:_SHOWN],
        orders_done=memory.orders_done,
        keeper=agent.keeper.sight(),
        hosts=_hosts(agent, shown[0]),
        hosts_tolerated=shown[1],
        metrics=pool.metrics.snapshot(),
    )


def _hosts(agent: Looking, hosts: Sequence[HostStatus]) -> tuple[HostView, ...]:
    away, left = agent.hosts.seconds_away(), agent.hosts.waited_for()
    return tuple(
        HostView(
            status=host,
            away_seconds=away.get(host.host),
            waited_seconds=left.get(host.host, 0.0),
        )
        for host in hosts
    )


def _warnings(agent: Looking) -> tuple[str, ...]:
    """What is wrong now: also after a restart, and no longer than it lasts."""
    policy, record = agent.memory.policy, agent.pool.admin.record
    found = [policy.alarm, agent.orders_problem, agent.memory_problem]
    for member in record.members:
        device, where = member.device_id, agent.url(member.device_id)
        if policy.health(device).pinned:
            found.append(f"{where}: it changes too often: pinned until it is readmitted")
        if expected := EXPECTED.get(worst(agent.eyes.disks.get(device, []))):
            found.append(f"{where}: {expected}")
    return tuple(text for text in found if text)


def _device(agent: Looking, member: Member, told: Decision | None) -> DeviceView:
    device = member.device_id
    health = agent.memory.policy.health(device)
    seen, watched = agent.eyes.seen().get(device), agent.watch.devices().get(device)
    told = None if member.left else told  # nobody reads it
    return DeviceView(
        device=device,
        url=agent.url(device),
        domain=member.domain,
        state=health.state,
        since_seconds=health.since_seconds,
        pool_state=member.state,
        present=device in agent.present,
        problem="" if seen is None else seen.problem,
        read_only=seen is not None and seen.read_only,
        score=health.score,
        refused=health.refused,
        reason="" if watched is None else watched.reason,
        process_state="" if told is None else told.becomes.value,
        process_reason="" if told is None else told.reason,
        total_bytes=0 if seen is None else seen.total_bytes,
        free_bytes=0 if seen is None else seen.free_bytes,
        probe_seconds=() if seen is None else seen.probe_seconds,
        latency_seconds=() if watched is None else watched.latency_seconds,
        read_seconds_p50=0.0 if watched is None else watched.read_seconds_p50,
        read_seconds_p99=0.0 if watched is None else watched.read_seconds_p99,
        disks=tuple(agent.eyes.disks.get(device, ())),
        evidence=SlowEvidence() if watched is None else watched.evidence,
    )


def publish(directory: Path, status: AgentStatus) -> None:
    """Leave a status for `hpstore status` and others on this node; not synced, it is soon old."""
    path = private_directory(directory) / STATUS_FILE
    write_atomically(path, json.dumps(status.as_dict(), default=str), durable=False)


def withdraw(directory: Path) -> None:
    """Remove the status, so that commands do not wait for an agent that has ended."""
    (directory / STATUS_FILE).unlink(missing_ok=True)
