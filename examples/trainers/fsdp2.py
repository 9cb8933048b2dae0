"""torchrun with FSDP2: every rank saves its shards, and any number of ranks goes on.

torchrun --standalone --nproc-per-node 2 examples/trainers/fsdp2.py pool.toml
"""

from __future__ import annotations

import parts
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders import DataLoader


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with hpstore.open(options.pool) as pool, Checkpointer(pool, "runs/fsdp2", keep_last=2) as ckpt:
        model = parts.net()
        fully_shard(model, mesh=mesh)
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
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            parts.show(step, whole)
        loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
