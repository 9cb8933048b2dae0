"""MONAI and timm: their savers' states by URL, and MONAI's loader from an open file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import torch_load, torch_save
from hpstore.interop import PoolFileSystem
from tests.integration.ranks import make_pool

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the objects of a pool of a name are."""
    (tmp_path / "names.toml").write_text(f'nets = "{make_pool(tmp_path)}"\n')
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    yield "hpstore://nets"
    PoolFileSystem.mounts.close()
    PoolFileSystem.clear_instance_cache()


def test_monais_trainer_saves_to_a_pool_and_its_loader_reads_it(url: str, tmp_path: Path) -> None:
    """Ignite's Checkpoint with our handler on MONAI's engine; CheckpointLoader takes a stream."""
    handlers: Any = pytest.importorskip("monai.handlers", reason="monai is not installed")
    engines: Any = pytest.importorskip("monai.engines")
    ignite: Any = pytest.importorskip("ignite.handlers")
    from ignite.engine import Events

    from hpstore.trainers import PoolSaveHandler

    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    rows = [{"image": torch.ones(2, 3), "label": torch.zeros(2, 1)} for _ in range(3)]
    with PoolSaveHandler(str(tmp_path / "pool.toml"), "runs/monai") as handler:
        trainer = engines.SupervisedTrainer(
            device=torch.device("cpu"),
            max_epochs=2,
            train_data_loader=rows,
            network=net,
            optimizer=optimizer,
            loss_function=torch.nn.MSELoss(),
        )
        saver = ignite.Checkpoint({"net": net, "optimizer": optimizer}, handler, n_saved=1)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
        trainer.run()
        handler.wait()
        fresh = torch.nn.Linear(3, 1)
        ignite.Checkpoint.load_objects({"net": fresh}, checkpoint=handler.load())
    assert torch.equal(fresh.weight, net.weight)
    torch_save({"net": net.state_dict()}, f"{url}/monai.pt")
    other = torch.nn.Linear(3, 1)
    with PoolFileSystem().open(f"{url}/monai.pt", "rb") as stream:
        handlers.CheckpointLoader(stream, {"net": other})(trainer)
    assert torch.equal(other.weight, net.weight)


def test_timms_saver_has_a_state_that_a_url_takes(url: str, tmp_path: Path) -> None:
    """What timm's CheckpointSaver wrote to a folder goes into the pool, and a model loads it."""
    try:
        import timm
        from timm.utils import CheckpointSaver
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch raises the latter
        pytest.skip(f"timm is not installed: {error}")
    net = timm.create_model("resnet10t", num_classes=3)
    optimizer = torch.optim.AdamW(net.parameters())
    saver = CheckpointSaver(
        net, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)
    )
    saver.save_checkpoint(epoch=1, metric=0.5)
    PoolFileSystem().put(str(tmp_path / "last.pth.tar"), f"{url}/last.pth.tar")
    saved = torch_load(f"{url}/last.pth.tar", weights_only=False)  # timm puts its arguments there
    assert (saved["epoch"], saved["arch"]) == (1, "resnet")
    torch_save({"epoch": 1, "state_dict": net.state_dict()}, f"{url}/plain.pth.tar")
    for name in ("last", "plain"):
        fresh = timm.create_model("resnet10t", num_classes=3)
        fresh.load_state_dict(torch_load(f"{url}/{name}.pth.tar", weights_only=False)["state_dict"])
        assert all(
            torch.equal(a, b) for a, b in zip(fresh.parameters(), net.parameters(), strict=True)
        )
