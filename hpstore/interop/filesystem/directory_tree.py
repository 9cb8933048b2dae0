"""Directories out of keys. Pure.

A pool knows keys only; directories are what stands before a slash, and what `mkdir` made up. A key
may be an object and a directory at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What lies below a directory; both sorted, without the directory itself."""

    files: tuple[str, ...]
    directories: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.files or self.directories)


def descend(
    keys: Iterable[str], made: Iterable[str], top: str, maxdepth: int | None = None
) -> Tree:
    """Files and directories below `top` ("" is the root), at most `maxdepth` components deep.

    `made`: directories without an object in them.
    """
    prefix = f"{top}/" if top else ""
    files: set[str] = set()
    directories: set[str] = set()

    def add_directories(parts: list[str]) -> None:
        for depth in range(1, min(len(parts), maxdepth or len(parts)) + 1):
            directories.add(prefix + "/".join(parts[:depth]))

    for key in keys:
        if key.startswith(prefix):
            parts = key[len(prefix) :].split("/")
            if maxdepth is None or len(parts) <= maxdepth:
                files.add(key)
            add_directories(parts[:-1])
    for directory in made:
        if directory.startswith(prefix) and directory != top:
            add_directories(directory[len(prefix) :].split("/"))
    return Tree(files=tuple(sorted(files)), directories=tuple(sorted(directories)))


def metadata_first(paths: Iterable[str]) -> list[str]:
    """The order to delete in: dot files before what they describe.

    A checkpoint counts as there when its `.metadata` is. Stopped half way, a delete must not leave
    a `.metadata` without its data; the reverse is the order to copy in.
    """
    dots, others = dot_files_and_others(paths)
    return [*dots, *others]


def dot_files_and_others(paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """The two parts of metadata_first, each sorted."""
    dots: list[str] = []
    others: list[str] = []
    for path in sorted(paths):
        (dots if path.rsplit("/", 1)[-1].startswith(".") else others).append(path)
    return dots, others
