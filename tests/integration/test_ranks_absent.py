"""Ranks that leave the others waiting are named, and a refused step is refused on all of them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import CheckpointError, VersionConflict
from tests.integration.ranks import launch, make_pool, open_pool

SECONDS = 3.0


def one_rank_leaves(rank: int, world: int, directory: Path, how: str) -> None:
    """Rank 1 makes the first save alone of all calls; the others time out, or see it die."""
    store = dist.distributed_c10d._get_default_store()
    with open_pool(directory) as pool:
        ckpt = Checkpointer(pool, "run", save=SaveOptions(commit_seconds=SECONDS))
        ckpt.save(1, {"x": torch.ones(3)}).result()
        if rank == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            others = [f"told-{n}" for n in range(world) if n != 1]
            store.wait(others, timedelta(seconds=60))  # it lives, and calls nothing
            return
        state = {"x": torch.ones(3)}
        call = (lambda: ckpt.restore(state)) if how == "restores" else (lambda: ckpt.save(2, state))
        who = "(0, )?1(, 2)?" if how == "dies" else "1"  # a death is seen before others come
        with pytest.raises(CheckpointError, match=rf"rank {rank} of 3: rank {who} died or did not"):
            call()
        store.set(f"told-{rank}", "yes")


@pytest.mark.parametrize("how", ["saves", "restores", "dies"])
def test_the_rank_that_others_wait_for_is_named(tmp_path: Path, how: str) -> None:
    """PROTOCOL 20: one that left its loop for an error that it alone caught, or that was killed."""
    make_pool(tmp_path)
    launch(tmp_path, 3, one_rank_leaves, how, killed=(1,) if how == "dies" else ())
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run") as ckpt:
        assert ckpt.steps() == [1]


def refused_on_all(rank: int, world: int, directory: Path) -> None:
    """A step that is there: no rank stages it, all raise, and the next save is made."""
    with open_pool(directory) as pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}).result()
        with pytest.raises(VersionConflict, match="step 1 under 'run' is committed already"):
            ckpt.save(1, {"x": torch.ones(3)})
        ckpt.save(2, {"x": torch.ones(3)}).result()


def test_a_step_that_is_there_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Before anything is staged."""
    make_pool(tmp_path)
    launch(tmp_path, 2, refused_on_all)
