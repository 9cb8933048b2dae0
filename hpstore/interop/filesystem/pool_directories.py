"""Directories of the fsspec file system: info, ls, find, mkdir, rmdir. Nothing is cached."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from hpstore.errors import ConfigError, InvalidKey, ObjectNotFound
from hpstore.interop.filesystem.directory_tree import Tree, descend
from hpstore.interop.filesystem.paths import ParsedPath, PoolPaths
from hpstore.interop.parallel_calls import stat_all
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.pool_names import pool_names

_Facts = dict[str, Any]  # Any: what fsspec calls an info, values of several types


class PoolListing(PoolPaths):
    """What the file system shows, and its directories; PoolFileSystem has the rest."""

    def _tree(self, place: ParsedPath, maxdepth: int | None = None) -> Tree:
        """What lies below; one walk over the keys under the prefix, whatever the depth."""
        keys = place.mount.pool.list(f"{place.key}/" if place.key else "")
        return descend(keys, place.mount.made(), place.key, maxdepth)

    def _is_directory(self, place: ParsedPath) -> bool:
        made = place.mount.made()
        return not place.key or place.key in made or bool(self._tree(place, 1))

    def info(self, path: str, **kwargs: Any) -> _Facts:
        """name, size, type; for files created (seconds since 1970), version and metadata.

        An object that is a directory too is a file here. Raises FileNotFoundError.
        """
        if self._where is None and not self._strip_protocol(path):
            return _directory("")
        place = self._place(path)
        if place.key:
            try:
                return _file(place, place.mount.pool.stat(place.key))
            except ObjectNotFound:
                pass
        if self._is_directory(place):
            return _directory(place.path(place.key))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _type(self, path: str) -> str | None:
        """Type, None when nothing is there; other errors go through: unknown is not absent."""
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, InvalidKey):
            return None

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a file or directory is there. Raises when that is unclear."""
        return self._type(path) is not None

    def isfile(self, path: str) -> bool:
        """Whether an object is there. Raises when that is unclear."""
        return self._type(path) == "file"

    def isdir(self, path: str) -> bool:
        """Whether a directory, and no object, is there. Raises when that is unclear."""
        return self._type(path) == "directory"

    def ls(self, path: str, detail: bool = True, *, sizes: bool = True, **kwargs: Any) -> list[Any]:
        """What lies directly below, and the object itself if `path` is one. Never cached.

        With `detail` every object is looked up, unless `sizes` is False. A name that is object and
        directory has an entry for each.
        """
        if self._where is None and not self._strip_protocol(path):
            return [_directory(name) if detail else name for name in pool_names()]
        place = self._place(path)
        tree = self._tree(place, 1)
        own = [place.key] if place.key and self._is_object(place) else []
        if not own and not tree and not self._is_directory(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not detail:
            names = sorted({*own, *tree.files, *tree.directories})
            return [place.path(name) for name in names]
        found = self._facts(place, [*own, *tree.files], sizes=sizes)
        found += [_directory(place.path(key)) for key in tree.directories]
        return sorted(found, key=lambda facts: (str(facts["name"]), str(facts["type"])))

    def _is_object(self, place: ParsedPath) -> bool:
        return place.mount.pool.exists(place.key)

    def _facts(self, place: ParsedPath, keys: list[str], *, sizes: bool) -> list[_Facts]:
        if not sizes:
            return [{"name": place.path(key), "size": None, "type": "file"} for key in keys]
        return [_file(place, found) for found in stat_all(place.mount.pool, keys)]

    def walk(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Iterator[Any]:
        """As `os.walk`. Objects are looked up only with `detail`."""
        kwargs.setdefault("sizes", bool(kwargs.get("detail")))
        return iter(super().walk(path, maxdepth, **kwargs))

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Paths that match. Objects are looked up only with `detail`."""
        kwargs.setdefault("sizes", bool(kwargs.get("detail")))
        return super().glob(path, maxdepth, **kwargs)

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        *,
        sizes: bool = True,
        **kwargs: Any,
    ) -> Any:
        """All files below, and the object itself if `path` is one; one walk over the keys."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        if self._where is None and not self._strip_protocol(path):
            return self._find_in_all(maxdepth, withdirs, detail, sizes)
        place = self._place(path)
        tree = self._tree(place, maxdepth)
        own = [place.key] if place.key and self._is_object(place) else []
        out: dict[str, _Facts] = {}
        if withdirs:
            here = [place.key] if place.path(place.key) and self._is_directory(place) else []
            out = {place.path(key): _directory(place.path(key)) for key in here}
            out |= {place.path(key): _directory(place.path(key)) for key in tree.directories}
        facts = self._facts(place, [*own, *tree.files], sizes=detail and sizes)
        out |= {facts["name"]: facts for facts in facts}
        return dict(sorted(out.items())) if detail else sorted(out)

    def _find_in_all(
        self, maxdepth: int | None, withdirs: bool, detail: bool, sizes: bool
    ) -> dict[str, _Facts] | list[str]:
        out: dict[str, _Facts] = {}
        for name in pool_names():
            if withdirs:
                out[name] = _directory(name)
            if maxdepth == 1:
                continue
            below = None if maxdepth is None else maxdepth - 1
            try:
                out |= self.find(name, below, withdirs, True, sizes=detail and sizes)
                self.mounts.is_there(name)
            except ConfigError as error:  # what is named is there no more
                self.mounts.is_gone(name, error)
        return out if detail else list(out)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make an empty directory, which this process alone knows until an object is in it."""
        if not create_parents and not self.isdir(self._parent(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._parent(path))
        self.makedirs(path, exist_ok=False)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As mkdir, with the directories above. Raises FileExistsError, over an object always."""
        place = self._place(path)
        there = self._type(path)
        if there == "file" or (there and not exist_ok):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if place.key:
            place.mount.make(place.key)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        place = self._place(path)
        if not self._is_directory(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if self._tree(place, 1) or not place.key:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        place.mount.forget(place.key)

    def _forget(self, directories: Iterable[str]) -> None:
        for name in directories:
            place = self._place(name)
            place.mount.forget(place.key)

    def created(self, path: str) -> datetime:
        """When the object was put, in UTC."""
        return datetime.fromtimestamp(self._stat(path).created, UTC)

    modified = created

    def _stat(self, path: str) -> ObjectInfo:
        place = self._object(path)
        return place.mount.pool.stat(place.key)


def _directory(path: str) -> _Facts:
    return {"name": path, "size": 0, "type": "directory"}


def _file(place: ParsedPath, found: ObjectInfo) -> _Facts:
    return {
        "name": place.path(found.key),
        "size": found.size,
        "type": "file",
        "created": found.created,
        "mtime": found.created,
        "version": found.version,
        "metadata": dict(found.metadata),
    }
