"""A ring of GPU memory for batches: used again only when nothing reads it any more."""

from __future__ import annotations

import ctypes
import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, GpuTransfer, Ragged
from hpstore.loaders.gpu.device_ring import DeviceRing
from hpstore.testing.fake_gpu import FakeGpu
from hpstore.units import KIB, MIB
from tests.integration.loader_cases import COUNT, KINDS, PLAIN, flat, write

RING = 64 * MIB


@pytest.fixture
def data(pool: hpstore.Pool) -> Dataset:
    return write(pool, "plain", PLAIN, COUNT)


def tensors_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for name, value in batch.items():
        if isinstance(value, Ragged):
            found |= {name: value.values, f"{name} offsets": value.offsets}
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_batches_in_a_ring_are_those_without_one(pool: hpstore.Pool, kind: str) -> None:
    """Every kind of field, over three epochs, in memory of the ring alone."""
    fields, options = KINDS[kind]
    data, gpu = write(pool, "set", fields, COUNT, **options), FakeGpu()
    plain = DataLoader(data, 10, shuffle=True)
    loader = DataLoader(data, 10, shuffle=True, device=gpu, gpu=GpuTransfer(ring_bytes=RING))
    for _ in range(3):
        for one, other in zip(plain, loader, strict=True):
            wanted, found = tensors_of(one), tensors_of(other)
            assert wanted.keys() == found.keys()
            for name in wanted:
                assert found[name].dtype == wanted[name].dtype
                assert torch.equal(found[name], wanted[name]), name
                assert found[name].data_ptr() % 64 == 0
    stats = loader.stats()
    assert stats["batches_outside_ring"] == 0
    assert 0 < stats["device_ring_bytes"] == gpu.allocated_bytes <= RING
    del other, found
    loader.close()
    assert loader.stats()["device_ring_bytes"] == 0


def test_a_ring_does_not_grow_and_a_batch_that_is_kept_stays(data: Dataset) -> None:
    """A view of one field holds all of its batch's memory; others go round."""
    gpu = FakeGpu()
    loader = DataLoader(
        data, 10, device=gpu, gpu=GpuTransfer(ring_bytes=RING), prefetch_factor=1, num_workers=2
    )
    run = iter(loader)
    kept = next(run)["image"][3, 1]
    before = kept.clone()
    assert flat(run) == list(range(10, COUNT))
    for _ in range(5):
        assert flat(loader) == list(range(COUNT))
    assert gpu.allocated_bytes <= 8 * MIB  # a slot each: two ahead, up to three here, the one kept
    assert torch.equal(kept, before)
    loader.close()


def test_all_batches_kept_are_right_and_the_fallback_is_told(
    data: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    """The ring is full: torch's allocator, counted, one warning."""
    loader = DataLoader(data, 10, device=FakeGpu(), gpu=GpuTransfer(ring_bytes=3 * MIB))
    with caplog.at_level(logging.WARNING):
        kept = [batch for _ in range(2) for batch in loader]
    assert flat(kept) == 2 * list(range(COUNT))
    assert loader.stats()["batches_outside_ring"] >= 2 * len(loader) - 3
    assert len([r for r in caplog.records if "ring of 3 MiB" in r.message]) == 1
    loader.close()


def raw(tensor: torch.Tensor) -> Callable[[], bytes]:
    """Reads the tensor's memory as a kernel does: by its address, whoever has it by then."""
    return partial(ctypes.string_at, tensor.data_ptr(), tensor.nbytes)


def test_memory_is_written_again_behind_the_step_that_reads_it(data: Dataset) -> None:
    """A step is enqueued, its batch dropped, and runs when batches further on have been copied."""
    gpu = FakeGpu()
    loader = DataLoader(
        data,
        10,
        device=gpu,
        gpu=GpuTransfer(ring_bytes=RING),
        prefetch_factor=1,
        num_workers=1,
        cache=0,
    )
    wanted, found = list[bytes](), list[bytes]()

    def step(batch: dict[str, Any]) -> None:
        wanted.append(batch["image"].numpy().tobytes())
        read = raw(batch["image"])
        gpu.enqueue(lambda: found.append(read()))

    for _ in range(4):
        for batch in loader:
            step(batch)
    gpu.run()
    assert found == wanted
    assert gpu.allocated_bytes < 12 * MIB  # it went round
    loader.close()


def test_a_slot_waits_for_the_last_tensor_over_it_and_for_the_user(data: Dataset) -> None:
    """It is free after passed(), not before; a batch that is smaller takes it as well."""
    gpu = FakeGpu()
    ring = DeviceRing(gpu, 2 * MIB)
    like = [torch.zeros(100, 3), torch.zeros(50 * KIB, dtype=torch.bfloat16)]
    with gpu.side():
        slot = ring.take(like)
        assert slot is not None
        lent = [slot.lend(gpu, one) for one in like]
        slot.all_lent()
        addresses = [tensor.data_ptr() for tensor in lent]
        assert addresses[1] - addresses[0] == 1280  # 1200 bytes, aligned
        view = lent[0][5]
        lent.clear()
        ring.passed()
        other = ring.take(like)
        assert other not in (None, slot)
        assert ring.take(like) is None
        assert ring.outside_total == 1
        del view
        assert ring.take(like) is None  # nobody has passed
        ring.passed()
        assert ring.take(like[:1]) is slot
        assert ring.take([torch.zeros(0)]) is None
        assert ring.outside_total == 2


class TakesSparse(FakeGpu):
    """As a GPU does."""

    def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return tensor.clone() if tensor.is_sparse else super().upload(tensor, into)


def test_sparse_tensors_of_a_transform_are_beside_the_ring(data: Dataset) -> None:
    """They have no bytes of their own to lend; the others of their batch are in it."""
    loader = DataLoader(
        data,
        10,
        device=TakesSparse(),
        gpu=GpuTransfer(ring_bytes=RING),
        batch_transform=lambda batch: {**batch, "eye": torch.eye(4).to_sparse()},
    )
    batches = list(loader)
    assert flat(batches) == list(range(COUNT))
    assert all(torch.equal(batch["eye"].to_dense(), torch.eye(4)) for batch in batches)
    assert loader.stats()["device_ring_bytes"] > 0
    loader.close()


def test_a_batch_outlives_the_loader(data: Dataset) -> None:
    """Its memory goes with its last tensor, not with the ring."""
    gpu = FakeGpu()
    loader = DataLoader(data, 10, device=gpu, gpu=GpuTransfer(ring_bytes=RING))
    batch = next(iter(loader))
    before = batch["image"].clone()
    ring = weakref.ref(loader.finish)
    loader.close()
    del loader
    gc.collect()
    assert ring() is None
    assert torch.equal(batch["image"], before)


def test_what_a_ring_does_not_go_with_is_refused(data: Dataset) -> None:
    with pytest.raises(ConfigError, match="ring_bytes are memory of a GPU"):
        DataLoader(data, 10, gpu=GpuTransfer(ring_bytes="1 GiB"))
    rows = torch.utils.data.TensorDataset(torch.from_numpy(np.arange(5)))
    with pytest.raises(ConfigError, match="device, gpu: for data sets of hpstore alone"):
        DataLoader(rows, device=FakeGpu(), gpu=GpuTransfer(ring_bytes=RING))
    loader = DataLoader(data, 10, device=FakeGpu())
    assert "device_ring_bytes" not in loader.stats()
    assert loader.gpu.ring_bytes == 0
