"""Whether a pool's data is safe, and the next command. Pure: from a status and an agent's word."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from hpstore.pool.status import DeviceStatus, PoolStatus

_SICK = "faulted"
_WORK = {
    "rebuild": "rebuilding",
    "scrub": "scrubbing",
    "rebalance": "rebalancing",
    "drain": "draining",
    "evict": "evicting",
    "heal": "evicting",
    "readmit": "readmitting",
}


class Level(IntEnum):
    """How safe the data is. The number is what `status --exit-code` ends with."""

    WHOLE = 0
    DEGRADED = 1
    AT_RISK = 2

    @property
    def word(self) -> str:
        """For JSON."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`command` is the next one, "" for none; `advice` is what a person reads in its place."""

    level: Level
    reason: str
    command: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.level.word.replace('-', ' ').upper()}: {self.reason}"

    @property
    def action(self) -> str:
        """What to do, for people."""
        return f"-> {self.advice or self.command}" if self.advice or self.command else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSight:
    """What an agent of this node has left about this pool, not older than a minute."""

    age_seconds: float
    dry_run: bool = False
    work: str = ""  # such as "rebuilding 41 %"
    devices: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # rows by device id
    warnings: tuple[str, ...] = ()
    keeper: str = ""  # who decides for a pool over several hosts, in words
    hosts: Mapping[str, str] = field(default_factory=dict)  # their states in words, by name

    def state_of(self, device: str) -> str:
        """What the agent makes of a device; "" for nothing."""
        return str(self.devices.get(device, {}).get("state", ""))

    def __str__(self) -> str:
        parts = ("dry run" if self.dry_run else "", self.work)
        return ", ".join([f"agent: {self.age_seconds:.0f} s ago", *filter(None, parts)])


def agent_sight(found: Mapping[str, object] | None, pool_id: str, now_ms: int) -> AgentSight | None:
    """Read what an agent has left, as JSON; None where none runs, or it is that of another pool.
    Any part may be missing: an agent of another version writes it."""
    if found is None or found.get("pool_id", pool_id) != pool_id:
        return None
    rows = [row for row in items(found, "devices") if isinstance(row, Mapping)]
    job = found.get("job")
    return AgentSight(
        age_seconds=max(0.0, (now_ms - number(found, "at_ms")) / 1000),
        dry_run=found.get("dry_run") is True,
        work=_work(job) if isinstance(job, Mapping) else "",
        devices={str(row.get("device")): row for row in rows},
        warnings=tuple(str(text) for text in items(found, "warnings")),
        keeper=_keeper(found.get("keeper")),
        hosts=dict(map(_host, items(found, "hosts"))),
    )


def _keeper(found: object) -> str:
    if not isinstance(found, Mapping) or found.get("alone") is True:
        return ""
    return str(found.get("text", ""))


def _host(found: object) -> tuple[str, str]:
    row = found if isinstance(found, Mapping) else {}
    status = row.get("status")
    name = status.get("host", "") if isinstance(status, Mapping) else ""
    return str(name), str(row.get("state", ""))


def _work(job: Mapping[str, object]) -> str:
    kind, total = str(job.get("kind")), number(job, "total")
    share = f" {100 * number(job, 'done') / total:.0f} %" if total else ""
    return f"{_WORK.get(kind, kind)}{share}"


def items(row: Mapping[str, object], name: str) -> Sequence[object]:
    """A list of a row, empty where there is none."""
    found = row.get(name)
    return found if isinstance(found, list | tuple) else ()


def number(row: Mapping[str, object], name: str) -> float:
    """A number of a row, 0 where there is none."""
    found = row.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def verdict_of(status: PoolStatus, pool: str, agent: AgentSight | None) -> Verdict:
    """The verdict on a pool that is open. `pool`: as the user calls it, for the command."""
    command, advice = _next(status, shlex.quote(pool), agent)
    return Verdict(
        level=_level(status, agent), reason=_reason(status), command=command, advice=advice
    )


def verdict_of_closed(pool: str) -> Verdict:
    """That on a pool that too few devices answer for: the error names them."""
    command = f"hpstore status {shlex.quote(pool)}"
    return Verdict(
        level=Level.AT_RISK,
        reason="too few devices answer, so it cannot be opened",
        command=command,
        advice=f"bring devices back, then {command}",
    )


def _level(status: PoolStatus, agent: AgentSight | None) -> Level:
    if status.unreadable or (status.objects and not status.losses_tolerated):
        return Level.AT_RISK
    lacking = status.degraded or status.losses_tolerated < status.parity
    ails = any(_ails(device, agent) for device in status.devices)
    if lacking or not status.effective_data or ails:
        return Level.DEGRADED
    return Level.WHOLE


def _ails(device: DeviceStatus, agent: AgentSight | None) -> bool:
    """Whether something must be done about a device. Not about one that an operator drains or has
    sit out, nor about one that is full: rebalancing is a matter of speed."""
    if device.state == "evicted":
        return not device.rebuilt
    return device.state in ("missing", "read-only") or judged(device, agent) == _SICK


def judged(device: DeviceStatus, agent: AgentSight | None) -> str:
    """What processes of this node make of a device, or else the agent; "" where it is well."""
    seen = "" if agent is None else agent.state_of(device.device)
    found = device.health if device.health not in ("", "online") else seen
    return "" if found in ("online", device.state) else found


def _reason(status: PoolStatus) -> str:
    count = status.losses_tolerated
    if status.unreadable:
        first = f"{status.unreadable} of {status.objects} objects cannot be read now"
    elif count < status.parity:
        first = f"{count or 'no'} more device{'s' * (count > 1)} may fail"
    else:
        first = f"{count} device{'s' * (count > 1)} may fail"
    notes = [
        f"{count} {state}"
        for state in ("read-only", "draining")
        if (count := _count(status, state))
    ]
    if released := sum(device.released for device in status.devices):
        notes.append(f"{released} released for maintenance")
    if not status.effective_data:
        full = _count(status, "full")
        notes.append("no new data fits" if full else "too few devices for new data")
    return "; ".join([first, *notes])


def _count(status: PoolStatus, state: str) -> int:
    return sum(device.state == state for device in status.devices)


def _next(status: PoolStatus, pool: str, agent: AgentSight | None) -> tuple[str, str]:
    """The next command, and what is said in its place."""

    def first(state: str) -> str:
        found = (d.url for d in status.devices if d.state == state and not d.released)
        return shlex.quote(url) if (url := next(found, "")) else ""

    released = next((d.url for d in status.devices if d.released), "")
    if released:
        return f"hpstore readmit {pool} {shlex.quote(released)}", ""
    missing, read_only, draining = map(first, ("missing", "read-only", "draining"))
    if status.unreadable:
        look = f"hpstore status {pool}"
        bring = f"bring {missing} back, then {look}"
        return (look, bring) if missing else (f"hpstore scrub {pool}", "")
    unrebuilt = any(device.state == "evicted" and not device.rebuilt for device in status.devices)
    short = status.degraded or unrebuilt
    if (short or missing or read_only or draining) and agent is not None and not agent.dry_run:
        watch = f"hpstore status {pool} --watch"
        return watch, f"the agent is on it: {watch}"
    if missing:  # first: a rebuild waits for it, and marks no other device as rebuilt
        evict = f"hpstore evict {pool} {missing}"
        return evict, f"bring {missing} back, or: {evict}"
    if unrebuilt or (short and not draining):
        return f"hpstore rebuild {pool}", ""
    if draining or read_only:  # one that drains makes objects short: it is on its way out
        return f"hpstore drain {pool} {draining or read_only}", ""
    return _next_where_all_answer(status, pool, agent), ""


def _next_where_all_answer(status: PoolStatus, pool: str, agent: AgentSight | None) -> str:
    sick = next((d for d in status.devices if judged(d, agent) == _SICK), None)
    if sick is not None:
        return f"hpstore drain {pool} {sick.device[:8]}"
    if status.losses_tolerated < status.parity:
        return f"hpstore rebuild {pool}"
    if not status.effective_data:
        return f"hpstore add {pool} DEVICE"
    if _count(status, "full"):
        return f"hpstore rebalance {pool}"
    return "" if status.objects else f"hpstore put {pool} KEY FILE"
