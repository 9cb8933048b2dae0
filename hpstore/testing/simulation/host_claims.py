"""What must hold over several hosts, looked at after every turn (PROTOCOL 14 to 18).

- A membership that was acknowledged is never succeeded by an older one: no process that opens the
  pool, or has it open, sees a generation below one that a change had returned before.
- No two changes that were acknowledged made different memberships of one generation.
- Of all agents at most one takes itself for the keeper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from hpstore.format.records import PoolRecord
from hpstore.testing.simulation.world import Process, World


class FindingsTaker(Protocol):
    """An ActionScene, which has these claims."""

    def find(self, kind: str, text: str) -> None:
        """Note what must not happen."""


@dataclass(slots=True)
class HostClaims:
    """What was seen of memberships and keepers."""

    agents: dict[str, tuple[Process, Any]] = field(default_factory=dict)  # by process
    acknowledged: dict[int, str] = field(default_factory=dict)  # generation -> nonce
    known: dict[int, int] = field(default_factory=dict)  # process, as born -> its generation

    def changed(self, scene: FindingsTaker, record: PoolRecord) -> None:
        """A change of the membership was acknowledged, and this is what it made."""
        generation, nonce = record.order
        before = self.acknowledged.setdefault(generation, nonce)
        if before != nonce:
            scene.find("two memberships", f"of generation {generation}: {before} and {nonce}")

    def opened(self, scene: FindingsTaker, record: PoolRecord, newest: int) -> None:
        """A process has opened the pool. `newest`: the generation acknowledged when it began."""
        if record.generation < newest:
            text = f"a pool that was opened has generation {record.generation}, {newest} was there"
            scene.find("older membership", text)

    @property
    def newest(self) -> int:
        """The highest generation that was acknowledged."""
        return max(self.acknowledged, default=0)

    def saw(self, scene: FindingsTaker, process: Process, record: PoolRecord) -> None:
        """A process' membership after one of its turns."""
        before = self.known.get(process.born, 0)
        if record.generation < before:
            text = f"{process.name} goes from generation {before} to {record.generation}"
            scene.find("older membership", text)
        self.known[process.born] = max(before, record.generation)

    def look_at_keepers(self, scene: FindingsTaker, world: World) -> None:
        """Of the agents that live, those that decide now."""
        alive = [(p, a) for p, a in self.agents.values() if not p.dead and p in world.processes]
        deciding = [process.name for process, agent in alive if agent.keeper.decides]
        if len(deciding) > 1:
            scene.find("two keepers", f"{deciding} decide for the pool at once")
