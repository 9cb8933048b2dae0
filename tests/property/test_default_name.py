"""A pool without a name has that of its settings file, as far as a pool can have such a name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from hpstore.config import default_name, registry_path
from hpstore.errors import ConfigError

# what a file name may hold on Linux, bytes that are not UTF-8 (surrogates) among it
characters = st.characters(exclude_characters="/\0", exclude_categories=())
pieces = characters | st.sampled_from([".", " ", "\n", "\udc80", ".toml"])
file_names = st.lists(pieces, min_size=1, max_size=12).map("".join)
file_names = file_names.filter(lambda text: text not in (".", ".."))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("lab.toml", "lab"),
        ("pool.toml", "pool"),
        ("lab", "lab"),
        ("lab.conf", "lab"),
        ("lab.2026.toml", "lab.2026"),
        ("my pool.toml", "my pool"),
        ("tübingen.toml", "tübingen"),
        (".lab.toml", "lab"),
        ("...toml", "pool"),
        (".toml", "toml"),
        ("lab.toml.toml", "lab"),
        ("a\nb.toml", "a_b"),
        ("a\udcffb.toml", "a_b"),
    ],
)
def test_names_of_files(file: str, name: str) -> None:
    assert default_name(Path("/mnt/elsewhere") / file) == name


@given(file_names)
def test_any_file_gives_a_name_that_a_pool_can_have(file: str) -> None:
    """One that could be registered, is not taken for a file, and is kept by TOML as it is."""
    name = default_name(Path("/srv") / file)
    registry_path(name)
    assert not name.endswith(".toml")
    assert name.isprintable()
    assert tomllib.loads(tomlkit.dumps({"name": name})) == {"name": name}


@given(file_names)
def test_a_name_that_a_pool_can_have_is_kept(file: str) -> None:
    """The stem itself, unless it is what `registry_path` refuses or no screen can show."""
    stem = Path(file).stem
    try:
        registry_path(stem)
    except ConfigError:
        return
    if stem.isprintable() and not stem.endswith(".toml"):
        assert default_name(Path("/srv") / file) == stem
