"""Lightning's Trainer: python examples/trainers/lightning_loop.py pool.toml."""

from __future__ import annotations

import lightning.pytorch as pl
import parts
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import hpstore
from hpstore.loaders import DataLoader
from hpstore.trainers import PoolCheckpointIO


class Net(pl.LightningModule):
    """The shared net as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.net()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Of one batch."""
        return parts.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Its moments are in the checkpoint."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    with hpstore.open(options.pool) as pool:
        io = PoolCheckpointIO(pool, "runs/lightning")
        loader = DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)
        model = Net()
        trainer = pl.Trainer(
            max_steps=options.steps,
            plugins=[io],
            callbacks=[
                ModelCheckpoint(
                    "checkpoints",
                    every_n_train_steps=options.every,
                    save_top_k=2,
                    monitor="step",
                    mode="max",
                )
            ],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader, ckpt_path=io.latest())
        io.teardown()
        parts.show(trainer.global_step, model.net.state_dict())
        loader.close()


if __name__ == "__main__":
    main()
