"""Hugging Face Accelerate: python examples/trainers/accelerate_loop.py pool.toml."""

from __future__ import annotations

import parts
import torch
from accelerate import Accelerator

import hpstore
from hpstore.loaders import DataLoader
from hpstore.trainers import PoolAccelerate, PoolLoader


def main() -> None:
    """Train from the newest state to the last step."""
    options = parts.options(__doc__)
    accelerator = Accelerator(cpu=True)
    with hpstore.open(options.pool) as pool:
        net = parts.net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader = PoolLoader(
            accelerator, DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)
        )
        with PoolAccelerate(accelerator, pool, "runs/accelerate", keep_last=2) as states:
            newest = states.latest()
            if newest is not None:
                accelerator.load_state(newest)
            step = int(newest.rpartition("-")[2]) if newest is not None else 0
            while step < options.steps:
                for batch in loader:
                    optimizer.zero_grad()
                    accelerator.backward(parts.loss(model, batch))
                    optimizer.step()
                    step += 1
                    if step % options.every == 0:
                        accelerator.save_state(f"states/step-{step}")
                    if step == options.steps:
                        break
        parts.show(step, net.state_dict())
        loader.close()


if __name__ == "__main__":
    main()
