"""SIGTERM as a notice: all ranks save and stop after one step, or the process ends as it would."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as _distributed

from hpstore.checkpoint import Checkpointer, Preempted, SaveOptions
from hpstore.checkpoint.ranks import stop_step
from hpstore.checkpoint.ranks.sigterm import DOUBLE_SECONDS
from hpstore.checkpoint.ranks.stop_step import Board
from hpstore.errors import CheckpointError
from hpstore.pool.pool import Pool
from tests.fault.common import exit_status, forked
from tests.integration.ranks import launch, make_pool, open_pool

dist: Any = _distributed  # its stores have no public types

PATIENCE = 30.0
NOTICED = SaveOptions(on_sigterm="save", drain_seconds=PATIENCE)


class Stays:
    """A trainer in its loop."""

    closed = False


STAYS = Stays()


@pytest.fixture(autouse=True)
def unhandled() -> Iterator[None]:
    """SIGTERM as a process has it at its start; as it was, afterwards."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    """A SIGTERM to this process. Python calls the handler before os.kill returns."""
    os.kill(os.getpid(), signal.SIGTERM)


def handler() -> object:
    """What handles SIGTERM now."""
    return signal.getsignal(signal.SIGTERM)


# --- one process ----------------------------------------------------------------------------


def test_the_step_of_the_signal_is_saved_though_a_save_is_under_way(pool: Pool) -> None:
    """on_busy="skip" and a gentle pace are for saves that others follow. Then the program goes on
    to its end, and nothing handles SIGTERM any more."""
    state = {"x": torch.zeros(200_000)}
    save = SaveOptions(on_sigterm="save", on_busy="skip", pace="gentle")
    with pool, Checkpointer(pool, "run", rng=False, save=save) as ckpt:
        assert not ckpt.reached_preemption(1)
        ckpt.save(1, state)
        terminate()
        assert ckpt.reached_preemption(2)
        assert ckpt.reached_preemption(2)  # as often as it is asked
        handle = ckpt.save(2, state)
        assert not handle.skipped
        ckpt.wait()
        assert ckpt.steps() == [1, 2]
        ckpt.close()
        assert handler() is signal.SIG_DFL


def test_a_handler_from_before_is_called_and_put_back(pool: Pool) -> None:
    """And again at the second signal, which is no notice: what it does then counts."""
    calls: list[int] = []
    mine = lambda number, frame: calls.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    with pool, Checkpointer(pool, "run", save=SaveOptions(on_sigterm="save")) as ckpt:
        terminate()
        assert calls == [signal.SIGTERM]
        terminate()  # what a launcher passes on, right behind it: one notice
        assert calls == [signal.SIGTERM] * 2
        terminate()
        assert calls == [signal.SIGTERM] * 3
        assert ckpt.reached_preemption(1)
        ckpt.close()
        assert handler() is mine


def test_a_handler_from_before_that_exits_does_so_after_the_save(pool: Pool) -> None:
    """sys.exit() in a handler is common: at the first signal it would end the rank in mid step."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with pool:
        ckpt = Checkpointer(pool, "run", save=SaveOptions(on_sigterm="save"))
        terminate()
        assert ckpt.reached_preemption(1)
        ckpt.save(1, {"x": torch.zeros(8)})
        with pytest.raises(SystemExit) as error:
            ckpt.close()
        assert error.value.code == 7
        with Checkpointer(pool, "run") as other:
            assert other.steps() == [1]


@pytest.mark.parametrize("on_sigterm", ["save", "finish"])
def test_a_handler_that_was_installed_over_ours_decides_alone(pool: Pool, on_sigterm: str) -> None:
    """pl1 sigterm latest: Lightning's handler calls ours, which then ended the process in the
    middle of the step. Closed, ours leaves the other one in place."""
    seen: list[object] = []
    with pool, Checkpointer(pool, "run", save=SaveOptions(on_sigterm=on_sigterm)) as ckpt:
        ours: Any = handler()

        def over(number: int, frame: object) -> None:
            seen.append(number)
            ours(number, frame)

        signal.signal(signal.SIGTERM, over)
        terminate()
        assert seen == [signal.SIGTERM]  # and this process is there
        assert ckpt.reached_preemption(1) is (on_sigterm == "save")
        ckpt.close()
        assert handler() is over
        terminate()
        assert len(seen) == 2


def test_the_handler_goes_with_the_last_checkpointer(pool: Pool) -> None:
    """One handler serves all; each hears of the signal."""
    with pool:
        one = Checkpointer(pool, "one", save=SaveOptions(on_sigterm="save"))
        two = Checkpointer(pool, "two")
        three = Checkpointer(pool, "three", save=SaveOptions(on_sigterm="save"))
        ours = handler()
        terminate()
        assert one.reached_preemption(1)
        assert three.reached_preemption(1)
        one.close()
        two.close()
        assert handler() is ours
        three.close()
        assert handler() is signal.SIG_DFL


@pytest.mark.parametrize("second", ["signal", "deadline", "close"])
def test_a_process_that_does_not_stop_is_ended(pool: Pool, tmp_path: Path, second: str) -> None:
    """By a second signal at once, at the deadline where the trainer does not come to a step, and
    at close() where it has not heard of the signal. The newest committed step stays."""

    def child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        seconds = 0.3 if second == "deadline" else PATIENCE
        ckpt = Checkpointer(
            open_pool(tmp_path),
            "run",
            rng=False,
            save=SaveOptions(on_sigterm="save", drain_seconds=seconds),
        )
        ckpt.save(1, {"x": torch.zeros(8)}).result()
        terminate()
        if second == "signal":
            time.sleep(2 * DOUBLE_SECONDS)
            terminate()
        elif second == "close":
            ckpt.close()
        time.sleep(PATIENCE)

    with forked(child) as pid:
        assert exit_status(pid, PATIENCE) == -signal.SIGTERM
    with pool, Checkpointer(pool, "run") as ckpt:
        assert ckpt.steps() == [1]


def test_what_cannot_be_is_refused(pool: Pool) -> None:
    """A thread that cannot handle signals. Nothing is left of the attempt."""
    found: list[BaseException] = []

    def make() -> None:
        try:
            Checkpointer(pool, "run", save=SaveOptions(on_sigterm="save"))
        except CheckpointError as error:
            found.append(error)

    with pool:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        assert "main thread" in str(found[0])
        assert handler() is signal.SIG_DFL


def test_the_exit_status_says_that_it_was_sigterm() -> None:
    """Launchers start a job that ended so again; 0 would be its success."""
    with pytest.raises(SystemExit) as error:
        raise Preempted("step 7 is saved")
    assert (error.value.code, str(error.value)) == (143, "step 7 is saved")


def test_ranks_agree_on_the_last_step_of_all_of_them() -> None:
    """Over a store that is a server, as launchers have it, with a connection for each rank."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    boards = [Board(dist.PrefixStore("job", server).clone(), "x", n, 3) for n in range(3)]
    assert not any(board.told() for board in boards)
    until = time.monotonic() + PATIENCE
    with ThreadPoolExecutor(3) as threads:
        answers = threads.map(lambda n: boards[n].agree([7, 12, 9][n], until, STAYS), range(3))
        assert list(answers) == [12, 12, 12]
    assert all(board.told() for board in boards)


def test_a_rank_that_does_not_answer_ends_the_agreement_in_time() -> None:
    """On all that ask: nothing is agreed."""
    store = dist.HashStore()
    boards = [Board(store, "x", n, 3) for n in range(3)]
    until = time.monotonic() + 0.2
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda n: boards[n].agree(5, until, STAYS), range(2))) == [None] * 2


# --- many ranks -----------------------------------------------------------------------------


def train(rank: int, world: int, directory: Path, signalled: tuple[int, ...]) -> None:
    """Ranks that do not wait for each other in a step, one of them slower."""
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False, save=NOTICED) as ckpt:
        x = torch.zeros(8)
        for step in range(1, 10_000):
            x += 1
            time.sleep(0.004 if rank else 0.002)
            if step == 20 and rank in signalled:
                terminate()
            if ckpt.reached_preemption(step):
                ckpt.save(step, {"x": x, "own": ckpt.per_rank(step)})
                break
        ckpt.wait()
        assert ckpt.steps() == [step], (ckpt.steps(), step)
        assert step >= 20
        assert ckpt.read(step).tree()["own"] == step  # of every rank: all were at one step
        assert float(ckpt.read(step).tree()["x"][0]) == step


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1, 2)])
def test_all_ranks_save_and_stop_after_one_step(tmp_path: Path, signalled: tuple[int, ...]) -> None:
    """bb_sigterm: whoever gets the signal, no rank stops before its peers are at the same step."""
    make_pool(tmp_path)
    launch(tmp_path, 3, train, signalled)


def leave(rank: int, world: int, directory: Path, leaver: int) -> None:
    """One rank has left its loop when the other gets the signal after its last step."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # nothing is delivered at the end
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False, save=NOTICED) as ckpt:
        for step in range(1, 4):
            assert not ckpt.reached_preemption(step)
        if rank == leaver:
            ckpt.close()
            (directory / "left").touch()
            return
        began = time.monotonic()
        while not (directory / "left").exists():
            time.sleep(0.01)
        terminate()
        while "hpstore-sigterm" in [t.name for t in threading.enumerate()] and (
            time.monotonic() < began + 1
        ):
            assert not ckpt.reached_preemption(3)
            time.sleep(0.01)
        assert time.monotonic() < began + PATIENCE / 2


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_is_not_held_for_one_that_has_left_its_loop(tmp_path: Path, leaver: int) -> None:
    """The job was at its end: the last rank goes on to it, without waiting for the deadline."""
    make_pool(tmp_path)
    launch(tmp_path, 2, leave, leaver)


def differ(rank: int, world: int, directory: Path) -> None:
    """What one rank cannot do is refused on all."""
    with open_pool(directory) as pool:
        with pytest.raises(CheckpointError, match="different on_sigterm"):
            Checkpointer(pool, "run", save=SaveOptions(on_sigterm="save" if rank else "finish"))
        with pytest.raises(CheckpointError, match="on all ranks without group="):
            Checkpointer(pool, "run", group="alone", save=SaveOptions(on_sigterm="save"))
        if rank == 1:
            stop_step.__dict__["require_handling"] = _refuse
        with pytest.raises(CheckpointError, match="cannot"):
            Checkpointer(pool, "run", save=SaveOptions(on_sigterm="save"))


def _refuse() -> None:
    raise CheckpointError("cannot")


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    """Some would stop without the others."""
    make_pool(tmp_path)
    launch(tmp_path, 2, differ)
