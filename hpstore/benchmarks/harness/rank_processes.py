"""Ranks of a benchmark: processes of this machine that form a gloo group."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_SECONDS = 1200.0  # for all ranks together


def launch(  # Any: JSON
    world: int, directory: Path, job: Callable[..., Any], *args: Any
) -> list[Any]:
    """What `job(directory, *args)` returns in each of so many processes, by rank.

    Each has one thread of torch's. Raises RuntimeError when one of them fails or hangs.
    """
    context = multiprocessing.get_context("forkserver")  # the sessions' one, where there are any
    processes = [
        context.Process(target=_enter, args=(rank, world, directory, job, args))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + PATIENCE_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in processes]
        if any(code != 0 for code in codes):  # None: it hangs
            raise RuntimeError(f"the ranks ended with {codes}; what they printed says why")
    finally:
        for process in processes:
            process.kill()
    return [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(world)]


def _enter(
    rank: int, world: int, directory: Path, job: Callable[..., Any], args: Sequence[Any]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = directory / f"store-{job.__name__}-{world}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    (directory / f"found-{rank}.json").write_text(json.dumps(job(directory, *args)))
    dist.barrier()
    dist.destroy_process_group()
