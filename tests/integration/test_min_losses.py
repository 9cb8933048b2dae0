"""min_losses_tolerated: a write that would survive less is refused, or at least not silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.config import Settings
from hpstore.errors import ConfigError, HpstoreError, RedundancyWarning, TooFewDevices
from hpstore.pool.loss_tolerance import require_stored


@pytest.fixture
def short(tmp_path: Path) -> hpstore.Pool:
    """4+2 on six directories, of which two are away: what is written survives no further loss."""
    made = hpstore.create(
        [tmp_path / f"d{i}" for i in range(6)],
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        settings=Settings(run_directory=str(tmp_path / "run")),
    )
    with made:
        made.put("before", b"1")
    for name in ("d0", "d1"):
        (tmp_path / name).rename(tmp_path / f"away-{name}")
    return hpstore.open(tmp_path / "pool.toml")


def test_a_write_that_would_survive_too_little_is_refused(short: hpstore.Pool) -> None:
    """Clients 5: it was stored as 1+2 with 0 losses tolerated, and a log line said so. By default
    it still is; what was there before is untouched by a refusal."""
    assert short.put("by default", b"x").losses_tolerated == 0
    for least in (1, 2):
        with pytest.raises(TooFewDevices, match=rf"survive 0 further.*asks for {least}.*Nothing"):
            short.put("before", b"2", min_losses_tolerated=least)
    assert short.get("before") == b"1"
    with pytest.raises(ConfigError, match="from 0 to 2"):
        short.put("k", b"x", min_losses_tolerated=3)
    short.close()


def test_the_pools_settings_ask_for_all_of_its_processes(
    short: hpstore.Pool, tmp_path: Path
) -> None:
    """And a caller may ask for less."""
    short.close()
    toml = tmp_path / "pool.toml"
    text = toml.read_text()
    toml.write_text(text.replace("[settings]", "[settings]\nmin_losses_tolerated = 1"))
    with hpstore.open(toml) as pool:
        with pytest.raises(TooFewDevices, match="min_losses_tolerated"):
            pool.put("k", b"x")
        assert pool.put("k", b"x", min_losses_tolerated=0).losses_tolerated == 0
    toml.write_text(text.replace("[settings]", "[settings]\nmin_losses_tolerated = -1"))
    with pytest.raises(ConfigError, match="must not be negative"):
        hpstore.open(toml)


def writes(fs: fsspec.AbstractFileSystem, tmp_path: Path) -> list[Callable[[], object]]:
    """The ways that a file system has to write."""
    local = tmp_path / "local"
    local.write_bytes(b"x")

    def stream(mode: str, key: str) -> Callable[[], object]:
        def write() -> None:
            with fs.open(key, mode) as file:
                file.write(b"x")

        return write

    return [
        lambda: fs.pipe_file("pipe", b"x"),
        lambda: fs.put_file(str(local), "put"),
        stream("wb", "w"),
        stream("xb", "x"),
        stream("ab", "a"),
        lambda: fs.cp_file("before", "copy"),
    ]


def test_a_file_system_refuses_or_warns_once(short: hpstore.Pool, tmp_path: Path) -> None:
    """Every way to write."""
    strict = fsspec.filesystem(
        "hpstore", pool=short, min_losses_tolerated=1, skip_instance_cache=True
    )
    for write in writes(strict, tmp_path):
        with pytest.raises(TooFewDevices, match="min_losses_tolerated"):
            write()
    assert strict.find("") == ["before"]
    plain = fsspec.filesystem("hpstore", pool=short, skip_instance_cache=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for write in writes(plain, tmp_path):
            write()
    (only,) = [w for w in caught if w.category is RedundancyWarning]
    assert "survives 0 further lost devices, not 2" in str(only.message)
    assert len(plain.find("")) == 7
    short.close()


def test_a_save_that_would_survive_too_little_is_refused(short: hpstore.Pool) -> None:
    """And leaves no step; without the option the step is there."""
    state = {"x": torch.arange(1000)}
    with Checkpointer(short, "strict", rng=False, save=SaveOptions(min_losses_tolerated=1)) as ckpt:
        with pytest.raises(HpstoreError, match="min_losses_tolerated"):
            ckpt.save(1, state).result()
        assert ckpt.steps() == []
    with Checkpointer(short, "plain", rng=False) as ckpt:
        assert ckpt.save(1, state).result().losses_tolerated == 0
    short.close()


def test_devices_that_fail_in_the_middle_of_a_write_are_said_too(pool: hpstore.Pool) -> None:
    """Then the object is there, and the error says that."""
    info = pool.put("k", bytes(1000))
    require_stored(info, 2)
    with pytest.raises(TooFewDevices, match="is stored, and survives 1") as failed:
        require_stored(replace(info, losses_tolerated=1), 2)
    assert failed.value.maybe_visible
