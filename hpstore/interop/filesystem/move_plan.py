"""Where everything goes in a move. Pure."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Paths that an operation is about."""

    files: frozenset[str]
    directories: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMoves:
    """Source to target, for files and for directories."""

    files: Mapping[str, str]
    directories: Mapping[str, str]


def plan_move(roots: list[str], chosen: Selection, target: str, *, into: bool) -> PathMoves | None:
    """Targets of everything chosen below `roots`; None when nothing is to be moved.

    `into`: `target` is a directory that takes the roots under their own names. Raises OSError for
    a move into itself, and when two sources have one target.
    """
    files: dict[str, str] = {}
    directories: dict[str, str] = {}
    for root in roots:
        top = f"{target}/{root.rsplit('/', 1)[-1]}".lstrip("/") if into else target
        if top == root:
            continue
        if top.startswith(f"{root}/") and root in chosen.directories:
            raise OSError(errno.EINVAL, f"{root} cannot be moved into itself", root)
        for kind, out in ((chosen.files, files), (chosen.directories, directories)):
            for path in kind:
                if path == root or path.startswith(f"{root}/"):
                    out[path] = top + path[len(root) :]
    clash = set(files) & set(files.values()) or len(set(files.values())) != len(files)
    if clash:
        raise OSError(errno.EINVAL, f"moving to {target} would write an object twice", target)
    return PathMoves(files=files, directories=directories) if files or directories else None
