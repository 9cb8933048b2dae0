"""Agents of several hosts over one pool on memory devices, by rounds and one clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpstore.agent import Agent, AgentConfig
from hpstore.agent.agent_status import AgentStatus
from hpstore.agent.disk_load import Foreground
from hpstore.config import Settings, load_config
from hpstore.health.policy.states import PolicyConfig, Role
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import KIB, MIB

SIZES = {"small": 3_000, "large": 900_000, "a/b": 400_001, "c": 700_000}
SIZES |= {f"many/{n}": 300_000 for n in range(16)}  # some have two columns on any host


class HostAgents:
    """A pool of 4+2 over `hosts` hosts of two disks, filled. Each host has its own run directory;
    an agent there looks after the pool once it is started."""

    def __init__(self, directory: Path, *, hosts: int = 4, **config: object) -> None:
        self.clock, self._directory = FakeClock(), directory
        self.names = "abcdefgh"[:hosts]
        self.harness = Harness(
            directory,
            data=4,
            parity=2,
            devices=2 * hosts,
            domains=[f"host-{name}" for name in self.names for _ in range(2)],
            clock=self.clock,
            unit_bytes=64 * KIB,
            settings=Settings(memory_bytes=64 * MIB),
        )
        self.content = {key: bytes([len(key)]) * size for key, size in SIZES.items()}
        with self.harness.open() as pool:
            for key, body in self.content.items():
                pool.put(key, body)
        made = {"scrub_days": 0.0, "smart_hours": 0.0, "rebalance_spread": 0.0, **config}
        self.config = AgentConfig(
            **made,  # type: ignore[arg-type]  # its fields by name
            policy=PolicyConfig(role=Role.AGENT),
        )
        self.agents: dict[str, Agent] = {}
        self.pools: dict[str, Pool] = {}
        self.status: dict[str, AgentStatus] = {}

    def start(self, *names: str) -> None:
        """Open the pool on these hosts, and begin to look after it."""
        for name in names:
            run = str(self._directory / f"run-{name}")
            known = replace(
                self.harness.config,
                devices=load_config(self.harness.config.path).devices,
                settings=replace(self.harness.config.settings, run_directory=run),
            )
            self.pools[name] = Pool(
                known, opener=self.harness._open_url, clock=self.clock, threads=False
            )
            self.agents[name] = Agent(
                self.pools[name],
                replace(self.config, host=name),
                threads=False,
                foreground=Foreground(activity=dict, own=lambda: 0),
            )

    def disks(self, names: str) -> list[str]:
        """URLs of the disks of some hosts."""
        places = [self.names.index(name) for name in names]
        return [url for n in places for url in self.harness.urls[2 * n : 2 * n + 2]]

    def ids(self, names: str) -> set[str]:
        """Ids of their devices."""
        urls = self.disks(names)
        record = next(iter(self.pools.values())).admin.record
        return {m.device_id for m in (*record.members, *record.evicted) if m.url in urls}

    def rounds(self, seconds: float, *names: str, step: float = 5.0, work: bool = True) -> None:
        """Rounds of these agents, by default of all, with the jobs that they ask for. The others
        are paused."""
        for _ in range(max(1, round(seconds / step))):
            self.clock.advance(step)
            for name in names or tuple(self.agents):
                self.status[name] = self.agents[name].tick()
                if work:
                    self.agents[name].finish_jobs()

    def kill(self, name: str) -> None:
        """Its process dies: no orderly end. Locks of its threads' devices are free."""
        agent = self.agents.pop(name)
        agent.keeper.close = lambda: None  # type: ignore[method-assign]
        agent.close()
        self.pools.pop(name).close()

    def keepers(self) -> str:
        """Hosts whose agents decide."""
        return "".join(name for name, agent in self.agents.items() if agent.keeper.decides)

    def evicted(self) -> set[str]:
        """Domains that have left the pool."""
        with self.harness.open(read_only=True) as pool:
            return {m.domain for m in pool.admin.record.evicted}

    def generation(self) -> int:
        """Of the membership."""
        with self.harness.open(read_only=True) as pool:
            return pool.admin.record.generation

    def whole(self) -> bool:
        """Whether every object has its bytes and its full stripe."""
        with self.harness.open(read_only=True) as pool:
            right = all(pool.get(key) == body for key, body in self.content.items())
            return right and pool.status().losses_tolerated == pool.parity

    def stop(self) -> None:
        """An orderly end."""
        for name in list(self.agents):
            self.agents.pop(name).close()
            self.pools.pop(name).close()
