"""A rank that is killed in the middle of a save: the others raise, and say what is still good."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.pool.pool import Pool
from tests.integration.ranks import breaking_put, launch, make_pool, open_pool, raised

LARGE, SMALL = 300_000, 30_000  # numbers of a rank: in segments, or all in the manifest


def die(rank: int, world: int, directory: Path, victim: int, when: str, count: int) -> None:
    """Save 1; then `victim` is killed in the middle of save 2: the others must raise in time."""

    def kill(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pool = open_pool(directory)
    ckpt = Checkpointer(pool, "run", rng=False, save=SaveOptions(commit_seconds=20.0))
    state: dict[str, Any] = {"x": ckpt.per_rank(torch.full((count,), float(rank))), "step": 1}
    ckpt.save(1, state).result()
    dist.barrier()
    state["x"].value += 10
    state["step"] = 2
    if rank == victim:
        if when == "after the manifest":
            after_put(pool, "manifest", kill)
        elif when == "before its vote":
            SaveJob.commit = kill  # type: ignore[method-assign,assignment]
        else:
            breaking_put(pool, "segment" if when == "segment" else "manifest", kill)
    said = raised(lambda: ckpt.save(2, state).result())
    (directory / f"said-{rank}").write_text(said)


def after_put(pool: Pool, word: str, act: Callable[[], None]) -> None:
    """Let the pool `act` when a put of such a key is done, before anybody hears of it."""
    original = pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        info = original(key, *args, **options)
        if word in key:
            act()
        return info

    pool.put = put  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("victim", "when", "newest", "count"),
    [
        (2, "segment", 1, LARGE),
        (0, "segment", 1, LARGE),
        (0, "before the manifest", 1, LARGE),
        (0, "after the manifest", 2, LARGE),
        (2, "before its vote", 1, SMALL),
        (0, "before its vote", 1, SMALL),
        (0, "before the manifest", 1, SMALL),
        (0, "after the manifest", 2, SMALL),
    ],
)
def test_a_killed_rank_leaves_the_old_step_or_the_new_one(
    tmp_path: Path, victim: int, when: str, newest: int, count: int
) -> None:
    """PROTOCOL 20: SIGKILL one of four ranks; the others raise and say what is still good.

    The old step, or the new one when its manifest was put, restores; the next job collects what
    was left and saves on.
    """
    make_pool(tmp_path)
    launch(tmp_path, 4, die, victim, when, count, killed=(victim,))
    for rank in {0, 1, 2, 3} - {victim}:
        said = (tmp_path / f"said-{rank}").read_text()
        assert f"rank {rank} of 4: rank {victim} died or did not answer" in said
        fate = "is not committed" if (victim, rank) == (2, 0) else "may be committed or not"
        assert f"step 2 {fate}, step {newest} is still current" in said
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        assert ckpt.steps() == list(range(1, newest + 1))
        state: dict[str, Any] = {"x": ckpt.per_rank(torch.zeros(count)), "step": 0}
        assert ckpt.restore(state) == newest
        assert state["step"] == newest
        assert bool((state["x"].value == (0 if newest == 1 else 10)).all())
        assert ckpt.verify(newest).ok
        named = set[str]().union(*(ckpt.steps.manifest(step).segment_keys for step in ckpt.steps()))
        assert bool(named) == (count == LARGE)
        manifests = {f"run/step-{step:012d}/manifest" for step in ckpt.steps()}
        assert set(pool.list("run")) == named | manifests | {"run/writer"}
        ckpt.save(3, state).result()
        assert ckpt.latest_valid() == 3
