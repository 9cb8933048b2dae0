"""A recorded tree as dicts whose entries can be taken out and put elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpstore.checkpoint.state.plain_values import is_plain
from hpstore.checkpoint.state.scalars import TAG
from hpstore.checkpoint.state.state_tree import join
from hpstore.checkpoint.state.tree_paths import children
from hpstore.errors import CheckpointMismatch, IntegrityError

Json = Any  # Any: JSON made by hpstore/checkpoint/state/state_tree.py
Node = Any  # Any: a Branch, a BranchList, or JSON that is one entry
_GONE = object()


class Branch:
    """A dict by the text of its keys. `facts`: what is recorded beside its entries, None for a
    plain one."""

    def __init__(self, facts: dict[str, Json] | None = None) -> None:
        self.facts = facts
        self.rows: dict[str, tuple[Json, Node]] = {}  # the key as it is recorded, and the node
        self._was_empty = True

    def fill(self, key: Json, name: str, node: Node) -> None:
        """Put an entry."""
        self.rows[name] = (key, node)
        self._was_empty = False

    def pop(self, name: str) -> None:
        """Take an entry out."""
        del self.rows[name]

    def closed(self) -> Json:
        """JSON; _GONE when all entries were taken out."""
        kept = [(name, key, _closed(node)) for name, (key, node) in self.rows.items()]
        left = [(name, key, node) for name, key, node in kept if node is not _GONE]
        if not left and not self._was_empty:
            return _GONE
        if self.facts is None and TAG not in self.rows:
            return {name: node for name, _, node in left}
        return {TAG: "dict", **(self.facts or {}), "v": [[key, node] for _, key, node in left]}


class BranchList:
    """A list or tuple of Branches and BranchLists."""

    def __init__(self, node: Json, parts: list[Node]) -> None:
        self._node, self.parts = node, parts

    def has(self, parts: Mapping[str, Node]) -> bool:
        """Whether the names of all parts are numbers of its own."""
        return parts.keys() <= {str(number) for number in range(len(self.parts))}

    def again(self, parts: Mapping[str, Node]) -> BranchList:
        """A list of this kind and length, of parts by their numbers."""
        return BranchList(self._node, [parts.get(str(n), {}) for n in range(len(self.parts))])

    def closed(self) -> Json:
        """JSON; _GONE when all entries were taken out."""
        parts = [_closed(part) for part in self.parts]
        if parts and all(part is _GONE for part in parts):
            return _GONE
        found = [{} if part is _GONE else part for part in parts]
        return found if isinstance(self._node, list) else {**self._node, "v": found}


def opened(node: Json, whole: Callable[[Json], bool]) -> Node:
    """Branches and BranchLists of a tree, down to what is one entry: a tensor, a value, an object,
    a list of such, and whatever is `whole`."""
    parts = node.get("v") if isinstance(node, dict) and node.get(TAG) == "tuple" else node
    if isinstance(parts, list):
        if is_plain(parts) or (isinstance(node, dict) and "type" in node):
            return node
        inside = [opened(part, whole) for part in parts]
        nothing = all(isinstance(part, Branch) and not part.rows for part in inside)
        return (
            BranchList(node, inside)
            if not nothing and all(isinstance(p, (Branch, BranchList)) for p in inside)
            else node
        )
    if not isinstance(node, dict) or node.get(TAG) not in (None, "dict") or whole(node):
        return node
    if node.get("type", "OrderedDict") != "OrderedDict" and TAG in node:
        return node
    facts = None if TAG not in node else {k: v for k, v in node.items() if k not in (TAG, "v")}
    found = Branch(facts)
    keys = list(node) if TAG not in node else [row[0] for row in node["v"]]
    for key, (name, child) in zip(keys, children(node), strict=True):
        found.fill(key, str(name), opened(child, whole))
    return found if len(found.rows) == len(keys) else node


def entries(node: Node, path: str = "") -> Iterator[tuple[Branch, str, str, Json]]:
    """Every entry with the branch that holds it, its key there, and its path; an empty dict is
    one."""
    if isinstance(node, BranchList):
        for number, part in enumerate(node.parts):
            yield from entries(part, join(path, number))
    elif isinstance(node, Branch):
        for name, (_, child) in node.rows.items():
            where = join(path, name)
            if isinstance(child, Branch) and not child.rows:
                yield node, name, where, child.closed()
            elif isinstance(child, (Branch, BranchList)):
                yield from entries(child, where)
            else:
                yield node, name, where, child


def branches(node: Node) -> Iterator[tuple[str, Branch]]:
    """Every branch with its path."""
    yield from ((path, found) for path, found in _below(node, "") if isinstance(found, Branch))


def lists(node: Node) -> Iterator[tuple[str, BranchList]]:
    """Every list with its path, those in lists after what holds them."""
    yield from ((path, found) for path, found in _below(node, "") if isinstance(found, BranchList))


def _below(node: Node, path: str) -> Iterator[tuple[str, Branch | BranchList]]:
    """Branches and lists of a tree, each before what it holds."""
    parts: list[tuple[str, Node]] = []
    if isinstance(node, Branch):
        yield path, node
        parts = [(name, child) for name, (_, child) in node.rows.items()]
    elif isinstance(node, BranchList):
        yield path, node
        parts = [(str(number), part) for number, part in enumerate(node.parts)]
    for name, child in parts:
        yield from _below(child, join(path, name))


def moved_whole(known: Mapping[str, BranchList], moves: Mapping[str, str]) -> dict[str, BranchList]:
    """By their new paths the lists all of whose entries go there. `moves`: new paths of entries by
    the old ones, of those that stay, too; "" for what is left out."""
    bases: dict[str, set[str]] = {}
    for old, new in moves.items() if known else ():
        at = old
        while "/" in at:
            at = at.rpartition("/")[0]
            if at in known:
                rest = old[len(at) :]
                bases.setdefault(at, set()).add(
                    new.removesuffix(rest) if new.endswith(rest) else ""
                )
    single = {path: next(iter(found)) for path, found in bases.items() if len(found) == 1}
    return {base: known[path] for path, base in single.items() if base not in ("", path)}


def listed(node: Node, like: Mapping[str, BranchList], path: str = "") -> Node:
    """A tree whose new dicts at the paths of `like` are lists of that kind."""
    if isinstance(node, BranchList):
        node.parts = [listed(p, like, join(path, n)) for n, p in enumerate(node.parts)]
    if not isinstance(node, Branch):
        return node
    for name, (key, child) in node.rows.items():
        node.rows[name] = (key, listed(child, like, join(path, name)))
    parts = {name: child for name, (_, child) in node.rows.items()}
    return like[path].again(parts) if path in like and like[path].has(parts) else node


def put(root: Branch, path: str, node: Json) -> None:
    """Put an entry at a path, in new plain dicts where there are none. Raises
    CheckpointMismatch."""
    here: Node = root
    *above, last = path.split("/")
    for name in above:
        if isinstance(here, BranchList):
            number = int(name) if name.isdigit() else len(here.parts)
            here = here.parts[number] if number < len(here.parts) else None
        elif isinstance(here, Branch):
            if name not in here.rows:
                here.fill(name, name, Branch())
            here = here.rows[name][1]
    if not isinstance(here, Branch) or last in here.rows:
        raise CheckpointMismatch(
            f"nothing can be renamed to {path!r}: that place is taken. Nothing was changed."
        )
    here.fill(last, last, node)


def moved(node: Json, path: str, new: str) -> Json:
    """An entry whose tensors have names at another path."""
    if isinstance(node, list):
        return node if is_plain(node) else [moved(child, path, new) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get(TAG) in ("tensor", "ndarray"):
        name = node["item"]
        if not name.startswith(path):
            raise IntegrityError(f"the manifest has {name!r} in the place of {path!r}")
        return {**node, "item": new + name[len(path) :]}
    return {key: moved(child, path, new) for key, child in node.items()}


def closed(root: Branch) -> Json:
    """The tree as JSON."""
    found = _closed(root)
    return {} if found is _GONE else found


def _closed(node: Node) -> Json:
    return node.closed() if isinstance(node, (Branch, BranchList)) else node
