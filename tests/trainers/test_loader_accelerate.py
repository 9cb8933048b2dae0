"""hpstore's DataLoader under the real Accelerate, alone and with two ranks over gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.errors import CheckpointError, ConfigError
from hpstore.loaders import DataLoader, Dataset
from tests.integration.loader_cases import PLAIN, flat, labels, write
from tests.integration.ranks import make_pool, open_pool
from tests.trainers.test_several_processes import launch

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from hpstore.trainers.accelerate_states import PoolAccelerate, PoolLoader  # noqa: E402

COUNT = 46
OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 2}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_pool(tmp_path)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        write(pool, "a", PLAIN, COUNT)
    return tmp_path


def accelerator(**options: Any) -> Any:
    """Accelerate keeps one state for the process: each test begins with a fresh one."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


def test_prepare_gives_the_loader_back(directory: Path) -> None:
    """Untouched: our order, our state; and the adapter counts as prepared as well."""
    with open_pool(directory) as pool:
        made = accelerator()
        loader = DataLoader(Dataset(pool, "a"), **OPTIONS)
        assert made.prepare(loader) is loader
        adapter = PoolLoader(made, loader)
        assert made.prepare(adapter) is adapter
        assert len(adapter) == len(loader) == 12
        assert adapter.state_dict() == loader.state_dict()
        assert adapter.batch_size == 4
        with pytest.raises(AttributeError):
            adapter.nothing_of_the_kind  # noqa: B018
        loader.close()


def test_accumulation_steps_at_the_end_of_an_epoch(directory: Path) -> None:
    """12 batches, a step each 5: after batch 5, 10 and the last one; for every epoch."""
    with open_pool(directory) as pool:
        made = accelerator(gradient_accumulation_steps=5)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = made.prepare(model, optimizer)
        loader = PoolLoader(made, DataLoader(Dataset(pool, "a"), **OPTIONS))
        for _ in range(2):
            steps = []
            for number, batch in enumerate(loader):
                with made.accumulate(model):
                    loss = model(batch["label"][:, None].float()).mean()
                    made.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    if made.sync_gradients:
                        steps.append(number)
            assert steps == [4, 9, 11]
            assert not made.gradient_state.in_dataloader
        for batch in loader:
            del batch
            break
        assert not made.gradient_state.in_dataloader
        loader.close()


def saved_and_loaded(made: Any, folder: str, data: Dataset) -> None:
    """save_state() in mid-epoch, load_state() with fresh things: the rest of the epoch."""
    made._dataloaders.clear()
    loader = PoolLoader(made, made.prepare(DataLoader(data, **OPTIONS)))
    assert made._dataloaders == [loader]
    run = iter(loader)
    next(run)
    next(run)
    made.save_state(folder)
    made.wait_for_everyone()  # accelerate writes a loader's state on every rank, to the same file
    rest = [label for batch in run for label in labels(batch)]
    made._dataloaders.clear()
    again = PoolLoader(made, DataLoader(data, **OPTIONS))
    made.load_state(folder)
    assert again.standing() == (0, 8 * made.num_processes)
    assert flat(again) == rest
    assert rest
    again.close()
    loader.close()
    made._dataloaders.clear()


@pytest.mark.parametrize("ours", [False, True], ids=["save_state", "PoolAccelerate"])
def test_states_are_saved_with_the_rest(directory: Path, ours: bool) -> None:
    """By accelerate itself and by PoolAccelerate."""
    with open_pool(directory) as pool:
        made = accelerator()
        if ours:
            with PoolAccelerate(made, pool, "runs/x"):
                saved_and_loaded(made, "one", Dataset(pool, "a"))
        else:
            saved_and_loaded(made, str(directory / "state"), Dataset(pool, "a"))


def gathered(made: Any, loader: DataLoader) -> list[int]:
    """What gather_for_metrics() gives of an epoch."""
    found: list[int] = []
    for batch in PoolLoader(made, loader):
        found += made.gather_for_metrics(batch["label"]).tolist()
    return found


def two_ranks(rank: int, world: int, directory: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29511",
    )
    with open_pool(directory) as pool:
        data = Dataset(pool, "a")
        early = DataLoader(data, **OPTIONS)
        made = accelerate.Accelerator(cpu=True)
        assert made.num_processes == world
        wanted = flat(DataLoader(data, 8, shuffle=True, seed=2, rank=0, world_size=1))
        assert gathered(made, early) == wanted, "both ranks' rows in order, none twice"
        odd = torch.utils.data.Subset(data, range(41))
        assert gathered(made, DataLoader(odd, 4)) == list(range(41))
        assert gathered(made, DataLoader(odd, 4, tail="drop")) == list(range(40))
        saved_and_loaded(made, str(directory / "state"), data)


def test_two_ranks_gather_every_sample_once(directory: Path) -> None:
    """Sharded by us alone; padded rows are dropped by gather_for_metrics, and no others where a
    rest that does not divide was left out; states at two ranks."""
    launch(directory, 2, two_ranks)


def accumulated(pool: Any, steps: int, folder: Path, load: bool) -> tuple[list[int], list[Any]]:
    """Labels of the rows and weights at each step of an accumulation over three micro-batches,
    saved after step 2 or resumed from there."""
    made = accelerator(gradient_accumulation_steps=3)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    model, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loader = PoolLoader(made, DataLoader(Dataset(pool, "a"), **OPTIONS))
    seen: list[int] = []
    weights: list[Any] = []
    done = 2 if load else 0
    with PoolAccelerate(made, pool, "runs/accumulated") as states:
        if load:
            made.load_state(states.latest())
        while done < steps:
            for batch in loader:
                seen += batch["label"].tolist()
                with made.accumulate(model):
                    made.backward(model(batch["label"][:, None].float()).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if not made.sync_gradients:
                    with pytest.raises(CheckpointError, match=r"if accelerator\.sync_gradients:"):
                        made.save_state("half")
                    continue
                done += 1
                weights.append(model.weight.detach().clone())
                if done == 2 and not load:
                    made.save_state(str(folder / "two"))
                if done == steps:
                    break
    loader.close()
    return seen, weights


def test_a_position_counts_micro_batches(directory: Path) -> None:
    """Resumed between two steps of an accumulation, the same rows and weights follow, over the end
    of the epoch; a save in the middle of one, whose gradients would be lost, is refused."""
    with open_pool(directory) as pool:
        seen, weights = accumulated(pool, 7, directory, load=False)
        again, found = accumulated(pool, 7, directory, load=True)
        assert again == seen[2 * 3 * 4 :]
        assert all(torch.equal(a, b) for a, b in zip(found, weights[2:], strict=True))


def splitting(rank: int, world: int, directory: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29512",
    )
    from accelerate.utils import DataLoaderConfiguration

    with open_pool(directory) as pool:
        made = accelerate.Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
        )
        loader = DataLoader(Dataset(pool, "a"), **OPTIONS)
        with pytest.raises(ConfigError, match=r"split_batches=True.*<rows of all> // 2"):
            PoolLoader(made, loader)
        loader.close()


def test_split_batches_are_refused_on_several_ranks(directory: Path) -> None:
    """batch_size would mean something else to each of the two."""
    launch(directory, 2, splitting)
