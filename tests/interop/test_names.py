"""Which pool a NAME means."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest

import hpstore
from hpstore.cli import main
from hpstore.config import PoolConfig, find_config, register, save_config
from hpstore.errors import ConfigError
from hpstore.pool.pool_names import find_named, find_pool, pool_names


def make(path: Path, name: str) -> PoolConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = PoolConfig(path=path, name=name, devices=("/mnt/a",))
    save_config(config)
    return config


def test_an_unknown_name_says_where_it_was_looked_for(home: Path) -> None:
    """Both places, the command that helps, and the names that there are."""
    register(make(home / "p.toml", "train"))
    with pytest.raises(ConfigError, match="no pool is called 'mian'") as caught:
        fsspec.filesystem("hpstore").exists("hpstore://mian/x")
    for part in ("pools.toml", "pools/mian.toml", "create --name mian", "known here: train"):
        assert part in str(caught.value)


def test_the_table_goes_before_the_registry(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HPSTORE_POOLS takes the place of pools.toml; paths are relative to the table."""
    old, new = make(tmp_path / "old.toml", "train"), make(tmp_path / "etc" / "new.toml", "other")
    register(old)
    assert find_named("train").path == old.path
    table = home / ".config" / "hpstore" / "pools.toml"
    table.write_text(f'train = "{new.path}"\n')
    assert find_named("train").path == new.path
    (tmp_path / "etc" / "pools.toml").write_text('mine = "new.toml"\n')
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "etc" / "pools.toml"))
    assert find_named("mine").path == new.path
    assert find_named("train").path == old.path
    assert pool_names() == ["mine", "train"]
    assert find_pool(str(old.path)).path == old.path


@pytest.mark.parametrize(
    ("text", "message"), [("x = 1", "path of a pool.toml"), ("x =", "cannot be read")]
)
def test_a_wrong_table_is_an_error(home: Path, text: str, message: str) -> None:
    """It is named; nothing else is tried in its place."""
    table = home / ".config" / "hpstore" / "pools.toml"
    table.parent.mkdir(parents=True)
    table.write_text(text)
    with pytest.raises(ConfigError, match=f"pools.toml.*{message}"):
        find_named("x")


def test_a_table_that_was_asked_for_must_be_there(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typing error in HPSTORE_POOLS does not lead to another pool of the same name."""
    register(make(tmp_path / "old.toml", "train"))
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"HPSTORE_POOLS names .*none\.toml"):
        find_named("train")


@pytest.mark.parametrize("url", ["hpstore:///x", "hpstore://../x", "hpstore://.x/y"])
def test_urls_without_a_name_are_refused(home: Path, url: str) -> None:
    """A name never leads out of the registry."""
    with pytest.raises(ConfigError, match="name"):
        fsspec.filesystem("hpstore").cat_file(url)


def test_no_pool_is_opened_before_it_is_used(disk_pool: hpstore.Pool) -> None:
    """url_to_fs, as DCP's check of an id does it, opens nothing, whatever the name."""
    fs, path = fsspec.core.url_to_fs("hpstore://nowhere/x")
    assert path == "nowhere/x"
    assert not fs.mounts._mounts


def created(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str) -> int:
    """`hpstore create --name NAME` over three directories in a folder; its exit code."""
    folder.mkdir()
    devices = [str(folder / f"d{n}") for n in range(3)]
    words = ["create", str(folder / "pool.toml"), *devices, "--data", "2", "--parity", "1"]
    monkeypatch.setattr(sys, "argv", ["hpstore", *words, "--name", name])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_create_writes_the_table_that_is_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HPSTORE_POOLS is honoured for writing: the name leads to the new pool, other lines stay."""
    table = tmp_path / "etc" / "pools.toml"
    monkeypatch.setenv("HPSTORE_POOLS", str(table))
    assert created(monkeypatch, tmp_path / "a", "first") == 0
    assert str(table) in capsys.readouterr().err
    table.write_text("# mine\n" + table.read_text())
    assert created(monkeypatch, tmp_path / "b", "second") == 0
    assert "# mine" in table.read_text()
    for name, folder in (("first", "a"), ("second", "b")):
        assert find_named(name).path == tmp_path / folder / "pool.toml"
        assert find_config(name).path == tmp_path / folder / "pool.toml"


def test_create_from_python_writes_the_table_too(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL then finds the pool; a name that leads elsewhere makes none."""
    table = tmp_path / "etc" / "pools.toml"
    monkeypatch.setenv("HPSTORE_POOLS", str(table))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()

    def create(folder: str) -> None:
        devices = [tmp_path / folder / name for name in "xyz"]
        toml = tmp_path / folder / "pool.toml"
        hpstore.create(devices, data=2, parity=1, config=toml, name="third").close()

    create("a")
    assert find_named("third").path == tmp_path / "a" / "pool.toml"
    with pytest.raises(ConfigError, match="'third' belongs to"):
        create("b")
    assert not (tmp_path / "b" / "x").exists()


def test_a_pool_whose_name_cannot_be_noted_is_said_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its devices are claimed, and its pool.toml has the key: it must not be taken for not made."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "file" / "pools.toml"))
    toml, places = tmp_path / "pool.toml", [tmp_path / f"n{i}" for i in range(3)]
    with pytest.raises(ConfigError, match=r"the pool is made, and .*pool\.toml opens it"):
        hpstore.create(places, data=2, parity=1, config=toml, name="lab")
    with hpstore.open(toml) as pool:
        pool.put("k", b"x")


@pytest.mark.parametrize("chosen", [True, False], ids=["HPSTORE_POOLS", "the default table"])
def test_a_name_that_would_lead_elsewhere_makes_no_pool(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: bool,
) -> None:
    """The table goes before the registry, so the new pool would not be what the name means."""
    old = make(tmp_path / "old.toml", "train")
    table = tmp_path / "t.toml" if chosen else home / ".config" / "hpstore" / "pools.toml"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(f'train = "{old.path}"\n')
    if chosen:
        monkeypatch.setenv("HPSTORE_POOLS", str(table))
    assert created(monkeypatch, tmp_path / "a", "train") == ConfigError.exit_code
    assert f"'train' belongs to {old.path}" in capsys.readouterr().err
    assert not (tmp_path / "a" / "pool.toml").exists()
