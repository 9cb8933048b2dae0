"""Page locks of batch memory: as long as somebody has a view of it, and not a moment longer.

A lock that outlives its memory is worse than a leak: CUDA then takes whatever is mapped there next
for locked, and copies from the pages that were there before.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint.save.arena import Arena
from hpstore.errors import ConfigError
from hpstore.loaders import DataLoader, Dataset, GpuTransfer
from hpstore.loaders.batching.batch_buffers import Slots
from hpstore.loaders.gpu.upload import Transfer
from hpstore.runtime.buffers import aligned_array, lock_for_life
from hpstore.testing.fake_accelerator import FakeAccelerator
from hpstore.testing.fake_gpu import FakeGpu, FakeMark
from hpstore.units import MIB
from tests.fault.common import poll
from tests.integration.direct_cases import cpu_epoch, gpu_epoch, write_direct
from tests.integration.loader_cases import same

OFF = GpuTransfer(direct="off")


class Marking(FakeGpu):
    """Keeps the marks that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[FakeMark] = []

    def mark(self, started: object = None) -> FakeMark:
        self.marks.append(super().mark(started))
        return self.marks[-1]


@pytest.fixture
def data(pool: hpstore.Pool) -> Dataset:
    """A data set of records."""
    return write_direct(pool, "records")


def test_locks_end_with_the_last_view_and_before_the_memory() -> None:
    """Views and tensors keep it locked; then the same addresses can be locked again."""
    gpu = FakeGpu()
    memory = aligned_array(4 * MIB)
    address = memory.ctypes.data
    lock_for_life(gpu, memory)
    tensor = torch.from_numpy(memory[MIB:].view("int32"))[5:]
    del memory
    assert gpu.pinned == {address: 4 * MIB}
    del tensor
    assert gpu.pinned == {}


def test_a_forked_child_undoes_no_lock() -> None:
    """CUDA does not live through a fork; the parent's locks are none of the child's business."""
    gpu = FakeGpu()
    memory = aligned_array(MIB)
    lock_for_life(gpu, memory)
    child = os.fork()
    if not child:
        del memory
        os._exit(0 if gpu.pinned else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del memory
    assert gpu.pinned == {}


def test_a_lock_that_cannot_be_undone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A finalizer has nobody to raise to."""

    class Refusing(FakeGpu):
        def unpin(self, address: int) -> None:
            raise RuntimeError("CUDA error 999")

    memory = aligned_array(MIB)
    lock_for_life(Refusing(), memory)
    del memory
    assert "CUDA error 999" in caplog.text


def test_an_arena_of_checkpoints_that_nobody_closed_is_unlocked() -> None:
    """Else the next one of the process is staged through pages that have gone."""
    fake = FakeAccelerator()
    arena = Arena(fake)
    arena.reserve(3 * MIB)
    view = arena.view(MIB)
    del arena
    assert list(fake.pinned.values()) == [3 * MIB]
    del view
    assert fake.pinned == {}


def test_slots_of_other_sizes_and_lost_ones_are_unlocked() -> None:
    """Whatever way a slot ends."""
    gpu = FakeGpu()
    slots = Slots(4 * MIB, partial(lock_for_life, gpu))
    slots.take(MIB // 2).release()
    slots.take(2 * MIB).release()
    slots.take(7 * MIB // 2).lose()  # in the place of the two
    gc.collect()
    assert gpu.pinned == {}


@pytest.mark.parametrize(
    "options", [{"gpu": OFF}, {"gpu": GpuTransfer(direct="always")}, {"cache": "auto"}]
)
def test_one_loader_after_the_other_leaves_nothing_locked(
    data: Dataset, options: dict[str, Any]
) -> None:
    """Its memory comes back from the system at the same addresses: locks must have ended."""
    gpu = FakeGpu()
    for _ in range(3):
        found, _ = gpu_epoch(data, gpu, **options)
        assert same(found, cpu_epoch(data))
        gc.collect()
        assert gpu.pinned == {}
    # "cuda" is the GPU of the thread that iterates, which others cannot know
    assert gpu.begun_by == [threading.current_thread()] * 3


def in_the_midst_of_copies(data: Dataset) -> tuple[Marking, DataLoader, Any]:
    """A loader with batches made ahead whose copies nobody has waited for."""
    gpu = Marking()
    loader = DataLoader(data, device=gpu, gpu=OFF, cache=0, batch_size=10)
    run = iter(loader)
    next(run)
    poll(60, lambda: len(gpu.marks) >= 2)
    assert not all(mark.done() for mark in gpu.marks)
    return gpu, loader, run


def test_closing_waits_for_copies(data: Dataset) -> None:
    """Memory is kept until they are through."""
    gpu, loader, run = in_the_midst_of_copies(data)
    loader.close()
    assert all(mark.done() for mark in gpu.marks)
    del run


def test_a_loader_that_nobody_has_any_more_waits_for_copies(data: Dataset) -> None:
    """Likewise, when the threads that make its batches have ended by themselves."""
    gpu, loader, run = in_the_midst_of_copies(data)
    del run, loader
    gc.collect()
    poll(60, lambda: all(mark.done() for mark in gpu.marks))


def test_what_was_sent_is_waited_for_when_the_way_ends() -> None:
    """Transfer alone: nobody closes it."""
    gpu = Marking()
    way = Transfer(gpu)
    there = way.send({"x": torch.arange(4)})
    del way
    assert gpu.marks[0].done()
    assert there.wait()["x"].tolist() == [0, 1, 2, 3]


class Failing(Marking):
    """A GPU that has failed: whoever waits for its copies is told."""

    def mark(self, started: object = None) -> FakeMark:
        mark = super().mark(started)

        def fail() -> None:
            raise RuntimeError("CUDA error 710: device-side assert")

        mark.wait_on_host = fail  # type: ignore[method-assign]
        return mark


def test_closing_stops_the_reading_when_the_gpu_has_failed(data: Dataset) -> None:
    """The error is told once; threads end and memory goes all the same."""
    loader = DataLoader(data, device=Failing(), gpu=OFF, cache=0, batch_size=10)
    way = loader.finish._transfer
    assert way is not None
    loader.engine()
    way.send({"x": torch.arange(4)})
    with pytest.raises(RuntimeError, match="device-side assert"):
        loader.close()
    assert loader._engine is None
    loader.close()


def test_a_forked_child_waits_for_no_copies_of_its_parent() -> None:
    """Nor for the lock of a thread that is not there."""
    gpu = Marking()
    way = Transfer(gpu)
    way.send({"x": torch.arange(4)})
    with way._lock:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)  # it would wait for ever
            way.settle()
            os._exit(1 if gpu.marks[0].done() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    way.settle()
    assert gpu.marks[0].done()


def test_copies_of_a_batch_that_the_gpu_refuses_in_part_are_waited_for() -> None:
    """The second of two uploads fails: the source of the first stays until its copy is through."""

    class Small(Marking):
        def upload(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
            if tensor.numel() > 10:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().upload(tensor, into)

    gpu = Small()
    way = Transfer(gpu)
    with pytest.raises(torch.OutOfMemoryError):
        way.send({"x": torch.arange(4), "y": torch.arange(40)})
    assert [mark.done() for mark in gpu.marks] == [False]
    way.settle()
    assert gpu.marks[0].done()


def test_closed_slots_let_go_of_all_but_what_somebody_has() -> None:
    """At once, not when the collector finds them; a batch stays good."""
    gpu = FakeGpu()
    slots = Slots(16 * MIB, partial(lock_for_life, gpu))
    free, out = slots.take(MIB), slots.take(2 * MIB)
    batch = out.memory[:100]
    out.memory[:] = 7
    out.hand_out([batch])
    free.release()
    del free, out
    slots.close()
    assert list(gpu.pinned.values()) == [3 * MIB]
    assert (batch == 7).all()
    del batch
    assert gpu.pinned == {}


def test_memory_that_cannot_be_locked_is_not_counted() -> None:
    """The next call has the whole budget again."""

    def refuse(memory: object) -> None:
        raise ConfigError("no more locks")

    slots = Slots(4 * MIB, refuse)
    for _ in range(3):
        with pytest.raises(ConfigError, match="no more locks"):
            slots.take(3 * MIB)
    assert slots.made_bytes == 0
