"""What the agent remembers over restarts: the policy's state, above all its guards.

A damaged file is refused, never taken for an empty one: that would reset the guards (PROTOCOL 17).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hpstore.errors import ConfigError, IntegrityError
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.health.policy.states import PolicyState
from hpstore.runtime.text_files import write_atomically

MEMORY_FILE = "agent.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """All of it. Times in milliseconds since 1970, 0 for never."""

    policy: PolicyState = field(default_factory=PolicyState)
    scrub_began_ms: int = 0  # of the last pass
    scrub_ended_ms: int = 0  # of the last whole one
    orders_done: int = 0  # number of the last order obeyed

    def encode(self) -> bytes:
        """JSON with a digest."""
        return seal(
            {
                "format": FORMAT,
                "policy": self.policy.encode().decode(),
                "scrub_began_ms": self.scrub_began_ms,
                "scrub_ended_ms": self.scrub_ended_ms,
                "orders_done": self.orders_done,
            }
        )

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> AgentState:
        """Raises IntegrityError or FormatTooNew."""
        body = unseal(data, where=where)
        try:
            return cls(
                policy=PolicyState.decode(str(body["policy"]).encode(), where=where),
                scrub_began_ms=int(str(body["scrub_began_ms"])),
                scrub_ended_ms=int(str(body["scrub_ended_ms"])),
                orders_done=int(str(body["orders_done"])),
            )
        except MALFORMED as error:
            raise IntegrityError(
                f"{where}: the agent's memory is malformed: {brief(error)}"
            ) from error

    def lasting(self) -> AgentState:
        """Without what changes at every look: equal ones need not be written again."""
        devices = {d: replace(health, score=0.0) for d, health in self.policy.devices.items()}
        return replace(self, policy=replace(self.policy, now_seconds=0.0, devices=devices))


def load_memory(directory: Path) -> AgentState:
    """What was saved; a fresh one when there is nothing. Raises ConfigError when it is damaged."""
    path = directory / MEMORY_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return AgentState()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return AgentState.decode(data, where=str(path))
    except IntegrityError as error:
        raise ConfigError(
            f"{error}. That says nothing of what is stored; the agent does not start without it, "
            "as its guards would be reset. Look at `hpstore status`, then move the file away to "
            "start over."
        ) from error


def save_memory(directory: Path, memory: AgentState) -> None:
    """Replace the file; its bytes are synced before it has the name."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(directory / MEMORY_FILE, memory.encode().decode())
