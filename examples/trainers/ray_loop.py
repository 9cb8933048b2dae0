"""Ray Train, its storage in a pool: python examples/trainers/ray_loop.py pool.toml."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import parts
import pyarrow.fs
import ray.train
import torch
from ray.train.torch import TorchTrainer

import hpstore
from hpstore.interop import PoolFileSystem
from hpstore.loaders import DataLoader


def train(config: dict[str, Any]) -> None:
    """In each worker: from the newest checkpoint to the last step."""
    with hpstore.open(config["pool"]) as pool:
        model = ray.train.torch.prepare_model(parts.net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)
        step = 0
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                state = torch.load(Path(folder, "state.pt"))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            step = state["step"]
        while step < config["steps"]:
            for batch in loader:
                optimizer.zero_grad()
                parts.loss(model, batch).backward()
                optimizer.step()
                step += 1
                if step % config["every"] == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    report({**state, "loader": loader.state_dict(), "step": step})
                if step == config["steps"]:
                    break
        loader.close()


def report(state: dict[str, Any]) -> None:
    """Rank 0's state as a checkpoint; Ray moves the folder into the pool before it returns."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": state["step"]}, checkpoint=checkpoint)


def main() -> None:
    """Start the workers; a run of the same name goes on where it was."""
    options = parts.options(__doc__)
    pool = os.path.abspath(options.pool)
    handler = pyarrow.fs.FSSpecHandler(PoolFileSystem(pool=pool))
    run = ray.train.RunConfig(
        name="toy",
        storage_path="runs/ray",
        storage_filesystem=pyarrow.fs.PyFileSystem(handler),
        checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    )
    scaling = ray.train.ScalingConfig(num_workers=options.workers)
    config = {"pool": pool, "steps": options.steps, "every": options.every}
    result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run)
    with result.fit().checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"))
    parts.show(state["step"], state["model"])


if __name__ == "__main__":
    main()
