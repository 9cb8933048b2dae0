"""SaveOptions(background="process"): the same saves, by a process that outlives the trainer."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.save.copy_gate import CopyGate
from hpstore.config import Settings
from hpstore.errors import CheckpointError, ConfigError, VersionConflict
from hpstore.testing.process_stop import stop_process
from tests.fault.common import poll
from tests.integration.nets import Net, adamw, same, train
from tests.integration.writer_cases import alive, writer
from tests.thorough import some_of

BIG = 600_000  # floats: too many bytes for a manifest


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    """Of real directories: another process opens it, too."""
    places = [tmp_path / f"d{i}" for i in range(4)]
    settings = Settings(memory_bytes=64 << 20, health=False)
    with hpstore.create(
        places, data=2, parity=2, config=tmp_path / "pool.toml", settings=settings
    ) as made:
        yield made


def checkpointer(pool: hpstore.Pool, **options: Any) -> Checkpointer:
    keep = options.pop("keep_last", None)
    return Checkpointer(
        pool, "run", keep_last=keep, save=SaveOptions(background="process", **options)
    )


@pytest.mark.parametrize(
    "options",
    some_of(
        [
            {"compression": "lz4", "memory": "2MiB"},
            {"staging": "overlap", "reuse": False},
            {},
        ],
        *(0, 1),
    ),
    ids=str,
)
def test_what_it_saves_is_what_threads_save(pool: hpstore.Pool, options: dict[str, Any]) -> None:
    """Model, moments and values come back bit by bit, step after step, and older steps go."""
    net = Net(1)
    optimizer = adamw(net)
    state: dict[str, Any] = {"net": net, "optimizer": optimizer, "frozen": torch.randn(BIG)}
    kept = {}
    with checkpointer(pool, keep_last=2, **options) as ckpt:
        for step in (1, 2, 3):
            train(net, optimizer)
            state["n"] = step
            report = ckpt.save(step, state).result()
            kept[step] = {name: value.clone() for name, value in net.state_dict().items()}
            assert (report.step, report.losses_tolerated) == (step, 2)
            assert (report.referenced_bytes > 4 * BIG - 1) == (
                step > 1 and options.get("reuse", True)
            )
        ckpt.wait()
        assert ckpt.steps() == [2, 3]
    for step in (2, 3):
        other = Net(2)
        fresh: dict[str, Any] = {"net": other, "optimizer": adamw(other), "n": 0}
        fresh["frozen"] = torch.zeros(BIG)
        with Checkpointer(pool, "run") as ckpt:
            assert ckpt.restore(fresh, step) == step
            assert ckpt.verify(step).ok
        assert same(dict(other.state_dict()), kept[step])
        assert fresh["n"] == step
        assert torch.equal(fresh["frozen"], state["frozen"])


def test_small_and_empty_states(pool: hpstore.Pool) -> None:
    """Tensors within the manifest, and none at all."""
    with checkpointer(pool) as ckpt:
        ckpt.save(1, {"w": torch.arange(5), "n": 7}).result()
        ckpt.save(2, {"n": 8}).result()
        found: dict[str, Any] = {"w": torch.zeros(5, dtype=torch.int64), "n": 0}
        assert ckpt.restore(found, 1) == 1
        assert found["w"].tolist() == [0, 1, 2, 3, 4]
        assert ckpt.restore({"n": 0}) == 2


def test_progress_metrics_and_overwriting(pool: hpstore.Pool) -> None:
    told: list[tuple[int, int]] = []
    with checkpointer(pool) as ckpt:
        state = {"w": torch.ones(BIG)}
        ckpt.save(1, state, progress=lambda done, total: told.append((done, total))).result()
        assert told[-1][0] >= 4 * BIG
        ckpt.save(1, {"w": torch.zeros(BIG)}, overwrite=True, metrics={"loss": 0.5}).result()
        with pytest.raises(VersionConflict):
            ckpt.save(1, state)
        assert ckpt.steps.manifest(1).extra["metrics"] == {"loss": 0.5}
        assert not ckpt.load(1)["w"].any()


def test_an_error_is_raised_where_a_thread_raises_it(pool: hpstore.Pool) -> None:
    """By the handle, with its class: another job has taken the prefix."""
    with checkpointer(pool) as ckpt, Checkpointer(pool, "run") as other:
        ckpt.save(1, {"w": torch.ones(BIG)}).result()
        other.save(2, {"w": torch.ones(BIG)}).result()
        with pytest.raises((VersionConflict, CheckpointError), match="has begun to save under"):
            ckpt.save(3, {"w": torch.ones(BIG)}).result()
        assert other.steps() == [1, 2]


def test_progress_that_raises_does_not_break_a_save(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error left the exchange in the middle: later saves had the answers of earlier ones, and
    were acknowledged before they were durable, from memory that was overwritten."""

    def broken(done: int, total: int) -> None:
        raise ValueError("the bar is gone")

    with checkpointer(pool) as ckpt:
        for step in range(1, 5):
            progress = broken if step == 2 else None
            report = ckpt.save(step, {"w": torch.full((BIG,), float(step))}, progress=progress)
            assert report.result().step == step
            assert ckpt.steps()[-1] == step
        assert all(ckpt.verify(step).ok for step in ckpt.steps())
    assert "progress of a save is not shown any more" in caplog.text


def test_an_interrupt_in_a_sliced_save_costs_that_save_alone(pool: hpstore.Pool) -> None:
    """Ctrl-C in save(), which writes all slices but the last: the next saves are as good as any."""

    def interrupt(done: int, total: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with checkpointer(pool, memory="3MiB") as ckpt:
        state = {str(n): torch.randn(BIG) for n in range(3)}
        ckpt.save(1, state).result()
        state = {str(n): torch.randn(BIG) for n in range(3)}  # nothing is referenced
        process = writer(ckpt).process_id
        with pytest.raises((KeyboardInterrupt, CheckpointError)):
            ckpt.save(2, state, progress=interrupt)
        assert not alive(process)
        for step in (3, 4):
            assert ckpt.save(step, state).result().step == step
        assert ckpt.steps() == [1, 3, 4]
        assert ckpt.verify(4).ok


def test_a_fork_that_saves_has_memory_of_its_own(pool: hpstore.Pool) -> None:
    """It wrote into the memory that its parent's writer was reading."""
    with checkpointer(pool) as ckpt:
        ckpt.save(1, {"w": torch.ones(BIG)}).result()
        process = writer(ckpt).process_id
        stop_process(process)
        handle = ckpt.save(2, {"w": torch.full((BIG,), 2.0)})
        arena = ckpt.saver._stage.arena
        child = os.fork()
        if not child:
            try:
                arena.reserve(BIG)
                arena.view(BIG)[:] = 7
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.kill(process, signal.SIGCONT)
        handle.result()
        assert float(ckpt.load(2)["w"].sum()) == 2.0 * BIG


def test_an_empty_tensor_is_a_state_too(pool: hpstore.Pool) -> None:
    with Checkpointer(pool, "run", rng=False, save=SaveOptions(background="process")) as ckpt:
        ckpt.save(1, {"w": torch.empty(0), "n": 1}).result()
        assert writer(ckpt).restarts_total == 0
        assert ckpt.load(1)["w"].shape == (0,)


def test_dropped_writers_are_no_zombies(pool: hpstore.Pool) -> None:
    """Each one that was dropped was a child that nobody had waited for."""
    gone = [checkpointer(pool) for _ in range(2)]
    processes = [writer(ckpt).process_id for ckpt in gone]
    del gone
    gc.collect()
    poll(60.0, lambda: not any(alive(process) for process in processes))
    with checkpointer(pool):
        assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_a_state_that_is_changed_too_soon_is_given_up(pool: hpstore.Pool) -> None:
    """The writer removes what it has; the next save is as good as any."""
    net = Net(1)
    optimizer = adamw(net)
    train(net, optimizer)
    with checkpointer(pool, staging="overlap") as ckpt:
        gate = CopyGate(blocks=True)
        gate.shut()
        ckpt.saver.stage_by("overlap", gate)
        handle = ckpt.save(1, {"net": net, "optimizer": optimizer})
        with torch.no_grad():
            net.head.weight.add_(1)
        gate.open()
        with pytest.raises(CheckpointError, match="was changed before its deferred copy"):
            handle.result()
        ckpt.save(2, {"net": net, "optimizer": optimizer}).result()
        assert ckpt.steps() == [2]
        assert ckpt.steps.collect_garbage() == 0


def test_a_writer_that_was_killed_is_started_again(pool: hpstore.Pool) -> None:
    """Between two saves nobody notices; all is written anew, since what it knew is gone."""
    with checkpointer(pool) as ckpt:
        state = {"w": torch.ones(BIG)}
        ckpt.save(1, state).result()
        os.kill(writer(ckpt).process_id, signal.SIGKILL)
        poll(30.0, lambda: not alive(writer(ckpt).process_id))
        assert ckpt.save(2, state).result().referenced_bytes == 0
        assert ckpt.save(3, state).result().referenced_bytes == 4 * BIG
        assert writer(ckpt).restarts_total == 1


def test_a_writer_that_is_killed_in_a_save_fails_it(pool: hpstore.Pool) -> None:
    """The error says what became of the step; what was written is garbage, and is collected."""
    with checkpointer(pool) as ckpt:
        ckpt.save(1, {"w": torch.ones(BIG)}).result()
        process = writer(ckpt).process_id
        # without it the writer, if it is faster than the kill, would commit
        claim = pool._session.claims.take(manifest_key(ckpt.prefix, 2))

        def kill(done: int, total: int) -> None:
            os.kill(process, signal.SIGKILL)

        handle = ckpt.save(2, {"w": torch.zeros(BIG)}, progress=kill)
        with pytest.raises(CheckpointError, match=r"step 2 .*1.*ended by signal 9"):
            handle.result()
        claim.give_back()
        ckpt.save(3, {"w": torch.zeros(BIG)}).result()
        assert ckpt.steps() == [1, 3]
        assert ckpt.restore({"w": torch.zeros(BIG)}) == 3


def test_a_writer_that_is_killed_before_it_has_begun_is_replaced(pool: hpstore.Pool) -> None:
    """Nothing of the save was written: another writer makes it."""
    with checkpointer(pool) as ckpt:
        ckpt.save(1, {"w": torch.ones(BIG)}).result()
        process = writer(ckpt).process_id
        stop_process(process)
        handle = ckpt.save(2, {"w": torch.zeros(BIG)})
        os.kill(process, signal.SIGKILL)
        assert handle.result().step == 2
        assert writer(ckpt).process_id != process


@pytest.mark.parametrize("end", ["close", "drop"])
def test_it_ends_with_its_checkpointer(
    pool: hpstore.Pool, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = checkpointer(pool)
    process = writer(ckpt).process_id
    ckpt.save(1, {"w": torch.ones(BIG)}).result()
    ckpt.wait()
    if end == "close":
        ckpt.close()
        assert not alive(process)
    del ckpt
    gc.collect()
    poll(20.0, lambda: not alive(process))
    assert not caplog.records


def test_two_at_once(pool: hpstore.Pool) -> None:
    with (
        Checkpointer(pool, "a", save=SaveOptions(background="process")) as one,
        Checkpointer(pool, "b", save=SaveOptions(background="process")) as two,
    ):
        handles = [
            ckpt.save(step, {"w": torch.full((BIG,), float(step))})
            for step in (1, 2)
            for ckpt in (one, two)
        ]
        assert [handle.result().step for handle in handles] == [1, 1, 2, 2]
        assert writer(one).process_id != writer(two).process_id
        assert one.load(2)["w"][0] == two.load(2)["w"][0] == 2


def test_a_writer_that_cannot_be_started_is_said(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's pids.max, for one."""

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(CheckpointError, match=r'cannot be started.*use background="thread"'):
        checkpointer(pool)


def test_words_are_checked() -> None:
    with pytest.raises(ConfigError, match="background 'threads' is not one of"):
        SaveOptions(background="threads")


TRAINER = """
    import os, signal, sys, time
    import torch, hpstore
    from hpstore.checkpoint import Checkpointer, SaveOptions
    pool = hpstore.open(sys.argv[1])
    ckpt = Checkpointer(pool, "run", save=SaveOptions(background="process"))
    ckpt.save(1, {"w": torch.zeros(1000000)}).result()
    writer = ckpt.saver._writing.writer
    print(writer.process_id, flush=True)
    ckpt.save(2, {"w": torch.arange(20000000)})
    while not writer.handed_over:
        time.sleep(0.001)
    END
"""


@pytest.mark.parametrize(
    ("end", "code"),
    some_of(
        [
            ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
            ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
            ("os.kill(0, signal.SIGINT); time.sleep(60)", 130),
            ("os._exit(3)", 3),
            ("sys.exit(4)", 4),
        ],
        *(0, 2),
    ),
)
def test_a_save_is_finished_when_the_trainer_is_gone(
    pool: hpstore.Pool, end: str, code: int
) -> None:
    """However it ends: killed, told to end, interrupted with its process group, or of its own.
    Then the writer ends, too."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAINER).replace("END", end), pool.config.path],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=120,
        check=False,
    )
    assert run.returncode in (code, -signal.SIGINT if code == 130 else code), run.stderr
    process = int(run.stdout)
    poll(60.0, lambda: not alive(process))
    with Checkpointer(pool, "run") as ckpt:
        found = {"w": torch.zeros(20000000, dtype=torch.int64)}
        assert ckpt.restore(found) == 2
        assert torch.equal(found["w"], torch.arange(20000000))
        assert ckpt.steps.collect_garbage() == 0
