"""The graph of the package: what imports what, between files and between folders; its picture.

python -m tests.house_graph    # draws docs/house.svg
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "house.svg"
WIDE, HIGH, GAP_X, GAP_Y = 118, 30, 16, 58  # a box and the room about it, in pixels


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


def folder_of(module: str) -> str:
    """Where a module is; an __init__.py and the few files beside it in hpstore/ are themselves."""
    path = modules()[module]
    if path.name == "__init__.py":
        return f"{module}.__init__"
    return module if path.parent == ROOT / "hpstore" else module.rpartition(".")[0]


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


def arrows(depth: int = 0) -> dict[str, set[str]]:
    """What each folder imports of others. `depth`: of the folders, 0 for the innermost ones."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in imports().items():
        for other in others - {"hpstore"}:
            here, there = folder_of(module), folder_of(other)
            if depth:
                here, there = (".".join(f.split(".")[: depth + 1]) for f in (here, there))
            if here != there and here != "hpstore" and not here.startswith("hpstore.__"):
                found[here].add(there)
    return found


def levels(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The nodes by how long the longest way down from them is, the longest first. No circles."""
    height: dict[str, int] = {}

    def of(node: str) -> int:
        if node not in height:
            height[node] = max((of(other) + 1 for other in graph.get(node, ())), default=0)
        return height[node]

    nodes = sorted({*graph, *(other for others in graph.values() for other in others)})
    rows: list[list[str]] = [[] for _ in range(max(map(of, nodes)) + 1)]
    for node in nodes:
        rows[len(rows) - 1 - of(node)].append(node)
    return rows


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that a longer way has the beginning and the end of. No circles."""

    @cache
    def below(node: str) -> set[str]:
        return {other for step in graph.get(node, ()) for other in (step, *below(step))}

    return {
        node: others - {far for near in others for far in below(near)}
        for node, others in graph.items()
    }


def picture() -> str:
    """The outer folders as SVG, each above all that it imports; the shortest arrows alone."""
    graph = reduced(arrows(1))
    rows = levels(graph)
    across = max(map(len, rows)) * (WIDE + GAP_X) + 240
    places = {}
    for y, row in enumerate(rows):
        for x, node in enumerate(row):
            shift = 60 * (y % 4) + (across - 180 - len(row) * (WIDE + GAP_X)) // 2
            places[node] = (shift + x * (WIDE + GAP_X), 10 + y * GAP_Y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {len(rows) * GAP_Y + 10}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{across}" height="{len(rows) * GAP_Y + 10}" fill="white"/>',
    ]
    for node in sorted(graph):
        for other in sorted(graph[node]):
            (x1, y1), (x2, y2) = places[node], places[other]
            lines.append(
                f'<line x1="{x1 + WIDE // 2}" y1="{y1 + HIGH}" x2="{x2 + WIDE // 2}" y2="{y2}" '
                'stroke="#689"/>'
            )
    for node, (x, y) in sorted(places.items()):
        lines.append(
            f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5" fill="#eef3f8" '
            f'stroke="#456"/><text x="{x + WIDE // 2}" y="{y + 20}" text-anchor="middle">'
            f"{node.removeprefix('hpstore.')}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
