"""Lightning Fabric: python examples/trainers/fabric_loop.py pool.toml."""

from __future__ import annotations

from typing import Any

import parts
import torch
from lightning.fabric import Fabric

import hpstore
from hpstore.loaders import DataLoader
from hpstore.trainers import PoolCheckpointIO


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    with hpstore.open(options.pool) as pool:
        io = PoolCheckpointIO(pool, "runs/fabric")
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
        net = parts.net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader = DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "loader": {}}
        newest = io.latest()
        if newest is not None:
            fabric.load(newest, state)
            loader.load_state_dict(state["loader"])
        while state["step"] < options.steps:
            for batch in loader:
                optimizer.zero_grad()
                fabric.backward(parts.loss(model, batch))
                optimizer.step()
                state["step"] += 1
                if state["step"] % options.every == 0:
                    state["loader"] = loader.state_dict()
                    fabric.save(f"fabric/step-{state['step']}.ckpt", state)
                if state["step"] == options.steps:
                    break
        io.teardown()
        parts.show(state["step"], net.state_dict())
        loader.close()


if __name__ == "__main__":
    main()
