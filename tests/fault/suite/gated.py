"""Run a script whose optimizer steps wait until they are let through.

python -m tests.fault.suite.gated DESCRIPTOR SCRIPT ARGUMENTS...

Each step takes one byte from the descriptor, so the test says what is trained while a fault is
there. Its end ends the process: a test that was killed leaves no trainer behind.
"""

from __future__ import annotations

import os
import runpy
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook


def arm(gate: int) -> None:
    """From now on each step of any optimizer waits for a byte."""

    def wait(*_: object) -> None:
        if not os.read(gate, 1):
            os._exit(1)

    register_optimizer_step_pre_hook(wait)


def main() -> None:
    arm(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
