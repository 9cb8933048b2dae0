"""torchrun with DistributedDataParallel.

torchrun --standalone --nproc-per-node 2 examples/trainers/ddp.py pool.toml
"""

from __future__ import annotations

import parts
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    dist.init_process_group("gloo")
    with hpstore.open(options.pool) as pool, Checkpointer(pool, "runs/ddp", keep_last=2) as ckpt:
        model = DistributedDataParallel(parts.net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = ckpt.restore(state) or 0
        while step < options.steps:
            for batch in loader:
                optimizer.zero_grad()
                parts.loss(model, batch).backward()
                optimizer.step()
                step += 1
                if step % options.every == 0:
                    ckpt.save(step, state)
                if step == options.steps:
                    break
        ckpt.wait()
        if dist.get_rank() == 0:
            parts.show(step, model.module.state_dict())
        loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
