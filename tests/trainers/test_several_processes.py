"""The adapters in jobs of two processes: the real Lightning with DDP, the real Accelerate, gloo."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.errors import CheckpointError
from hpstore.trainers.rank_messages import of_bytes, to_bytes
from tests.integration import ranks
from tests.integration.ranks import make_pool, open_pool
from tests.thorough import LONG

EPOCHS = 4
HUGGINGFACE = (
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "hpstore.trainers.huggingface",
    "tests.trainers.test_huggingface",
)
launch = functools.partial(ranks.launch, imports=HUGGINGFACE)


def join_job(rank: int, world: int) -> None:
    """What a launcher tells a process; the group is there already."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "ACCELERATE_USE_CPU": "true",
    }


# --- Lightning ----------------------------------------------------------------------------------


def fit(rank: int, world: int, directory: Path, prefix: str, epochs: int) -> None:
    """Train up to `epochs` with DDP, from the newest checkpoint; what it has then to a file."""
    join_job(rank, world)
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from hpstore.trainers.lightning import PoolCheckpointIO
    from tests.trainers.test_lightning import Tiny, batches

    torch.manual_seed(5)
    model = Tiny()
    with open_pool(directory) as pool:
        io = PoolCheckpointIO(pool, prefix, root=directory)
        run = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=world,
            plugins=[io],
            logger=False,
            strategy=DDPStrategy(process_group_backend="gloo"),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory / prefix,
        )
        run.fit(model, batches(), ckpt_path=io.latest())
        io.close()
        assert run.world_size == world
        found = {
            "model": model.state_dict(),
            "optimizer": run.optimizers[0].state_dict(),
            "step": run.global_step,
        }
    torch.save(found, directory / f"{prefix}-{epochs}-{rank}.pt")


@pytest.mark.skipif(not LONG, reason="half a minute: HPSTORE_LONG_TESTS=1")
@pytest.mark.parametrize("later", [2, 1], ids=["on two again", "on one"])
def test_a_ddp_fit_resumes_on_every_rank(tmp_path: Path, later: int) -> None:
    """Two of four epochs on two ranks, markers lost, resumed: on two, as never stopped; on one, it
    goes on from the same step."""
    pytest.importorskip("lightning.pytorch")
    make_pool(tmp_path)
    launch(tmp_path, 2, fit, "cut", 2)
    for marker in (tmp_path / "cut").rglob("*.ckpt"):
        marker.unlink()
    launch(tmp_path, later, fit, "cut", EPOCHS)
    if later == 1:
        found = torch.load(tmp_path / "cut-4-0.pt")
        assert found["step"] == 2 * 3 + 2 * 6  # half of the batches while there were two ranks
        return
    launch(tmp_path, 2, fit, "whole", EPOCHS)
    wanted = torch.load(tmp_path / "whole-4-0.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"cut-4-{rank}.pt")
        assert found["step"] == wanted["step"] == 12
        for name, tensor in wanted["model"].items():
            if "running" not in name or rank == 0:  # those of BatchNorm are each rank's own
                assert torch.equal(found["model"][name], tensor), (rank, name)
        moments = wanted["optimizer"]["state"]
        for number, slots in moments.items():
            for slot, value in slots.items():
                assert torch.equal(found["optimizer"]["state"][number][slot], value)


# --- Accelerate ---------------------------------------------------------------------------------


def accelerated(folder: Path) -> Any:
    """A loop under accelerate, as in the tests of one process; each rank has its own noise."""
    from tests.trainers.test_huggingface import Run

    run = Run(folder)
    torch.manual_seed(100 + run.accelerator.process_index)
    return run


def saving(rank: int, world: int, directory: Path) -> None:
    """Two steps, a save, three steps: their losses, and the weights, to files."""
    join_job(rank, world)
    from hpstore.trainers.accelerate_states import PoolAccelerate

    torch.manual_seed(1)
    run = accelerated(directory / "p")
    assert run.accelerator.num_processes == world
    with open_pool(directory) as pool, PoolAccelerate(run.accelerator, pool, "run") as hp:
        for _ in range(2):
            run.step()
        run.accelerator.save_state("one")
        hp.wait()
        assert [name.rpartition("/")[2] for name in hp.checkpoints.names()] == ["one"]
        losses = [run.step() for _ in range(3)]
    (directory / f"losses-{rank}.json").write_text(json.dumps(losses))
    torch.save(run.accelerator.unwrap_model(run.net).state_dict(), directory / f"net-{rank}.pt")


def loading(rank: int, world: int, directory: Path) -> None:
    """The same three steps from the newest state, with each rank's own noise."""
    join_job(rank, world)
    from hpstore.trainers.accelerate_states import PoolAccelerate

    torch.manual_seed(2)
    run = accelerated(directory / "p")
    with open_pool(directory) as pool, PoolAccelerate(run.accelerator, pool, "run") as hp:
        latest = hp.latest()
        assert latest is not None
        assert latest.endswith("one")
        run.accelerator.load_state()
        assert run.counter.n == 2
        wanted = json.loads((directory / f"losses-{rank}.json").read_text())
        assert [run.step() for _ in range(3)] == wanted
        net = run.accelerator.unwrap_model(run.net).state_dict()
        for name, tensor in torch.load(directory / f"net-{rank}.pt").items():
            assert torch.equal(net[name], tensor)


def failing(rank: int, world: int, directory: Path) -> None:
    """Rank 1 cannot take part in a load, rank 0 cannot save: both ranks hear of both."""
    join_job(rank, world)
    from hpstore.trainers.accelerate_states import PoolAccelerate

    run = accelerated(directory / "p")
    with open_pool(directory) as pool, PoolAccelerate(run.accelerator, pool, "run") as hp:
        run.accelerator.save_state("one")
        hp.wait()
        if rank == 1:
            vars(hp.checkpoints)["load"] = refuse
        with pytest.raises(CheckpointError, match="not on this host"):
            run.accelerator.load_state("one")
        if rank == 0:
            vars(hp.checkpoints)["save"] = refuse
        with pytest.raises(CheckpointError, match="not on this host"):
            run.accelerator.save_state("two")
        dist.barrier()


def refuse(*args: Any, **options: Any) -> Any:
    """What a rank cannot do."""
    raise CheckpointError("not on this host")


def test_accelerate_resumes_every_rank_with_its_own_noise(tmp_path: Path) -> None:
    """DDP: the same losses follow on each rank as without the stop, bit by bit."""
    pytest.importorskip("accelerate")
    make_pool(tmp_path)
    launch(tmp_path, 2, saving)
    launch(tmp_path, 2, loading)
    assert (tmp_path / "losses-0.json").read_text() != (tmp_path / "losses-1.json").read_text()
    assert not (tmp_path / "p").exists()


def test_what_fails_on_one_rank_of_accelerate_is_raised_on_all(tmp_path: Path) -> None:
    """Nobody waits for a rank that has raised."""
    pytest.importorskip("accelerate")
    make_pool(tmp_path)
    launch(tmp_path, 2, failing)


def test_states_travel_between_ranks_bit_by_bit() -> None:
    """RNG states of Python, numpy and torch, and tensors of odd kinds."""
    from hpstore.checkpoint.state.training_state import rng_state

    state: dict[str, Any] = {
        "rng": rng_state(),
        "half": torch.ones(2, 3, dtype=torch.bfloat16),
        "no": None,
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(3),
        "pair": (1, [2.5]),
    }
    found = of_bytes(to_bytes(state))
    assert found["rng"]["python"] == state["rng"]["python"]
    assert torch.equal(found["rng"]["torch"], state["rng"]["torch"])
    for name in ("half", "empty", "scalar"):
        assert torch.equal(found[name], state[name])
        assert found[name].dtype == state[name].dtype
    assert (found["no"], found["pair"]) == (None, (1, [2.5]))
