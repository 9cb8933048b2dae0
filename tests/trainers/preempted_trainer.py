"""A transformers.Trainer for torchrun, which gets SIGTERM: `-m tests.trainers.preempted_trainer`.

Arguments: the directory of a pool, the prefix, the number of steps, and a FIFO or "-". After step 3
rank 0 writes to the FIFO, and then trains on: what comes of the SIGTERM is rank by rank in files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from hpstore.checkpoint import Preempted
from hpstore.trainers.huggingface import PoolTrainerCallback
from tests.integration.ranks import open_pool
from tests.trainers.test_huggingface import losses, rows, tiny
from tests.trainers.test_huggingface_ranks import arguments

AT = 3


class Herald(transformers.TrainerCallback):
    """Says that step AT is done."""

    def __init__(self, fifo: str) -> None:
        self.fifo = fifo

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AT and self.fifo != "-" and args.process_index == 0:
            with open(self.fifo, "w") as file:
                file.write("go")


def train(directory: Path, prefix: str, steps: int, fifo: str) -> None:
    """Until the last step, or until Preempted, which goes on to the launcher."""
    args = arguments(directory, steps, lr_scheduler_type="constant")
    transformers.set_seed(11)
    found: dict[str, Any] = {}
    with open_pool(directory) as pool:
        callback = PoolTrainerCallback(pool, prefix, every=1000, on_sigterm="save")
        run: Any = transformers.Trainer(
            model=tiny(), args=args, train_dataset=rows(), callbacks=[callback, Herald(fifo)]
        )
        folder = callback.resume_folder(directory / "scratch")
        try:
            run.train(resume_from_checkpoint=folder)
        except Preempted as error:
            found["code"] = error.code
            raise
        finally:
            callback.close()
            found |= {
                "losses": losses(run),
                "model": run.model.state_dict(),
                "step": run.state.global_step,
                "folder": folder or "",
            }
            torch.save(found, directory / f"{prefix}-{args.process_index}-{steps}.pt")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
