"""SaveOptions(background="process") of several ranks: a writer each, which vote by themselves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save.writer_client import WriterClient
from hpstore.errors import CheckpointError
from hpstore.testing.process_stop import stop_process
from tests.fault.common import poll
from tests.integration.ranks import launch, make_pool, open_pool
from tests.integration.writer_cases import alive, writer
from tests.thorough import LONG, some_of

PROCESS = SaveOptions(background="process", warm=False, commit_seconds=60)
BIG = 600_000


def note_writer(ckpt: Checkpointer, directory: Path, rank: int) -> int:
    """For the test, which sees to it that none is left behind."""
    process = writer(ckpt).process_id
    (directory / f"writer-{rank}-{process}").touch()
    return process


def require_none_left(directory: Path) -> None:
    found = [int(path.name.rpartition("-")[2]) for path in directory.glob("writer-*")]
    assert found
    poll(60.0, lambda: not any(alive(process) for process in found))


def state_of(ckpt: Checkpointer, rank: int, step: int, size: int = BIG) -> dict[str, Any]:
    return {
        "w": torch.full((size,), float(step)),
        "mine": ckpt.per_rank(torch.full((size // 2,), step + rank / 10)),
        "frozen": torch.arange(size),
        "n": step,
    }


def require_saved(ckpt: Checkpointer, rank: int, step: int, size: int = BIG) -> None:
    found = state_of(ckpt, rank, 0, size)
    found["frozen"].zero_()
    assert ckpt.restore(found) == step
    expected = state_of(ckpt, rank, step, size)
    assert found["n"] == step
    assert torch.equal(found["w"], expected["w"])
    assert torch.equal(found["mine"].value, expected["mine"].value)
    assert torch.equal(found["frozen"], expected["frozen"])
    assert ckpt.verify(step).ok


def save_three(rank: int, world: int, directory: Path, kind: str) -> None:
    size = 2_000 if kind == "within" else BIG
    memory = "2MiB" if kind == "sliced" else None
    options = SaveOptions(background="process", warm=False, memory=memory, commit_seconds=60)
    with (
        open_pool(directory) as pool,
        Checkpointer(pool, "run", keep_last=2, save=options) as ckpt,
    ):
        note_writer(ckpt, directory, rank)
        for step in (1, 2, 3):
            report = ckpt.save(step, state_of(ckpt, rank, step, size)).result()
            assert (report.step, report.losses_tolerated) == (step, 2)
            if kind == "segments":  # what does not change is referenced, by the writers' memory
                assert (report.referenced_bytes >= 8 * BIG) == (step > 1)
        require_saved(ckpt, rank, 3, size)
        assert ckpt.steps.collect_garbage() == 0
        assert writer(ckpt).restarts_total == 0
        if not rank:
            ckpt.steps.retain()
            assert ckpt.steps() == [2, 3]


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        *some_of([(2, "segments"), (2, "within"), (2, "sliced")], 0, 2),
        # eight processes start: on two busy cores that takes longer than ranks are waited for
        *([(4, "segments"), (4, "sliced")] if LONG else []),
    ],
)
def test_what_they_save_is_what_threads_save(tmp_path: Path, world: int, kind: str) -> None:
    """Bit by bit, step after step; older steps go, and the writers with the checkpointers."""
    make_pool(tmp_path)
    launch(tmp_path, world, save_three, kind)
    require_none_left(tmp_path)


def die_when_all_is_handed_over(rank: int, world: int, directory: Path, ends: str) -> None:
    with open_pool(directory) as pool:
        ckpt = Checkpointer(pool, "run", save=PROCESS)
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        note_writer(ckpt, directory, rank)
        stop_process(writer(ckpt).process_id)  # nothing is written before all are dead
        handle = ckpt.save(2, state_of(ckpt, rank, 2))
        client = writer(ckpt)
        os.kill(client.process_id, signal.SIGCONT)
        poll(60.0, lambda: client.handed_over)
        (directory / f"handed-{rank}").touch()
        poll(60.0, lambda: len(list(directory.glob("handed-*"))) == world)
        if ends == "all" or rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        assert handle.result().step == 2


@pytest.mark.parametrize(("world", "ends"), some_of([(2, "all"), (2, "leader"), (4, "all")], 1))
def test_a_save_is_finished_when_trainers_are_gone(tmp_path: Path, world: int, ends: str) -> None:
    """All writers have all of it: they vote, commit and end. A job that is started again at once
    waits for them."""
    make_pool(tmp_path)
    killed = tuple(range(world)) if ends == "all" else (0,)
    launch(tmp_path, world, die_when_all_is_handed_over, ends, killed=killed)
    launch(tmp_path, world, find_saved, 2)
    require_none_left(tmp_path)


def find_saved(rank: int, world: int, directory: Path, step: int) -> None:
    with open_pool(directory) as pool, Checkpointer(pool, "run") as ckpt:
        require_saved(ckpt, rank, step)
        assert ckpt.steps.collect_garbage() == 0


def die_before_it_is_handed_over(rank: int, world: int, directory: Path, ends: str) -> None:
    options = SaveOptions(background="process", warm=False, commit_seconds=60, drain_seconds=1)
    with open_pool(directory) as pool:
        ckpt = Checkpointer(pool, "run", save=options)
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        note_writer(ckpt, directory, rank)
        if rank == world - 1:
            client = writer(ckpt)
            client.tell_part = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        ckpt.save(2, state_of(ckpt, rank, 2))
        if ends == "all" and rank != world - 1:
            client = writer(ckpt)
            poll(60.0, lambda: client.handed_over)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CheckpointError, match="step 2 is not committed, step 1 is still"):
            ckpt.wait()
        assert ckpt.steps() == [1]


@pytest.mark.parametrize(
    ("world", "ends"), some_of([(3, "one"), (2, "all"), (2, "one"), (4, "one")], 0)
)
def test_a_part_that_is_missing_leaves_the_step_before(
    tmp_path: Path, world: int, ends: str
) -> None:
    """One trainer dies before its writer has its part: its writer says so, and none commits."""
    make_pool(tmp_path)
    killed = tuple(range(world)) if ends == "all" else (world - 1,)
    launch(tmp_path, world, die_before_it_is_handed_over, ends, killed=killed)
    require_none_left(tmp_path)
    launch(tmp_path, world, find_saved, 1)


def hold_writer(client: WriterClient, until: Path) -> None:
    """Of one save: the writer is stopped before it has its part, until the file is there."""
    tell_part = client.tell_part

    def tell_and_wait(*args: Any, **kwargs: Any) -> None:
        client.tell_part = tell_part  # type: ignore[method-assign]
        stop_process(client.process_id)
        tell_part(*args, **kwargs)
        poll(60.0, until.exists)
        os.kill(client.process_id, signal.SIGCONT)

    client.tell_part = tell_and_wait  # type: ignore[method-assign]


def lose_writers(rank: int, world: int, directory: Path) -> None:
    options = SaveOptions(
        background="process", on_failure="warn", warm=False, commit_seconds=60, reuse=False
    )
    with open_pool(directory) as pool, Checkpointer(pool, "run", save=options) as ckpt:
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        if rank:  # idle: nothing fails
            os.kill(note_writer(ckpt, directory, rank), signal.SIGKILL)
        ckpt.save(2, state_of(ckpt, rank, 2)).result()
        for step, where in ((3, 0), (5, world - 1)):  # in the middle: the save fails on all ranks
            process = note_writer(ckpt, directory, rank)
            killed = directory / f"killed-{step}"

            def kill(done: int, total: int, process: int = process, killed: Path = killed) -> None:
                os.kill(process, signal.SIGKILL)
                killed.touch()

            if rank != where:  # without this one's vote nothing is committed before the kill
                hold_writer(writer(ckpt), until=killed)
            handle = ckpt.save(
                step, state_of(ckpt, rank, step), progress=kill if rank == where else None
            )
            ckpt.wait()
            found = handle.outcome()
            assert isinstance(found, CheckpointError)
            assert "a writer process is gone" in str(found)
            assert ckpt.saver.last_failure is found
            assert ckpt.save(step + 1, state_of(ckpt, rank, step + 1)).result().step == step + 1
            require_saved(ckpt, rank, step + 1)
        assert ckpt.steps() == [1, 2, 4, 6]
        note_writer(ckpt, directory, rank)


def test_writers_that_are_killed_are_replaced_on_all_ranks(tmp_path: Path) -> None:
    """Between saves nobody notices; in a save all ranks fail alike, and the next one is as good as
    any."""
    make_pool(tmp_path)
    launch(tmp_path, 2, lose_writers)
    require_none_left(tmp_path)


def pause_one(rank: int, world: int, directory: Path) -> None:
    options = SaveOptions(
        background="process", on_failure="warn", warm=False, commit_seconds=60, reuse=False
    )
    with open_pool(directory) as pool, Checkpointer(pool, "run", save=options) as ckpt:
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        process = note_writer(ckpt, directory, rank)
        if rank:
            client = writer(ckpt)
            start = client.start

            def start_another() -> None:
                client.answer_seconds = 90.0
                start()

            client.start = start_another  # type: ignore[method-assign]
            client.answer_seconds = 3.0
            stop_process(process)
        handle = ckpt.save(2, state_of(ckpt, rank, 2))
        ckpt.wait()
        if rank:
            assert not alive(process)
        assert handle.result().step == 2
        require_saved(ckpt, rank, 2)
        ckpt.save(3, state_of(ckpt, rank, 3)).result()
        assert ckpt.steps() == [1, 2, 3]
        note_writer(ckpt, directory, rank)


def test_a_writer_that_stands_is_given_up(tmp_path: Path) -> None:
    """Its trainer ends it after a time; it had begun nothing, so new writers make the save."""
    make_pool(tmp_path)
    launch(tmp_path, 2, pause_one)
    require_none_left(tmp_path)


def differ(rank: int, world: int, directory: Path) -> None:
    with open_pool(directory) as pool:
        with pytest.raises(CheckpointError, match="the ranks have different background"):
            Checkpointer(pool, "run", save=SaveOptions(background="process" if rank else "thread"))
        with Checkpointer(pool, "run", save=PROCESS) as ckpt:
            stage = ckpt.saver._stage._stage

            def full(*_: object) -> None:
                raise MemoryError("no more")

            if rank:  # one rank cannot stage its part
                ckpt.saver._stage._stage = full  # type: ignore[method-assign,assignment]
            with pytest.raises(CheckpointError, match=r"rank 1: .*MemoryError: no more"):
                ckpt.save(1, state_of(ckpt, rank, 1)).result()
            ckpt.saver._stage._stage = stage  # type: ignore[method-assign]
            ckpt.save(2, state_of(ckpt, rank, 2)).result()
            assert ckpt.steps() == [2]
            assert writer(ckpt).restarts_total == 0


def test_what_one_rank_cannot_do_fails_on_all(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, differ)
