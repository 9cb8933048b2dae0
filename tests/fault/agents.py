"""An agent as a process of its own, as it is seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import hpstore
from hpstore.membership.agent_observations import STATUS_FILE, read_status
from tests.fault.common import poll

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
COMMAND_LINE = ("-c", "from hpstore.cli import main; main()")
QUICK = """
[agent]
tick_seconds = 0.05
probe_seconds = 0.1
survey_seconds = 0.3
scrub_days = {scrub_days}
smart_hours = 0.0
{extra}

[agent.policy]
removed_seconds = 0.2
grace_seconds = {grace}
return_seconds = 0.2
retry_seconds = 1.0
probation_seconds = 0.1
changes_per_hour = 1000
"""


class Agents:
    """Starts agents of a pool, and reads what they say. `directory` holds their log.

    They are quick: what takes minutes in earnest takes parts of a second.
    """

    def __init__(
        self,
        toml: Path,
        directory: Path,
        *,
        grace: float = 0.5,
        scrub_days: float = 0.0,
        extra: str = "",
    ) -> None:
        self.toml, self.directory, self.log = toml, directory, directory / "agent.log"
        with hpstore.open(toml, read_only=True) as pool:
            self.run_directory = pool.admin.run_directory
        self._plain = toml.read_text()
        self.configure(grace=grace, scrub_days=scrub_days, extra=extra)

    def configure(self, *, grace: float = 0.5, scrub_days: float = 0.0, extra: str = "") -> None:
        """Settings of the agents that start from now on."""
        quick = QUICK.format(grace=grace, scrub_days=scrub_days, extra=extra)
        self.toml.write_text(self._plain + quick)

    def command(self, *words: str, launcher: tuple[str, ...] = COMMAND_LINE) -> list[str]:
        """A word of the command line, about this pool."""
        return [sys.executable, *launcher, words[0], str(self.toml), *words[1:]]

    def environment(self) -> Mapping[str, str]:
        """Of agents and commands."""
        return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(self.directory)}

    @contextmanager
    def agent(
        self, *words: str, launcher: tuple[str, ...] = COMMAND_LINE
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A process of its own; killed at the end if it is still there."""
        (self.run_directory / STATUS_FILE).unlink(missing_ok=True)  # one that was killed leaves it
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self.command("agent", *words, launcher=launcher),
                stdout=log,
                stderr=log,
                env=self.environment(),
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def status(self) -> dict[str, object]:
        """What an agent has left lately; {} when none runs."""
        found = read_status(self.run_directory, time.time_ns() // 1_000_000)
        return found or {}

    def state(self, url: str) -> str:
        """What the agent thinks of a device, and where the pool has it: "online/online"."""
        devices = self.status().get("devices", [])
        assert isinstance(devices, list)
        for device in devices:
            if device["url"] == url:
                return f"{device['state']}/{device['pool_state']}"
        return ""

    def until(self, what: str, done: Callable[[], bool]) -> None:
        """Wait for the agent, which is another process."""
        poll(
            PATIENCE,
            done,
            lambda: f"{what}: {json.dumps(self.status())[-3000:]}\n{self.log.read_text()[-3000:]}",
        )

    def until_within(self, seconds: float, done: Callable[[], bool]) -> None:
        """As until(), for so long. Raises AssertionError."""
        poll(seconds, done, lambda: json.dumps(self.status())[-3000:])

    def whole(self) -> bool:
        """Whether every object survives two losses."""
        with hpstore.open(self.toml, read_only=True) as pool:
            found = pool.status()
        return found.losses_tolerated == 2 and found.degraded == 0
