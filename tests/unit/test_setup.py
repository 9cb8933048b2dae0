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
PLAIN = ("_directories", "_nontemporal", "_ranges")
OF_PYTHON = ("_values",)  # needs Python's headers too


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
    assert all(f"hpstore.{name}" in said for name in (*PLAIN, *OF_PYTHON))


def compiles(compiler: str, *headers: str) -> bool:
    """There is one, for x86-64, with the C library's headers and these."""
    command = [*compiler.split(), f"-I{sysconfig.get_path('include')}", "-fsyntax-only", "-xc", "-"]
    program = "".join(f"#include <{name}>\n" for name in ("string.h", "immintrin.h", *headers))
    try:
        done = subprocess.run(command, input=program, capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and platform.machine() == "x86_64"


def test_with_a_compiler_it_is_built_without_a_warning(tmp_path: Path) -> None:
    if not compiles("cc"):
        pytest.skip("no C compiler with the C library's headers, or not x86-64")
    _, built = build(tmp_path, CC="cc", CFLAGS="-Wall -Wextra -Werror")
    known = OF_PYTHON if compiles("cc", "Python.h") else ()
    names = sorted(path.name.split(".")[0] for path in built)
    assert names == sorted((*PLAIN, *known))
    assert {path.parent.name for path in built} == {"hpstore"}


def test_it_is_there_where_it_can_be() -> None:
    """Guards the tests that skip without it: an installation with a compiler has it."""
    compiler = sysconfig.get_config_var("CC") or "cc"
    if not compiles(compiler):
        pytest.skip("no C compiler with the C library's headers, or not x86-64")
    for name in (*PLAIN, *(OF_PYTHON if compiles(compiler, "Python.h") else ())):
        found = importlib.util.find_spec(f"hpstore.{name}")
        assert found is not None, (
            "installed before there was a compiler? rm .venv/.ready, then make"
        )
