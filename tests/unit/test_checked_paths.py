"""Paths, names and URLs that nothing can have here are a ConfigError, before anything is made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpstore
from hpstore.cli.output import require_place
from hpstore.config import Settings, save_config
from hpstore.errors import ConfigError, HpstoreError, InvalidKey
from hpstore.hosts.certificates import make_host
from hpstore.loaders.ingestion.source_paths import local_path
from hpstore.pool.pool import Pool
from hpstore.runtime.text_files import checked_path, write_atomically

UNUSABLE = {
    "a\0b": "holds a NUL",
    "a\ud800b": "cannot be written as utf-8",
    "": "is empty",
    "n" * 256: "longer than",
    "/".join(["x" * 200] * 21): "longer than",
}
NO_PATHS: list[Any] = [7, None, b"a", ["a"]]


def made(directory: Path, **options: Any) -> Pool:
    devices = options.pop("devices", [directory / f"d{n}" for n in range(3)])
    return hpstore.create(
        devices, **{"data": 2, "parity": 1, "config": directory / "pool.toml", **options}
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, which is HOME too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


CALLS: dict[str, Callable[[Path, Any], object]] = {
    "open": lambda home, path: hpstore.open(path),
    "config": lambda home, path: made(home, config=path),
    "device": lambda home, path: made(home, devices=[path, "b", "c"]),
    "stores": lambda home, path: made(home, stores=path),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", [*UNUSABLE, *NO_PATHS], ids=repr)
def test_what_no_file_can_have_is_refused(home: Path, call: str, path: Any) -> None:
    """They were a ValueError, UnicodeEncodeError, OSError or TypeError of Python; "" was the
    working directory."""
    if call == "stores" and path is None:
        return  # there are none
    said = UNUSABLE.get(path, "must be a path") if isinstance(path, str) else "must be a path"
    if (call, path) == ("open", ""):
        said = "is empty"
    with pytest.raises(ConfigError, match=said):
        CALLS[call](home, path)
    assert os.listdir(home) == []


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb", "n" * 251, 7, "", "a/b"], ids=repr)
def test_a_name_that_no_pool_can_have_is_refused(home: Path, name: Any) -> None:
    with pytest.raises(ConfigError):
        made(home, name=name)
    assert os.listdir(home) == []


@pytest.mark.parametrize("url", ["file://a\0b", "memory://a\0b", "memory://a\udcffb", "a\udcffb"])
def test_a_device_that_cannot_be_recorded_is_refused(home: Path, url: str) -> None:
    """Records are UTF-8. It showed after all devices were claimed, with a piece of the record."""
    with pytest.raises(ConfigError, match="a device"):
        made(home, devices=[url, "b", "c"])
    assert os.listdir(home) == []
    with made(home) as pool:
        for change in (pool.add_device, pool.evict):
            with pytest.raises(HpstoreError, match="a device"):
                change(url)


def test_one_path_is_no_list_of_devices(home: Path) -> None:
    """Its characters were taken for paths: "device / is given twice"."""
    for devices in ("/mnt/a", Path("/mnt/a"), b"/mnt/a"):
        with pytest.raises(ConfigError, match="must be a list"):
            made(home, devices=devices)


def test_settings_name_directories_that_can_be() -> None:
    for path in ("/a\0b", "/a\ud800b", "/" + "n" * 256):
        with pytest.raises(ConfigError, match="setting run_directory"):
            Settings(run_directory=path)


def test_a_prefix_and_a_version_are_text(home: Path) -> None:
    no_text: Any = 7
    with made(home) as pool:
        pool.put("k", b"x")
        with pytest.raises(InvalidKey, match="a str"):
            pool.list(no_text)
        with pytest.raises(ConfigError, match="7 is not a version"):
            pool.get("k", version=no_text)


def test_text_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    """A hidden file of the half of it stayed."""
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a", "\ud800")
    assert os.listdir(tmp_path) == []


def test_names_that_are_not_utf8_are_paths_all_the_same(tmp_path: Path) -> None:
    """Of files that hpstore does not write the name of."""
    assert checked_path("a\udcffb", "x") == "a\udcffb"
    with made(tmp_path, config=tmp_path / "a\udcffb.toml") as pool:
        save_config(pool.config)
    hpstore.open(tmp_path / "a\udcffb.toml").close()


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "call",
    [
        "create(['d\\u00e9', 'b', 'c'], data=2, parity=1, config='p.toml')",
        "create(['a', 'b', 'c'], data=2, parity=1, config='p\\u00e9.toml')",
        "create(['a', 'b', 'c'], data=2, parity=1, config='p.toml', name='p\\u00e9')",
        "open('p\\u00e9.toml')",
    ],
)
def test_an_ascii_locale_is_named_with_its_cure(home: Path, call: str) -> None:
    """A raw UnicodeEncodeError named neither."""
    script = (
        f"import hpstore\ntry: hpstore.{call}\n"
        "except hpstore.HpstoreError as error: print(ascii(str(error)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **ASCII},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be written as ascii" in said.stdout, said.stderr
    assert "PYTHONUTF8=1" in said.stdout
    assert os.listdir(home) in ([], [".config"])


def test_get_into_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    """It was a RuntimeError of pathlib."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="loop of symbolic links"):
        require_place(loop)


def test_a_host_has_a_name_that_certificates_can_hold(tmp_path: Path) -> None:
    """It was a ValueError of the package."""
    pytest.importorskip("cryptography")
    with pytest.raises(ConfigError, match="such names are ASCII"):
        make_host(tmp_path, "h\u00f6st", [], 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["a\0b", "n" * 256, "a\ud800b"], ids=repr)
def test_a_source_that_no_file_can_have_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        local_path(path)
