"""LoRA under Hugging Face's Trainer: python examples/trainers/peft_loop.py pool.toml.

The adapters alone are saved. With torchrun --nproc-per-node 2 in the place of python it is a job
of two ranks (DDP).
"""

from __future__ import annotations

import os
import tempfile

import parts
import peft
import torch
import transformers
from transformers.modeling_outputs import ModelOutput

import hpstore
from hpstore.trainers import PoolTrainerCallback


class Net(torch.nn.Module):
    """The shared net as the Trainer wants it."""

    _keys_to_ignore_on_save = None  # the Trainer asks for it when it has loaded adapters

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.net()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> ModelOutput:
        """Of one batch."""
        return ModelOutput(loss=parts.loss(self.net, {"x": x, "y": y}))


def main() -> None:
    """Train the adapters from the newest checkpoint to the last step."""
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
        label_names=["y"],
    )
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=4, target_modules=["0", "2"]))
    with (
        hpstore.open(options.pool) as pool,
        PoolTrainerCallback(
            pool, "runs/lora", every=options.every, keep_last=2, save_frozen=False
        ) as callback,
    ):
        trainer = transformers.Trainer(
            model, args, callbacks=[callback], train_dataset=parts.rows(pool)
        )
        trainer.train(resume_from_checkpoint=callback.resume_folder(scratch))
        if args.process_index == 0:
            parts.show(trainer.state.global_step, peft.get_peft_model_state_dict(model))


if __name__ == "__main__":
    main()
