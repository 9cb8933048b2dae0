"""The house: imports go one way between files and between folders, and a name is given once."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from functools import reduce
from typing import Any

import pytest

from tests.house_graph import PICTURE, ROOT, arrows, circles, imports, modules, picture

RENAMES = ROOT / "docs" / "decisions" / "renames.tsv"
ARGUMENTS = RENAMES.with_name("renamed_arguments.tsv")
MAP = ROOT / "CONTRIBUTING.md"


def test_circles_are_found() -> None:
    """Guards the tests below against finding nothing."""
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": []}
    assert circles(graph) == [["a", "b", "c"]]
    assert len(modules()) > 300


def test_no_file_imports_itself_through_others() -> None:
    assert circles(imports()) == []


def test_no_folder_imports_itself_through_others() -> None:
    """Late imports and those for types count: an arrow is an arrow."""
    assert circles(arrows()) == []
    assert circles(arrows(1)) == []


def test_the_picture_is_of_this_house() -> None:
    """`python -m tests.house_graph` draws it anew."""
    assert PICTURE.read_text() == picture()


def test_the_map_names_files_that_are_there() -> None:
    """CONTRIBUTING.md: who looks for a file by it finds it."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", MAP.read_text())
    assert len(named) > 40
    assert [name for name in named if not (ROOT / "hpstore" / name).is_file()] == []


def test_no_file_name_is_given_twice() -> None:
    """But for those that Python names."""
    found = defaultdict(list)
    for module, path in modules().items():
        if not path.stem.startswith("__"):
            found[path.stem].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_no_public_class_name_is_given_twice() -> None:
    found = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_what_was_renamed_is_there_under_its_new_name() -> None:
    """docs/decisions/renames.tsv: scripts outside the tree follow it."""
    lines = RENAMES.read_text().splitlines()[1:]
    assert len(lines) > 500
    assert [line for line in lines if not is_there(line.split("\t")[1])] == []


def is_there(name: str) -> bool:
    """Whether a module, or what is in one, has this name."""
    there = modules()
    if name in there:
        return True
    module = name.rpartition(".")[0]
    while module and module not in there:
        module = module.rpartition(".")[0]
    names = name[len(module) + 1 :].split(".")
    try:
        reduce(getattr, names, importlib.import_module(module))
    except (AttributeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("line", ARGUMENTS.read_text().splitlines()[1:])
def test_an_argument_that_moved_is_taken_where_it_is_said(line: str) -> None:
    """docs/decisions/renamed_arguments.tsv; the old place does not take it any more."""
    owner, argument, now = line.split("\t")
    found = re.fullmatch(r"(?:\w+=)?([\w.]+)\((\w+)=\)", now)
    assert found is not None
    assert found[2] in parameters(found[1])
    assert owner == "hpstore.Pool.readers" or argument not in parameters(owner)


def parameters(name: str) -> set[str]:
    """Of a public callable."""
    parts = name.split(".")
    module = max((n for n in range(1, len(parts)) if ".".join(parts[:n]) in modules()), default=1)
    made: Any = reduce(getattr, parts[module:], importlib.import_module(".".join(parts[:module])))
    return set(inspect.signature(made).parameters)


def test_threads_are_started_in_one_place() -> None:
    """By what knows what to do when no more are to be had (docs/decisions/0107)."""
    elsewhere = re.compile(r"ThreadPoolExecutor\(|thread\.start\(\)|Thread\([^()]*\)\.start\(\)")
    found = {
        module
        for module, path in modules().items()
        if elsewhere.search(path.read_text())
        and not module.startswith(("hpstore.benchmarks", "hpstore.testing"))
    }
    # a stream that is closed by its end catches every reason, also that the interpreter ends
    assert found == {"hpstore.runtime.threads", "hpstore.interop.filesystem.unclosed_streams"}
