"""`hpstore gpu`: a verdict with its reason for every place, on any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hpstore
from hpstore.cli import app
from hpstore.errors import ConfigError
from hpstore.loaders.gpu.direct.detect import Route


def test_a_pools_devices_and_directories_are_told_of(tmp_path: Path) -> None:
    """Each device of the pool and the directory, in order; JSON holds the facts."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "pool.toml").close()
    places = [str(tmp_path / "pool.toml"), str(tmp_path)]
    done = CliRunner().invoke(app, ["gpu", *places, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found) == 4
    for verdict in found:
        assert verdict["route"] in list(Route)
        assert verdict["reason"]
        assert verdict["mount"]["filesystem"]
    assert [one["directory"] for one in found] == [*map(str, devices), str(tmp_path)]
    told = CliRunner().invoke(app, ["gpu", *places]).stdout
    assert "GPUDirect" in told
    if not any(verdict["direct"] for verdict in found):
        assert "over pinned host memory" in told
    assert list((tmp_path / "d0" / "tmp").iterdir()) == []


def test_what_is_no_place_is_an_error(tmp_path: Path) -> None:
    """Neither a directory nor a pool."""
    done = CliRunner().invoke(app, ["gpu", str(tmp_path / "none")])
    assert isinstance(done.exception, ConfigError)


def test_a_pool_without_a_device_here_is_an_error(tmp_path: Path) -> None:
    """All directories gone: said, not an empty table."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "pool.toml").close()
    for device in devices:
        device.rename(device.with_suffix(".away"))
    done = CliRunner().invoke(app, ["gpu", str(tmp_path / "pool.toml")])
    with pytest.raises(ConfigError, match="no device of"):
        raise done.exception or AssertionError(done.output)
