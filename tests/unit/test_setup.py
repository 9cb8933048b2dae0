"""The compiled part is built where it can be, and missed nowhere else."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).resolve().parents[2]


def build(place: Path, **settings: str) -> tuple[str, list[Path]]:
    """What building says, and the libraries that came of it."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", str(place), "-t", str(place / "t")],
        cwd=ROOT,
        env={**os.environ, **settings},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr, list(place.rglob("*.so"))


def test_without_a_compiler_the_installation_goes_on(tmp_path: Path) -> None:
    """It says that it went without."""
    nothing = shutil.which("false") or "/nothing"
    said, built = build(tmp_path, CC=nothing, LDSHARED=nothing)
    assert built == []
    assert "hpstore._nontemporal" in said
    assert "hpstore._directories" in said
    assert "hpstore._ranges" in said


def compiles(compiler: str) -> bool:
    """There is one, for x86-64, with the C library's headers."""
    command = [*compiler.split(), "-fsyntax-only", "-xc", "-"]
    program = "#include <string.h>\n#include <immintrin.h>\n"
    try:
        done = subprocess.run(command, input=program, capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and platform.machine() == "x86_64"


def test_with_a_compiler_it_is_built_without_a_warning(tmp_path: Path) -> None:
    if not compiles("cc"):
        pytest.skip("no C compiler with the C library's headers, or not x86-64")
    _, built = build(tmp_path, CC="cc", CFLAGS="-Wall -Wextra -Werror")
    assert [path.parent.name for path in built] == ["hpstore"] * 3


def test_it_is_there_where_it_can_be() -> None:
    """Guards the tests that skip without it: an installation with a compiler has it."""
    if not compiles(sysconfig.get_config_var("CC") or "cc"):
        pytest.skip("no C compiler with the C library's headers, or not x86-64")
    for name in ("hpstore._nontemporal", "hpstore._directories", "hpstore._ranges"):
        found = importlib.util.find_spec(name)
        assert found is not None, (
            "installed before there was a compiler? rm .venv/.ready, then make"
        )
