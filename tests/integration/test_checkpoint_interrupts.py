"""Interrupts and timeouts while a save is under way: its error still reaches somebody."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.ranks.collectives import Ranks
from hpstore.checkpoint.save.commit import StepCommit
from hpstore.checkpoint.save.rank_plan import Planner
from hpstore.checkpoint.save.rank_vote import RankVote
from hpstore.checkpoint.save.save_handle import SaveHandle, SaveReport
from hpstore.checkpoint.save.stage import SaveStage
from hpstore.config import Settings
from hpstore.errors import CheckpointError, ThreadsExhausted, VersionConflict
from hpstore.testing.fake_accelerator import FakeAccelerator
from hpstore.units import MIB
from tests.fault.common import within

PATIENCE = 20.0  # seconds


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    settings = Settings(memory_bytes=32 * MIB, run_directory=str(tmp_path / "run"))
    paths = [tmp_path / f"d{i}" for i in range(5)]
    with (
        hpstore.create(paths, data=3, parity=2, config=tmp_path / "p", settings=settings) as pool,
        Checkpointer(pool, "run", rng=False) as made,
    ):
        yield made


class FailsLate(Future[SaveReport]):
    """Fails in the moment in which somebody has waited long enough."""

    def result(self, timeout: float | None = None) -> SaveReport:
        if not self.done():
            self.set_exception(CheckpointError("the device is gone"))
            raise TimeoutError
        return super().result(timeout)


def test_an_error_that_a_timeout_hid_is_not_called_delivered() -> None:
    """Else the next save, wait and close would say nothing of it."""
    handle = SaveHandle(1, 0.0, FailsLate())
    with pytest.raises(TimeoutError):
        handle.result(0.0)
    assert not handle.delivered


def test_the_error_of_a_save_is_raised_after_an_interrupted_wait(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control-C while wait() waits: the next wait() still raises what went wrong."""
    ckpt.save(1, {"w": torch.ones(3)}).result()
    ckpt.wait()
    ckpt.pool.put(manifest_key("run", 2), b"of another job")
    ckpt.save(2, {"w": torch.ones(3)})  # of a step that is there now: it fails

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpstore.checkpoint.save.save_underway.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.wait()
    with pytest.raises(VersionConflict, match="committed already"):
        ckpt.wait()


def test_close_ends_after_an_interrupted_wait(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r_sigint_wait: it waited for what comes after a commit of a save that no thread makes."""
    hold, publish = threading.Event(), StepCommit._publish

    def held(commit: StepCommit, written: Sequence[RankVote]) -> SaveReport:
        assert hold.wait(20)
        return publish(commit, written)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepCommit, "_publish", held)
    ckpt.save(1, {"w": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr("hpstore.checkpoint.save.save_underway.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.wait()
        with pytest.raises(KeyboardInterrupt):
            ckpt.close()
    hold.set()
    within(20, ckpt.close)
    assert StepCatalog(ckpt.pool, "run").all() == [1]


def test_a_second_thread_is_refused_while_one_saves(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r_threads: two threads staged into one arena, and wrong bytes were committed."""
    entered, hold, prepare = threading.Event(), threading.Event(), Planner.prepare

    def slow(planner: Planner, *args: Any) -> Any:  # Any: passed on
        entered.set()
        assert hold.wait(20)
        return prepare(planner, *args)

    monkeypatch.setattr(Planner, "prepare", slow)
    first = threading.Thread(target=ckpt.save, args=(1, {"w": torch.ones(3)}))
    first.start()
    assert entered.wait(20)
    with pytest.raises(CheckpointError, match=r"another thread is in save\(\)"):
        ckpt.save(2, {"w": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"another thread is in save\(\)"):
        ckpt.restore({"w": torch.zeros(3)})
    hold.set()
    first.join(20)
    ckpt.wait()
    assert ckpt.steps() == [1]
    assert ckpt.save(3, {"w": torch.zeros(3)}).result().step == 3


def test_a_save_whose_thread_does_not_start_is_over(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has too many threads: this save fails, the next one is made."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "hpstore-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(ThreadsExhausted, match="start no more"):
            ckpt.save(1, {"w": torch.ones(3)})
    assert ckpt.save(2, {"w": torch.ones(3)}).result().step == 2
    assert ckpt.steps() == [2]


def test_memory_is_given_back_after_the_copies_into_it() -> None:
    """A save that was interrupted between staging and writing, then close()."""
    gpu, weights = FakeAccelerator(), torch.nn.Linear(200, 200)
    state = {"model": weights, "optimizer": torch.optim.SGD(weights.parameters(), lr=0.1)}
    gpu.take(weights.parameters())
    stage = SaveStage("overlap", gpu)
    planner = Planner(Ranks(1.0, alone=True), None, rng=False, allow_pickle=False)
    counters = {"overlap_without_optimizer_total": 0}
    stage.begin(planner.prepare(1, state), state, counters, lambda part: None)
    assert gpu.pending
    stage.close()
    assert not gpu.pending
    assert gpu.events.index("unpin", gpu.events.index("copy")) == len(gpu.events) - 1


def test_a_forked_child_leaves_a_save_under_way_to_its_parent(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """proc.py `forked`: a worker forked during a save waited at its end for `drain_seconds`, and
    wait(), close() or result() in it for ever, for a thread that does not exist in it."""
    go, original = threading.Event(), ckpt.pool.put

    def held(key: str, *args: Any, **options: Any) -> Any:
        if key.endswith("manifest"):
            go.wait(PATIENCE)
        return original(key, *args, **options)

    monkeypatch.setattr(ckpt.pool, "put", held)
    handle = ckpt.save(1, {"x": torch.ones(1000)})

    def child() -> None:
        with pytest.raises(CheckpointError, match="is a fork"):
            handle.result()
        ckpt.wait()
        ckpt.close()

    for forked in (int, child):  # the first does nothing: its end alone took a minute
        process = multiprocessing.get_context("fork").Process(target=forked)
        process.start()
        process.join(PATIENCE / 2)
        process.kill()
        process.join()
        assert process.exitcode == 0, forked
    assert not handle.done()
    go.set()
    assert handle.result().step == 1
