"""The real Accelerate with FSDP2 in jobs of several processes over gloo: saved, killed, resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.errors import CheckpointError, CheckpointMismatch
from tests.integration.ranks import breaking_put, make_pool, open_pool
from tests.trainers.cpu_shards import shard_on_the_cpu
from tests.trainers.test_huggingface_ranks import die_at
from tests.trainers.test_huggingface_shards import state_of
from tests.trainers.test_several_processes import join_job, launch, refuse

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS = 6


class ShardedRun:
    """A training loop with everything that save_state() keeps; FSDP2, or DDP."""

    def __init__(self, folder: Path, *, sharded: bool = True) -> None:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

        from tests.trainers.test_huggingface import Counter

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap",
            cpu_ram_efficient_loading=False,
        )
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin if sharded else None,
            project_config=ProjectConfiguration(str(folder)),
        )
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.net, self.optimizer = self.accelerator.prepare(net, optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.schedule = self.accelerator.prepare(schedule)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(100 + self.accelerator.process_index)

    def step(self) -> float:
        loss = self.net(torch.randn(5, 4)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counter.n += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Weights and moments, whole. Collective."""
        return state_of(self.accelerator.unwrap_model(self.net), self.optimizer)


def loop(
    rank: int, world: int, directory: Path, prefix: str, kind: str, steps: int, dies: int
) -> None:
    """Go on from the newest state, saving after each second step; what there was and is to a
    file."""
    join_job(rank, world)
    shard_on_the_cpu()
    from hpstore.trainers import PoolAccelerate

    run = ShardedRun(directory / "p", sharded=kind == "fsdp2")
    losses = []
    with open_pool(directory) as pool:
        hp = PoolAccelerate(run.accelerator, pool, prefix, keep_last=2)
        latest = hp.latest()
        if latest is not None:
            run.accelerator.load_state(latest)
            assert latest.endswith(f"step-{run.counter.n}")
        begun = run.state()
        if dies and rank == 1:
            die_at(dies)
        try:
            while run.counter.n < steps:
                losses.append(run.step())
                if run.counter.n % 2 == 0:
                    run.accelerator.save_state(f"step-{run.counter.n}")
            hp.close()
        except (CheckpointError, RuntimeError):  # of the save, or of FSDP's own messages
            assert dies
            return
    found = {"begun": begun, "losses": losses, **run.state(), "n": run.counter.n}
    torch.save(found, directory / f"{prefix}-{rank}.pt")


def left(directory: Path, prefix: str, rank: int) -> dict[str, Any]:
    """What a loop has left in its file."""
    found: dict[str, Any] = torch.load(directory / f"{prefix}-{rank}.pt", weights_only=True)
    return found


def test_a_loop_killed_in_a_save_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """Rank 1 dies in the second save: the first is loaded into the shards, the same losses follow
    on each rank with its own noise, weights and moments too, bit by bit; no local folder."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    launch(tmp_path, 2, loop, "straight", "fsdp2", STEPS, 0)
    launch(tmp_path, 2, loop, "cut", "fsdp2", STEPS, 2, killed=(1,))
    launch(tmp_path, 2, loop, "cut", "fsdp2", STEPS, 0)
    for rank in range(2):
        straight, cut = left(tmp_path, "straight", rank), left(tmp_path, "cut", rank)
        assert cut["losses"] == straight["losses"][2:]
        assert same(cut["model"], straight["model"])
        assert same(cut["optimizer"], straight["optimizer"])
    assert left(tmp_path, "cut", 0)["losses"] != left(tmp_path, "cut", 1)["losses"]
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("first", "before", "later", "after"),
    [(2, "fsdp2", 1, "fsdp2"), (1, "ddp", 2, "fsdp2"), (2, "fsdp2", 2, "ddp")],
)
def test_a_loop_may_go_on_with_other_shards(
    tmp_path: Path, first: int, before: str, later: int, after: str
) -> None:
    """Weights and moments are those of the save, bit by bit, whatever holds them."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    launch(tmp_path, first, loop, "run", before, 2, 0)
    saved = left(tmp_path, "run", 0)
    launch(tmp_path, later, loop, "run", after, 4, 0)
    for rank in range(later):
        found = left(tmp_path, "run", rank)
        assert found["n"] == 4
        assert same(found["begun"]["model"], saved["model"])
        assert same(found["begun"]["optimizer"]["state"], saved["optimizer"]["state"])


def failing(rank: int, world: int, directory: Path) -> None:
    """One rank cannot stage, prepare, publish or load: all hear of it, and can go on."""
    join_job(rank, world)
    shard_on_the_cpu()
    from hpstore.trainers import PoolAccelerate

    run = ShardedRun(directory / "p")
    save = run.accelerator
    with open_pool(directory) as pool, PoolAccelerate(save, pool, "run", keep_last=2) as hp:
        run.step()
        run.accelerator.save_state("one")
        hp.wait()
        if rank == 1:
            vars(hp.checkpoints)["wait"] = refuse
        with pytest.raises(CheckpointError, match="not on this host"):
            run.accelerator.save_state("two")
        vars(hp.checkpoints).pop("wait", None)
        if rank == 0:
            undo = breaking_put(pool, "run/names", lambda: refuse())
        run.accelerator.save_state("three")
        with pytest.raises(CheckpointError, match="not on this host"):
            hp.wait()
        if rank == 0:
            undo()
        wanted = run.state()
        run.step()
        custom = run.accelerator._custom_objects
        if rank == 1:
            custom.append(custom[0])
        with pytest.raises(CheckpointError, match="1 custom were saved, 2 are there"):
            run.accelerator.load_state("one")
        del custom[1:]
        run.accelerator._optimizers.append(run.accelerator._optimizers[0])
        with pytest.raises(CheckpointMismatch, match="1 optimizers were saved, 2 are there"):
            run.accelerator.load_state("one")
        del run.accelerator._optimizers[1:]
        with pytest.raises(CheckpointError, match=r"no checkpoint '\S*nothing'.*one"):
            run.accelerator.load_state("nothing")
        run.accelerator.load_state("one")
        assert same_state(run.state(), wanted)
        for name in ("four", "five", "six"):
            run.accelerator.save_state(name)
        hp.wait()
        dist.barrier()
        names = [name.rpartition("/")[2] for name in hp.checkpoints.names()]
        assert names == ["five", "six"]


def same_state(one: Any, two: Any) -> bool:
    """But for the learning rate, which the schedule has moved."""
    from tests.trainers.test_huggingface import same

    return same(one["model"], two["model"]) and same(
        one["optimizer"]["state"], two["optimizer"]["state"]
    )


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """No rank waits for one that has raised; retention removes the older names at the end."""
    make_pool(tmp_path)
    launch(tmp_path, 2, failing)


def dying(rank: int, world: int, directory: Path) -> None:
    """Rank 1 is killed between two saves: rank 0 hears of it at its next one."""
    join_job(rank, world)
    shard_on_the_cpu()
    from hpstore.trainers import PoolAccelerate

    run = ShardedRun(directory / "p")
    with open_pool(directory) as pool:
        hp = PoolAccelerate(run.accelerator, pool, "run")
        run.accelerator.save_state("one")
        hp.wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CheckpointError, match="rank 1 died or did not answer"):
            run.accelerator.save_state("two")


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, dying, killed=(1,))
