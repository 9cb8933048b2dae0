"""An operator's words to the agent of this node."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import hpstore
from hpstore.agreement.registers import AGENT
from hpstore.cli.output import say
from hpstore.errors import LockTimeout, MembershipError, RegistersForeign, RegistersUnavailable
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.policy.operator_commands import Command
from hpstore.pool.pool import Pool

_ORDER_SECONDS = 15.0  # that a running agent has to obey
_SAID = {
    "obeyed": "{word} of {url}: the agent obeys",
    "noted": "{word} of {url} is noted; no agent runs here now, the next one obeys",
    "waiting": "{word} of {url} is noted; the agent has not come to it yet (`hpstore status`)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """What became of an order."""

    order: str
    device: str
    url: str
    outcome: Literal["obeyed", "noted", "waiting"]

    def __str__(self) -> str:
        return _SAID[self.outcome].format(word=self.order, url=self.url)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def looked_after(pool: Pool) -> bool:
    """Whether an agent has ever looked after a pool on this node."""
    from hpstore.agent.saved_state import MEMORY_FILE

    return (pool.admin.state_directory / MEMORY_FILE).exists()


def in_maintenance(pool: Pool, device: str) -> bool:
    """Whether an operator has a device in maintenance, by the agent's memory or an order that waits
    for an agent."""
    from hpstore.agent.operator_requests import read_orders
    from hpstore.agent.saved_state import load_memory

    memory = load_memory(pool.admin.state_directory)
    waiting = [
        order.word
        for order in read_orders(pool.admin.state_directory)
        if order.device == device and order.number > memory.orders_done
    ]
    if waiting:
        return waiting[-1] is Command.MAINTENANCE
    return memory.policy.health(device).state is HealthState.MAINTENANCE


def order(pool: str, device: str, word: Command) -> RequestOutcome:
    """Give a word to the agent, and wait for what becomes of it. Raises MembershipError when the
    agent refuses."""
    from hpstore.agent.operator_requests import give_order
    from hpstore.membership.agent_observations import read_status

    with hpstore.open(pool, read_only=True) as opened:
        member, clock = opened.admin.devices.find(device), opened.admin.clock
        directory, run_directory = opened.admin.state_directory, opened.admin.run_directory
        heard = read_status(run_directory, clock.wall_ms()) is not None
        if not heard:
            _require_no_agent_elsewhere(opened)
    given = give_order(directory, word, member.device_id, clock)

    def became(outcome: Literal["obeyed", "noted", "waiting"]) -> RequestOutcome:
        return RequestOutcome(
            order=str(word), device=member.device_id, url=member.url, outcome=outcome
        )

    if not heard:
        return became("noted")
    until = clock.monotonic() + _ORDER_SECONDS
    while clock.monotonic() < until:
        status = read_status(run_directory, clock.wall_ms())
        if status is not None and int(str(status.get("orders_done", 0))) >= given.number:
            _require_obeyed(status, given.number)
            return became("obeyed")
        clock.wait(0.1)
    return became("waiting")


def _require_no_agent_elsewhere(pool: Pool) -> None:
    """Raise MembershipError where an agent that leaves no word here looks after the pool."""
    try:
        with pool.admin.registers.hold(AGENT, "look for an agent", deadline_seconds=0.0):
            return
    except (RegistersForeign, RegistersUnavailable):
        return  # no agent could hold it, either
    except LockTimeout as error:
        raise MembershipError(
            "an agent of another user or host, or one that has just begun, looks after this pool "
            "and would not hear the order. Nothing was changed. Give the order there, as its user: "
            f"{error}"
        ) from error


def tell(pool: str, device: str, word: Command, *, as_json: bool) -> None:
    """A command that is one word to the agent."""
    given = order(pool, device, word)
    say(given.as_dict(), str(given), as_json=as_json)


def _require_obeyed(status: dict[str, object], number: int) -> None:
    events = status.get("events")
    for event in events if isinstance(events, list) else ():
        text = str(event.get("text", "")) if isinstance(event, dict) else ""
        if text.startswith(f"order {number}, "):
            raise MembershipError(text)
