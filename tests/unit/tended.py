"""An agent over memory devices, its rounds by a clock that tests move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpstore.agent import Agent, AgentConfig
from hpstore.agent.agent_status import AgentStatus
from hpstore.agent.disk_load import Foreground
from hpstore.config import Settings
from hpstore.health import HealthState
from hpstore.health.policy.states import PolicyConfig, Role
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness, Wrap
from hpstore.units import KIB, MIB

SIZES = {"small": 3_000, "large": 900_000, "a/b": 400_001}


class Tended:
    """A pool of 3+2 on seven devices, filled, with an agent that does nothing by itself."""

    def __init__(
        self,
        directory: Path,
        *,
        data: int = 3,
        parity: int = 2,
        devices: int = 7,
        config: AgentConfig | None = None,
        dry_run: bool = False,
        **policy: object,
    ) -> None:
        self.clock = FakeClock()
        self.harness = Harness(
            directory,
            data=data,
            parity=parity,
            devices=devices,
            clock=self.clock,
            unit_bytes=64 * KIB,
            settings=Settings(memory_bytes=64 * MIB),
        )
        self.content = {key: bytes([len(key)]) * size for key, size in SIZES.items()}
        with self.harness.open() as pool:
            for key, body in self.content.items():
                pool.put(key, body)
        made = PolicyConfig(role=Role.AGENT, dry_run=dry_run)
        self.config = replace(
            config or AgentConfig(scrub_days=0.0, smart_hours=0.0),
            policy=replace(made, **policy),  # type: ignore[arg-type]  # its fields by name
        )
        self.status: AgentStatus | None = None
        self.start()

    def start(self, wrap: Wrap | None = None) -> None:
        """Open the pool, `wrap` round each device, and begin to look after it."""
        self.pool: Pool = self.harness.open(wrap, read_only=self.config.policy.dry_run)
        self.agent = Agent(
            self.pool,
            self.config,
            threads=False,
            foreground=Foreground(activity=dict, own=lambda: 0),
        )
        self.ids = {
            url: device
            for device, url in (
                *self.pool.admin.devices.places.items(),
                *((m.device_id, m.url) for m in self.pool.admin.record.members),
            )
        }

    def stop(self) -> None:
        """An orderly end."""
        self.agent.close()
        self.pool.close()

    def rounds(self, seconds: float, *, step: float = 5.0, work: bool = True) -> None:
        """Rounds for so long, with the jobs they ask for."""
        for _ in range(max(1, round(seconds / step))):
            self.clock.advance(step)
            self.status = self.agent.tick()
            if work:
                self.agent.finish_jobs()

    def device(self, number: int) -> str:
        """Id of the device at memory://d{number}."""
        return self.ids[f"memory://d{number}"]

    def states(self) -> dict[int, HealthState]:
        """By the number of the device, of all that are not online."""
        numbers = {device: int(url.rpartition("d")[2]) for url, device in self.ids.items()}
        return {
            numbers[d]: health.state
            for d, health in self.agent.memory.policy.devices.items()
            if health.state is not HealthState.ONLINE
        }

    def members(self) -> set[int]:
        """Numbers of the pool's members."""
        return {int(m.url.rpartition("d")[2]) for m in self.pool.admin.record.members}

    def files(self) -> dict[str, dict[str, bytes]]:
        """All bytes on all devices, past the code under test."""
        return {
            url: {path: bytes(file.bytes) for path, file in device.files.items()}
            for url, device in self.harness.devices.items()
        }

    def whole(self) -> bool:
        """Whether every object has its bytes and survives as many losses as parity says."""
        with self.harness.open(read_only=True) as pool:
            return all(pool.get(key) == body for key, body in self.content.items()) and (
                pool.status().losses_tolerated == pool.parity
            )
