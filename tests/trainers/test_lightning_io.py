"""PoolCheckpointIO by itself: names, types, devices and strategies."""

from __future__ import annotations

import copy
import os
import re
import sys
import tomllib
from collections import Counter, OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpstore.errors import AlreadyClosed, CheckpointError, ConfigError
from hpstore.pool.pool import Pool
from hpstore.trainers.checkpoint_paths import name_of, path_of
from tests.property.test_typed_values import Colour, Frozen
from tests.property.test_typed_values import same as typed

pytest.importorskip("lightning.pytorch")
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from hpstore.trainers.lightning import PoolCheckpointIO, RequireUsedIO, place
from hpstore.trainers.lightning_guard import callbacks
from tests.trainers.test_lightning import Tiny, batches, same, trainer

pytestmark = [
    # two cores: Lightning wishes for more workers and for a GPU that may be there
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    # Lightning 2.6 still uses what torch 2.13 has renamed
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    # a run of its own in the same directory is what these tests are about
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def test_paths_become_names_and_back(tmp_path: Path) -> None:
    """Absolute, below a root, through a linked directory, and URLs."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    direct = name_of(tmp_path / "real" / "epoch=0-step=6.ckpt", None)
    assert direct == f"at{tmp_path}/real/epoch=0-step=6.ckpt"
    assert name_of(tmp_path / "link" / "epoch=0-step=6.ckpt", None) == direct
    assert name_of(tmp_path / "real" / "a.ckpt", str(tmp_path)) == "under/real/a.ckpt"
    assert path_of("under/real/a.ckpt", "/elsewhere") == "/elsewhere/real/a.ckpt"
    assert path_of(direct, None) == str(tmp_path / "real" / "epoch=0-step=6.ckpt")
    assert path_of(name_of("hpstore://main/x/y.ckpt", None), None) == "hpstore://main/x/y.ckpt"
    with pytest.raises(CheckpointError, match="root="):
        path_of("under/a", None)


def test_a_moved_run_resumes_below_its_new_root(pool: Pool, tmp_path: Path) -> None:
    """Saved under one root, read under another, by a pool's settings file."""
    with pool:
        io = PoolCheckpointIO(pool, "run", root=tmp_path / "old")
        io.save_checkpoint({"step": 1}, tmp_path / "old" / "c" / "a.ckpt")
        io.close()
    other = PoolCheckpointIO(tmp_path / "pool.toml", "run", root=tmp_path / "new")
    assert other.latest() == str(tmp_path / "new" / "c" / "a.ckpt")
    assert other.load_checkpoint(other.latest() or "") == {"step": 1}
    other.close()
    other.close()


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_hyper_parameters_of_every_type_come_back(
    pool: Pool, tmp_path: Path, *, allow_pickle: bool
) -> None:
    """Paths, enums, dataclasses, sets: a fit with them is saved, load_from_checkpoint has them.
    What no type stands for is refused by name, unless pickles are allowed."""
    note: list[object] = [Path("a/b"), Colour.RED, Frozen("x", (1,)), {1, 2}, Counter("aab")]
    with pool:
        io = PoolCheckpointIO(pool, "run", allow_pickle=allow_pickle)

        def notes(location: object = None) -> Any:
            newest = io.latest()
            assert newest is not None
            return io.load_checkpoint(newest, location)["hyper_parameters"]["note"]

        run = trainer(io, tmp_path, epochs=1)
        run.fit(Tiny(note=note), batches())
        for location in (None, "cpu"):
            assert typed(notes(location), note)
        pattern = Tiny(note=re.compile("a+"))
        again = trainer(io, tmp_path, epochs=1)
        if allow_pickle:
            again.fit(pattern, batches())
            assert notes() == re.compile("a+")
        else:
            with pytest.raises(CheckpointError, match=r"note' is a re\.Pattern"):
                again.fit(pattern, batches())
        io.close()


def test_map_location_keeps_types() -> None:
    """Of all that holds the tensors."""
    value = Counter(a=1), deque([torch.ones(1)], 3), OrderedDict(t=torch.ones(1)), torch.Size([2])
    assert typed(place(copy.deepcopy(value), "cpu"), value)


def test_map_location_places_tensors() -> None:
    """A device, a dict, a function and None; what is no location is refused."""
    value = {"a": [torch.ones(2), (torch.zeros(1), 3)]}
    for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda s, where: s):
        assert same(place(value, location), value)
    assert place(value, "meta")["a"][0].device.type == "meta"
    with pytest.raises(ConfigError):
        place(value, 3)


def test_saving_overwrites_a_name_whole(pool: Pool, tmp_path: Path) -> None:
    """The same path twice: the new content, one checkpoint left, os.sep in no way special."""
    with pool:
        io = PoolCheckpointIO(pool, "run")
        for step in range(3):
            io.save_checkpoint({"step": step, "t": torch.full((3,), step)}, tmp_path / "last.ckpt")
        assert io.load_checkpoint(f"{tmp_path}{os.sep}last.ckpt")["step"] == 2
        assert len(io.checkpoints._checkpoints.steps()) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_strategy_that_asks_no_checkpoint_io_is_refused(pool: Pool, wrapped: bool) -> None:
    """lt_modelparallel: checkpoints went to the local disk, none to the pool, without a word."""
    io: Any = PoolCheckpointIO(pool, "runs/ignored")
    given: Any = callbacks()  # of the entry point: PoolCheckpointIO was imported
    guard: Any = given[0]
    assert type(given[0]) is RequireUsedIO
    strategies = [ModelParallelStrategy(), FSDPStrategy(state_dict_type="sharded")]
    for strategy in strategies:
        strategy.checkpoint_io = AsyncCheckpointIO(io) if wrapped else io
        with pytest.raises(CheckpointError, match=f"{type(strategy).__name__} does not ask"):
            guard.setup(SimpleNamespace(strategy=strategy), Tiny(), "fit")
        strategy.checkpoint_io = TorchCheckpointIO()
        guard.setup(SimpleNamespace(strategy=strategy), Tiny(), "fit")
    for good in (SingleDeviceStrategy("cpu", checkpoint_io=io), DDPStrategy(checkpoint_io=io)):
        guard.setup(SimpleNamespace(strategy=good), Tiny(), "fit")


def test_no_callback_is_given_where_the_plugin_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Trainer of others is left alone."""
    monkeypatch.delitem(sys.modules, "hpstore.trainers.lightning")
    assert callbacks() == []
    found = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]
    assert found["lightning.pytorch.callbacks_factory"] == {
        "hpstore": f"{callbacks.__module__}:{callbacks.__name__}"
    }


def test_close_with_a_save_under_way_leaves_nothing_open(pool: Pool, tmp_path: Path) -> None:
    """No teardown of a Trainer has waited before: the marker is written, the pool closed, and no
    second Checkpointer is made."""
    io = PoolCheckpointIO(tmp_path / "pool.toml", "run")
    io.save_checkpoint({"w": torch.zeros(1 << 20)}, tmp_path / "final.ckpt")
    inner = io.checkpoints
    io.close()
    with pytest.raises(AlreadyClosed):
        inner.pool.list()
    assert vars(io)["_named"] is None
    assert vars(io)["_opened"] is False
    assert (tmp_path / "final.ckpt").read_text(encoding="utf-8")
    io.close()
