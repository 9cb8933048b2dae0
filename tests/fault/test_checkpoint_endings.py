"""How a process with a save under way ends: SIGTERM, an exception, kill -9 in a loop of saves."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.pool.pool import Pool
from tests.fault.common import Bench, exit_status, forked
from tests.thorough import LONG

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]
PATIENCE = 60.0
KILLS, SEED = 30 if LONG else 8, 20261121
FLOATS = 200_000


def state_of(step: int) -> dict[str, torch.Tensor]:
    """A part that never changes, which later steps refer to, and one that tells the step."""
    return {"frozen": torch.full((FLOATS,), 0.5), "free": torch.full((FLOATS,), float(step))}


def checkpointer(pool: Pool, *, drain_seconds: float = 60.0, **options: Any) -> Checkpointer:
    """As all tests here have it: reading what is stored, not what is in memory."""
    return Checkpointer(
        pool, "run", rng=False, save=SaveOptions(warm=False, drain_seconds=drain_seconds), **options
    )


def check_newest(pool: Pool, at_least: int) -> int:
    """As the next job does: collect garbage, restore the newest step. All steps are whole."""
    with checkpointer(pool) as ckpt:
        state = state_of(-1)
        found = ckpt.restore(state)
        assert found is not None
        assert found >= at_least
        assert found == ckpt.steps()[-1]
        wanted = state_of(found)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
        assert all(ckpt.verify(step).ok for step in ckpt.steps())
        named = {s.key for step in ckpt.steps() for s in ckpt.steps.manifest(step).objects}
        keys = set(pool.list("run"))
        assert {key for key in keys if "/segment-" in key} == named
        assert not [key for key in keys if "/attempts/" in key]
    return found


def before_manifest(pool: Pool, act: Callable[[], object]) -> None:
    """Right before the pool puts a manifest."""
    original = pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        if "manifest" in key:
            act()
        return original(key, *args, **options)

    pool.put = put  # type: ignore[method-assign]


# --- SIGTERM --------------------------------------------------------------------------------


class Stopped:
    """A child whose save stops before its manifest, says so, and goes on when it is told to."""

    def __init__(self, bench: Bench, drain_seconds: float) -> None:
        self._bench, self._drain_seconds = bench, drain_seconds
        self._said, self._says = os.pipe()
        self._hears, self._tells = os.pipe()

    def child(self) -> None:
        """Save step 2 and do what a trainer does meanwhile: something else."""
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pool = self._bench.open()
        before_manifest(pool, self._stop)
        ckpt = checkpointer(pool, drain_seconds=self._drain_seconds)
        ckpt.save(2, state_of(2))
        while True:
            signal.pause()

    def _stop(self) -> None:
        os.write(self._says, b"x")
        os.read(self._hears, 1)

    def wait_for_it(self) -> None:
        """Until the save stands before its manifest."""
        ready, _, _ = select.select([self._said], [], [], PATIENCE)
        assert ready, "the child does not save"

    def go_on(self) -> None:
        """Let it."""
        os.write(self._tells, b"x")


@pytest.fixture
def one_step(bench: Bench) -> Bench:
    """A pool with step 1."""
    with bench.create(4, data=2, parity=1) as pool, checkpointer(pool) as ckpt:
        ckpt.save(1, state_of(1)).result()
    return bench


def test_sigterm_lets_the_save_under_way_commit(one_step: Bench) -> None:
    """The process ends by the signal, as it would have, with the step committed."""
    stopped = Stopped(one_step, PATIENCE)
    with forked(stopped.child) as pid:
        stopped.wait_for_it()
        os.kill(pid, signal.SIGTERM)
        stopped.go_on()
        assert exit_status(pid, PATIENCE) == -signal.SIGTERM
    with one_step.open() as pool:
        assert check_newest(pool, 2) == 2


def test_sigterm_gives_up_a_save_that_takes_longer_than_drain_seconds(one_step: Bench) -> None:
    """The process ends in time; the step before is current, the next job clears up."""
    stopped = Stopped(one_step, 0.2)
    with forked(stopped.child) as pid:
        stopped.wait_for_it()
        os.kill(pid, signal.SIGTERM)
        assert exit_status(pid, PATIENCE) == -signal.SIGTERM
    with one_step.open() as pool:
        assert check_newest(pool, 1) == 1


def test_sigterm_drains_in_a_process_forked_from_one_that_saves(one_step: Bench) -> None:
    """The handler was installed by the parent; the child's own saves are waited for, too."""
    stopped = Stopped(one_step, PATIENCE)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with one_step.open() as pool, checkpointer(pool):
            with forked(lambda: inherit(stopped)) as pid:
                stopped.wait_for_it()
                os.kill(pid, signal.SIGTERM)
                stopped.go_on()
                assert exit_status(pid, PATIENCE) == -signal.SIGTERM
            assert check_newest(pool, 2) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def inherit(stopped: Stopped) -> None:
    """A child that keeps the parent's handler."""
    torch.set_num_threads(1)
    pool = stopped._bench.open()
    before_manifest(pool, stopped._stop)
    ckpt = checkpointer(pool, drain_seconds=PATIENCE)
    ckpt.save(2, state_of(2))
    while True:
        signal.pause()


# --- exit -----------------------------------------------------------------------------------


SCRIPT = """
import sys, threading
import torch
import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions

pool = hpstore.open(sys.argv[1])
ckpt = Checkpointer(pool, "run", rng=False, save=SaveOptions(drain_seconds=float(sys.argv[3])))
leaving = threading.Event()
original = pool.put

def put(key, *args, **options):
    if "manifest" in key:
        leaving.wait()
        if sys.argv[2] == "hangs":
            threading.Event().wait()
    return original(key, *args, **options)

pool.put = put
ckpt.save(2, {"frozen": torch.full((200_000,), 0.5), "free": torch.full((200_000,), 2.0)})
leaving.set()
if sys.argv[2] == "raises":
    raise RuntimeError("the loop has a bug")
"""


@pytest.mark.parametrize(
    ("how", "drain_seconds", "status", "newest"),
    [("raises", 60.0, 1, 2), ("ends", 60.0, 0, 2), ("hangs", 0.2, 0, 1)],
)
def test_an_interpreter_that_ends_without_close_waits_for_its_save(
    one_step: Bench, how: str, drain_seconds: float, status: int, newest: int
) -> None:
    """After an exception, after the last line; for no longer than drain_seconds."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(one_step.toml), how, str(drain_seconds)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=Path.cwd(),
    )
    assert done.returncode == status, done.stderr
    assert ("the loop has a bug" in done.stderr) == (how == "raises")
    with one_step.open() as pool:
        assert check_newest(pool, newest) == newest


# --- kill -9 --------------------------------------------------------------------------------


def save_on(bench: Bench, pipe: int) -> None:
    """Resume, then save step after step until killed; say what was acknowledged."""
    torch.set_num_threads(1)
    with bench.open() as pool, checkpointer(pool, keep_last=2) as ckpt:
        first = (ckpt.restore(state_of(-1)) or 0) + 1
        for step in range(first, first + 10_000):
            ckpt.save(step, state_of(step)).result()
            os.write(pipe, f"{step}\n".encode())


def live_and_die(bench: Bench, rng: random.Random) -> list[int]:
    """Start a child, kill it 0-400 ms after its first acknowledgement; what it acknowledged."""
    reading, writing = os.pipe()
    with forked(lambda: save_on(bench, writing)) as pid:
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], PATIENCE)
        assert ready, "the child acknowledges nothing"
        kill_at = time.monotonic() + rng.uniform(0.0, 0.4)
        while time.monotonic() < kill_at:
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lines = bytearray()
    while part := os.read(reading, 65536):
        lines += part
    os.close(reading)
    return [int(line) for line in lines.split()]


def test_killed_savers_leave_the_newest_committed_step_and_all_others_whole(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill a loop of saves with keep_last=2 again and again; every step holds its own values."""
    rng = random.Random(SEED)
    acknowledged, rolled_forward, newest = 0, 0, 0
    with bench.create(4, data=2, parity=1) as pool:
        for _ in range(KILLS):
            steps = live_and_die(bench, rng)
            assert steps[0] == newest + 1
            newest = check_newest(pool, steps[-1])
            assert newest - steps[-1] in (0, 1)
            acknowledged += len(steps)
            rolled_forward += newest - steps[-1]
        assert pool.scrub().clean
    with capsys.disabled():
        print(
            f"\n{KILLS} kills, {acknowledged} saves acknowledged, {rolled_forward} became "
            f"visible; seed {SEED}"
        )
    assert acknowledged >= KILLS
