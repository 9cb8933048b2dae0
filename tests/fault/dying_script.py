"""python dying_script.py NUMBER SCRIPT ...: the script, killed at its save of that number.

Rank 1 of a job dies, or its only process: when all of its bytes are staged, before the commit.
Of accelerate's FSDP2 scripts, which train DDP on the CPU, the shards are forced upon it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from hpstore.checkpoint.save.save_job import SaveJob
from tests.trainers.cpu_shards import shard_on_the_cpu


def arm(number: int) -> None:
    """Let this process die at its save of that number; 0 is none."""
    commit, calls = SaveJob.commit, iter(range(1, number + 1))

    def fatal(job: SaveJob) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(job)

    SaveJob.commit = fatal  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    number, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    if number and os.environ.get("RANK", "1") == "1":
        arm(number)
    if Path(script).name.startswith("fsdp2_"):
        shard_on_the_cpu()
    runpy.run_path(script, run_name="__main__")
