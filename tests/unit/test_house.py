"""The house: imports go one way between files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    return {module_of(path): path for path in sorted((ROOT / "hpstore").rglob("*.py"))}


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports of the package, wherever in it: at its top, late, or for types."""
    known = modules()
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        of = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    of.add(full if full in known else node.module)
            elif isinstance(node, ast.Import):
                of.update(alias.name for alias in node.names)
        found[name] = (of & known.keys()) - {name}
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of which each member reaches every other (Tarjan 1972, without recursion)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for start in graph:
        if start in order:
            continue
        work = [(start, iter(graph.get(start, ())))]
        order[start] = low[start] = len(order)
        stack.append(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in order:
                    order[other] = low[other] = len(order)
                    stack.append(other)
                    work.append((other, iter(graph.get(other, ()))))
                    break
                if other in stack:
                    low[node] = min(low[node], order[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    at = stack.index(node)
                    if len(stack) - at > 1:
                        found.append(sorted(stack[at:]))
                    del stack[at:]
    return found


def test_circles_are_found() -> None:
    """Guards the tests below against finding nothing."""
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": []}
    assert circles(graph) == [["a", "b", "c"]]
    assert len(modules()) > 300


def test_no_file_imports_itself_through_others() -> None:
    """Late imports and those for types count: an arrow is an arrow."""
    assert circles(imports()) == []
