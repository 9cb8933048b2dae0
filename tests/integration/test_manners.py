"""How the project treats what is not its own: files, settings, errors, garbage."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.cli import app
from hpstore.config import load_config
from hpstore.errors import (
    CheckpointError,
    ConfigError,
    DeviceInUse,
    ObjectNotFound,
    VersionConflict,
)
from hpstore.loaders import TokenBatches, TokenCorpus, write_corpus


@pytest.fixture
def pool(tmp_path: Path) -> hpstore.Pool:
    return hpstore.create(
        [tmp_path / f"d{i}" for i in range(4)], data=2, parity=2, config=tmp_path / "pool.toml"
    )


def test_get_follows_links_and_writes_into_pipes(pool: hpstore.Pool, tmp_path: Path) -> None:
    """A link stays a link, a FIFO stays a FIFO, a directory is refused, no part file is left."""
    with pool:
        pool.put("k", b"data")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    config, run = str(tmp_path / "pool.toml"), CliRunner()
    assert run.invoke(app, ["get", config, "k", str(tmp_path / "link")]).exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"data"
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert run.invoke(app, ["get", config, "k", str(tmp_path / "fifo")]).exit_code == 0
    assert os.read(reader, 100) == b"data"
    os.close(reader)
    assert (tmp_path / "fifo").is_fifo()
    refused = run.invoke(app, ["get", config, "k", str(tmp_path / "d0")])
    assert isinstance(refused.exception, ConfigError)
    assert not list(tmp_path.glob(".*.part"))


def test_a_failed_add_leaves_the_settings_as_they_were(pool: hpstore.Pool, tmp_path: Path) -> None:
    """A device of another pool is refused, and not looked for ever after."""
    others = [tmp_path / f"e{i}" for i in range(3)]
    hpstore.create(others, data=1, parity=2, config=tmp_path / "other.toml").close()
    before = load_config(tmp_path / "pool.toml").devices
    with pool:
        with pytest.raises(DeviceInUse):
            pool.add_device(str(others[0]))
        assert load_config(tmp_path / "pool.toml").devices == before
        pool.evict(str(tmp_path / "d0"))
        assert len(load_config(tmp_path / "pool.toml").devices) == 3
        pool.readmit(str(tmp_path / "d0"))
        assert set(load_config(tmp_path / "pool.toml").devices) == set(before)


def test_a_failed_create_can_be_tried_again(tmp_path: Path) -> None:
    """One place by two names is found; the other places are not taken by the attempt."""
    places = [tmp_path / f"d{i}" for i in range(3)]
    for place in places:
        place.mkdir()
    (tmp_path / "link").symlink_to(places[2])
    with pytest.raises(ConfigError, match="twice"):
        hpstore.create([*places, tmp_path / "link"], data=2, parity=1, config=tmp_path / "p.toml")
    hpstore.create(places, data=2, parity=1, config=tmp_path / "p.toml").close()


def test_a_mistyped_mount_is_not_made(tmp_path: Path) -> None:
    """Only the last directory of a device's path is created."""
    places = [tmp_path / "no" / "such" / f"d{i}" for i in range(3)]
    with pytest.raises(hpstore.errors.DeviceMissing, match="mistyped"):
        hpstore.create(places, data=2, parity=1, config=tmp_path / "p.toml")


def test_memory_files_and_buffers_can_be_put(pool: hpstore.Pool) -> None:
    """BytesIO, bytearray, memoryview, numpy arrays."""
    with pool:
        for number, data in enumerate(
            (
                io.BytesIO(b"abc"),
                bytearray(b"abc"),
                memoryview(b"abc"),
                np.array([97, 98, 99], "u1"),
            )
        ):
            pool.put(f"k{number}", data)
            assert pool.get(f"k{number}") == b"abc"


def test_readers_say_what_is_wrong_with_the_call(pool: hpstore.Pool) -> None:
    """A negative offset and a closed reader are not reported as lost data."""
    with pool:
        pool.put("k", b"x" * 200_000)
        reader = pool.reader("k")
        with pytest.raises(ValueError, match="negative"):
            reader.read_into(bytearray(4), -5)
        reader.close()
        with pytest.raises(ConfigError, match="closed"):
            reader.read_into(bytearray(4))


def test_token_batches_go_on_after_an_error(pool: hpstore.Pool) -> None:
    """An error of the read-ahead thread is raised, and the next call tries again."""
    with pool:
        write_corpus(pool, "c", [b"some text " * 1000])
        with TokenBatches(TokenCorpus(pool, "c"), batch_size=2, length=8, seed=0) as batches:
            first = next(batches)
            batches.close()  # stops reading ahead; the next call starts afresh
            pool.delete("data/c/shard-00000")
            for _ in range(2):
                with pytest.raises(ObjectNotFound):
                    next(batches)
            pool.put("data/c/shard-00000", b"some text " * 1000)
            assert next(batches).shape == first.shape


def test_an_error_of_a_save_is_raised_once(pool: hpstore.Pool) -> None:
    """What the handle has raised does not come back out of the next save."""
    with pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, {"x": torch.ones(3)}).result()
        with pytest.raises(VersionConflict):
            ckpt.save(1, {"x": torch.ones(3)}).result()
        ckpt.save(np.int64(2), {"x": torch.ones(3)}).result()  # type: ignore[arg-type]
        assert ckpt.steps() == [1, 2]


def test_what_cannot_be_a_step_or_a_state_is_refused(pool: hpstore.Pool) -> None:
    """Before anything is staged or written, with the name of the entry."""
    with pool, Checkpointer(pool, "run") as ckpt:
        for step in (1.5, "3", None, True, -1, 10**12):
            with pytest.raises(CheckpointError, match="step"):
                ckpt.save(step, {"x": torch.ones(3)})  # type: ignore[arg-type]
        loop: dict[str, object] = {}
        loop["again"] = loop
        for bad in (torch.empty(2, device="meta"), "half \ud800", loop):
            with pytest.raises(CheckpointError, match="entry"):
                ckpt.save(1, {"entry": bad})
        ckpt.save(1, {"big": np.arange(3, dtype=">i4")}).result()
        assert torch.equal(ckpt.load(1)["big"], torch.arange(3, dtype=torch.int32))
        ckpt.wait()
        assert pool.list("run/attempts") == []
    with pytest.raises(CheckpointError, match="keep_last"):
        Checkpointer(pool, "run", keep_every=4)


def test_what_is_no_pool_no_state_and_no_time_is_said(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """The common slips end in one line that says what to do, not in Python's own errors."""
    with pytest.raises(CheckpointError, match=r"hpstore\.open"):
        Checkpointer("pool.toml", "run")  # type: ignore[arg-type]
    with pool:
        for wrong in ({"commit_seconds": -1.0}, {"drain_seconds": float("nan")}):
            with pytest.raises(CheckpointError, match="number of seconds"):
                Checkpointer(pool, "run", **wrong)  # type: ignore[arg-type]
        with Checkpointer(pool, "run", staging_bytes="64MiB", rng=False) as ckpt:
            ckpt.save(5, {"w": torch.ones(3)}).result()
            with pytest.raises(CheckpointError, match="not a Linear"):
                ckpt.restore(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
            with pytest.raises(KeyError, match="step 5 holds no 'weight'; it has"):
                ckpt.open(5)["weight"]
            with pytest.raises(CheckpointError, match=r"no checkpoint of step 7.*\[5\]"):
                ckpt.delete(7)
        with Checkpointer(pool, "run", rng=False) as ckpt:
            ckpt.save(3, {"w": torch.ones(3)}).result()
            ckpt.wait()
        assert "later steps [5] of a run that was rolled back" in caplog.text


def test_saving_into_a_read_only_pool_is_refused_at_once(tmp_path: Path) -> None:
    """save() says it, not the background."""
    hpstore.create(
        [tmp_path / f"d{i}" for i in range(3)], data=1, parity=1, config=tmp_path / "pool.toml"
    ).close()
    with (
        hpstore.open(tmp_path / "pool.toml", read_only=True) as pool,
        Checkpointer(pool, "run") as ckpt,
        pytest.raises(CheckpointError, match="read-only"),
    ):
        ckpt.save(1, {"w": torch.ones(3)})
