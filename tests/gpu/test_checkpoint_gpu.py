"""Checkpoints of CUDA tensors, where there is a GPU: bytes, order, and figures on the way.

Run with -s to see stall, copy rate against one raw pinned copy, and what a save costs the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save.accelerator import CudaStaging
from hpstore.runtime.buffers import aligned_array
from hpstore.units import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WIDTH, LAYERS = 2048, 16  # 0.8 GB with Adam's moments


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    with hpstore.create(
        [tmp_path / f"d{i}" for i in range(6)], data=4, parity=2, config=tmp_path / "pool.toml"
    ) as made:
        yield made


class Run:
    """A model in training on the GPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*blocks).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.x = torch.randn(4096, WIDTH, device="cuda")
        self.step()

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def copy(self) -> dict[str, torch.Tensor]:
        """Host copies of all that a save holds."""
        torch.cuda.synchronize()
        found = {f"model/{n}": p.detach().cpu().clone() for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state[parameter].items():
                found[f"optimizer/state/{name}/{slot}"] = value.detach().cpu().clone()
        return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("staging", ["copy", "overlap"])
def test_what_is_saved_is_the_state_at_the_call(pool: hpstore.Pool, staging: str) -> None:
    """Steps go on at once after save(); what is restored is the state before them, bit by bit."""
    run = Run()
    with Checkpointer(
        pool, "run", rng=False, save=SaveOptions(staging=staging, warm=False)
    ) as ckpt:
        for number in range(1, 4):
            wanted = run.copy()
            handle = ckpt.save(number, run.state)
            for _ in range(5):
                run.step()
            handle.result()
            assert same(ckpt.load(number), wanted)
        assert ckpt.restore(run.state) == 3
        assert same(run.copy(), wanted)


def test_a_change_outside_the_step_fails_an_overlapping_save(pool: hpstore.Pool) -> None:
    """A parameter that is changed before the hook was reached: the save fails, naming it."""
    run = Run()
    with torch.no_grad():  # a kernel's first launch may wait for all copies
        run.model[1].weight.add_(1)  # type: ignore[operator]
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(staging="overlap")) as ckpt:
        ckpt.save(1, run.state).result()
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # the copies wait
        handle = ckpt.save(2, run.state)
        with torch.no_grad():
            run.model[0].weight.add_(1)  # type: ignore[operator]
        run.step()
        with pytest.raises(hpstore.HpstoreError, match="was changed before"):
            handle.result()
        assert ckpt.latest_valid() == 1


def test_tensors_are_loaded_onto_the_gpu(pool: hpstore.Pool) -> None:
    """map_location: the values arrive on the device."""
    x = torch.arange(3_000_000, device="cuda")
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"x": x}).result()
        found = ckpt.load(1, map_location="cuda")["x"]
        assert found.is_cuda
        assert torch.equal(found, x)


def test_figures(pool: hpstore.Pool) -> None:
    """Prints stall, device-to-host rate against one raw pinned copy, and the step's disturbance."""
    run = Run()
    size = sum(t.nbytes for t in run.copy().values())
    memory, cuda = aligned_array(256 * MIB, populate=True), CudaStaging()
    cuda.pin(memory)
    raw = torch.from_numpy(memory)
    source = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    raw.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        raw.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    rate = 8 * 256 * MIB / (time.perf_counter() - began)
    cuda.unpin(memory.ctypes.data)
    for staging in ("copy", "overlap"):
        with Checkpointer(
            pool,
            staging,
            rng=False,
            keep_last=1,
            example=run.state,
            save=SaveOptions(staging=staging),
        ) as ckpt:
            ckpt.save(1, run.state).result()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                run.step()
            torch.cuda.synchronize()
            quiet = (time.perf_counter() - began) / 20
            began = time.perf_counter()
            handle = ckpt.save(2, run.state)
            blocked = time.perf_counter() - began
            for _ in range(20):
                run.step()
            torch.cuda.synchronize()
            beside = (time.perf_counter() - began - blocked) / 20
            report = handle.result()
            print(
                f"\n{staging}: {size / 1e9:.2f} GB, blocked {blocked * 1e3:.1f} ms "
                f"({size / blocked / 1e9:.1f} GB/s; raw pinned copy {rate / 1e9:.1f}), visible "
                f"{handle.visible_stall_seconds * 1e3:.1f} ms, step {quiet * 1e3:.2f} -> "
                f"{beside * 1e3:.2f} ms, durable {report.durable_seconds:.2f} s"
            )
            assert report.losses_tolerated == 2
