"""zarr arrays and groups in a pool: `PoolStore`, a store for zarr-python 3.

A value is an object, `<prefix>/<key>`; what holds and what does not is in docs/zarr.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, ObjectNotFound, VersionConflict
from hpstore.interop.bulk import Span, delete_all, read_spans
from hpstore.interop.names import find_pool, is_path
from hpstore.interop.paths import PoolPaths
from hpstore.interop.tree import descend
from hpstore.keys import check_key
from hpstore.pool import Pool

_log = logging.getLogger(__name__)
T = TypeVar("T")
# what makes an array or group; without it, chunks are bytes that nobody reads as data
_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")


def byte_span(request: ByteRequest | None, size: int) -> Span:
    """[low, high) of a value of `size` bytes that a request means; cut where the value ends. Pure.

    Raises ValueError for a negative bound and for what is no request.
    """
    match request:
        case None:
            low, high = 0, size
        case RangeByteRequest(start=low, end=high):
            pass
        case OffsetByteRequest(offset=low):
            high = max(low, size)
        case SuffixByteRequest(suffix=suffix):
            low, high = (max(0, size - suffix), size) if suffix >= 0 else (suffix, size)
        case _:
            raise ValueError(f"Unexpected byte_range, got {request!r}.")
    if low < 0 or high < 0:
        raise ValueError(f"Unexpected byte_range, got {request!r}: a bound is negative.")
    low = min(low, size)
    return low, max(low, min(high, size))


class PoolStore(Store):
    """The values of zarr arrays and groups, under a prefix of a pool's keys. Thread-safe.

    `pool`: an open Pool, which stays the caller's to close; or a pool's name, or the path of its
    pool.toml: then the pool is opened on first use, shared by the process, and closed at its end.
    `prefix`: where the keys begin; a store that can be written needs one, as zarr's mode "w"
    deletes all that it finds. Pickles as pool.toml and prefix.

    A value that cannot be read now raises TooManyErasures; None, which zarr takes for a chunk of
    fill values, means that no such object exists. Blocking work runs on the event loop's threads.
    A read that is cancelled goes on into memory that nobody else gets; a write that is cancelled
    ends first, as `value` is read until then.
    """

    supports_writes = True
    supports_deletes = True
    supports_listing = True

    def __init__(
        self, pool: Pool | str | os.PathLike[str], prefix: str = "", *, read_only: bool = False
    ) -> None:
        self._own = pool if isinstance(pool, Pool) else None
        if isinstance(pool, Pool):
            self._config, read_only = pool.config, read_only or pool.read_only
        else:
            where = os.fspath(pool)
            self._config = find_pool(os.path.abspath(where) if is_path(where) else where)
        self.prefix = check_key(prefix.strip("/")) if prefix.strip("/") else ""
        if not self.prefix and not read_only:
            raise ConfigError(
                "a zarr store that can be written needs a prefix of its own: mode 'w' and "
                "overwrite=True delete all below it, here that would be the whole pool"
            )
        super().__init__(read_only=read_only)
        self._mounted_read_only = read_only

    @classmethod
    def from_url(cls, url: str, *, read_only: bool = False) -> PoolStore:
        """The store at `hpstore://NAME/prefix`. Raises ConfigError."""
        name, _, prefix = PoolPaths._strip_protocol(url).partition("/")
        if not name or not url.startswith("hpstore://"):
            raise ConfigError(f"{url!r} is no URL of a pool; write hpstore://NAME/prefix")
        return cls(name, prefix, read_only=read_only)

    def with_read_only(self, read_only: bool = False) -> PoolStore:
        """The same place, writable or not. Raises ConfigError over a Pool opened read-only."""
        if self._own is not None and self._own.read_only and not read_only:
            raise ConfigError(
                f"{self} cannot be written: its Pool was opened read-only; open one that is not"
            )
        made = type(self)(self._own or self._config.path, self.prefix, read_only=read_only)
        made._mounted_read_only = self._mounted_read_only and read_only  # no second pool for "r"
        return made

    def __reduce__(self) -> tuple[Callable[..., PoolStore], tuple[object, ...]]:
        return _reopen, (type(self), str(self._config.path), self.prefix, self.read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._place() == other._place()

    __hash__ = None  # type: ignore[assignment]  # as zarr's own stores

    def _place(self) -> tuple[object, ...]:
        return self._config.path.resolve(), self.prefix, self.read_only

    def __str__(self) -> str:
        return f"hpstore://{self._config.name}/{self.prefix}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    # --- opening ----------------------------------------------------------------------------

    async def _open(self) -> None:
        """Open the pool, so that a place that is not there is found now."""
        if self._is_open:
            raise ValueError("store is already open")
        await self._ensure_open()

    async def _ensure_open(self) -> None:
        if not self._is_open:
            await asyncio.to_thread(self._pool)
            self._is_open = True

    def _pool(self) -> Pool:
        if self._own is not None:
            return self._own
        return PoolPaths.mounts.mount(self._config, read_only=self._mounted_read_only).pool

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    # --- reading ----------------------------------------------------------------------------

    def _read(self, key: str, requests: Sequence[ByteRequest | None]) -> list[Bytes] | None:
        """Parts of a value, all of one version; None when there is no such object."""
        try:
            with self._pool().reader(self._key(key)) as reader:
                return read_spans(reader, lambda size: [byte_span(r, size) for r in requests])
        except ObjectNotFound:
            return None

    def get_sync(
        self,
        key: str,
        *,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """`get`, called by a thread that may block."""
        found = self._read(key, [byte_range])
        return None if found is None else _buffer(found[0], prototype)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """A value or a part of it, verified, of one version; None when there is no such object.

        Raises TooManyErasures when it is there and cannot be read now.
        """
        await self._ensure_open()
        found = await asyncio.to_thread(self._read, key, [byte_range])
        return None if found is None else _buffer(found[0], prototype)

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Many parts in the order asked for. Those of one key are read at once, of one version."""
        await self._ensure_open()
        wanted = list(key_ranges)
        by_key: dict[str, list[int]] = {}
        for index, (key, _) in enumerate(wanted):
            by_key.setdefault(key, []).append(index)
        results: list[Buffer | None] = [None] * len(wanted)

        async def read(key: str, indices: list[int]) -> None:
            found = await asyncio.to_thread(self._read, key, [wanted[i][1] for i in indices])
            for index, array in zip(indices, found or (), strict=found is not None):
                results[index] = _buffer(array, prototype)

        await asyncio.gather(*(read(key, indices) for key, indices in by_key.items()))
        return results

    def get_ranges_sync(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **limits: Any,  # Any: zarr's hints for stores that pay for each request
    ) -> Sequence[tuple[int, Buffer | None]]:
        """(index, part) for each range, one look-up for all: zarr 3.2 reads shards so.

        Raises ExceptionGroup with a FileNotFoundError when there is no such object.
        """
        found = self._read(key, byte_ranges)
        if found is None:
            raise ExceptionGroup("chunk read failed", [FileNotFoundError(key)])
        return [(index, _buffer(array, prototype)) for index, array in enumerate(found)]

    async def get_ranges(
        self,
        key: str,
        byte_ranges: Sequence[ByteRequest | None],
        *,
        prototype: BufferPrototype,
        **limits: Any,  # Any: as above
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """As get_ranges_sync, in one batch."""
        await self._ensure_open()
        yield await asyncio.to_thread(self.get_ranges_sync, key, byte_ranges, prototype=prototype)

    async def exists(self, key: str) -> bool:
        """Whether a read would find a value. Raises TooManyErasures when that is unclear."""
        await self._ensure_open()
        return await asyncio.to_thread(lambda: self._pool().exists(self._key(key)))

    async def getsize(self, key: str) -> int:
        """Bytes of a value, without reading it. Raises ObjectNotFound, a FileNotFoundError."""
        await self._ensure_open()
        return await asyncio.to_thread(lambda: self._pool().stat(self._key(key)).size)

    # --- writing ----------------------------------------------------------------------------

    def _put(self, key: str, value: Buffer, *, if_absent: bool = False) -> None:
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"a value is a zarr Buffer, not {type(value).__name__}")
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
        with suppress(ObjectNotFound):
            self._pool().delete(self._key(key))

    async def delete(self, key: str) -> None:
        """Delete a value, if it is there. Durable on return."""
        self._check_writable()
        await self._ensure_open()
        await _to_the_end(self.delete_sync, key)

    async def delete_dir(self, prefix: str) -> None:
        """Delete all below. Stopped half way, no array is left that reads as fill values.

        The documents that make arrays and groups go before the chunks. Raises TooFewDevices,
        before anything is deleted, when values may be there unseen.
        """

        def delete() -> None:
            folder = prefix.strip("/")
            keys = self._pool().list(self._key(f"{folder}/" if folder else ""), certain=True)
            documents = {key for key in keys if key.rpartition("/")[2] in _DOCUMENTS}
            delete_all(self._pool(), sorted(documents))
            delete_all(self._pool(), [key for key in keys if key not in documents])

        self._check_writable()
        await self._ensure_open()
        await _to_the_end(delete)

    # --- listing ----------------------------------------------------------------------------

    async def _keys(self, prefix: str) -> list[str]:
        """Keys, relative to the store, that begin so; one walk over the devices.

        Raises TooFewDevices when keys may be there unseen: a group must not look smaller than it
        is.
        """
        await self._ensure_open()
        start = self._key("")
        found = await asyncio.to_thread(lambda: self._pool().list(f"{start}{prefix}", certain=True))
        return [key[len(start) :] for key in found]

    async def list(self) -> AsyncIterator[str]:
        """All keys. Raises TooFewDevices, as all that lists."""
        for key in await self._keys(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Keys that begin with `prefix`, which may end within a name."""
        for key in await self._keys(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names directly below; all keys below are walked for it."""
        folder = prefix.strip("/")
        start = f"{folder}/" if folder else ""
        tree = descend(await self._keys(start), (), folder, 1)
        for key in sorted({*tree.files, *tree.directories}):
            yield key[len(start) :]

    async def is_empty(self, prefix: str) -> bool:
        """Whether nothing is below."""
        folder = prefix.strip("/")
        return not await self._keys(f"{folder}/" if folder else "")


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


def _buffer(array: Bytes, prototype: BufferPrototype | None) -> Buffer:
    return (prototype or default_buffer_prototype()).buffer.from_bytes(array.data)


def _reopen(kind: type[PoolStore], path: str, prefix: str, read_only: bool) -> PoolStore:
    return kind(path, prefix, read_only=read_only)


__all__ = ["PoolStore", "byte_span"]
