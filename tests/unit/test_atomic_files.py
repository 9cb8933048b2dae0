"""Exports that replace a directory: what was there before is never gone from its name for long."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpstore.checkpoint.convert import atomic_files
from hpstore.checkpoint.convert.atomic_files import published


def replace(target: Path) -> None:
    with published(target, directory=True, force=True, ours=lambda _: True) as part:
        (part / "new").write_text("new")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    (made / "old").write_text("old")
    return made


def test_a_directory_is_replaced_whole(target: Path) -> None:
    replace(target)
    assert [file.name for file in target.iterdir()] == ["new"]
    assert [file.name for file in target.parent.iterdir()] == ["export"]


def test_a_directory_is_under_its_name_at_every_moment(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the one step that replaces it, where a kill could come: the old one is whole
    under the name that may be deleted."""
    seen = []

    def watched(path: Path) -> None:
        seen.append((path.suffix, [file.name for file in path.iterdir()]))
        seen.append((target.suffix, [file.name for file in target.iterdir()]))

    monkeypatch.setattr(atomic_files, "_remove", watched)
    replace(target)
    assert seen == [(".part", ["old"]), ("", ["new"])]


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a filesystem that cannot swap two names."""
    monkeypatch.setattr(atomic_files, "_exchanged", lambda *_: False)


@pytest.mark.usefixtures("no_exchange")
def test_a_directory_is_replaced_in_two_steps_where_one_cannot_do(target: Path) -> None:
    replace(target)
    assert [file.name for file in target.iterdir()] == ["new"]
    assert [file.name for file in target.parent.iterdir()] == ["export"]


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("taken", [False, True])
def test_a_rename_that_fails_leaves_what_was_there(
    target: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Under its name; where another process has taken that, under one that the error has, and that
    does not say that it may be deleted."""
    rename = Path.rename

    def failing(path: Path, new: Path) -> Path:
        if path.name.endswith(".part"):
            if taken:
                new.mkdir()
                (new / "other").write_text("of another process")
            raise OSError(errno.EIO, "the disk failed")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk failed") as said:
        replace(target)
    names = sorted(file.name for file in target.parent.iterdir())
    if not taken:
        assert names == ["export"]
        assert [file.name for file in target.iterdir()] == ["old"]
        return
    (kept,) = [name for name in names if name != "export"]
    assert kept.endswith(".old")
    assert kept in "".join(said.value.__notes__)
    assert [file.name for file in (target.parent / kept).iterdir()] == ["old"]
