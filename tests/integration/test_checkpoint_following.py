"""A save is written while the rest of it is still being staged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hpstore
from hpstore import Pool
from hpstore.checkpoint import Checkpointer, copying
from hpstore.checkpoint.copying import PIECE_BYTES, Copier, as_bytes
from hpstore.checkpoint.following import FollowingSource, Watermark
from hpstore.checkpoint.saving import SaveJob
from hpstore.codec.galois import Bytes
from hpstore.config import Settings
from hpstore.errors import CheckpointError
from hpstore.units import MIB

PATIENCE_SECONDS = 60.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    settings = Settings(memory_bytes=64 * MIB, run_directory=str(tmp_path / "run"))
    paths = [tmp_path / f"d{i}" for i in range(6)]
    config = tmp_path / "pool.toml"
    with hpstore.create(paths, data=4, parity=2, config=config, settings=settings) as made:
        yield made


def state(pieces: int, value: float = 1.0) -> dict[str, torch.Tensor]:
    """Of so many pieces of a copy, with a small tensor before and behind them."""
    big = torch.full((pieces * PIECE_BYTES // 4,), value)
    return {"first": torch.full((3,), value), "big": big, "last": torch.full((5,), value)}


def test_what_is_staged_is_written_while_the_rest_is_not(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last piece is copied only after the writer has been given the first stripes."""
    handed, copied = threading.Event(), []
    view = FollowingSource.view

    def seen(self: FollowingSource, start: int, end: int) -> object:
        found = view(self, start, end)
        handed.set()
        return found

    def held(to: Bytes, piece: Bytes) -> None:
        copied.append(piece)
        if len(copied) == 16:
            assert handed.wait(PATIENCE_SECONDS), "nothing was written before all was staged"
        np.copyto(to, piece)

    monkeypatch.setattr(FollowingSource, "view", seen)
    monkeypatch.setattr(copying, "copy_piece", held)
    kept = state(16)
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, kept).result()
        assert len(copied) == 16
        for name, tensor in ckpt.load(1).items():
            assert torch.equal(tensor, kept[name]), name


def test_the_mark_never_passes_a_piece_that_is_still_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads: while the first piece is held, later ones are copied and nothing is told."""
    source = torch.arange(6 * PIECE_BYTES // 4, dtype=torch.int32)
    target = torch.zeros_like(source)
    memory = as_bytes(target)
    assert memory is not None
    mark = Watermark(memory)
    reached: list[int] = []
    others = threading.Event()
    lock = threading.Lock()
    order: list[int] = []

    def held(to: object, piece: Bytes) -> None:
        with lock:
            order.append(1)
            number = len(order)
        if number == 1:
            assert others.wait(PATIENCE_SECONDS)
        np.copyto(to, piece)
        if number == 4:
            reached.append(mark._at)
            others.set()

    monkeypatch.setattr(copying, "copy_piece", held)
    copier = Copier()
    copier._helpers = 1
    copier.run([(target, source)], mark)
    copier.close()
    assert reached == [0]
    mark.finish()
    mark.wait(len(memory))
    assert torch.equal(target, source)


def test_who_waits_below_the_mark_gets_the_bytes_and_who_waits_above_the_error() -> None:
    memory = np.arange(8192, dtype=np.uint8)
    mark = Watermark(memory)
    source = FollowingSource(mark, len(memory))
    mark.reach(memory.ctypes.data + 4096)
    mark.fail(CheckpointError("no more"))
    view = source.view(0, 4096)
    assert view is not None
    assert (view == memory[:4096]).all()
    out = np.zeros(100, np.uint8)
    source.read_into(3996, out)
    assert (out == memory[3996:4096]).all()
    with pytest.raises(CheckpointError, match="no more"):
        source.view(0, 4097)


def test_what_fails_in_staging_fails_the_save_and_leaves_the_step_before(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised by save() itself, once; the next save is not touched by it."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state(4)).result()

        def broken(to: object, piece: object) -> None:
            raise MemoryError("no memory for a temporary")

        with monkeypatch.context() as patch:
            patch.setattr(copying, "copy_piece", broken)
            with pytest.raises(MemoryError, match="temporary"):
                ckpt.save(2, state(4, 2.0))
        ckpt.wait()
        assert ckpt.steps() == [1]
        ckpt.save(3, state(4, 3.0)).result()
        assert ckpt.steps() == [1, 3]
        assert ckpt.collect_garbage() == 0, "the failed save has left segments"


def test_control_c_in_mid_copy_leaves_a_checkpointer_that_works(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(pool, "run", rng=False) as ckpt:

        def interrupted(to: object, piece: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(copying, "copy_piece", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(1, state(4))
        assert ckpt.steps() == []
        ckpt.save(2, state(4)).result()
        assert ckpt.verify(2).damaged == ()


def test_unchanged_tensors_are_still_referenced(pool: Pool) -> None:
    """Whoever follows the copies does not look for them: such a save is staged first."""
    with Checkpointer(pool, "run", rng=False) as ckpt:
        kept = {"frozen": torch.randn(1 << 20), "moving": torch.randn(1 << 20)}
        ckpt.save(1, kept).result()
        kept["moving"] += 1
        report = ckpt.save(2, kept).result()
        assert report.referenced_bytes == kept["frozen"].nbytes
        kept["frozen"] += 1
        kept["moving"] += 1
        report = ckpt.save(3, kept).result()
        assert report.referenced_bytes == 0
        report = ckpt.save(4, kept).result()
        assert report.referenced_bytes == 2 * kept["frozen"].nbytes


IN_MID_COPY = """
    import os, signal, sys, time
    import numpy as np, torch
    from hpstore import open as open_pool
    from hpstore.checkpoint import Checkpointer, copying

    ckpt = Checkpointer(open_pool(sys.argv[1]), "run", rng=False, drain_seconds=600.0)
    ckpt.save(1, {"w": torch.ones(8 << 20)}).result()

    def hit(to, piece):
        np.copyto(to, piece)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

    copying.copy_piece = hit
    ckpt.save(2, {"w": torch.zeros(8 << 20)})
"""


def test_sigterm_in_mid_copy_ends_the_process_at_once(pool: Pool, tmp_path: Path) -> None:
    """Its handler runs on the thread that stages: waiting for the save would wait for itself."""
    program = tmp_path / "job.py"
    program.write_text(textwrap.dedent(IN_MID_COPY))
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "pool.toml")],
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == -signal.SIGTERM
    with Checkpointer(pool, "run", rng=False) as ckpt:
        assert ckpt.latest_valid() == 1


def test_a_saver_that_fails_before_all_is_staged_fails_its_save_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """save() returns as always, the handle raises, the arena is free for the next save."""
    with Checkpointer(pool, "run", rng=False) as ckpt:

        def refused(self: SaveJob, *, fence: bool) -> None:
            raise CheckpointError("the note could not be put")

        def held(to: Bytes, piece: Bytes) -> None:
            assert ckpt._thread is not None
            ckpt._thread.join(PATIENCE_SECONDS)
            np.copyto(to, piece)

        with monkeypatch.context() as patch:
            patch.setattr(copying, "copy_piece", held)
            patch.setattr(SaveJob, "begin", refused)
            handle = ckpt.save(1, state(4))
        with pytest.raises(CheckpointError, match="could not be put"):
            handle.result()
        ckpt.save(2, state(4)).result()
        assert ckpt.verify(2).damaged == ()
