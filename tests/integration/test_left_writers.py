"""A trainer that is killed and started again while its old writer process still writes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog import left_writers
from hpstore.checkpoint.catalog.left_writers import LeftWriters, WriterNotice, WriterRecord
from hpstore.checkpoint.catalog.writer_fence import began, here
from hpstore.config import Settings
from hpstore.errors import VersionConflict
from tests.thorough import some_of

BIG, SMALL = 600_000, 2_000

# a module of the writer: its second save stands still at one place
STOPPING = """
    import os, signal
    from hpstore.checkpoint.save.commit import StepCommit
    before = StepCommit.PLACE
    def stopping(self, *words):
        if "PLACE" == "_require_mine":
            before(self, *words)
        if self._options.step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if "PLACE" != "_require_mine":
            return before(self, *words)
    StepCommit.PLACE = stopping
"""
TRAINER = """
    import os, signal, sys, time
    import torch, hpstore
    from hpstore.checkpoint import Checkpointer, SaveOptions
    from hpstore.checkpoint.save import writer_client
    pool, size = hpstore.open(sys.argv[1]), int(sys.argv[2])
    sys.path.append(sys.argv[3])
    writer_client._MAIN = writer_client._MAIN.replace("main(", "import stopping; main(")
    ckpt = Checkpointer(pool, "run", save=SaveOptions(background="process"))
    ckpt.save(1, {"w": torch.full((size,), 1.0)}).result()
    writer = ckpt.saver._writing.writer
    print(writer.process_id, flush=True)
    ckpt.save(2, {"w": torch.full((size,), 2.0)})
    state = lambda: open(f"/proc/{writer.process_id}/stat").read().rpartition(")")[2].split()[0]
    while state() != "T":
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[hpstore.Pool]:
    """Of real directories: another process opens it, too."""
    places = [tmp_path / f"d{i}" for i in range(4)]
    settings = Settings(
        memory_bytes=64 << 20, health=False, run_directory=str(tmp_path / "run"), claim_seconds=1.0
    )
    with hpstore.create(
        places, data=2, parity=2, config=tmp_path / "pool.toml", settings=settings
    ) as made:
        yield made


@pytest.fixture
def left(pool: hpstore.Pool, tmp_path: Path) -> Iterator[Callable[[int, str], int]]:
    """Leaves a writer that stands still, and ends it after the test."""
    processes: list[int] = []

    def leave(size: int, place: str) -> int:
        stopping = textwrap.dedent(STOPPING).replace("PLACE", place)
        (tmp_path / "stopping.py").write_text(stopping)
        words = [str(pool.config.path), str(size), str(tmp_path)]
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRAINER), *words],
            stdout=subprocess.PIPE,  # not stderr: the writer has that, too
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == -signal.SIGKILL
        processes.append(int(run.stdout))
        return processes[-1]

    yield leave
    for process in processes:
        if Path(f"/proc/{process}").exists():
            os.kill(process, signal.SIGKILL)


def gone(process: int) -> bool:
    end = time.monotonic() + 60
    while left_writers._runs(process, began(process) or 0):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


at_places = pytest.mark.parametrize(
    ("size", "place"),
    some_of([(s, p) for s in (BIG, SMALL) for p in ("_publish", "_require_mine")], 1, 2),
)
sizes = pytest.mark.parametrize("size", some_of([BIG, SMALL], 0))


@at_places
def test_a_restart_waits_for_the_old_writer(
    pool: hpstore.Pool,
    left: Callable[[int, str], int],
    size: int,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds the step that the writer commits, and saves on from there."""
    process = left(size, place)
    ended = LeftWriters._ended

    def go_on(self: LeftWriters, record: WriterRecord, end: float) -> bool:
        assert (record.pid, record.step) == (process, 2)
        threading.Timer(0.2, os.kill, (process, signal.SIGCONT)).start()
        return ended(self, record, end)

    monkeypatch.setattr(LeftWriters, "_ended", go_on)
    with Checkpointer(pool, "run") as ckpt:
        found = {"w": torch.zeros(size)}
        assert ckpt.restore(found) == 2
        assert torch.equal(found["w"], torch.full((size,), 2.0))
        assert gone(process)
        with pytest.raises(VersionConflict):
            ckpt.save(2, found)
        ckpt.save(3, found).result()
        assert ckpt.steps() == [1, 2, 3]
    assert not list((pool.admin.run_directory / "checkpoint-writers").iterdir())


@at_places
def test_a_writer_that_stands_is_waited_for_within_a_limit(
    pool: hpstore.Pool,
    left: Callable[[int, str], int],
    size: int,
    place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After it nothing of its save comes: the next save of that step commits, whenever the writer
    goes on, and its own bytes are there."""
    process = left(size, place)
    with Checkpointer(pool, "run", save=SaveOptions(drain_seconds=0.3)) as ckpt:
        assert ckpt.latest_valid() == 1  # waits, too
        found = {"w": torch.zeros(size)}
        assert ckpt.restore(found) == 1
        assert torch.equal(found["w"], torch.full((size,), 1.0))
        assert caplog.text.count("it is waited for, at most 0 s") == 1
        os.kill(process, signal.SIGCONT)
        assert gone(process)
        assert ckpt.steps() == [1]
        ckpt.save(2, {"w": torch.full((size,), 7.0)}).result()
        assert ckpt.steps() == [1, 2]
        assert torch.equal(ckpt.load(2)["w"], torch.full((size,), 7.0))
        assert ckpt.steps.collect_garbage() == 0
    names = pool.list("run/")
    assert not [name for name in names if "attempts" in name or "condemned" in name]


@sizes
def test_a_save_commits_beside_a_writer_that_stands(
    pool: hpstore.Pool, left: Callable[[int, str], int], size: int
) -> None:
    """It goes on after the restart has saved the same step: its own is not acknowledged."""
    process = left(size, "_require_mine")
    with Checkpointer(pool, "run", save=SaveOptions(drain_seconds=0.1)) as ckpt:
        assert ckpt.restore({"w": torch.zeros(size)}) == 1
        ckpt.save(2, {"w": torch.full((size,), 7.0)}).result()
        os.kill(process, signal.SIGCONT)
        assert gone(process)
        ckpt.save(3, {"w": torch.full((size,), 8.0)}).result()
        assert ckpt.steps() == [1, 2, 3]
        assert torch.equal(ckpt.load(2)["w"], torch.full((size,), 7.0))
        ckpt.steps.collect_garbage()
        assert ckpt.verify(2).ok
        assert ckpt.verify(3).ok


class Sleeper:
    """A process of this user that runs, as a writer; its trainer has ended."""

    def __init__(self, pool: hpstore.Pool) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        ended = subprocess.Popen(["true"])
        ended.wait()
        _, boot, namespace = here()
        self.record = WriterRecord(
            pool_id=pool.admin.record.pool_id,
            prefix="run",
            boot=boot,
            namespace=namespace,
            pid=self.process.pid,
            ticks=began(self.process.pid) or 0,
            trainer_pid=ended.pid,
            trainer_ticks=1,
            step=7,
        )
        self.path = pool.admin.run_directory / "checkpoint-writers" / "w.json"
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, **other: object) -> None:
        self.path.write_text(json.dumps(asdict(self.record) | other))


@pytest.fixture
def sleeper(pool: hpstore.Pool) -> Iterator[Sleeper]:
    made = Sleeper(pool)
    yield made
    made.process.kill()
    made.process.communicate()


def found(pool: hpstore.Pool) -> list[int]:
    """Writers that a restart would wait for."""
    looks = LeftWriters(pool, "run")
    looks.patience_seconds = 0.01
    return [record.pid for record in looks.wait()]


def test_who_is_waited_for(pool: hpstore.Pool, sleeper: Sleeper) -> None:
    """A process that runs, for a trainer that does not, on this pool and prefix."""
    mine = [sleeper.process.pid]
    sleeper.write()
    assert found(pool) == mine
    own = {"trainer_pid": os.getpid(), "trainer_ticks": began(os.getpid())}
    for other in (
        {"pool_id": "another"},
        {"prefix": "run2"},
        {"namespace": "pid:[1]"},
        own,
    ):
        sleeper.write(**other)
        assert found(pool) == []
        assert sleeper.path.exists()
    sleeper.write(trainer_pid=os.getpid(), trainer_ticks=1)  # an id that was used again
    assert found(pool) == mine
    for stale in ({"boot": "before"}, {"ticks": 1}, {"pid": 2**22 + 1}):
        sleeper.write(**stale)
        assert found(pool) == []
        assert not sleeper.path.exists()


def test_a_pool_that_is_open_read_only_waits_for_nobody(
    pool: hpstore.Pool, sleeper: Sleeper
) -> None:
    sleeper.write()
    with hpstore.open(pool.config.path, read_only=True) as reading:
        assert found(reading) == []
    assert found(pool) == [sleeper.process.pid]


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"{",
        b"[]",
        b'{"pid": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"pool_id": 1, "pid": 1e999, "step": {}}',
    ],
    ids=str,
)
def test_bytes_of_others_are_no_record(pool: hpstore.Pool, sleeper: Sleeper, bytes_: bytes) -> None:
    sleeper.path.write_bytes(bytes_)
    assert found(pool) == []
    for name, value in (("ticks", "1"), ("step", -1), ("pid", True), ("trainer_pid", None)):
        sleeper.write(**{name: value})
        assert found(pool) == []


def test_only_this_users_own_files_are_read(
    pool: hpstore.Pool, sleeper: Sleeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No link, no pipe, nothing in a directory that others may write to."""
    caplog.set_level(logging.WARNING)
    sleeper.write()
    elsewhere = tmp_path / "elsewhere"
    sleeper.path.rename(elsewhere)
    sleeper.path.symlink_to(elsewhere)
    assert found(pool) == []
    sleeper.path.unlink()
    os.mkfifo(sleeper.path)
    assert found(pool) == []
    sleeper.path.unlink()
    elsewhere.rename(sleeper.path)
    sleeper.path.parent.chmod(0o777)
    assert found(pool) == []
    assert "writers of earlier processes are not looked for" in caplog.text
    sleeper.path.parent.chmod(0o700)
    assert found(pool) == [sleeper.process.pid]


def test_the_wait_goes_by_a_clock_that_does_not_jump(pool: hpstore.Pool, sleeper: Sleeper) -> None:
    """Its limit is of the monotonic clock that it is given; each writer is waited for once."""
    sleeper.write()
    now = iter([0.0, 1.0, 61.0, 62.0, 63.0])  # for the limit, the log, a look; the limit
    looks = LeftWriters(pool, "run", clock=lambda: next(now))
    for _ in range(2):
        assert [record.pid for record in looks.wait()] == [sleeper.process.pid]
    assert next(now) == 63.0


def test_a_writer_that_ends_is_noticed_at_once(pool: hpstore.Pool, sleeper: Sleeper) -> None:
    sleeper.write()
    looks = LeftWriters(pool, "run")
    timer = threading.Timer(0.1, sleeper.process.kill)
    timer.start()
    began_at = time.monotonic()
    assert list(looks.wait()) == []
    assert time.monotonic() - began_at < looks.patience_seconds / 2
    timer.join()


def test_a_record_that_cannot_be_written_stops_no_save(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    place = pool.admin.run_directory / "checkpoint-writers"
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    place.write_text("")
    notice = WriterNotice(pool, "run", os.getppid())
    notice.saves(1, replaces=False)
    notice.remove()
    assert "a restart will not wait for this writer" in caplog.text
    assert found(pool) == []
