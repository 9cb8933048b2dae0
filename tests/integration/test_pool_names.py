"""Names, schemes and settings of a pool, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hpstore
from hpstore.errors import ConfigError
from hpstore.runtime.text_files import write_atomically


def test_a_pool_opens_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered name opens the pool; the name of another pool is not taken over."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    devices = [tmp_path / f"d{i}" for i in range(3)]
    hpstore.create(devices, data=2, parity=1, config=tmp_path / "a.toml", name="main").close()
    with hpstore.open("main") as pool:
        pool.put("k", b"x")
    with pytest.raises(ConfigError, match="no pool is called"):
        hpstore.open("other")


def test_a_pool_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    """It records that name, keeps it when the file moves, and nothing is registered by it."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    with hpstore.create(devices, scheme="2+1", config=tmp_path / "lab.toml") as pool:
        assert pool.status().name == "lab"
    (tmp_path / "lab.toml").rename(tmp_path / "moved.toml")
    with hpstore.open(tmp_path / "moved.toml") as pool:
        assert pool.status().name == "lab"
    with pytest.raises(ConfigError, match="no pool is called"):
        hpstore.open("lab")


@pytest.mark.parametrize("name", ["main", "anything"])
def test_a_pool_keeps_the_name_that_its_file_records(tmp_path: Path, name: str) -> None:
    """Files of before say "main", whatever they are called."""
    devices = [tmp_path / f"d{i}" for i in range(3)]
    file = tmp_path / "lab.toml"
    hpstore.create(devices, scheme="2+1", config=file).close()
    file.write_text(file.read_text().replace('name = "lab"', f'name = "{name}"'))
    with hpstore.open(file) as pool:
        assert pool.status().name == name
    file.write_text(file.read_text().replace(f'name = "{name}"', ""))
    with hpstore.open(file) as pool:
        assert pool.status().name == "lab"


def test_a_scheme_is_the_same_as_data_and_parity(tmp_path: Path) -> None:
    """By either, and by both where they agree; what is no scheme makes nothing."""
    given: list[dict[str, Any]] = [
        {"scheme": "3+2"},
        {"data": 3, "parity": 2},
        {"scheme": "3+2", "data": 3, "parity": 2},
    ]
    for number, words in enumerate(given):
        devices = [tmp_path / f"p{number}d{i}" for i in range(5)]
        with hpstore.create(devices, config=tmp_path / f"p{number}.toml", **words) as pool:
            assert (pool.data, pool.parity) == (3, 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "not a whole scheme"),
        ({"data": 3}, "not a whole scheme"),
        ({"scheme": "3+"}, "is not a scheme"),
        ({"scheme": "a+b"}, "is not a scheme"),
        ({"scheme": "3+0"}, "choose 1 to 8 parity units"),
        ({"scheme": "0+2"}, "at least one data unit"),
        ({"scheme": "3+2", "parity": 1}, "differ"),
    ]
    devices = [tmp_path / f"e{i}" for i in range(5)]
    for words, said in wrong:
        with pytest.raises(ConfigError, match=said):
            hpstore.create(devices, config=tmp_path / "e.toml", **words)
    assert not any(path.exists() for path in (tmp_path / "e.toml", *devices))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('memory_bytes = "lots"', "pool.toml: memory_bytes: 'lots'"),
        ("memory_bytes = -1", "pool.toml: setting memory_bytes"),
    ],
)
def test_a_bad_setting_is_named_with_its_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "pool.toml").write_text(f'devices = ["a"]\n[settings]\n{line}\n')
    with pytest.raises(ConfigError, match=said):
        hpstore.open(tmp_path / "pool.toml")


def test_a_device_with_a_nul_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text('devices = ["a\\u0000b"]\n')
    with pytest.raises(ConfigError, match="holds a NUL"):
        hpstore.open(tmp_path / "pool.toml")


def test_settings_that_cannot_be_replaced_leave_no_file(tmp_path: Path) -> None:
    """The target is a directory here."""
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path / "x", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
