"""The limits of STYLE.md that a parser can check."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("loaders", "checkpoint", "benchmarks")
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60


def package_files() -> list[Path]:
    """Every module of the package, each once (the links beside it are not followed)."""
    return sorted((ROOT / "hpstore").rglob("*.py"))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


FILES = package_files()


def offenders(found: Callable[[Path], object], files: Iterable[Path] = FILES) -> dict[str, object]:
    """What is found in each of these files, of those in which something is."""
    each = {str(path.relative_to(ROOT)): found(path) for path in files}
    return {path: what for path, what in each.items() if what}


def test_the_packages_are_found() -> None:
    """Guards the tests below against looking at nothing."""
    assert ROOT / "hpstore" / "pool" / "pool.py" in FILES
    assert len(FILES) > 30


def test_modules_are_short() -> None:
    """At most 500 lines a module."""

    def too_many(path: Path) -> int:
        lines = len(path.read_text().splitlines())
        return lines if lines > MAX_MODULE_LINES else 0

    assert offenders(too_many) == {}


def test_functions_are_short() -> None:
    """At most 60 lines a function."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)

    def long(path: Path) -> dict[str, int]:
        return {
            node.name: (node.end_lineno or 0) - node.lineno + 1
            for node in ast.walk(parse(path))
            if isinstance(node, kinds)
            and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        }

    assert offenders(long) == {}


def test_no_except_is_bare() -> None:
    """A handler names what it handles."""

    def bare(path: Path) -> list[int]:
        return [
            node.lineno
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ExceptHandler) and node.type is None
        ]

    assert offenders(bare) == {}


def test_nothing_prints() -> None:
    """Libraries log; only the benchmark CLI writes to standard output by print()."""

    def calls(path: Path) -> list[int]:
        return [
            node.lineno
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]

    library = [path for path in FILES if path.relative_to(ROOT).parts[1] != "benchmarks"]
    assert offenders(calls, library) == {}


def test_names_are_exported_by_packages_alone() -> None:
    """`__all__` stands in `__init__` files; in modules a leading `_` says what is private."""

    def exports(path: Path) -> bool:
        return "__all__" in [
            target.id
            for node in parse(path).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]

    assert offenders(exports, [path for path in FILES if path.name != "__init__.py"]) == {}


def test_the_formatter_is_nowhere_told_to_stop() -> None:
    """`ruff format` alone decides how code is laid out."""
    marks = ["fmt: " + word for word in ("skip", "off")]
    files = [
        f for folder in ("hpstore", "tests", "examples") for f in (ROOT / folder).rglob("*.py")
    ]
    assert [str(f) for f in files if any(mark in f.read_text() for mark in marks)] == []


def test_nothing_unpickles() -> None:
    """No module imports pickle or a relative of it: reading data never runs code.

    But for the one that allow_pickle=True asks for, and the socket to a loader's own processes.
    """
    allowed = ("hpstore/checkpoint/state/pickled.py", "hpstore/loaders/batching/worker_channel.py")
    banned = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}

    def imports(path: Path) -> list[str]:
        names = []
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
        return [name for name in names if name.split(".")[0] in banned]

    assert offenders(imports).keys() == set(allowed)


def test_public_modules_have_docstrings() -> None:
    """A newcomer reads in one line what the module is for."""

    def silent(path: Path) -> bool:
        docstring = ast.get_docstring(parse(path)) or ""
        return not docstring.partition("\n")[0].strip()

    public = [f for f in FILES if not f.stem.startswith("_") or f.stem == "__init__"]
    assert offenders(silent, public) == {}


def test_nothing_is_left_to_do() -> None:
    """No TODO on a path that touches data."""
    words = ("TO" + "DO", "FIX" + "ME")
    assert offenders(lambda path: [word for word in words if word in path.read_text()]) == {}


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
