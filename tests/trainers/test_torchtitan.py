"""torchtitan's CheckpointManager over a pool: by configuration, by our writer, and imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, export_checkpoint, import_checkpoint
from hpstore.checkpoint.dcp.dcp_metadata import manifest_at
from hpstore.errors import ConfigError
from hpstore.interop import PoolFileSystem
from tests.integration.ranks import launch, make_pool, open_pool

pytest.importorskip("torchtitan.components.optimizer", reason="torchtitan is not installed")
cases: Any = pytest.importorskip("tests.trainers.titan_cases")

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of torch's schedulers, and others
    pytest.mark.timeout(300),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL in a pool of a name, in a process group of one rank."""
    toml = make_pool(tmp_path)
    (tmp_path / "names.toml").write_text(f'titan = "{toml}"\n')
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield "hpstore://titan/runs/x"
    dist.destroy_process_group()
    PoolFileSystem.mounts.close()
    PoolFileSystem.clear_instance_cache()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_training_goes_on_from_a_url(folder: str, native: bool, async_mode: str) -> None:
    """Saved at each step, two are kept; one that resumes at step 3 ends as one never stopped."""
    options = {"native": native, "async_mode": async_mode, "keep_latest_k": 2}
    first = cases.Training(folder, seed=1, **options)
    assert first.manager.load() is False
    first.steps(3)
    second = cases.Training(folder, seed=2, **options)
    assert second.manager.load()
    cases.require_same(second.facts(), first.facts())
    first.steps(2)
    third = cases.Training(f"{folder}-b", seed=3, **options)
    third.manager.initial_load_path = f"{folder}/step-5"
    third.manager.initial_load_model_only = False
    third.manager.load()
    second.steps(2)
    cases.require_same(second.facts(), first.facts())
    cases.require_same(third.facts(), first.facts())
    for training in (first, second, third):
        training.manager.close()
    left = PoolFileSystem().ls(folder, detail=False)
    assert left == ["titan/runs/x/step-4", "titan/runs/x/step-5"]
    stored = PoolFileSystem().resolved(f"{folder}/step-5")
    assert stored.mount.pool.exists(manifest_at(stored.key)) is native


def test_our_manager_loads_what_torchtitans_own_has_saved(folder: str) -> None:
    """The configuration may be changed in the middle of a run."""
    first = cases.Training(folder, seed=1)
    first.steps(2)
    second = cases.Training(folder, seed=2, native=True)
    assert second.manager.load()
    cases.require_same(second.facts(), first.facts())
    second.steps(1)
    third = cases.Training(folder, seed=3, native=True)
    assert third.manager.load()
    cases.require_same(third.facts(), second.facts())


def test_our_manager_wants_a_pool(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match="hpstore://NAME/path"):
        cases.Training(str(tmp_path / "here"), seed=1, native=True)


@pytest.mark.parametrize("where", ["folder", "url", "native"])
def test_a_checkpoint_is_imported_into_an_optimizer_and_exported_back(
    folder: str, tmp_path: Path, where: str
) -> None:
    """Without running its code; moments and options reach a plain AdamW, and the way back loads."""
    at = folder if where != "folder" else str(tmp_path / "steps")
    first = cases.Training(at, seed=1, native=where == "native")
    first.steps(3)
    with open_pool(tmp_path) as pool:
        import_checkpoint(pool, "new", 3, f"{at}/step-3", layout="torchtitan", format="dcp")
        model = cases.Net(seed=9)
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        optimizer = torch.optim.AdamW([{"params": biases}, {"params": others}], lr=0.7)
        state = {"model": model, "optimizer": optimizer, "train_state": {"step": torch.tensor(0)}}
        with Checkpointer(pool, "new", rng=False) as ckpt:
            assert ckpt.restore(state, strict=False) == 3
        facts = first.facts()
        cases.require_same(dict(model.state_dict()), facts["model"])
        assert [group["lr"] for group in optimizer.param_groups] == [
            facts["optimizer"]["param_groups.layers.0.bias.lr"],
            facts["optimizer"]["param_groups.layers.0.weight.lr"],
        ]
        for name, parameter in model.named_parameters():
            for slot, value in optimizer.state[parameter].items():
                assert torch.equal(value, facts["optimizer"][f"state.{name}.{slot}"])
        back = tmp_path / "back" / "step-3"
        back.parent.mkdir()
        export_checkpoint(pool, "new", 3, back, format="dcp", layout="torchtitan")
    second = cases.Training(str(tmp_path / "back"), seed=2)
    assert second.manager.load()
    cases.require_same(second.facts(), facts)
    first.steps(1)
    second.steps(1)
    cases.require_same(second.facts(), first.facts())


def test_a_step_of_ours_is_exported_for_torchtitan(folder: str, tmp_path: Path) -> None:
    """A run of a Checkpointer with plain torch goes on in torchtitan."""
    model = cases.Net(seed=4)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups = [{"params": biases, "lr": 0.1}, {"params": others, "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups, foreach=False, fused=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    for _ in range(2):
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
        schedule.step()
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
    with open_pool(tmp_path) as pool:
        with Checkpointer(pool, "ours") as ckpt:
            ckpt.save(2, {**state, "train_state": {"step": torch.tensor(2)}}).result()
        export_checkpoint(pool, "ours", 2, tmp_path / "step-2", format="dcp", layout="torchtitan")
    # no loader was in that run's state
    training = cases.Training(str(tmp_path), seed=5, exclude_from_loading=["dataloader"])
    assert training.manager.load()
    facts = training.facts()
    assert facts["step"] == 2
    cases.require_same(facts["model"], dict(model.state_dict()))
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(value, facts["optimizer"][f"state.{name}.{slot}"])


def ranks_save(rank: int, world: int, directory: Path, native: bool) -> None:
    """Rank's part of a job that saves three steps and loads them."""
    os.environ["HPSTORE_POOLS"] = str(directory / "names.toml")
    at = f"hpstore://titan/runs/{native}"
    first = cases.Training(at, seed=1, native=native)
    first.steps(3)
    second = cases.Training(at, seed=2, native=native)
    assert second.manager.load()
    cases.require_same(second.facts(), first.facts())
    facts = first.facts()
    if rank == 0:
        torch.save(facts, directory / f"facts-{native}.pt")


@pytest.mark.parametrize("native", [False, True])
def test_two_ranks_save_and_one_goes_on(tmp_path: Path, native: bool, folder: str) -> None:
    """FSDP2 on two ranks by URL; one rank loads the same, and so does an import."""
    launch(tmp_path, 2, ranks_save, native)
    facts = torch.load(tmp_path / f"facts-{native}.pt")
    alone = cases.Training(f"hpstore://titan/runs/{native}", seed=3, native=native)
    assert alone.manager.load()
    cases.require_same(alone.facts(), facts)
    with open_pool(tmp_path) as pool:
        url = f"hpstore://titan/runs/{native}/step-3"
        import_checkpoint(pool, "new", 3, url, layout="torchtitan")
        model = cases.Net(seed=9)
        with Checkpointer(pool, "new", rng=False) as ckpt:
            ckpt.restore({"model": model}, strict=False)
    cases.require_same(dict(model.state_dict()), facts["model"])
