"""FSDP2 over two pools: each rank's shards are copied, and resumed when the first pool is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Tier
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.pool.pool import Pool
from tests.integration.ranks import make_pool
from tests.thorough import LONG
from tests.trainers.cpu_shards import shard_on_the_cpu
from tests.trainers.test_several_processes import join_job, launch
from tests.trainers.test_trainer_tiers import PATIENCE, another_pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(not LONG, reason="two jobs each: HPSTORE_LONG_TESTS=1")


@contextmanager
def two_pools(directory: Path, first: str) -> Iterator[tuple[Pool, Pool]]:
    """The first pool of a run, and the cold one behind it."""
    with (
        hpstore.open(directory / f"{first}.toml") as pool,
        hpstore.open(directory / "cold.toml") as cold,
    ):
        yield pool, cold


def looped(rank: int, world: int, directory: Path, first: str) -> None:
    """Save twice in the first pool, or go on from the tier where the pool is new."""
    join_job(rank, world)
    shard_on_the_cpu()
    from hpstore.trainers import PoolAccelerate
    from tests.trainers.test_accelerate_shards import ShardedRun

    run = ShardedRun(directory / "p")
    with two_pools(directory, first) as (pool, cold):
        tiers = [Tier(pool=cold, keep_last=3)]
        with PoolAccelerate(
            run.accelerator, pool, "run", keep_last=1, root=directory, tiers=tiers
        ) as hp:
            if first == "pool":
                for name in ("s1", "s2"):
                    run.step()
                    run.accelerator.save_state(str(directory / name))
                    hp.wait()
            else:
                assert [Path(name).name for name in hp.checkpoints.names()] == ["s1", "s2"]
                run.accelerator.load_state()
                assert run.counter.n == 2
            found = run.state()
    torch.save(found, directory / f"{first}-{world}-{rank}.pt")


def test_accelerates_shards_go_on_from_a_tier_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The first pool is gone: weights and moments of both ranks come from the tier, bit by bit."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    for name in ("cold", "fresh"):
        another_pool(tmp_path, name).close()
    launch(tmp_path, 2, looped, "pool")
    with hpstore.open(tmp_path / "cold.toml") as cold:
        assert StepCatalog(cold, "run/saves").all() == [0, 1]
    saved = torch.load(tmp_path / "pool-2-0.pt", weights_only=True)
    for world in (2, 1):
        launch(tmp_path, world, looped, "fresh")
        for rank in range(world):
            found = torch.load(tmp_path / f"fresh-{world}-{rank}.pt", weights_only=True)
            assert same(found["model"], saved["model"])
            assert same(found["optimizer"]["state"], saved["optimizer"]["state"])


def trained(rank: int, world: int, directory: Path, first: str) -> None:
    """A sharded Trainer of six steps, from the newest checkpoint in either pool."""
    join_job(rank, world)
    shard_on_the_cpu()
    import transformers

    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface import losses, rows, tiny
    from tests.trainers.test_huggingface_ranks import arguments
    from tests.trainers.test_huggingface_shards import FSDP2, state_of

    args = arguments(directory, 6, **FSDP2)
    transformers.set_seed(11)
    with two_pools(directory, first) as (pool, cold):
        tiers = [Tier(pool=cold, keep_last=3)]
        with PoolTrainerCallback(pool, "run", every=2, keep_last=1, tiers=tiers) as callback:
            run: Any = transformers.Trainer(
                model=tiny(), args=args, train_dataset=rows(), callbacks=[callback]
            )
            folder = callback.resume_folder(directory / "scratch")
            run.train(resume_from_checkpoint=folder)
            assert callback.checkpoints.tiers.wait(PATIENCE)
    found = {**state_of(run.model, run.optimizer), "losses": losses(run), "folder": folder or ""}
    torch.save(found, directory / f"{first}-{rank}.pt")


def test_a_sharded_trainer_goes_on_from_a_tier_bit_by_bit(tmp_path: Path) -> None:
    """The first pool is lost after step 4 of 6; the same losses and weights as never stopped."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    for name in ("cold", "fresh"):
        another_pool(tmp_path, name).close()
    launch(tmp_path, 2, trained, "pool")
    with hpstore.open(tmp_path / "cold.toml") as cold:
        catalog = StepCatalog(cold, "run")
        assert catalog.all()[-1] == 6
        catalog.delete(6)  # the same run, cut at step 4: the later checkpoint never came to be
    launch(tmp_path, 2, trained, "fresh")
    for rank in range(2):
        straight, cut = (
            torch.load(tmp_path / f"{first}-{rank}.pt", weights_only=True)
            for first in ("pool", "fresh")
        )
        assert "resume-4-" in cut["folder"]
        assert cut["losses"][-2:] == straight["losses"][-2:]
        assert same(cut["model"], straight["model"])
        assert same(cut["optimizer"]["state"], straight["optimizer"]["state"])
