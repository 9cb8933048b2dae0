"""Trainers' adapters over two pools: copied by name, resumed when the first pool is gone."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, Tier
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.errors import CheckpointError, ConfigError, TooFewDevices
from hpstore.pool.pool import Pool
from hpstore.trainers.named_checkpoints import NamedCheckpoints
from hpstore.trainers.tier_names import leads_job
from tests.integration.ranks import make_pool
from tests.trainers.test_several_processes import join_job, launch

PATIENCE = 60.0


def another_pool(directory: Path, name: str) -> Pool:
    """2+1 on three devices."""
    devices = [directory / f"{name}{number}" for number in range(3)]
    return hpstore.create(devices, data=2, parity=1, config=directory / f"{name}.toml")


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Pool]:
    """The pool behind the first one."""
    with another_pool(tmp_path, "cold") as pool:
        yield pool


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Pool]:
    """A new, empty first pool, of a machine that has never seen the run."""
    with another_pool(tmp_path, "fresh") as pool:
        yield pool


def state(number: int) -> dict[str, Any]:
    return {"n": number, "t": torch.full((100,), float(number))}


def save(named: NamedCheckpoints, name: str, number: int) -> None:
    """And wait until it is copied."""
    named.save(name, state(number))
    named.wait()
    assert named._checkpoints.tiers.wait(PATIENCE)


def numbers_in(pool: Pool) -> list[int]:
    return StepCatalog(pool, "run/saves").all()


def test_names_are_found_in_a_tier_when_the_first_pool_is_gone(
    pool: Pool, cold: Pool, fresh: Pool
) -> None:
    """Each by what it meant last, the newest first; numbers go on, so nothing is replaced."""
    tiers = [Tier(pool=cold)]
    with NamedCheckpoints(pool, "run", tiers=tiers) as named:
        for number, name in enumerate(("a", "b", "a", "c")):
            save(named, name, number)
    with NamedCheckpoints(fresh, "run", tiers=tiers) as named:
        assert named.names() == ["b", "a", "c"]
        assert named.latest() == "c"
        assert [named.load(name)["n"] for name in "abc"] == [2, 1, 3]
        save(named, "d", 9)
        assert named.names() == ["b", "a", "c", "d"]
        assert numbers_in(fresh) == [4]
        assert numbers_in(cold) == [0, 1, 2, 3, 4]
        with pytest.raises(CheckpointError, match=r"no checkpoint 'e' under 'run'; the newest are"):
            named.load("e")


def test_what_leaves_the_first_pool_stays_in_the_tier_by_its_own_rule(
    pool: Pool, cold: Pool
) -> None:
    """keep_last and removals here, keep_last=4 there; loaded by the same names."""
    with NamedCheckpoints(pool, "run", keep_last=2, tiers=[Tier(pool=cold, keep_last=4)]) as named:
        for number in range(6):
            save(named, f"s{number}", number)
        named.remove("s4")
        named.wait()
        assert numbers_in(pool) == [5]
        assert numbers_in(cold) == [2, 3, 4, 5]
        assert named.names() == ["s2", "s3", "s4", "s5"]
        assert named.load("s3")["n"] == 3
    assert [key for key in pool.list("run/") if "doubtful" in key] == [f"run/doubtful/{5:012d}"]


def test_a_number_is_not_given_again_while_a_tier_cannot_be_listed(
    pool: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest left the first pool: else its copy would be replaced by the next save's."""
    tiers = [Tier(pool=cold)]
    with NamedCheckpoints(pool, "run", tiers=tiers) as named:
        save(named, "a", 1)
        save(named, "b", 2)
        named.remove("b")
        named.wait()
        assert numbers_in(pool) == [0]
    listed = StepCatalog.all

    def away(catalog: StepCatalog) -> list[int]:
        if catalog.pool is cold:
            raise TooFewDevices("away")
        return listed(catalog)

    with NamedCheckpoints(pool, "run", tiers=tiers) as named:
        monkeypatch.setattr(StepCatalog, "all", away)
        named.save("c", state(3))
        named.wait()
        monkeypatch.undo()
        save(named, "d", 4)
        assert numbers_in(pool) == [0, 2, 3]
        assert named.load("b")["n"] == 2


def test_a_checkpoint_that_is_removed_before_its_copy_stays_until_then(
    pool: Pool, cold: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tier would lack the steps that it is for."""
    named = NamedCheckpoints(pool, "run", tiers=[Tier(pool=cold)])
    named.save("a", state(0))
    named.wait()
    copies = named._checkpoints.saver.tiers
    assert named._checkpoints.tiers.wait(PATIENCE)
    cold.delete(manifest_key("run/saves", 0))  # as if the copy had only begun
    monkeypatch.setattr(copies, "held", lambda: {"copy 0 to cold": 0})
    named.remove("a")
    named.wait()
    assert numbers_in(pool) == [0]
    monkeypatch.undo()
    named.close()
    assert numbers_in(pool) == []


def test_a_damaged_checkpoint_comes_from_the_tier(pool: Pool, cold: Pool) -> None:
    """Of the same name, not an older one."""
    with NamedCheckpoints(pool, "run", tiers=[Tier(pool=cold)]) as named:
        save(named, "a", 1)
        key = manifest_key("run/saves", 0)
        data = bytearray(pool.get(key))
        data[len(data) // 2] ^= 1
        pool.put(key, bytes(data))
        assert named.load("a")["n"] == 1


def test_a_process_that_only_loads_copies_nothing(pool: Pool, cold: Pool) -> None:
    """Each rank of a job opens the adapter: the first alone brings the tier up to date."""
    with NamedCheckpoints(pool, "run") as named:
        named.save("a", state(1))
    with NamedCheckpoints(pool, "run", tiers=[Tier(pool=cold, copies=False)]) as named:
        assert named.load("a")["n"] == 1
    assert numbers_in(cold) == []
    with NamedCheckpoints(pool, "run", tiers=[Tier(pool=cold)]):
        pass
    assert numbers_in(cold) == [0]


@pytest.mark.parametrize(
    ("said", "leads"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "3"}, True),
        ({"RANK": "2"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "5"}, False),
        ({"RANK": "x"}, True),
    ],
)
def test_the_first_of_a_job_is_known_before_its_group(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], leads: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert leads_job() is leads


def test_a_tier_that_keeps_by_a_metric_is_refused(pool: Pool, cold: Pool) -> None:
    """No adapter records one: the rule would keep nothing, and say nothing."""
    with pytest.raises(ConfigError, match=r"keep_best=.*record none: use keep_last="):
        NamedCheckpoints(pool, "run", tiers=[Tier(pool=cold, keep_last=1, keep_best="min:loss")])
    with pytest.raises(ConfigError, match=r"takes Tier\(pool=...\), not a Pool"):
        NamedCheckpoints(pool, "run", tiers=[cold])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="copies is 1, not True or False"):
        Tier(pool=cold, copies=1)  # type: ignore[arg-type]


def test_lightnings_io_resumes_from_a_tier_without_markers(
    pool: Pool, cold: Pool, fresh: Pool, tmp_path: Path
) -> None:
    """And a pickled one opens the tier again, by itself."""
    pytest.importorskip("lightning.pytorch")
    from hpstore.trainers.lightning import PoolCheckpointIO

    place = str(tmp_path / "ck" / "epoch=1.ckpt")
    io = PoolCheckpointIO(pool, "run", root=tmp_path, tiers=[Tier(pool=cold)])
    io.save_checkpoint({"n": 1, "w": torch.ones(4)}, place)
    io.close()
    shutil.rmtree(tmp_path / "ck")
    io = PoolCheckpointIO(fresh, "run", root=tmp_path, tiers=[Tier(pool=cold)])
    for one in (io, pickle.loads(pickle.dumps(io))):
        assert one.latest() == place
        assert torch.equal(one.load_checkpoint(place)["w"], torch.ones(4))
        one.close()
    assert cold.list("run/")  # still open


def test_ignites_handler_resumes_from_a_tier(pool: Pool, cold: Pool, fresh: Pool) -> None:
    pytest.importorskip("ignite")
    from hpstore.trainers.ignite import PoolSaveHandler

    with PoolSaveHandler(pool, "run", tiers=[Tier(pool=cold)]) as handler:
        handler({"w": torch.ones(3)}, "model_1.pt")
    with PoolSaveHandler(fresh, "run", tiers=[Tier(pool=cold)]) as handler:
        assert handler.latest() == "model_1.pt"
        assert torch.equal(handler.load()["w"], torch.ones(3))


# --- with the real packages -------------------------------------------------------------------


def accelerated(rank: int, world: int, directory: Path, first: str) -> None:
    """Save with Accelerate on each rank, or go on from the tier where the pool is new."""
    join_job(rank, world)
    import accelerate

    from hpstore.trainers.accelerate_states import PoolAccelerate

    torch.manual_seed(rank)
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(directory))
    net = torch.nn.Linear(3, 2)
    net, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    with (
        hpstore.open(directory / f"{first}.toml") as pool,
        hpstore.open(directory / "cold.toml") as cold,
        PoolAccelerate(accelerator, pool, "run", root=directory, tiers=[Tier(pool=cold)]) as states,
    ):
        if first == "pool":
            accelerator.save_state(str(directory / "s1"))
        else:
            for parameter in net.parameters():
                torch.nn.init.zeros_(parameter)
            accelerator.load_state()
            assert states.latest() == str(directory / "s1")
        found = {name: value.clone() for name, value in net.state_dict().items()}
    torch.save(found, directory / f"{first}-{rank}.pt")


def test_accelerate_on_two_ranks_goes_on_from_a_tier(tmp_path: Path) -> None:
    """Rank 0 alone copies, every rank loads."""
    pytest.importorskip("accelerate")
    make_pool(tmp_path)
    for name in ("cold", "fresh"):
        another_pool(tmp_path, name).close()
    launch(tmp_path, 2, accelerated, "pool")
    launch(tmp_path, 2, accelerated, "fresh")
    for rank in range(2):
        before, after = (
            torch.load(tmp_path / f"{first}-{rank}.pt", weights_only=True)
            for first in ("pool", "fresh")
        )
        assert all(torch.equal(before[name], after[name]) for name in before)


def trained(pool: Pool, cold: Pool, directory: Path) -> tuple[Any, str | None]:
    """A Trainer of six steps, from the newest checkpoint in either pool."""
    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface import trainer

    tiers = [Tier(pool=cold, keep_last=3)]
    with PoolTrainerCallback(pool, "run", every=2, keep_last=1, tiers=tiers) as callback:
        run = trainer(directory, callback, 6, save_strategy="no")
        folder = callback.resume_folder(directory / "scratch")
        run.train(resume_from_checkpoint=folder)
        assert callback.checkpoints.tiers.wait(PATIENCE)
    return run, folder


@pytest.mark.usefixtures("one_process")
def test_a_trainer_goes_on_from_a_tier_bit_by_bit(
    pool: Pool, cold: Pool, fresh: Pool, tmp_path: Path
) -> None:
    """The first pool is lost after step 4 of 6; the same losses and weights as never stopped."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.trainers.test_huggingface import losses, same

    straight, _ = trained(pool, cold, tmp_path / "straight")
    catalog = StepCatalog(cold, "run")
    assert catalog.all()[-1] == 6
    catalog.delete(6)  # the same run, cut at step 4: the later checkpoint never came to be
    run, folder = trained(fresh, cold, tmp_path / "cut")
    assert folder is not None
    assert "resume-4-" in folder
    assert losses(run)[-2:] == losses(straight)[-2:]
    assert same(run.model.state_dict(), straight.model.state_dict())
    with Checkpointer(fresh, "run", rng=False, tiers=[Tier(pool=cold)]) as ckpt:
        assert ckpt.steps()[-2:] == [4, 6]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a launcher has left in the environment."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
