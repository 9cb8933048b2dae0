"""Paths of the fsspec file system: which pool, which key; one instance for each pool."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.spec import _Cached, make_instance  # the metaclass has no public name
from fsspec.utils import stringify_path, tokenize

from hpstore.config import PoolConfig
from hpstore.errors import ConfigError
from hpstore.format.keys import check_key
from hpstore.interop.filesystem.open_pools import Mount, Mounts
from hpstore.interop.filesystem.write_buffer import SPOOL_BYTES
from hpstore.pool.pool import Pool
from hpstore.pool.pool_names import find_named, find_pool, is_path

_SCHEME = "hpstore://"
_SLASHES = re.compile("//+")  # as many as there are mean one, as on a disk


class _Canonical(_Cached):  # type: ignore[misc]  # fsspec is untyped
    """Gives each pool its own instances: fsspec compares arguments by their text.

    A relative path must not mean another pool after chdir, nor two Pool objects of one name be
    taken for the same.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: whatever fsspec passes on
        pool = kwargs.get("pool")
        if isinstance(pool, Pool):
            made = super().__call__(*args, **{**kwargs, "skip_instance_cache": True})
            made._fs_token_ = tokenize(made._fs_token_, id(pool))
            return made
        if pool is not None:
            text = os.fspath(pool)
            kwargs["pool"] = os.path.abspath(text) if is_path(text) else text
        return super().__call__(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedPath:
    """A path, taken apart."""

    mount: Mount
    root: str  # name of the pool in paths; "" over one pool
    key: str  # "" for the pool itself

    def path(self, key: str) -> str:
        """The path of a key of the same pool."""
        return f"{self.root}/{key}".strip("/") if self.root else key


class PoolPaths(AbstractFileSystem, metaclass=_Canonical):  # type: ignore[misc]
    """What the file system knows about paths; PoolFileSystem has the rest."""

    protocol = "hpstore"
    root_marker = ""
    mounts: ClassVar[Mounts] = Mounts()

    def __init__(
        self,
        *,
        pool: str | Pool | None = None,
        read_only: bool = False,
        spool_bytes: int = SPOOL_BYTES,
        spool_directory: str | None = None,
        min_losses_tolerated: int | None = None,
        **options: Any,  # Any: fsspec's own
    ) -> None:
        super().__init__(**{**options, "use_listings_cache": False})
        self.read_only = read_only
        self._spool_bytes, self._spool_directory = spool_bytes, spool_directory
        self._least = min_losses_tolerated
        self._where = pool
        self._own = Mount(pool) if isinstance(pool, Pool) else None
        self._configs: dict[str, PoolConfig] = {}
        if pool is not None:
            self._strip_protocol = self._strip_bound  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[object, ...]:
        options = dict(self.storage_options)
        if isinstance(self._where, Pool):
            options["pool"] = str(self._where.config.path)
            options["read_only"] = self._where.read_only
        return make_instance, (type(self), self.storage_args, options)

    # --- paths ------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:  # Any: a path or a list of them
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = stringify_path(path)
        if not text.startswith(_SCHEME):
            return _SLASHES.sub("/", text).strip("/")
        rest = text[len(_SCHEME) :].rstrip("/")
        if rest.startswith("/") or (not rest and text != _SCHEME):
            raise ConfigError(f"{text} names no pool; write hpstore://NAME/key")
        return _SLASHES.sub("/", rest)

    def _strip_bound(self, path: Any) -> Any:  # Any: as above
        """Paths of a file system over one pool: keys, or URLs that name this very pool."""
        if isinstance(path, list):
            return [self._strip_bound(one) for one in path]
        stripped = type(self)._strip_protocol(path)
        if not stringify_path(path).startswith(_SCHEME):
            return stripped
        name, _, key = stripped.partition("/")
        if name not in (self._config("").name, self._where):
            raise ConfigError(
                f"{path} names the pool {name!r}, but this file system is over "
                f"{self._config('').path}; leave out `pool`, or the URL's name"
            )
        return key

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        if name.startswith(_SCHEME):
            return name
        root = f"{self._config('').name}/" if self._where is not None else ""
        return f"{_SCHEME}{root}{name.lstrip('/')}"

    def _config(self, root: str) -> PoolConfig:
        if isinstance(self._where, Pool):
            return self._where.config
        if root not in self._configs:
            where = self._where
            self._configs[root] = find_named(root) if where is None else find_pool(where)
        return self._configs[root]

    def _place(self, path: Any) -> ParsedPath:  # Any: str or PathLike
        """Take a path apart and open its pool. Raises ConfigError, InvalidKey."""
        root, key = "", self._strip_protocol(path)
        if self._where is None:
            root, _, key = key.partition("/")
            if not root:
                raise IsADirectoryError(errno.EISDIR, "a path begins with a pool's name", str(path))
        if key:
            check_key(key)
        mount = self._own or self.mounts.mount(self._config(root), read_only=self.read_only)
        return ParsedPath(mount=mount, root=root, key=key)

    def resolved(self, path: Any) -> ParsedPath:  # Any: str or PathLike
        """The open pool and the key that a path means. Raises ConfigError where there is no pool,
        IsADirectoryError where there is no key."""
        return self._object(path)

    def _object(self, path: Any) -> ParsedPath:  # Any: str or PathLike
        place = self._place(path)
        if not place.key:
            raise IsADirectoryError(errno.EISDIR, "a pool is no file", str(path))
        return place
