"""Staging from a device, on a stand-in whose copies run only when somebody waits or orders."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save.accelerator import Accelerator
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.checkpoint.save.stage import SaveStage
from hpstore.config import Settings
from hpstore.errors import CheckpointError, DeviceFull
from hpstore.testing.fake_accelerator import FakeAccelerator
from hpstore.testing.memory_pool import Harness
from hpstore.units import MIB


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    harness = Harness(
        tmp_path, data=2, parity=1, devices=3, settings=Settings(memory_bytes=32 * MIB)
    )
    with harness.open() as opened:
        yield opened


class Job:
    """A model and its optimizer "on the device", and all tensors of both."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Linear(200, 300)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        self.net(torch.randn(8, 200)).square().mean().backward()

    @property
    def state(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        moments = [t for slots in self.optimizer.state.values() for t in slots.values()]
        return [*self.net.parameters(), *moments]

    def values(self) -> Any:
        return copy.deepcopy([t.detach() for t in self.tensors()])


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def restored(ckpt: Checkpointer, step: int) -> list[torch.Tensor]:
    """What a step holds, read from the pool into another job."""
    ckpt.saver.options = replace(ckpt.saver.options, warm=False)
    other = Job(2)
    ckpt.restore(other.state, step=step)
    found: list[torch.Tensor] = other.values()
    return found


class Writer:
    """Notes how many copies are outstanding when a slice is given to the writer.

    Saves wait for their copies, on their thread, once `begin` is set.
    """

    def __init__(self, fake: FakeAccelerator, patch: pytest.MonkeyPatch) -> None:
        self.begin = threading.Event()
        self.outstanding: list[int] = []
        stage, write = SaveStage.write, SaveJob.write

        def held(*args: Any) -> None:
            if not self.begin.wait(20):
                raise TimeoutError("the test forgot to let the save begin")
            stage(*args)

        def noted(job: SaveJob, *args: Any, **options: Any) -> Any:
            self.outstanding.append(fake.pending)
            return write(job, *args, **options)

        patch.setattr(SaveStage, "write", held)
        patch.setattr(SaveJob, "write", noted)


@pytest.fixture
def fake() -> FakeAccelerator:
    return FakeAccelerator()


@pytest.fixture
def writer(fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(fake, monkeypatch)


def test_the_stand_in_is_an_accelerator(fake: FakeAccelerator) -> None:
    """It has the shape of the protocol, and refuses what does not pair up."""
    one: Accelerator = fake
    memory = torch.zeros(8, dtype=torch.uint8).numpy()
    one.pin(memory)
    with pytest.raises(ValueError, match="pin of 8 bytes"):
        one.pin(memory)
    with pytest.raises(ValueError, match="where nothing is page-locked"):
        one.unpin(memory.ctypes.data + 4)
    one.unpin(memory.ctypes.data)
    assert fake.pinned == {}


def test_plain_staging_has_all_copies_when_save_returns(
    pool: hpstore.Pool, fake: FakeAccelerator, writer: Writer
) -> None:
    """staging="copy": copies are enqueued and waited for; tensors may change at once."""
    job = Job()
    fake.take(job.tensors())
    wanted = job.values()
    with Checkpointer(pool, "run", save=SaveOptions(accelerator=fake)) as ckpt:
        handle = ckpt.save(1, job.state)
        assert fake.events == ["pin", "copy", "wait"]
        assert fake.pending == 0
        with torch.no_grad():
            for tensor in job.tensors():
                tensor.zero_()
        writer.begin.set()
        handle.result()
        assert equal(wanted, restored(ckpt, 1))


def test_the_step_is_ordered_behind_the_copies(
    pool: hpstore.Pool, fake: FakeAccelerator, writer: Writer
) -> None:
    """staging="overlap": nothing large is copied before the step's hook, which orders the stream
    before the first parameter changes; the saver has not begun, so nobody else did it."""
    job = Job()
    fake.take(job.tensors())
    wanted = job.values()
    seen: list[tuple[int, bool]] = []
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap", accelerator=fake)) as ckpt:
        handle = ckpt.save(1, job.state)
        assert fake.pending == 1
        job.optimizer.register_step_pre_hook(
            lambda *_: seen.append((fake.pending, equal(wanted, job.values())))
        )
        job.backward()
        assert fake.pending == 1
        assert fake.events.count("order") == 0
        job.optimizer.step()
        assert fake.events.count("order") == 1
        assert seen == [(0, True)]
        assert not equal(wanted, job.values())
        writer.begin.set()
        handle.result()
        assert equal(wanted, restored(ckpt, 1))


def test_the_writer_gets_the_arena_after_the_last_copy(
    pool: hpstore.Pool, fake: FakeAccelerator, writer: Writer
) -> None:
    """Nobody steps: the saving thread waits for the copies itself, for each slice, in each mode."""
    job = Job()
    fake.take(job.tensors())
    writer.begin.set()
    for prefix, mode, limit in (
        ("a", "copy", None),
        ("b", "overlap", None),
        ("c", "overlap", 300_000),
    ):
        with Checkpointer(
            pool, prefix, save=SaveOptions(accelerator=fake, staging=mode, memory=limit)
        ) as ckpt:
            ckpt.save(1, job.state).result()
            assert equal(job.values(), restored(ckpt, 1))
    assert len(writer.outstanding) >= 5
    assert set(writer.outstanding) == {0}


def test_a_change_on_the_device_before_the_step_fails_the_save(
    pool: hpstore.Pool, fake: FakeAccelerator, writer: Writer
) -> None:
    """A parameter that was changed in place while its copy was on its way is named."""
    job = Job()
    fake.take(job.tensors())
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap", accelerator=fake)) as ckpt:
        handle = ckpt.save(1, job.state)
        with torch.no_grad():
            job.net.weight.add_(1)
        job.optimizer.step()
        writer.begin.set()
        with pytest.raises(CheckpointError, match=r"'net/weight' was changed"):
            handle.result()
        ckpt.save(2, job.state).result()
        assert ckpt.steps() == [2]
        assert equal(job.values(), restored(ckpt, 2))


def test_a_failed_save_leaves_no_copy_on_its_way(
    pool: hpstore.Pool, fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that cannot begin still waits for its copies: the arena is to be used again."""
    job = Job()
    fake.take(job.tensors())

    def fail(_job: SaveJob, *, fence: bool) -> None:
        raise DeviceFull("no room for the note")

    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap", accelerator=fake)) as ckpt:
        monkeypatch.setattr(SaveJob, "begin", fail)
        handle = ckpt.save(1, job.state)
        with pytest.raises(DeviceFull):
            handle.result()
        ckpt.wait()
        assert fake.pending == 0


def test_tensors_of_the_host_are_not_given_to_the_device(
    pool: hpstore.Pool, fake: FakeAccelerator, writer: Writer
) -> None:
    """A state on both: each kind is copied its own way, and all of it is there."""
    job = Job()
    fake.take([job.net.weight])  # its moments are on the host: an offloaded optimizer
    wanted = job.values()
    with Checkpointer(pool, "run", save=SaveOptions(staging="overlap", accelerator=fake)) as ckpt:
        handle = ckpt.save(1, job.state)
        assert fake.pending == 1
        job.optimizer.step()
        writer.begin.set()
        handle.result()
        assert fake.events.count("copy") == 1
        assert equal(wanted, restored(ckpt, 1))


def test_memory_is_unpinned_before_it_is_given_back(
    pool: hpstore.Pool, fake: FakeAccelerator, writer: Writer
) -> None:
    """Growth and close() pair every pin with an unpin of the same memory."""
    writer.begin.set()
    with Checkpointer(pool, "run", save=SaveOptions(accelerator=fake)) as ckpt:
        for number, size in enumerate((100_000, 90_000, 900_000, 5_000_000)):
            ckpt.save(number, {"w": torch.ones(size)}).result()
            assert list(fake.pinned.values()) == [ckpt.saver._stage.arena.capacity_bytes]
    assert fake.pinned == {}
    assert fake.events == ["pin", "unpin", "pin", "unpin", "pin", "unpin"]
