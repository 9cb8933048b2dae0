"""Keys on filesystems that do not keep all names apart (PROTOCOL 13, r08)."""

from __future__ import annotations

import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.devices import confined_names, file_handles
from hpstore.devices.local import LocalDevice
from hpstore.units import MIB

COMPOSED, DECOMPOSED = "caf\u00e9/model", "cafe\u0301/model"


@pytest.fixture
def normalising(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are looked up take one Unicode form, as on ZFS with normalization=formD."""
    monkeypatch.setattr(confined_names, "_supported", False)  # then it is os.open() that opens
    for name in ("open", "stat", "mkdir", "unlink", "rename", "rmdir", "scandir"):
        plain = getattr(os, name)

        def call(path: Any, *args: Any, _plain: Any = plain, **named: Any) -> Any:
            form = unicodedata.normalize("NFD", path) if isinstance(path, str) else path
            second = [unicodedata.normalize("NFD", a) if isinstance(a, str) else a for a in args]
            return _plain(form, *second, **named)

        monkeypatch.setattr(os, name, call)


def create(root: Path) -> hpstore.Pool:
    settings = Settings(memory_bytes=32 * MIB, run_directory=str(root / "run"))
    return hpstore.create(
        [root / f"d{n}" for n in range(3)],
        data=1,
        parity=1,
        config=root / "pool.toml",
        settings=settings,
    )


@pytest.mark.usefixtures("normalising")
def test_keys_of_different_forms_are_different_objects(tmp_path: Path) -> None:
    """r08: a put of one removed the acknowledged other."""
    with create(tmp_path) as pool:
        pool.put(COMPOSED, b"composed")
        pool.put(DECOMPOSED, b"decomposed")
        assert pool.get(COMPOSED) == b"composed"
        assert pool.get(DECOMPOSED) == b"decomposed"
        assert pool.list() == sorted([COMPOSED, DECOMPOSED])
        pool.delete(COMPOSED)
        assert pool.get(DECOMPOSED) == b"decomposed"
    with hpstore.open(tmp_path / "pool.toml", read_only=True) as pool:
        assert pool.get(DECOMPOSED) == b"decomposed"


def test_what_was_escaped_is_read_on_any_other_filesystem(tmp_path: Path) -> None:
    """A device is copied from a filesystem that normalises to one that does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_handles, "names_normalise", lambda *_: True)
        with create(tmp_path) as pool:
            pool.put(COMPOSED, b"composed")
    copied = tmp_path / "copy"
    shutil.move(tmp_path / "d0", copied)
    shutil.move(copied, tmp_path / "d0")
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert all(device.folds_names for device in pool._store.view.devices.values())
        assert pool.get(COMPOSED) == b"composed"


def test_ordinary_filesystems_keep_plain_names(tmp_path: Path) -> None:
    """No mark is left, and the directory of a key is the key."""
    device = LocalDevice(str(tmp_path))
    device.prepare()
    device.probe(write=True)
    assert not device.folds_names
    assert not (tmp_path / file_handles.ESCAPED_NAMES).exists()
    assert os.listdir(tmp_path / "tmp") == []
    device.close()
