"""Agents that are killed while a device goes and comes back; the last one brings all in order."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress

from hpstore.testing.fuse import FaultRule
from tests.fault.agents import Agents
from tests.fault.common import poll
from tests.fault.suite.faults import refused
from tests.fault.suite.killed import AGENT_AWAY, AGENT_BACK, reached
from tests.fault.suite.rig import Rig
from tests.fault.suite.runner import Load, Pace, References, StartTrainer, judge, under_load
from tests.fault.suite.table import Row

SEED, PATIENCE = 20261122, 40.0
RANDOM_KILLS, RANDOM_SECONDS = 3, 1.5  # within which a random kill comes after the first round
SCRUB_DAYS = 10 / 86_400  # ten seconds


def kill_agent(rig: Rig, pace: Pace, start: StartTrainer, references: References, row: Row) -> None:
    """Kill agents at each phase of a device's absence and return, then at random in another."""
    agents = Agents(rig.toml, rig.root)
    kills = len(AGENT_AWAY) + len(AGENT_BACK) + RANDOM_KILLS
    steps = (pace.plan.steps - pace.start) // kills
    with under_load(rig, pace, start, row) as load:
        load.begin()
        began = time.monotonic()
        lose(rig)
        kill_at(agents, AGENT_AWAY, load, steps)
        rig.relieve()
        agents.configure(scrub_days=SCRUB_DAYS)
        kill_at(agents, AGENT_BACK, load, steps)
        agents.configure()
        settle(agents, rig)
        lose(rig)
        kill_at_random(agents, load, steps)
        rig.relieve()
        settle(agents, rig)
        row.note = f"{kills} kills, whole again after {time.monotonic() - began:.0f} s"
        row.failures += load.end()
        losses = load.trainer.losses()
    judge(rig, row, losses, references(pace.plan))


def lose(rig: Rig) -> None:
    """Device 0 fails every call, until the rig is relieved."""
    rig.faulty.behave(FaultRule(error=errno.EIO))
    refused(rig.paths[0], errno.EIO)


def kill_at(agents: Agents, phases: Iterable[str], load: Load, steps: int) -> None:
    """One life of an agent for each phase."""
    for phase in phases:
        load.let_train(steps)
        launcher = ("-m", "tests.fault.suite.killed", phase, "hpstore")
        with agents.agent("--listen", "none", launcher=launcher) as process:
            agents.until(f"killed {phase}", lambda: process.poll() is not None)
        log = agents.log.read_text()
        assert process.returncode == -signal.SIGKILL, f"{phase}: {process.returncode}: {log[-500:]}"
        assert reached(phase) in log


def kill_at_random(agents: Agents, load: Load, steps: int) -> None:
    """Some time after its first round."""
    rng = random.Random(SEED)
    for _ in range(RANDOM_KILLS):
        load.let_train(steps)
        with agents.agent("--listen", "none") as process:
            poll(PATIENCE, lambda: bool(agents.status()), lambda: "an agent at work")
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.random() * RANDOM_SECONDS)
            process.kill()
            assert process.wait() == -signal.SIGKILL, "it had ended before"


def settle(agents: Agents, rig: Rig) -> None:
    """An agent that nobody kills takes the device back, heals everything, and ends when told."""
    with agents.agent("--listen", "none") as process:
        agents.until("taken back", lambda: agents.state(rig.paths[0]) == "online/online")
        agents.until("whole", agents.whole)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
