"""Names of pools under ~/.config/hpstore."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.config import PoolConfig, Settings, find_config, register, registry_path, save_config
from hpstore.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and an empty working directory elsewhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def make(path: Path, name: str) -> PoolConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = PoolConfig(path=path, name=name, devices=("/mnt/a",))
    save_config(config)
    return config


def test_a_registered_pool_is_found_by_name(home: Path, tmp_path: Path) -> None:
    """The name leads to the file, whose relative devices stay relative to the file itself."""
    config = make(tmp_path / "p" / "pool.toml", "train")
    register(config)
    assert registry_path("train").is_relative_to(home)
    found = find_config("train")
    assert found.path == config.path
    assert found.devices == config.devices


def test_a_pool_is_found_by_path(home: Path, tmp_path: Path) -> None:
    """Without any registration."""
    config = make(tmp_path / "p" / "pool.toml", "train")
    assert find_config(config.path) == config
    assert find_config(str(config.path)) == config


def test_registering_twice_is_fine_but_not_for_another_pool(home: Path, tmp_path: Path) -> None:
    """A name is not taken away from a pool that still exists."""
    first = make(tmp_path / "a" / "pool.toml", "train")
    register(first)
    register(first)
    with pytest.raises(ConfigError, match="belongs to"):
        register(make(tmp_path / "b" / "pool.toml", "train"))
    assert find_config("train").path == first.path


def test_a_name_whose_pool_is_gone_can_be_taken(home: Path, tmp_path: Path) -> None:
    """A dangling link holds nobody up."""
    first = make(tmp_path / "a" / "pool.toml", "train")
    register(first)
    first.path.unlink()
    with pytest.raises(ConfigError, match="train"):
        find_config("train")
    second = make(tmp_path / "b" / "pool.toml", "train")
    register(second)
    assert find_config("train").path == second.path


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden"])
def test_names_that_are_paths_are_refused(home: Path, name: str) -> None:
    """A name never leads out of the registry."""
    with pytest.raises(ConfigError, match="name for a pool"):
        registry_path(name)


def test_an_unknown_name_says_so(home: Path) -> None:
    """The message asks for the path."""
    with pytest.raises(ConfigError, match=r"no pool is called 'train'.*path"):
        find_config("train")
    with pytest.raises(ConfigError, match="does not exist"):
        find_config("train.toml")


def test_a_folder_of_the_same_name_does_not_hide_a_pool(home: Path, tmp_path: Path) -> None:
    """`hpstore.open("train")` means the pool, also where ./train is a directory of data."""
    config = make(tmp_path / "p" / "pool.toml", "train")
    register(config)
    Path("train").mkdir()
    assert find_config("train").path == config.path


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """t18_nohome2: a container that runs as a number; it was a RuntimeError."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.delenv("HPSTORE_POOLS", raising=False)
    with pytest.raises(ConfigError, match="HPSTORE_POOLS"):
        registry_path("train")
    with pytest.raises(ConfigError, match="state_directory"):
        Settings().state_path("p")
    assert Settings(run_directory="/r").state_path("p") == Path("/r/p")
