"""From what was seen of a pool to the facts that the policy decides on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hpstore.agent.background_jobs import BackgroundJob, JobKind
from hpstore.agent.device_probes import Seen
from hpstore.agent.monitor_watch import WatchedDevice
from hpstore.format.records import DeviceState, Member, PoolRecord
from hpstore.health.decision_notes import verdicts_of_processes
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.states import (
    Decision,
    DeviceFacts,
    ForecastOutlook,
    PolicyConfig,
    PolicyState,
    PoolFacts,
    Role,
)
from hpstore.maintenance.survey_condition import Condition
from hpstore.membership.host_names import over_several_hosts

REPORT = "report: "  # how the reason of a process' report to the agent begins
_REPORT_SECONDS = 900.0  # a process repeats it each 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """All that was seen. `condition` None: not known, or not of the devices that are there now."""

    record: PoolRecord
    open: Collection[str]  # members that are open
    seen: Mapping[str, Seen]
    back: Collection[str]  # devices at places where no member answers
    denied: Collection[str]  # places that this agent's user has no rights on
    reconciled: Collection[str]
    condition: Condition | None
    outlooks: Mapping[str, ForecastOutlook]
    watched: Mapping[str, WatchedDevice]
    reports: Mapping[str, str]
    busy: str
    waited_for: Collection[str] = ()  # devices of hosts that are away, and may come back
    gone: Collection[str] = ()  # those of hosts that were waited for long enough
    leaving: Collection[str] = ()  # of which an eviction is queued or under way


def pool_facts(sighting: Sighting, config: PolicyConfig) -> PoolFacts:
    """Facts of all members and evicted devices."""
    record = sighting.record
    everyone = (*record.members, *record.evicted)
    condition = sighting.condition
    return PoolFacts(
        parity=record.parity,
        devices={m.device_id: _device(sighting, m, config) for m in everyone},
        losses_tolerated=None if condition is None else condition.spare,
        busy=sighting.busy,
        spare_capacity=_spare_capacity(sighting),
        spread=record.spread,
        too_much_away=_too_much_away(sighting),
    )


def leaving(jobs: Iterable[BackgroundJob], record: PoolRecord) -> frozenset[str]:
    """Devices of which an eviction is queued or under way.

    Parameters
    ----------
    jobs
        What waits and what runs.
    record
        Has the devices of a host that leaves as one.

    Returns
    -------
    frozenset[str]
        Ids of devices.
    """
    heals = [job for job in jobs if job.kind is JobKind.HEAL]
    domains = {job.domain for job in heals if job.domain}
    inside = {member.device_id for member in record.members if member.domain in domains}
    return frozenset(inside.union(job.device for job in heals))


def _too_much_away(sighting: Sighting) -> str:
    """Why nothing is evicted from a pool over several hosts: what is away weighs more than parity,
    which is the network more often than the disks (PROTOCOL 17)."""
    record = sighting.record
    away = record.unhealed().union(m.device_id for m in record.members if not answers(sighting, m))
    found = record.weight(away)
    if found <= record.parity or not over_several_hosts(record):
        return ""
    return f"as much as {found} columns of an object are away, and parity replaces {record.parity}"


def answers(sighting: Sighting, member: Member) -> bool:
    """Whether a device is there. One that was asked and has not answered yet is: who knows better?

    A member at a place where it was seen but is not open is not: its record may be old. One that
    this user has no rights on was not asked, so it has not left.
    """
    if member.left:
        return member.device_id in sighting.back
    seen = sighting.seen.get(member.device_id)
    if member.device_id not in sighting.open:
        return member.url in sighting.denied
    return seen is None or seen.answers


def _device(sighting: Sighting, member: Member, config: PolicyConfig) -> DeviceFacts:
    device, condition = member.device_id, sighting.condition
    watched = sighting.watched.get(device)
    # a process ends its own sit-out by its own probes; so it is well where that one is over
    well = watched is None or watched.state is not HealthState.SITOUT
    known = condition is not None and device not in condition.silent
    seen = sighting.seen.get(device)
    return DeviceFacts(
        present=answers(sighting, member),
        domain=member.domain,
        pool_state=member.state,
        reported=sighting.reports.get(device, ""),
        probes=config.probes_least if well else 0,
        read_only=seen is not None and seen.read_only,
        forecast=sighting.outlooks.get(device, ForecastOutlook.NONE),
        empty=known
        and condition is not None
        and device not in condition.holding
        and member.state is DeviceState.DRAINING,
        evictable=condition is not None and device not in condition.needed,
        reconciled=device in sighting.reconciled,
        waited_for=device in sighting.waited_for,
        host_gone=device in sighting.gone,
        leaving=device in sighting.leaving,
    )


def _spare_capacity(sighting: Sighting) -> bool:
    """Whether what the fullest member holds fits on the others. Stores that do not say what space
    they have take what comes."""
    answering = [seen for seen in sighting.seen.values() if seen.answers]
    rows = [seen for seen in answering if seen.total_bytes]
    if len(answering) > max(1, len(rows)):
        return True
    if len(rows) < 2:
        return False
    fullest = max(rows, key=lambda seen: seen.total_bytes - seen.free_bytes)
    free = sum(seen.free_bytes for seen in rows) - fullest.free_bytes
    return free > fullest.total_bytes - fullest.free_bytes


def reports_in(
    decisions: Collection[Decision], state: PolicyState, now_seconds: float
) -> dict[str, str]:
    """What processes of this node ask the agent to drain, and why; the newest of each device.

    A report from before a device was taken back counts no more.
    """
    found: dict[str, str] = {}
    for said in sorted(decisions, key=lambda decision: decision.at_seconds):
        fresh = 0 <= now_seconds - said.at_seconds <= _REPORT_SECONDS  # later ones: no clock's
        pardoned = said.at_seconds <= state.health(said.device).pardoned_seconds
        if said.role is Role.PROCESS and said.reason.startswith(REPORT) and fresh and not pardoned:
            found[said.device] = f"a process reports: {said.reason.removeprefix(REPORT)}"
    return found


def told_by_processes(
    decisions: Collection[Decision], state: PolicyState, now_seconds: float
) -> dict[str, Decision]:
    """What a process of this node decided last about each device that is not well for it.

    For people: nothing is decided by it (PROTOCOL 16). What is older than the device's last return
    counts no more.
    """
    told = verdicts_of_processes(decisions, now_seconds)
    return {
        device: said
        for device, said in told.items()
        if said.at_seconds > state.health(device).pardoned_seconds
    }
