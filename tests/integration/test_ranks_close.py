"""How what ranks share ends: the groups of a checkpointer with it, or before the process.

r_uneven ended with SIGABRT under load: gloo's thread let the last message's tensors go while the
interpreter ended (docs/decisions/0163).
"""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as _distributed

from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.errors import CheckpointError
from tests.integration.ranks import launch, make_pool, open_pool, together

dist: Any = _distributed  # what it keeps of groups has no public names


def groups() -> int:
    """How many groups torch has in this process."""
    return len(dist.distributed_c10d._world.pg_map)


def threads_of_groups() -> int:
    """Threads that run the messages of gloo groups, where this torch gives them names."""
    names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def closes(rank: int, world: int, directory: Path) -> None:
    """Checkpointers that are closed, and one that is dropped."""
    with open_pool(directory) as pool:
        before = groups(), threads_of_groups()
        for name in ("a", "b"):
            with Checkpointer(pool, name, rng=False) as ckpt:
                ckpt.save(1, {"x": torch.ones(4)}).result()
                assert groups() == before[0] + len(RankChannel)
        with pytest.raises(CheckpointError, match="closed"):
            ckpt._ranks.all_gather(b"", RankChannel.TRAINER)
        together((groups(), threads_of_groups()) == before, "closed")
        left = Checkpointer(pool, "c", rng=False)
        assert groups() > before[0]
        dist.barrier()
        atexit._run_exitfuncs()
        together((groups(), threads_of_groups()) == before, left.prefix)


def test_the_groups_of_a_checkpointer_end_with_it(tmp_path: Path) -> None:
    """Each had left two groups, their threads and connections to the process."""
    make_pool(tmp_path)
    launch(tmp_path, 2, closes)


def some(rank: int, world: int, directory: Path) -> None:
    """Checkpointers of a group that the user has made, and others that end between them."""
    group = dist.new_group([0, 1])
    with open_pool(directory) as pool:
        for n in range(2):
            with Checkpointer(pool, "all", rng=False):
                ckpt = Checkpointer(pool, f"some-{n}", rng=False, group=group)
            ckpt.save(1, {"x": torch.ones(4)}).result()
            ckpt.close()
        dist.barrier()


def test_groups_of_some_ranks_never_get_a_name_that_was_used(tmp_path: Path) -> None:
    """torch makes it of the ranks and of how many groups there are."""
    make_pool(tmp_path)
    launch(tmp_path, 2, some)


def loses(rank: int, world: int, directory: Path) -> None:
    """Rank 1 does not answer."""
    ranks = Ranks(0.3)
    before = groups()
    if rank == 0:
        with pytest.raises(CheckpointError, match="did not answer"):
            ranks.all_gather(b"x", RankChannel.TRAINER)
        ranks.close()
        assert groups() == before
    dist.barrier()


def test_a_group_in_which_a_message_was_lost_is_not_waited_for(tmp_path: Path) -> None:
    """torch waits for such a message as long as the group's timeout, also in the group's end."""
    launch(tmp_path, 2, loses)
