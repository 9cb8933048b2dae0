"""PoolCheckpointIO and the pool that it works with: pickled, not opened, not there."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path

import pytest
import torch

from hpstore.errors import CheckpointError
from hpstore.pool.pool import Pool

pytest.importorskip("lightning.pytorch")
from hpstore.trainers.lightning import PoolCheckpointIO


@pytest.mark.parametrize("how", ["pickle", "copy"])
def test_a_pickled_io_opens_its_pool_when_it_is_used(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A Trainer that is pickled with its model and loaded again had a second pool open, with its
    threads, that nothing closed (Lightning's test_model_torch_save)."""
    opened: list[Pool] = []
    closed: list[Pool] = []
    make, close = Pool.__init__, Pool.close

    def made(self: Pool, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]  # of any kind
        opened.append(self)

    def ended(self: Pool) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Pool, "__init__", made)
    monkeypatch.setattr(Pool, "close", ended)
    with contextlib.closing(PoolCheckpointIO(pool, "run")) as io:
        io.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
        io.teardown()
        other = pickle.loads(pickle.dumps(io)) if how == "pickle" else copy.deepcopy(io)
        other.close()
        assert opened == []
        assert other.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
        assert len(opened) == 1
        other.close()
        assert closed == opened
        assert other.load_checkpoint(tmp_path / "a.ckpt") == {"step": 3}
        other.close()
        assert io.latest() == str(tmp_path / "a.ckpt")
    assert closed == opened


def test_a_file_that_is_not_in_the_pool_can_be_taken_in(pool: Pool, tmp_path: Path) -> None:
    """The error of a checkpoint that the stock IO saved has the line that helps; that of a marker
    whose checkpoint is gone has none."""
    io = PoolCheckpointIO(pool, "run")
    path = tmp_path / "old.ckpt"
    torch.save({"step": 5}, path)
    with pytest.raises(CheckpointError, match=r"io\.save_checkpoint\(torch\.load\(path\), path\)"):
        io.load_checkpoint(path)
    io.save_checkpoint(torch.load(path), path)
    assert io.load_checkpoint(path) == {"step": 5}
    io.checkpoints.remove("at" + str(path))
    for gone in (path, tmp_path / "never.ckpt"):
        with pytest.raises(CheckpointError, match="no checkpoint") as raised:
            io.load_checkpoint(gone)
        assert "torch.load" not in str(raised.value)
    io.close()
