"""torchtitan's CheckpointManager, its folder in a pool.

torchrun --standalone --nproc-per-node 2 examples/trainers/torchtitan_loop.py pool.toml
"""

from __future__ import annotations

import parts
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import hpstore
from hpstore.loaders import DataLoader


class Progress:
    """What torchtitan's Trainer saves as its train_state."""

    step = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Inverse of state_dict."""
        self.step = int(state["step"])


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    dist.init_process_group("gloo")
    with hpstore.open(options.pool) as pool:
        model = fully_shard(parts.net())
        optimizers = default_adamw(lr=1e-2, fused=False).build(model_parts=[model])
        config = LRSchedulersContainer.Config(warmup_steps=2)
        schedulers = config.build(optimizers=optimizers, training_steps=options.steps)
        loader = DataLoader(parts.rows(pool), batch_size=8, shuffle=True, seed=0)
        progress = Progress()
        manager = CheckpointManager.Config(
            enable=True,
            folder=f"hpstore://{pool.config.name}/runs/titan",
            interval=options.every,
            last_save_model_only=False,
        ).build(
            dataloader=loader,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": progress},
            sd_adapter=None,
        )
        manager.load()
        while progress.step < options.steps:
            for batch in loader:
                optimizers.zero_grad()
                parts.loss(model, batch).backward()
                optimizers.step()
                schedulers.step()
                progress.step += 1
                manager.save(progress.step, last_step=progress.step == options.steps)
                if progress.step == options.steps:
                    break
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            parts.show(progress.step, whole)
        manager.close()
        loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
