"""The real pytorch-ignite: its Checkpoint over a pool, resumed bit by bit."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ignite", reason="pytorch-ignite is not installed: pip install hpstore[ignite]")

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint

from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.errors import CheckpointError, ConfigError, TooFewDevices
from hpstore.pool.pool import Pool
from hpstore.trainers import PoolSaveHandler
from tests.integration.ranks import make_pool, open_pool
from tests.trainers.test_huggingface import same


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    make_pool(tmp_path)
    with open_pool(tmp_path) as opened:
        yield opened


class Training:
    """A net with dropout, AdamW, a schedule, an engine; all of it is saved."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.engine = Engine(self.step)
        self.parts = {
            "model": self.net,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "trainer": self.engine,
        }

    def step(self, engine: Engine, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())

    def run(self, epochs: int) -> None:
        rows = [torch.arange(8.0).reshape(2, 4) / (n + 9) for n in range(3)]
        self.engine.run(rows, max_epochs=epochs)

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}


def test_a_run_that_resumes_is_the_one_that_never_stopped(pool: Pool, tmp_path: Path) -> None:
    """Model, moments, schedule and the engine's place, from the newest name, two devices gone."""
    straight = Training()
    straight.run(5)
    first = Training()
    with PoolSaveHandler(pool, "runs/ignite") as handler:
        assert handler.latest() is None
        saver = Checkpoint(first.parts, handler, n_saved=2, include_self=True)
        first.parts["checkpointer"] = saver
        first.engine.add_event_handler(Events.EPOCH_COMPLETED, saver)
        first.run(3)
        handler.wait()
        assert handler.checkpoints.names() == ["checkpoint_6.pt", "checkpoint_9.pt"]
    for name in ("d1", "d4"):
        shutil.rmtree(tmp_path / name)
    with PoolSaveHandler(tmp_path / "pool.toml", "runs/ignite") as handler:
        second = Training()
        again = Checkpoint(second.parts, handler, n_saved=2, include_self=True)
        Checkpoint.load_objects({**second.parts, "checkpointer": again}, checkpoint=handler.load())
        assert again.last_checkpoint == handler.latest() == "checkpoint_9.pt"
        second.run(5)
    assert same(second.state(), straight.state())


def test_there_is_no_moment_without_a_checkpoint(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignite removes first: with n_saved=1 the old one goes only when the new one is durable, and
    stays when that fails; the error is raised by the next call."""
    commit, reached, go_on = SaveJob.commit, threading.Event(), threading.Event()
    training = Training()
    with PoolSaveHandler(pool, "run") as handler:
        saver = Checkpoint(training.parts, handler, n_saved=1)
        training.engine.add_event_handler(Events.ITERATION_COMPLETED, saver)
        training.engine.run([torch.ones(2, 4)], max_epochs=1)
        handler.wait()

        def held(job: SaveJob) -> Any:
            reached.set()
            assert go_on.wait(60)
            return commit(job)

        with monkeypatch.context() as patched:
            patched.setattr(SaveJob, "commit", held)
            saver(training.engine)
            training.engine.state.iteration = 2
            saver(training.engine)
            assert reached.wait(60)
            assert handler.checkpoints.names() == ["checkpoint_1.pt"]
            go_on.set()
            handler.wait()
        assert handler.checkpoints.names() == ["checkpoint_2.pt"]

        def failing(job: SaveJob) -> Any:
            raise TooFewDevices("no more")

        monkeypatch.setattr(SaveJob, "commit", failing)
        training.engine.state.iteration = 3
        saver(training.engine)
        with pytest.raises(TooFewDevices, match="no more"):
            handler.wait()
        assert handler.checkpoints.names() == ["checkpoint_2.pt"]
        monkeypatch.undo()
        training.engine.state.iteration = 4
        saver(training.engine)
        handler.wait()
        assert handler.checkpoints.names() == ["checkpoint_4.pt"]


def test_the_best_are_kept_and_a_name_may_be_saved_again(pool: Pool) -> None:
    """n_saved by score; one object alone is its own state; the same name twice is replaced."""
    net = torch.nn.Linear(2, 1)
    scores = iter([0.5, 0.9, 0.1, 0.7])
    engine = Engine(lambda engine, batch: None)
    with PoolSaveHandler(pool, "run") as handler:
        best = Checkpoint(
            {"model": net},
            handler,
            n_saved=2,
            score_function=lambda engine: next(scores),
            score_name="accuracy",
        )
        engine.add_event_handler(Events.EPOCH_COMPLETED, best)
        engine.run([0], max_epochs=4)
        handler.wait()
        assert sorted(handler.checkpoints.names()) == [
            "model_accuracy=0.7000.pt",
            "model_accuracy=0.9000.pt",
        ]
        other = torch.nn.Linear(2, 1)
        Checkpoint.load_objects({"model": other}, handler.load("model_accuracy=0.9000.pt"))
        assert same(other.state_dict(), net.state_dict())
    with PoolSaveHandler(pool, "same") as handler:
        last = Checkpoint({"model": net}, handler, n_saved=1, filename_pattern="last.{ext}")
        for value in (1.0, 2.0):
            torch.nn.init.constant_(net.weight, value)
            engine.state.iteration += 1
            last(engine)
        assert handler.load("last.pt")["weight"].sum() == 4.0
        assert handler.checkpoints.names() == ["last.pt"]


def test_one_rank_saves_and_every_rank_loads(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ignite's own DiskSaver, by save_on_rank."""
    with PoolSaveHandler(pool, "run", save_on_rank=1) as handler:
        handler({"n": 1}, "a.pt")
        handler.remove("a.pt")
        assert handler.latest() is None
        with pytest.raises(CheckpointError, match="ask latest"):
            handler.load()
        monkeypatch.setattr("ignite.distributed.get_rank", lambda: 1)
        handler({"n": 1}, "a.pt")
        handler.wait()
        monkeypatch.undo()
        assert handler.load() == {"n": 1}
    for wrong in (-1, 1.0, "0"):
        with pytest.raises(ConfigError, match="not the number of a rank"):
            PoolSaveHandler(pool, "run", save_on_rank=wrong)  # type: ignore[arg-type]


def test_what_cannot_be_saved_is_named(pool: Pool) -> None:
    """At the call, which saves nothing and removes nothing."""
    with PoolSaveHandler(pool, "run") as handler:
        handler({"n": 1}, "a.pt")
        handler.remove("a.pt")
        with pytest.raises(CheckpointError, match=r"\['net'\] is a torch\.nn\.modules"):
            handler({"net": torch.nn.Linear(1, 1)}, "b.pt")
    with PoolSaveHandler(pool, "run") as handler:
        assert handler.load() == {"n": 1}


def test_the_example_of_the_docs_runs(pool: Pool) -> None:
    """As printed: a run that ends in its sixth epoch, and one that goes on behind the fifth."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "trainers.md").read_text()
    (code,) = re.findall(r"```py\n(from ignite.*?)```", text, re.DOTALL)
    for ends_at, steps in ((17, 17), (0, 15)):
        made = Training()
        seen: list[int] = []

        def count(engine: Engine, seen: list[int] = seen, ends_at: int = ends_at) -> None:
            seen.append(engine.state.iteration)
            if len(seen) == ends_at:
                raise KeyboardInterrupt

        made.engine.add_event_handler(Events.ITERATION_COMPLETED, count)
        rows = [torch.ones(2, 4)] * 3
        names = {"pool": pool, "net": made.net, "optimizer": made.optimizer}
        with contextlib.suppress(KeyboardInterrupt):
            exec(code, {**names, "trainer": made.engine, "rows": rows})
        assert len(seen) == steps
    assert seen[0] == 16
