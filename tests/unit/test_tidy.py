"""The limits of STYLE.md that a parser can check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("loaders", "checkpoint", "benchmarks")
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60


def package_files() -> list[Path]:
    """Every module of the package, each once (the links beside it are not followed)."""
    return sorted((ROOT / "hpstore").rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


FILES = package_files()
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_packages_are_found() -> None:
    """Guards the tests below against looking at nothing."""
    assert ROOT / "hpstore" / "pool" / "pool.py" in FILES
    assert len(FILES) > 30


@every_file
def test_module_is_short(path: Path) -> None:
    """At most 500 lines a module."""
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES


@every_file
def test_functions_are_short(path: Path) -> None:
    """At most 60 lines a function."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(parse(path))
        if isinstance(node, kinds) and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == {}


@every_file
def test_no_except_is_bare(path: Path) -> None:
    """A handler names what it handles."""
    bare = [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert bare == []


@every_file
def test_nothing_prints(path: Path) -> None:
    """Libraries log; only the benchmark CLI writes to standard output by print()."""
    if path.relative_to(ROOT).parts[1] == "benchmarks":
        return
    calls = [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []


@every_file
def test_names_are_exported_by_packages_alone(path: Path) -> None:
    """`__all__` stands in `__init__` files; in modules a leading `_` says what is private."""
    if path.name == "__init__.py":
        return
    assigned = [
        target.id
        for node in parse(path).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert "__all__" not in assigned


def test_the_formatter_is_nowhere_told_to_stop() -> None:
    """`ruff format` alone decides how code is laid out."""
    marks = ["fmt: " + word for word in ("skip", "off")]
    files = [
        f for folder in ("hpstore", "tests", "examples") for f in (ROOT / folder).rglob("*.py")
    ]
    assert [str(f) for f in files if any(mark in f.read_text() for mark in marks)] == []


@every_file
def test_nothing_unpickles(path: Path) -> None:
    """No module imports pickle or a relative of it: reading data never runs code.

    But for the one that allow_pickle=True asks for, and the socket to a loader's own processes.
    """
    if path.as_posix().endswith(
        ("hpstore/checkpoint/state/pickled.py", "hpstore/loaders/batching/worker_channel.py")
    ):
        return
    banned = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    found = []
    for node in ast.walk(parse(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [name for name in names if name.split(".")[0] in banned]
    assert found == []


@every_file
def test_public_module_has_a_docstring(path: Path) -> None:
    """A newcomer reads in one line what the module is for."""
    if path.stem.startswith("_") and path.stem != "__init__":
        return
    docstring = ast.get_docstring(parse(path))
    assert docstring
    assert docstring.splitlines()[0].strip()


@every_file
def test_nothing_is_left_to_do(path: Path) -> None:
    """No TODO on a path that touches data."""
    words = ("TO" + "DO", "FIX" + "ME")
    assert [word for word in words if word in path.read_text()] == []


@pytest.mark.parametrize("name", LINKS)
def test_folder_is_linked_beside_hpstore(name: str) -> None:
    """An import path is a file's path; <name> is a relative link, so that a checkout can move."""
    link = ROOT / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"hpstore/{name}"
    assert (ROOT / "hpstore" / name).is_dir()
    assert [path for path in (ROOT / "hpstore").rglob("*") if path.is_symlink()] == []


def test_the_package_says_that_it_is_typed() -> None:
    """py.typed is there, so that users' type checkers look at our annotations."""
    assert (ROOT / "hpstore" / "py.typed").is_file()
