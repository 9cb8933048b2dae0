"""The compiled part is built where it can be, and missed nowhere else."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[2]


def build(place: Path, **settings: str) -> tuple[str, list[Path]]:
    """What building says, and the libraries that came of it."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", str(place), "-t", str(place / "t")],
        cwd=ROOT, env={**os.environ, **settings}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr, list(place.rglob("*.so"))


def test_without_a_compiler_the_installation_goes_on(tmp_path: Path) -> None:
    """It says that it went without."""
    nothing = shutil.which("false") or "/nothing"
    said, built = build(tmp_path, CC=nothing, LDSHARED=nothing)
    assert built == []
    assert "hpstore._nontemporal" in said


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not x86-64")
def test_with_a_compiler_it_is_built_without_a_warning(tmp_path: Path) -> None:
    _, built = build(tmp_path, CC="cc", CFLAGS="-Wall -Wextra -Werror")
    assert [path.parent.name for path in built] == ["hpstore"]
