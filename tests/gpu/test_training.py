"""Loader and checkpointer beside a training loop on a GPU, with devices that go meanwhile.

Stages 3 and 9 of the plan in docs/gpu.md. `pytest tests/gpu/test_training.py -s` shows what the
loader and the saves cost the step; nothing about speed is asserted.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.units import KIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ROWS, ROW_BYTES, BATCH = 8192, 48 * KIB, 64
EPOCHS, SAVE_EVERY, WIDTH = 4, 64, 4096


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A 4+2 pool with 0.4 GB of records, each made of its label."""
    devices, config = [tmp_path / f"d{i}" for i in range(6)], tmp_path / "pool.toml"
    fields = {"x": Field("uint8", (ROW_BYTES,)), "label": Field("int64")}
    ramp = np.arange(ROW_BYTES, dtype=np.int64)
    with (
        hpstore.create(devices, data=4, parity=2, config=config) as pool,
        DatasetWriter(pool, "ramps", fields) as writer,
    ):
        for label in range(ROWS):
            writer.write({"x": (ramp * (label + 1)).astype(np.uint8), "label": label})
    return tmp_path


class Training:
    """A model whose step keeps the GPU busy; counts bytes of batches that are not as written."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(2048, WIDTH, device="cuda")
        self.ramp = torch.arange(ROW_BYTES, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.marks: list[Any] = []  # Any: CUDA events are untyped

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        self.marks.append(mark)

    def check(self, batch: dict[str, torch.Tensor]) -> None:
        wanted = (self.ramp * (batch["label"] + 1)[:, None]).to(torch.uint8)
        self.wrong += (batch["x"] != wanted).sum()

    def milliseconds(self) -> dict[str, float]:
        """Between the ends of steps, since the last call."""
        torch.cuda.synchronize()
        marks, self.marks = self.marks, []
        gaps = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        cuts = quantiles(gaps, n=100)
        return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "worst": round(max(gaps), 2)}


def weights(training: Training) -> list[torch.Tensor]:
    return [p.detach().clone() for p in training.model.parameters()]


@pytest.mark.parametrize("lost", [0, 2])
def test_training_over_lost_devices_sees_every_byte_and_keeps_its_saves(
    place: Path, lost: int
) -> None:
    """Epochs to the GPU with overlapping saves; devices are wiped in their midst."""
    training = Training()
    for _ in range(40):
        training.step()
    torch.cuda.synchronize()
    training.marks.clear()
    for _ in range(200):
        training.step()
    alone = training.milliseconds()
    seen, steps, saved, handle = 0, 0, weights(training), None
    with (
        hpstore.open(place / "pool.toml") as pool,
        Checkpointer(
            pool,
            "run",
            rng=False,
            keep_last=2,
            example=training.state,
            save=SaveOptions(staging="overlap"),
        ) as ckpt,
    ):
        loader = DataLoader(
            Dataset(pool, "ramps"), BATCH, shuffle=True, seed=1, device="cuda", cache=0
        )
        began = time.perf_counter()
        for _ in range(EPOCHS):
            for batch in loader:
                if steps and not steps % SAVE_EVERY:
                    if handle is not None:
                        handle.result()
                    saved = weights(training)
                    handle = ckpt.save(steps, training.state)
                training.check(batch)
                training.step()
                seen, steps = seen + len(batch["label"]), steps + 1
                if not steps % 100 and steps // 100 <= lost:
                    gone = place / f"gone{steps // 100}"
                    os.rename(place / f"d{steps // 100 - 1}", gone)
                    shutil.rmtree(gone, ignore_errors=True)  # a save may write there
        assert handle is not None
        handle.result()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        beside, stats = training.milliseconds(), loader.stats()
        loader.close()
    assert (seen, int(training.wrong)) == (EPOCHS * ROWS, 0)
    print(
        "\n"
        + json.dumps(
            {
                "stage": 9 if lost else 3,
                "devices lost": lost,
                "step ms alone": alone,
                "with loader, check and saves": beside,
                "GB/s to the GPU": round(seen * ROW_BYTES / seconds / 1e9, 2),
                "reads": stats.get("reads"),
            },
            default=str,
        )
    )
    with (
        hpstore.open(place / "pool.toml") as pool,
        Checkpointer(pool, "run", rng=False, keep_last=2) as ckpt,
    ):
        last = (steps - 1) // SAVE_EVERY * SAVE_EVERY
        assert ckpt.restore(training.state) == last
        assert all(torch.equal(a, b) for a, b in zip(weights(training), saved, strict=True))
