"""Run a script that kills its own process at a named phase.

python -m tests.fault.suite.killed PHASE SCRIPT ARGUMENTS...

SCRIPT is a path, or "hpstore" for the command line.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Right before or after the n-th call of a function with a word in one of its arguments, or in
    one of a collection of them.

    `owner`: a module, or "module:class".
    """

    function: str
    owner: str = "hpstore.pool.pool:Pool"
    word: str = ""
    after: bool = False
    times: int = 1


TRAINER = {
    # twice, so that something is there that may be lost
    "before its note": Phase(function="put", word="/attempts/", times=2),
    "before a segment": Phase(function="put", word="/segment-", times=2),
    "after a segment": Phase(function="put", word="/segment-", after=True, times=2),
    "before the manifest": Phase(function="put", word="manifest", times=2),
    "after the manifest": Phase(function="put", word="manifest", after=True, times=2),
    "before an old step goes": Phase(
        owner="hpstore.pool.admin:PoolAdmin", function="remove_versions", word="manifest"
    ),
    "before an old segment goes": Phase(function="delete_many", word="/segment-"),
}
REPAIR = "is_deleted"  # called for each object that a rebuild or a scrub has looked at
DEVICES = "hpstore.pool.pool_devices:PoolDevices"
AGENT_AWAY = {
    "before it notes what it does": Phase(owner="hpstore.agent.loop", function="save_memory"),
    "before an eviction": Phase(owner=DEVICES, function="evict"),
    "after an eviction": Phase(owner=DEVICES, function="evict", after=True),
    "in a rebuild": Phase(owner="hpstore.maintenance.rebuild", function=REPAIR, times=5),
    "after a rebuild": Phase(owner="hpstore.pool.admin:PoolAdmin", function="rebuild", after=True),
}  # while a device does not answer
AGENT_BACK = {
    "before a readmission": Phase(function="readmit"),
    "after a readmission": Phase(function="readmit", after=True),
    "in a scrub": Phase(owner="hpstore.maintenance.scrub", function=REPAIR, times=5),
}  # when it answers again
PHASES = {**TRAINER, **AGENT_AWAY, **AGENT_BACK}


def reached(phase: str) -> str:
    """What is said before the kill, so that a phase that is gone does not pass for one survived."""
    return f"reached: {phase}\n"


def die(phase: str) -> None:
    """Kill this process, and say at which phase."""
    os.write(2, reached(phase).encode())
    os.kill(os.getpid(), signal.SIGKILL)


def arm(name: str, then: Callable[[str], None] = die) -> None:
    """From now on this process dies at the phase, or does what is given instead."""
    phase, seen = PHASES[name], 0
    module, _, kind = phase.owner.partition(":")
    # Any: whatever the phase names
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, kind) if kind else owner
    original = getattr(owner, phase.function)

    def call(*args: Any, **options: Any) -> Any:
        nonlocal seen
        meant = not phase.word or any(phase.word in text for text in _texts(args))
        seen += meant
        due = meant and seen == phase.times
        if due and not phase.after:
            then(name)
        result = original(*args, **options)
        if due and phase.after:
            then(name)
        return result

    setattr(owner, phase.function, call)


def _texts(arguments: Iterable[Any]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, str):
            yield argument
        elif isinstance(argument, list | set | frozenset | tuple | dict):
            yield from (item for item in argument if isinstance(item, str))


def main() -> None:
    name, script = sys.argv[1:3]
    arm(name)
    sys.argv = sys.argv[2:]
    if script == "hpstore":
        from hpstore.cli import main as command_line

        command_line()
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
