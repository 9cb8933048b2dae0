"""Run a script that kills its own process at a named phase of a save.

python -m tests.fault.suite.killed PHASE SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from dataclasses import dataclass
from typing import Any

from hpstore.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Right before or after the n-th call of a pool's method with a word in the key."""

    method: str
    word: str
    after: bool = False
    times: int = 2  # so that something is there that may be lost


PHASES = {
    "before its note": Phase(method="put", word="/attempts/"),
    "before a segment": Phase(method="put", word="/segment-"),
    "after a segment": Phase(method="put", word="/segment-", after=True),
    "before the manifest": Phase(method="put", word="manifest"),
    "after the manifest": Phase(method="put", word="manifest", after=True),
    "before an old step goes": Phase(method="delete", word="manifest", times=1),
    "before an old segment goes": Phase(method="delete", word="/segment-", times=1),
}


def reached(phase: str) -> str:
    """What is said before the kill, so that a phase that is gone does not pass for one survived."""
    return f"reached: {phase}\n"


def arm(name: str) -> None:
    """From now on this process dies at the phase."""
    phase, seen = PHASES[name], 0
    original = getattr(Pool, phase.method)

    def die() -> None:
        os.write(2, reached(name).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def call(pool: Pool, key: str, *args: Any, **options: Any) -> Any:
        nonlocal seen
        if phase.word in key:
            seen += 1
        due = phase.word in key and seen == phase.times
        if due and not phase.after:
            die()
        result = original(pool, key, *args, **options)
        if due:
            die()
        return result

    setattr(Pool, phase.method, call)


def main() -> None:
    name, script = sys.argv[1:3]
    arm(name)
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
