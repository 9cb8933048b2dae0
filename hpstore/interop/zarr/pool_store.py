"""zarr arrays and groups in a pool: `PoolStore`, a store for zarr-python 3.

A value is an object, `<prefix>/<key>`; a published dataset shows as a group (zarr_views). What
holds and what does not is in docs/zarr.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, ObjectNotFound, VersionConflict
from hpstore.format.keys import check_key
from hpstore.interop.filesystem.paths import PoolPaths
from hpstore.interop.parallel_calls import read_parts
from hpstore.interop.zarr.base_store import BlockingStore, byte_span
from hpstore.interop.zarr.view_registry import PoolViews
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)
T = TypeVar("T")
# what makes an array or group; without it, chunks are bytes that nobody reads as data
_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")


class PoolStore(BlockingStore):
    """The values of zarr arrays and groups, under a prefix of a pool's keys. See docs/zarr.md.

    Thread-safe. Blocking work runs on the event loop's threads. Listings raise TooFewDevices when
    keys may be there unseen: a group must not look smaller than it is.

    A value that cannot be read now raises TooManyErasures; None, which zarr takes for a chunk of
    fill values, means that no such object exists. A write that is cancelled ends first, as its
    value is read until then.

    Under `data/<name>` of a published dataset, the arrays of its fields are read instead of its
    objects; writing or deleting there raises ConfigError. One that is replaced or deleted after it
    was opened raises VersionConflict, or ConfigError: make another store for the new one.

    Parameters
    ----------
    pool
        An open pool, which stays the caller's; or a pool's name, or the path of its pool.toml: then
        the pool is opened on first use, shared by the process, and closed at its end.
    prefix
        Where the keys begin. A store that can be written needs one, as zarr's mode "w" deletes all
        that it finds.
    read_only
        Refuse writes and deletes. A store over a pool that was opened read-only always does.

    Raises
    ------
    ConfigError
        There is no such pool, or a store that can be written has no prefix.
    InvalidKey
        No key can begin with `prefix`.
    """

    supports_writes = True
    supports_deletes = True

    def __init__(
        self, pool: Pool | str | os.PathLike[str], prefix: str = "", *, read_only: bool = False
    ) -> None:
        self.prefix = prefix.strip("/") if isinstance(prefix, str) else check_key(prefix)
        if self.prefix:
            check_key(self.prefix)
        super().__init__(pool, self.prefix, read_only=read_only)
        self._views = PoolViews(self._pool)
        if not self.prefix and not self.read_only:
            raise ConfigError(
                "a zarr store that can be written needs a prefix of its own: mode 'w' and "
                "overwrite=True delete all below it, here that would be the whole pool"
            )

    @classmethod
    def from_url(cls, url: str, *, read_only: bool = False) -> PoolStore:
        """Make the store at a URL. The pool is opened on first use.

        Parameters
        ----------
        url
            `hpstore://NAME/prefix`, with the name of a pool.
        read_only
            Refuse writes and deletes.

        Returns
        -------
        PoolStore
            As PoolStore(NAME, prefix) makes it.

        Raises
        ------
        ConfigError
            `url` is not such a URL, there is no such pool, or a store that can be written has no
            prefix.
        InvalidKey
            No key can begin with the prefix.
        """
        name, _, prefix = PoolPaths._strip_protocol(url).partition("/")
        if not name or not url.startswith("hpstore://"):
            raise ConfigError(f"{url!r} is no URL of a pool; write hpstore://NAME/prefix")
        return cls(name, prefix, read_only=read_only)

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as pickle wants it, of several lengths
        seen = self._views.seen()
        return (*super().__reduce__(), seen) if seen else super().__reduce__()

    def __setstate__(self, seen: Mapping[str, Mapping[str, str]]) -> None:
        self._views.expect(seen)

    def close(self) -> None:
        """Close what was opened for it, but no pool; the next use opens it again."""
        super().close()
        self._views.close()

    # --- reading ----------------------------------------------------------------------------

    def _read(self, key: str, requests: Sequence[ByteRequest | None]) -> list[Bytes] | None:
        shown = self._views.find(self._key(key))
        if shown is not None:
            return shown.store._read(shown.key, requests)
        try:
            with self._pool().open(self._key(key)) as reader:
                return read_parts(reader, lambda size: [byte_span(r, size) for r in requests])
        except ObjectNotFound:
            return None

    def _keys(self, prefix: str) -> list[str]:
        start = self._key("")
        return [key[len(start) :] for key in self._views.list(f"{start}{prefix}")]

    def _names(self, prefix: str) -> list[str]:
        start = self._key("")
        return [key[len(start) :] for key in self._views.list(f"{start}{prefix}", names=True)]

    def _size(self, key: str) -> int | None:
        shown = self._views.find(self._key(key))
        if shown is not None:
            return shown.store._size(shown.key)
        try:
            return self._pool().stat(self._key(key)).size
        except ObjectNotFound:
            return None

    # --- writing ----------------------------------------------------------------------------

    def _put(self, key: str, value: Buffer, *, if_absent: bool = False) -> None:
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"a value is a zarr Buffer, not {type(value).__name__}")
        self._views.check_write(self._key(key))
        data = np.ascontiguousarray(value.as_numpy_array())
        self._pool().put(self._key(key), data, if_absent=if_absent)

    def set_sync(self, key: str, value: Buffer) -> None:
        """`set`, called by a thread that may block."""
        self._put(key, value)

    async def set(self, key: str, value: Buffer) -> None:
        """Store a value; shown as a whole or not at all, durable on return.

        `value` belongs to the store until this ends. Raises TooFewDevices.
        """
        self._check_writable()
        await self._ensure_open()
        await _to_the_end(self._put, key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Store a value unless one is there; exact between the processes of one host."""

        def put() -> None:
            with suppress(VersionConflict):
                self._put(key, value, if_absent=True)

        self._check_writable()
        await self._ensure_open()
        await _to_the_end(put)

    def delete_sync(self, key: str) -> None:
        """`delete`, called by a thread that may block."""
        self._check_writable()
        self._views.check_write(self._key(key))
        with suppress(ObjectNotFound):
            self._pool().delete(self._key(key))

    async def delete(self, key: str) -> None:
        """Delete a value, if it is there. Durable on return."""
        self._check_writable()
        await self._ensure_open()
        await _to_the_end(self.delete_sync, key)

    async def delete_dir(self, prefix: str) -> None:
        """Delete all below. Stopped half way, no array is left that reads as fill values.

        The documents that make arrays and groups go before the chunks. Raises, before anything is
        deleted, TooFewDevices when values may be there unseen, ConfigError when a dataset is.
        """

        def delete() -> None:
            folder = prefix.strip("/")
            start = self._key(f"{folder}/" if folder else "")
            keys = self._pool().list(start, certain=True)
            self._views.check_delete(start, keys)
            documents = {key for key in keys if key.rpartition("/")[2] in _DOCUMENTS}
            self._pool().delete_many(sorted(documents), missing_ok=True)
            data = [key for key in keys if key not in documents]
            self._pool().delete_many(data, missing_ok=True)

        self._check_writable()
        await self._ensure_open()
        await _to_the_end(delete)


async def _to_the_end(work: Callable[..., T], *args: object) -> T:
    """Run blocking work on a thread; a cancelled wait goes on until the work has ended.

    Its memory and its key would otherwise be used again under its hands. It ends by the deadlines
    of the devices.
    """
    running = asyncio.get_running_loop().run_in_executor(None, lambda: work(*args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if running.exception() is not None:
            _log.warning("after it was cancelled, a write failed: %s", running.exception())
        raise
