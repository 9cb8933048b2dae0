"""hpstore's DataLoader under the real Lightning, alone and with two ranks over gloo."""

from __future__ import annotations

import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.loaders import DataLoader, Dataset, GpuTransfer, LoaderMemory
from tests.integration.loader_cases import PLAIN, flat, labels, write
from tests.integration.ranks import launch, make_pool, open_pool
from tests.thorough import LONG

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

pytestmark = [
    # two cores: Lightning wishes for more workers and for a GPU that may be there
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    # Lightning 2.6 still uses what torch 2.13 has renamed
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # its advice on evaluating with several ranks is not about our shares
    pytest.mark.filterwarnings("ignore:.*recommended to use `Trainer.devices=1.*"),
    pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`.*"),
    pytest.mark.filterwarnings("ignore:.*custom batch sampler.*for prediction"),
]
COUNT = 46
MEMORY = LoaderMemory(prefetch_bytes="2MiB", window_bytes="1MiB")
OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 2}


class Seen(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Notes the labels of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.trained: list[tuple[int, list[int]]] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.trained.append((self.current_epoch, labels(batch)))
        loss: torch.Tensor = self.net(batch["label"][:, None].float()).mean()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated += labels(batch)

    def predict_step(self, batch: Any, index: int) -> list[int]:
        return labels(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_pool(tmp_path)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        write(pool, "a", PLAIN, COUNT)
    return tmp_path


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **{"devices": 1, "max_epochs": 3, **options},
    )


def expected(data: Dataset, epochs: int, **place: int) -> list[tuple[int, list[int]]]:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, **OPTIONS, **place}
    loader = DataLoader(data, **options)
    return [(epoch, labels(batch)) for epoch in range(epochs) for batch in loader]


def run_and_resume(data: Dataset, folder: Path, loaders: Any, **options: Any) -> None:
    """A fit; a fit that is cut in mid-epoch by its checkpoint; one that goes on from that."""
    place = options.pop("place", {"rank": 0, "world_size": 1})
    wanted = expected(data, 3, **place)
    whole = Seen()
    trainer(folder / "whole", enable_checkpointing=False, **options).fit(whole, loaders())
    assert whole.trained == wanted
    per_epoch = len(wanted) // 3
    cut = per_epoch + per_epoch // 2
    saving = ModelCheckpoint(folder / "saved", every_n_train_steps=cut, save_top_k=-1)
    first = Seen()
    trainer(folder / "cut", saving, max_steps=cut, **options).fit(first, loaders())
    assert first.trained == wanted[:cut]
    second = Seen()
    trainer(folder / "cut", enable_checkpointing=False, **options).fit(
        second, loaders(), ckpt_path=saving.best_model_path, weights_only=False
    )
    assert second.trained == wanted[cut:]


def test_a_fit_resumed_in_mid_epoch_sees_every_sample_once(directory: Path) -> None:
    """Our order, our epochs; Lightning keeps the loader's state in its checkpoint."""
    with open_pool(directory) as pool:
        data = Dataset(pool, "a")
        run_and_resume(data, directory, lambda: DataLoader(data, **OPTIONS))


def test_prediction_rebuilds_the_loader_and_loses_nothing(directory: Path) -> None:
    """For predict() Lightning makes a loader of the same class from public attributes."""
    with open_pool(directory) as pool:
        data = Dataset(pool, "a")
        loader = DataLoader(data, 4, num_workers=1, cache=0, memory=MEMORY)
        found = trainer(directory, enable_checkpointing=False).predict(Seen(), loader)
        assert [label for batch in found for label in batch] == list(range(COUNT))
        loader.close()


def two_ranks(rank: int, world: int, directory: Path, early: bool) -> None:
    """One process of a fit with DDP."""
    os.environ.update(
        NODE_RANK="0",
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29512",
    )
    warnings.simplefilter("ignore")
    with open_pool(directory) as pool:
        data = Dataset(pool, "a")
        folder = directory / f"rank-{rank if early else rank + 2}"
        if early:
            torch.distributed.destroy_process_group()
        run_and_resume(
            data,
            directory / f"both-{early}",
            lambda: DataLoader(data, **OPTIONS),
            devices=world,
            strategy="ddp",
            place={"rank": rank, "world_size": world},
        )
        module = Seen()

        def evaluation() -> DataLoader:
            return DataLoader(data, 4, tail="uneven")

        options = {"devices": world, "strategy": "ddp", "enable_checkpointing": False}
        trainer(folder, **options).validate(module, evaluation(), verbose=False)
        (directory / f"validated-{rank}").write_text(json.dumps(module.validated))
        found = trainer(folder, **options).predict(Seen(), evaluation())
        predicted = [label for batch in found for label in batch]
        (directory / f"predicted-{rank}").write_text(json.dumps(predicted))


@pytest.mark.parametrize("early", [True, *([False] if LONG else [])])
def test_two_ranks_share_each_epoch_and_resume(directory: Path, early: bool) -> None:
    """DDP over gloo: sharded once and by us, shuffled by us, also when the loader is made before
    the process group; validate and predict have every sample once."""
    launch(directory, 2, two_ranks, early, imports=("lightning.pytorch", __name__))
    for what in ("validated", "predicted"):
        found = [json.loads((directory / f"{what}-{rank}").read_text()) for rank in range(2)]
        assert sorted(found[0] + found[1]) == list(range(COUNT))


def test_rebuilding_from_public_attributes_gives_the_same_loader(directory: Path) -> None:
    """Constructor arguments are attributes of the same names."""
    with open_pool(directory) as pool:
        data = Dataset(pool, "a")
        given: dict[str, Any] = {
            "shuffle": "window",
            "num_workers": 2,
            "drop_last": True,
            "prefetch_factor": 3,
            "seed": 7,
            "cache": 0,
            "memory": MEMORY,
            "gpu": GpuTransfer(arena_bytes="1MiB"),
            "rank": 1,
            "world_size": 2,
            "tail": "drop",
            "on_error": "skip",
            "batch_size": 3,
        }
        loader = DataLoader(data, **given)
        names = inspect.signature(DataLoader.__init__).parameters.keys() - {"self"}
        kept = {name: getattr(loader, name) for name in names}
        assert {name: kept[name] for name in given} == given
        assert kept["collate_fn"] is None
        del kept["sampler"], kept["batch_sampler"]
        again = DataLoader(**kept)
        assert again.state_dict() == loader.state_dict()
        assert flat(again) == flat(loader)
        again.close()
        loader.close()
