"""Accelerate with FSDP2: every rank saves its shards, and any number of ranks goes on.

torchrun --standalone --nproc-per-node 2 examples/trainers/fsdp2_accelerate.py pool.toml
On the CPU accelerate trains with DDP instead.
"""

from __future__ import annotations

import parts
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import hpstore
from hpstore.loaders import DataLoader
from hpstore.trainers import PoolAccelerate, PoolLoader


def main() -> None:
    """Train from the newest state to the last step."""
    options = parts.options(__doc__)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, gradient_accumulation_steps=2
    )
    with hpstore.open(options.pool) as pool:
        net = parts.net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader = PoolLoader(
            accelerator, DataLoader(parts.rows(pool), batch_size=4, shuffle=True, seed=0)
        )
        with PoolAccelerate(accelerator, pool, "runs/fsdp2", keep_last=2) as states:
            newest = states.latest()
            if newest is not None:
                accelerator.load_state(newest)
            step = int(newest.rpartition("-")[2]) if newest is not None else 0
            while step < options.steps:
                for batch in loader:
                    with accelerator.accumulate(model):
                        accelerator.backward(parts.loss(model, batch))
                        optimizer.step()
                        optimizer.zero_grad()
                    step += accelerator.sync_gradients
                    if accelerator.sync_gradients and step % options.every == 0:
                        accelerator.save_state(f"states/step-{step}")
                    if step == options.steps:
                        break
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if accelerator.is_main_process:
            parts.show(step, whole)
        loader.close()


if __name__ == "__main__":
    main()
