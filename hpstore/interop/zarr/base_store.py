"""What zarr stores over a pool have in common: which pool, blocking work on threads, listings."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from hpstore.codec.galois import Bytes
from hpstore.errors import ConfigError, ObjectNotFound
from hpstore.interop.filesystem.directory_tree import descend
from hpstore.interop.filesystem.paths import PoolPaths
from hpstore.interop.parallel_calls import Span
from hpstore.pool.pool import Pool
from hpstore.pool.pool_names import find_pool, is_path


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


class BlockingStore(Store):
    """A zarr store that reads by blocking calls. Thread-safe; pickles as pool.toml and `place`.

    `pool`: an open Pool, which stays the caller's to close; or a pool's name, or the path of its
    pool.toml: then the pool is opened on first use, shared by the process, and closed at its end.
    `place`: what the store shows of the pool, the second argument of each class.

    Blocking work runs on the event loop's threads. A read that is cancelled goes on into memory
    that nobody else gets.
    """

    supports_listing = True

    def __init__(
        self, pool: Pool | str | os.PathLike[str], place: str, *, read_only: bool = False
    ) -> None:
        self._own = pool if isinstance(pool, Pool) else None
        if isinstance(pool, Pool):
            self._config, read_only = pool.config, read_only or pool.read_only
        else:
            where = os.fspath(pool)
            self._config = find_pool(os.path.abspath(where) if is_path(where) else where)
        self._place = place
        super().__init__(read_only=read_only)
        self._mounted_read_only = read_only

    @abstractmethod
    def _read(self, key: str, requests: Sequence[ByteRequest | None]) -> list[Bytes] | None:
        """Parts of a value, all of one version; None when there is no such value. May block."""

    @abstractmethod
    def _keys(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`. May block."""

    def _names(self, prefix: str) -> list[str]:
        """Keys, of which only the first names after `prefix` are looked at. May block."""
        return self._keys(prefix)

    @abstractmethod
    def _size(self, key: str) -> int | None:
        """Bytes of a value, None when there is no such value. May block."""

    def with_read_only(self, read_only: bool = False) -> BlockingStore:
        """The same place, writable or not. Raises ConfigError over a Pool opened read-only."""
        if self._own is not None and self._own.read_only and not read_only:
            raise ConfigError(
                f"{self} cannot be written: its Pool was opened read-only; open one that is not"
            )
        made = type(self)(self._own or self._config.path, self._place, read_only=read_only)
        made._mounted_read_only = self._mounted_read_only and read_only  # no second pool for "r"
        return made

    def __reduce__(self) -> tuple[Callable[..., BlockingStore], tuple[object, ...]]:
        return _reopen, (type(self), str(self._config.path), self._place, self.read_only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self._identity() == other._identity()

    __hash__ = None  # type: ignore[assignment]  # as zarr's own stores

    def _identity(self) -> tuple[object, ...]:
        return self._config.path.resolve(), self._place, self.read_only

    def __str__(self) -> str:
        return f"hpstore://{self._config.name}/{self._place}"

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
            await asyncio.to_thread(self._connect)
            self._is_open = True

    def _connect(self) -> None:
        """Find what the store is over. May block."""
        self._pool()

    def _pool(self) -> Pool:
        if self._own is not None:
            return self._own
        return PoolPaths.mounts.mount(self._config, read_only=self._mounted_read_only).pool

    # --- reading ----------------------------------------------------------------------------

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
        return await asyncio.to_thread(self._size, key) is not None

    async def getsize(self, key: str) -> int:
        """Bytes of a value, without reading it. Raises ObjectNotFound, a FileNotFoundError."""
        await self._ensure_open()
        found = await asyncio.to_thread(self._size, key)
        if found is None:
            raise ObjectNotFound(f"{self} has no value {key!r}", key=key)
        return found

    # --- listing ----------------------------------------------------------------------------

    async def _list(self, prefix: str, *, names: bool = False) -> list[str]:
        await self._ensure_open()
        return await asyncio.to_thread(self._names if names else self._keys, prefix)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Keys that begin with `prefix`, which may end within a name."""
        for key in await self._list(prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names directly below; all keys below are walked for it."""
        folder = prefix.strip("/")
        start = f"{folder}/" if folder else ""
        tree = descend(await self._list(start, names=True), (), folder, 1)
        for key in sorted({*tree.files, *tree.directories}):
            yield key[len(start) :]

    async def is_empty(self, prefix: str) -> bool:
        """Whether nothing is below."""
        folder = prefix.strip("/")
        return not await self._list(f"{folder}/" if folder else "", names=True)

    async def list(self) -> AsyncIterator[str]:
        """All keys."""
        for key in await self._list(""):
            yield key


def _buffer(array: Bytes, prototype: BufferPrototype | None) -> Buffer:
    return (prototype or default_buffer_prototype()).buffer.from_bytes(array.data)


def _reopen(kind: type[BlockingStore], path: str, place: str, read_only: bool) -> BlockingStore:
    return kind(path, place, read_only=read_only)
