"""python dying_script.py NUMBER SCRIPT ...: the script, killed at its save of that number.

Rank 1 of a job dies, or its only process: when all of its bytes are staged, before the commit. A
script of files (Ray, torchtitan) dies in the put of a data file, and in Ray it is the worker.
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
from hpstore.interop import PoolFileSystem
from hpstore.interop.filesystem.paths import ParsedPath
from tests.trainers.cpu_shards import shard_on_the_cpu

DATA_FILES = (".distcp", "state.pt")  # of torchtitan, and of examples/trainers/ray_loop.py
NUMBER = "HPSTORE_DIES_AT"  # how the workers of Ray are told


def arm(number: int) -> None:
    """Let this process die at its save of that number; 0 is none."""
    commit, calls = SaveJob.commit, iter(range(1, number + 1))

    def fatal(job: SaveJob) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(job)

    SaveJob.commit = fatal  # type: ignore[method-assign,assignment]


def arm_files(number: int) -> None:
    """Let this process die in the middle of its put of that number of a checkpoint's data."""
    put, calls = PoolFileSystem._put, iter(range(1, number + 1))

    def fatal(files: PoolFileSystem, place: ParsedPath, data: object, **options: Any) -> None:
        if place.key.endswith(DATA_FILES) and next(calls) == number:
            die = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            place.mount.pool.put(place.key, data, progress=die)
        put(files, place, data, **options)

    PoolFileSystem._put = fatal  # type: ignore[method-assign,assignment]


def arm_worker() -> None:
    """What each process that Ray starts does first."""
    if os.environ[NUMBER] != "0":
        arm_files(int(os.environ[NUMBER]))


def start_ray(number: int) -> None:
    """Ray on this machine, without its dashboard."""
    import ray

    environment = {
        "env_vars": {NUMBER: str(number)},
        "worker_process_setup_hook": "tests.fault.dying_script.arm_worker",
    }
    ray.init(runtime_env=environment, include_dashboard=False, object_store_memory=100 << 20)


if __name__ == "__main__":
    number, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent)
    if number and "1" in (os.environ.get("RANK", "1"), os.environ.get("WORLD_SIZE")):
        arm(number)
        arm_files(number)
    if Path(script).name.startswith("fsdp2_"):
        shard_on_the_cpu()
    if Path(script).stem.startswith("ray"):
        start_ray(number)
    runpy.run_path(script, run_name="__main__")
