"""The data set and the states of a soak: every byte is known from numbers alone."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from hpstore.loaders import DatasetWriter, Field
from hpstore.pool.pool import Pool
from hpstore.units import MIB

DATA_SET, PREFIX = "soak", "runs/soak"
SAMPLES, SAMPLE_BYTES, BATCH = 6400, 4096, 32
STEPS_AN_EPOCH = SAMPLES // BATCH
WEIGHTS = 400_000  # float32; twice, as an optimizer has moments
SAVE_EVERY, KEEP_LAST = 40, 3
WORK_SECONDS = 0.15  # that an accelerator would compute for in each step


def samples_of(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The bytes of samples.  (samples,) -> (samples, SAMPLE_BYTES)"""
    mixed = numbers[:, None] * 2_654_435_761 + np.arange(SAMPLE_BYTES, dtype=np.int64) * 40_503
    return ((mixed ^ (mixed >> 13)) >> 7).astype(np.uint8)


def write_data_set(pool: Pool) -> None:
    """All samples, each with its number."""
    fields = {"number": Field("int64", ()), "bytes": Field("uint8", (SAMPLE_BYTES,))}
    with DatasetWriter(pool, DATA_SET, fields, shard_bytes=8 * MIB) as writer:
        for first in range(0, SAMPLES, 800):
            numbers = np.arange(first, first + 800)
            writer.write_batch({"number": numbers, "bytes": samples_of(numbers)})


def new_state() -> dict[str, torch.Tensor]:
    """Before the first step."""
    return {"weights": torch.zeros(WEIGHTS), "moments": torch.zeros(WEIGHTS)}


def train_on(state: dict[str, torch.Tensor], numbers: npt.NDArray[np.int64]) -> None:
    """One step: what comes out depends on every batch so far and on their order."""
    gradient = torch.linspace(0.0, 1.0, WEIGHTS) * float((numbers * np.arange(1, BATCH + 1)).sum())
    state["moments"].mul_(0.9).add_(gradient)
    state["weights"].mul_(0.5).add_(state["moments"])


def digest_of(state: dict[str, torch.Tensor]) -> str:
    """Of all bytes of a state."""
    total = hashlib.blake2b(digest_size=12)
    for name in ("weights", "moments"):
        total.update(state[name].numpy().data)
    return total.hexdigest()
