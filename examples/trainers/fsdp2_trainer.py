"""Hugging Face's Trainer with FSDP2: every rank saves its shards, and any number of ranks goes on.

torchrun --standalone --nproc-per-node 2 examples/trainers/fsdp2_trainer.py pool.toml
On the CPU accelerate trains with DDP instead, and says so.
"""

from __future__ import annotations

import os
import tempfile

import parts
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.modeling_outputs import ModelOutput

import hpstore
from hpstore.trainers import PoolTrainerCallback


class Net(torch.nn.Module):
    """The shared net as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> ModelOutput:
        """Of one batch."""
        return ModelOutput(loss=parts.loss(self.net, {"x": x, "y": y}))


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    options = parts.options(__doc__)
    scratch = tempfile.gettempdir()
    on_cpu = not torch.cuda.is_available()
    args = transformers.TrainingArguments(
        scratch,
        max_steps=options.steps,
        save_strategy="no",
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"},
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=1e-2,
    )
    with (
        hpstore.open(options.pool) as pool,
        PoolTrainerCallback(pool, "runs/fsdp2", every=options.every, keep_last=2) as callback,
    ):
        trainer = transformers.Trainer(
            Net(), args, callbacks=[callback], train_dataset=parts.rows(pool)
        )
        trainer.train(resume_from_checkpoint=callback.resume_folder(scratch))
        whole = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
        if int(os.environ["RANK"]) == 0:
            parts.show(trainer.state.global_step, whole)


if __name__ == "__main__":
    main()
