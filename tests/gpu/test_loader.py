"""Epochs of the DataLoader to a GPU: over pinned memory, and straight where cuFile works.

The cases of tests/integration/test_loader_direct.py, bit by bit against the loader to the CPU.
`pytest tests/gpu -s` shows stats(); --basetemp=DIR chooses the filesystem.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.loaders import DataLoader, Dataset, GpuTransfer
from hpstore.loaders.gpu.gpu_device import CudaGpu
from hpstore.testing.fake_direct import FakeCuFile
from tests.integration.direct_cases import KINDS, cpu_epoch, gpu_epoch, holders, write_direct
from tests.integration.loader_cases import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Bouncing(CudaGpu):
    """A GPU on which every directory counts as direct: cuFile may bounce, the way is the same."""

    def obstacle(self, directory: str) -> str | None:
        found = super().obstacle(directory)
        return None if found is not None and found.startswith("compat") else found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A 3+2 pool of five directories with a data set of each kind."""
    devices, config = [tmp_path / f"d{i}" for i in range(5)], tmp_path / "pool.toml"
    with hpstore.create(devices, data=3, parity=2, config=config) as pool:
        for kind in KINDS:
            write_direct(pool, kind)
    return tmp_path


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direct", ["off", "auto", "always"])
def test_an_epoch_on_the_gpu_is_that_of_the_cpu(
    place: Path, kind: str, direct: str, gone: int
) -> None:
    """Whatever detection says here; with devices missing, decoded on the GPU where it is direct."""
    with hpstore.open(place / "pool.toml") as pool:
        away = holders(place, Dataset(pool, kind), gone)
    for path in away:
        os.rename(path, path.with_name(f"away-{path.name}"))
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, kind)
        found, stats = gpu_epoch(
            data, Bouncing(torch.device("cuda")), gpu=GpuTransfer(direct=direct)
        )
        assert same(found, cpu_epoch(data))
    print("\n" + json.dumps({"kind": kind, "asked": direct, "gone": gone, **stats}))
    if stats["state"] == "on" and direct == "always":
        assert stats["records"] > 0
        assert (stats["units_decoded"] > 0) == (gone > 0)


def test_batches_are_there_and_are_kept(place: Path) -> None:
    """Tensors on the GPU; a kept batch is not overwritten by later ones."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        loader = DataLoader(data, batch_size=10, device="cuda", cache=0, seed=3, shuffle=True)
        kept = list(loader)
        list(loader)
        assert all(v.is_cuda for batch in kept for v in batch.values())
        back: list[Any] = [{n: v.cpu() for n, v in batch.items()} for batch in kept]
        assert same(back, cpu_epoch(data))
        loader.close()


def test_batches_of_pinned_memory_outlive_their_loader(place: Path) -> None:
    """pin_memory=True: page-locked for as long as they are kept; loader after loader."""
    with hpstore.open(place / "pool.toml") as pool:
        data, kept = Dataset(pool, "records"), []
        wanted = cpu_epoch(data)
        for _ in range(3):
            loader = DataLoader(data, batch_size=10, cache=0, seed=3, shuffle=True, pin_memory=True)
            kept.append(list(loader))
            loader.close()
            del loader
            assert all(v.is_pinned() for batch in kept[-1] for v in batch.values())
        for epoch in kept:
            assert same([{n: v.cuda().cpu() for n, v in b.items()} for b in epoch], wanted)


def test_copies_of_pinned_batches_may_run_after_the_batch_was_dropped(place: Path) -> None:
    """A training loop that is ahead of its GPU: what it copies is what it was given."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        loader = DataLoader(data, batch_size=10, cache=0, seed=3, shuffle=True, pin_memory=True)
        for epoch in range(3):
            there = []
            for batch in loader:
                torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # 20 ms
                there.append({n: v.to("cuda", non_blocking=True) for n, v in batch.items()})
                del batch
            found = [{n: v.cpu() for n, v in batch.items()} for batch in there]
            assert same(found, cpu_epoch(data, epoch=epoch))
        loader.close()


def test_a_ring_of_gpu_memory_is_written_again_behind_the_step(place: Path) -> None:
    """Steps that run late read what they were given, whose tensors have gone; it does not grow."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        loader = DataLoader(
            data,
            batch_size=10,
            cache=0,
            seed=3,
            shuffle=True,
            device="cuda",
            gpu=GpuTransfer(direct="off", ring_bytes=1 << 28),
            prefetch_factor=1,
            num_workers=1,
        )
        for epoch in range(6):
            there = []
            for batch in loader:
                torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # 20 ms
                there.append({n: v.clone() for n, v in batch.items()})
                del batch
            found = [{n: v.cpu() for n, v in batch.items()} for batch in there]
            assert same(found, cpu_epoch(data, epoch=epoch))
        stats = loader.stats()
        print("\n" + json.dumps({"ring": stats["device_ring_bytes"]}))
        assert stats["batches_outside_ring"] == 0
        assert stats["device_ring_bytes"] < 8 * max(1 << 20, stats["bytes"] // stats["batches"] * 2)
        loader.close()


class Failing(Bouncing):
    """The real GPU below a driver on host memory that does not answer: its arena is no use."""

    def driver(self) -> Any:
        return FakeCuFile(refuse="memory")


def test_a_driver_that_refuses_leaves_the_pinned_way(place: Path) -> None:
    """The same bytes over page-locked memory."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        found, stats = gpu_epoch(data, Failing(torch.device("cuda")))
        assert same(found, cpu_epoch(data))
    assert (stats["state"], stats["records"]) == ("off", 0)
