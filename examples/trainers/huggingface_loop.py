"""Hugging Face's Trainer: python examples/trainers/huggingface_loop.py pool.toml.

With torchrun --nproc-per-node 2 in the place of python it is a job of two ranks (DDP).
"""

from __future__ import annotations

import os
import tempfile

import parts
import torch
import transformers
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
    args = transformers.TrainingArguments(
        scratch,
        max_steps=options.steps,
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=1e-2,
    )
    with (
        hpstore.open(options.pool) as pool,
        PoolTrainerCallback(pool, "runs/trainer", every=options.every, keep_last=2) as callback,
    ):
        model = Net()
        trainer = transformers.Trainer(
            model, args, callbacks=[callback], train_dataset=parts.rows(pool)
        )
        trainer.train(resume_from_checkpoint=callback.resume_folder(scratch))
        if args.process_index == 0:
            parts.show(trainer.state.global_step, model.net.state_dict())


if __name__ == "__main__":
    main()
