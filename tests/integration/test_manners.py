"""How the project treats what is not its own: files, settings, errors, garbage."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hpstore
from hpstore.cli import app
from hpstore.config import PoolConfig, load_config
from hpstore.errors import ConfigError, DeviceInUse, TooFewDevices
from hpstore.pool import create_pool


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
    assert run.invoke(app, ["get", config, "k", str(tmp_path / "link"), "--yes"]).exit_code == 0
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


def test_what_a_create_that_was_killed_leaves_can_be_created_again(
    tmp_path: Path,
) -> None:
    """Killed when all devices are claimed and none has a record: errors say what to delete, and
    with that it works. A device that has objects, or a pool that lacks one, gets no such advice."""
    places, file = [tmp_path / f"d{i}" for i in range(3)], tmp_path / "p.toml"
    keep = create_pool._keep

    def killed(made: PoolConfig, undo: ExitStack) -> None:
        keep(made, undo)
        os._exit(9)

    child = os.fork()
    if child == 0:
        create_pool._keep = killed
        hpstore.create(places, data=2, parity=1, config=file)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    advice = "cut off"
    with pytest.raises(TooFewDevices, match=advice):
        hpstore.open(str(file))
    places[0].rename(tmp_path / "away")
    with pytest.raises(TooFewDevices) as told:
        hpstore.open(str(file))
    assert advice not in str(told.value)
    (tmp_path / "away").rename(places[0])
    file.unlink()
    with pytest.raises(DeviceInUse, match=advice):
        hpstore.create(places, data=2, parity=1, config=file)
    (places[0] / "objects" / "k").mkdir()
    with pytest.raises(DeviceInUse) as refused:
        hpstore.create(places, data=2, parity=1, config=file)
    assert advice not in str(refused.value)
    (places[0] / "objects" / "k").rmdir()
    for place in places:
        (place / "hpstore.json").unlink()
    with hpstore.create(places, data=2, parity=1, config=file) as pool:
        pool.put("k", b"data")
        assert pool.get("k") == b"data"


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
        reader = pool.open("k")
        with pytest.raises(ValueError, match="negative"):
            reader.read_into(bytearray(4), -5)
        reader.close()
        with pytest.raises(ConfigError, match="closed"):
            reader.read_into(bytearray(4))
