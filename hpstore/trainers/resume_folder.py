"""The folder that a Hugging Face Trainer resumes from, with the files that it looks for."""

from __future__ import annotations

import logging
import os
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpstore.trainers.checkpoint_paths import PathLike

_log = logging.getLogger(__name__)
_FILES = {
    "model": "pytorch_model.bin",
    "optimizer": "optimizer.pt",
    "lr_scheduler": "scheduler.pt",
    "scaler": "scaler.pt",
}
_SHARDS = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}


def write_resume_folder(
    parent: PathLike,
    loaded: Mapping[str, Any],
    step: int,
    *,
    rank: int,
    world: int,
    saved_by: int,
) -> str:
    """Write a new folder below `parent` for this rank of `world`; returns it.

    `loaded`: what PoolTrainerCallback has saved, from `saved_by` ranks. Where it lacks model and
    optimizer, empty folders stand for them, which the Trainer takes for shards of FSDP.
    """
    os.makedirs(parent, exist_ok=True)
    # not as the Trainer names its own, of which it removes the oldest
    folder = tempfile.mkdtemp(prefix=f"resume-{step}-", dir=parent)
    names = dict(_FILES)
    if rank < saved_by:
        names["rng"] = f"rng_state_{rank}.pth" if world > 1 else "rng_state.pth"
    else:
        _log.warning(
            "rank %d was not there when step %d was saved: its RNG goes on as it is", rank, step
        )
    for part, name in _SHARDS.items():
        if part not in loaded:
            os.mkdir(os.path.join(folder, name))
            del names[part]
    for part, name in names.items():
        if loaded[part] is not None:
            torch.save(loaded[part], os.path.join(folder, name))
    Path(folder, "trainer_state.json").write_text(loaded["trainer_state"], encoding="utf-8")
    return folder


def trainer_rng() -> dict[str, Any]:
    """RNG states as a Trainer of one process writes and reads them."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states
