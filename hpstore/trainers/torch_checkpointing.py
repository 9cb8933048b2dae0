"""torch_checkpointing: a Storage on a pool whose directory rename is one put."""

from __future__ import annotations

import errno
import io
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from hpstore.checkpoint.catalog.segment_safety import require_safe
from hpstore.errors import InvalidKey, ObjectNotFound, VersionConflict
from hpstore.format.keys import check_key
from hpstore.interop.filesystem.file_streams import WholeOrNothing
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.runtime.fresh_bytes import fresh_bytes
from hpstore.trainers.optional_import import PoolLike, as_pool, missing
from hpstore.trainers.rename_plan import TOP, EntryMove, RenamePlan, next_root, parse_move

try:
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
except ModuleNotFoundError as error:
    raise missing("torch_checkpointing", "torch-checkpointing", error) from error

_log = logging.getLogger(__name__)
_MARK = ".hpstore-directory"  # an object that makes a directory exist while it is empty


@dataclass
class PoolStorageConfig(StorageConfig):
    """`storage_config=PoolStorageConfig("pool.toml", "runs/gpt")` for a CheckpointManager.

    Parameters
    ----------
    pool
        A Pool, or the name or settings file of one; it pickles, so async savers work.
    prefix
        Key prefix where in the pool the paths begin.
    """

    pool: PoolLike
    prefix: str

    def create_storage(self) -> PoolStorage:
        """A storage on the pool."""
        return PoolStorage(self.pool, self.prefix)


class PoolStorage(Storage):
    """torch_checkpointing's files as objects under a prefix. Thread-safe.

    A path is a key: "/ckpt/step-1" and "ckpt/step-1" are the same. A file is durable when its
    stream is closed or write() returns. Renaming a directory is one put: a crash leaves all of it
    at the old path or all of it at the new one. Removing one hides it whole by one put, before its
    files go. Any number of processes may write files; renames and removals of directories are made
    by one process at a time (the package makes them on rank 0).

    Parameters
    ----------
    pool
        A Pool, which stays the caller's, or the name or settings file of one, which is opened now
        and closed by close().
    prefix
        Key prefix where in the pool the paths begin.

    Raises
    ------
    ConfigError
        There is no such pool.
    InvalidKey
        No key can begin with `prefix`.
    """

    def __init__(self, pool: PoolLike, prefix: str) -> None:
        self.pool, self._opened = as_pool(pool)
        self.prefix = check_key(prefix)
        self._lock = threading.RLock()  # of renames and removals in this process

    # --- files --------------------------------------------------------------------------------

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Open a file to read; whole in memory by default, by ranges without pre_read_full_file.

        Every byte is verified. Raises FileNotFoundError.
        """
        args = read_args or ReadArgs()
        reader = PooledStream(self.pool.open(self._key(path)))
        known = args.known_size_bytes
        if known is not None and known != reader.size:
            reader.close()
            raise OSError(f"{path} has {reader.size} bytes, not {known}")
        if not args.pre_read_full_file:
            return reader
        with reader:
            whole: Any = io.BytesIO(reader.readall())  # Any: as the package's own, no RawIOBase
        found: io.RawIOBase = whole
        return found

    def stream_write(self, path: Path) -> io.IOBase:
        """Open a file to write. It appears, whole and durable, when the stream is closed.

        Held in memory until then. Left by an exception, or never closed, it does not appear.
        """
        self._check_writable(path)
        return PoolWriteFile(self, path)

    def write(self, path: Path, data: Any) -> None:
        """Write a file; whole and durable on return. `data`: bytes-like."""
        self._check_writable(path)
        self.pool.put(self._key(path), data)

    def delete(self, path: Path) -> None:
        """Delete a file. Raises FileNotFoundError, IsADirectoryError."""
        if self.isdir(path):
            raise IsADirectoryError(errno.EISDIR, f"{path} is a directory")
        self.pool.delete(self._key(path))

    def getsize(self, path: Path) -> int:
        """Bytes in a file. Raises FileNotFoundError."""
        return self.pool.stat(self._key(path)).size

    # --- directories --------------------------------------------------------------------------

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory. Raises as os.makedirs(exist_ok=True), or as os.mkdir."""
        parts = components(path)
        _, root = self._moves().find(parts)
        if self.pool.exists(self._full(root)):
            raise FileExistsError(errno.EEXIST, f"{path} is a file")
        self._check_parents(parts)
        there = self.isdir(path)
        if not recursive:
            if there:
                raise FileExistsError(errno.EEXIST, f"{path} is there")
            if len(parts) > 1 and not self.isdir(Path(*parts[:-1])):
                raise FileNotFoundError(errno.ENOENT, f"the parent of {path} is not there")
        if not there:
            self.pool.put(f"{self._full(root)}/{_MARK}", b"\n")

    def isdir(self, path: Path) -> bool:
        """Whether it is a directory: made, or with something below it."""
        return self._entries(path) is not None

    def exists(self, path: Path) -> bool:
        """Whether a file or a directory is there."""
        return self.isdir(path) or self.pool.exists(self._key(path))

    def ls(self, path: Path) -> list[str]:
        """Names in a directory. Raises FileNotFoundError, NotADirectoryError."""
        found = self._entries(path)
        if found is not None:
            return sorted(found)
        if self.pool.exists(self._key(path)):
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is a file")
        raise FileNotFoundError(errno.ENOENT, f"{path} is not there")

    def rmdir(self, path: Path) -> None:
        """Remove a directory and all below it: gone whole by one put, then its files go.

        A crash between leaves files that nobody sees; the next rename or removal takes them.
        """
        with self._lock:
            moves = self._moves()
            parts = components(path)
            _, root = moves.find(parts)
            if not parts or not self.isdir(path):
                raise FileNotFoundError(errno.ENOENT, f"there is no directory {path} to remove")
            self._record(EntryMove(sequence=moves.next_sequence, root=root, place=None))
            self._sweep()

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Rename a directory (by one put) or a file (copied, then deleted).

        Every file of a directory is first brought to where it survives one more loss. Raises
        OSError when the destination is occupied: nothing is merged, nested or replaced, but a file
        by a file and an empty directory by a directory.
        """
        with self._lock:
            if self.isdir(src_path):
                self._rename_directory(src_path, dst_path)
                self._sweep()
            else:
                self._rename_file(src_path, dst_path)

    def remap_path(self, path: Path) -> str:
        """The URL of a path: hpstore://POOL/key. After a rename the key is not the path's own."""
        return f"hpstore://{self.pool.config.name}/{self._key(path)}"

    def close(self) -> None:
        """Close the pool, if it was opened here. Idempotent."""
        if self._opened:
            self.pool.close()

    # --- how ----------------------------------------------------------------------------------

    def _rename_directory(self, source: Path, target: Path) -> None:
        from_parts, to_parts = components(source), components(target)
        if from_parts == to_parts:
            return
        if to_parts[: len(from_parts)] == from_parts:
            raise OSError(errno.EINVAL, f"{source} cannot be moved into itself, to {target}")
        self._check_parents(to_parts)
        entries = self._entries(target)
        if entries or not to_parts:
            raise occupied(source, target, errno.ENOTEMPTY)
        if self.pool.exists(self._key(target)):
            raise occupied(source, target, errno.ENOTDIR)
        moves = self._moves()
        _, root = moves.find(from_parts)
        place, covered = moves.find(to_parts)
        for key in self._objects(moves, root):
            require_safe(self.pool, key)
        if entries is not None:  # an empty directory gives way
            self._delete(f"{self._full(covered)}/{_MARK}")
            if covered in moves.places.values():
                self._record(EntryMove(sequence=moves.next_sequence, root=covered, place=None))
                moves = self._moves()
        self._record(EntryMove(sequence=moves.next_sequence, root=root, place=place))

    def _rename_file(self, source: Path, target: Path) -> None:
        if self.isdir(target):
            raise occupied(source, target, errno.EISDIR)
        self._check_parents(components(target))
        from_key, to_key = self._key(source), self._key(target)
        version = self.pool.stat(from_key).version
        if from_key == to_key:
            return
        with PooledStream(self.pool.open(from_key, version=version)) as stream:
            content = np.empty(stream.size, np.uint8)
            if stream.readinto(content) != stream.size:
                raise OSError(errno.EIO, f"{source} ends before its size: it was not renamed")
        self.pool.put(to_key, content)
        if self.pool.stat(from_key).version != version:
            raise VersionConflict(
                f"{source} was replaced while it was renamed: {target} has what was there, the new "
                "one is where it was put",
                key=from_key,
            )
        self.pool.delete(from_key)

    def _record(self, move: EntryMove) -> None:
        self.pool.put(f"{self.prefix}/moves/{move}", b"\n")

    def _sweep(self) -> None:
        """Finish removals, also those that a crash left, and drop entries that say no more."""
        moves = self._moves()
        while used := [root for root in moves.orphaned() if self._used(moves, root)]:
            for number, root in enumerate(used, moves.next_sequence):
                self._record(EntryMove(sequence=number, root=root, place=None))
            moves = self._moves()
        for gone in moves.unswept():
            before = f"{self._full(gone.root)}/"
            for key in self.pool.list(before):
                if moves.owns(gone.root, key.removeprefix(before)):
                    self._delete(key)
            swept = EntryMove(sequence=moves.next_sequence, root=gone.root, place=None, swept=True)
            self._record(swept)
            moves = self._moves()
        for entry in moves.stale():
            self._delete(f"{self.prefix}/moves/{entry}")
        for entry in moves.droppable():
            if not self._used(moves, next_root(entry.root)):
                self._delete(f"{self.prefix}/moves/{entry}")

    def _delete(self, key: str) -> None:
        try:
            self.pool.delete(key)
        except ObjectNotFound:
            _log.debug("%s is gone already", key)

    def _moves(self) -> RenamePlan:
        before = f"{self.prefix}/moves/"
        found = (parse_move(key.removeprefix(before)) for key in self.pool.list(before))
        return RenamePlan(move for move in found if move is not None)

    def _full(self, root: str) -> str:
        return f"{self.prefix}/{root}"

    def _key(self, path: Path) -> str:
        return self._full(self._moves().find(components(path))[1])

    def _used(self, moves: RenamePlan, root: str) -> bool:
        """Whether a root holds a file, is one, or is a directory that was moved."""
        return (
            root in moves.places.values()
            or bool(self.pool.list(f"{self._full(root)}/"))
            or self.pool.exists(self._full(root))
        )

    def _below(self, moves: RenamePlan, root: str) -> dict[str, str]:
        """What is seen under a root and lies elsewhere: place -> root."""
        found = {place: moves.root_of(place) for place in moves.below(root)}
        return {place: other for place, other in found.items() if self._used(moves, other)}

    def _own(self, moves: RenamePlan, root: str) -> list[str]:
        """What is seen under a root and lies there, relative to it."""
        before = f"{self._full(root)}/"
        found = (key.removeprefix(before) for key in self.pool.list(before))
        return [rest for rest in found if moves.visible(root, rest)]

    def _objects(self, moves: RenamePlan, root: str) -> list[str]:
        """Keys of all files seen under a root."""
        keys = [f"{self._full(root)}/{rest}" for rest in self._own(moves, root)]
        for other in self._below(moves, root).values():
            keys += self._objects(moves, other)
            if self.pool.exists(self._full(other)):
                keys.append(self._full(other))
        return keys

    def _entries(self, path: Path) -> set[str] | None:
        """Names in a directory; None when it is none."""
        moves = self._moves()
        _, root = moves.find(components(path))
        seen = self._own(moves, root)
        seen += [place[len(root) + 1 :] for place in self._below(moves, root)]
        if not seen and root not in moves.places.values() and root != TOP:
            return None
        return {rest.split("/")[0] for rest in seen} - {_MARK}

    def _check_writable(self, path: Path) -> None:
        if self.isdir(path):
            raise IsADirectoryError(errno.EISDIR, f"{path} is a directory")
        self._check_parents(components(path))

    def _check_parents(self, parts: tuple[str, ...]) -> None:
        moves = self._moves()
        for end in range(1, len(parts)):
            if self.pool.exists(self._full(moves.find(parts[:end])[1])):
                above = "/".join(parts[:end])
                raise NotADirectoryError(errno.ENOTDIR, f"{above} is a file, not a directory")


def components(path: PurePath | str) -> tuple[str, ...]:
    """The names in a path, without the root. Raises InvalidKey for "..", "." and URLs' like."""
    parts = tuple(part for part in PurePath(path).parts if part != os.sep)
    if ".." in parts or _MARK in parts:
        raise InvalidKey(f"path {os.fspath(path)!r} holds '..' or {_MARK!r}")
    return parts


def occupied(source: Path, target: Path, number: int) -> OSError:
    """The error of a rename whose destination is taken."""
    return FileExistsError(
        number,
        f"{source} is not renamed to {target}, which is occupied; nothing was changed. Remove it "
        "first if it is to be replaced",
    )


class PoolWriteFile(WholeOrNothing, io.BytesIO):
    """A file on its way to the pool; close() puts it."""

    def __init__(self, storage: PoolStorage, path: Path) -> None:
        super().__init__()
        self._storage, self._path = storage, path

    def close(self) -> None:
        """Put the file. Durable on return; when it raises, the file is as it was before, unless the
        error says that it may have been stored."""
        if self.closed:
            return
        try:
            with self.getbuffer() as content:
                self._storage.pool.put(self._storage._key(self._path), content)
        finally:
            super().close()

    def discard(self) -> None:
        """Close without putting."""
        super().close()

    def __del__(self) -> None:
        self.discard()  # never closed: what is there may be half a file


class PooledStream(io.RawIOBase):
    """Reads of one version of a file by ranges, verified. One thread at a time."""

    def __init__(self, reader: PooledReader) -> None:
        super().__init__()
        self._reader, self._at = reader, 0
        self.size, self._version = reader.size, reader.version

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = self._reader.read_into(buffer, self._at)
        if self._reader.version != self._version:
            raise VersionConflict(
                f"a file was replaced while it was read (version {self._version}, now "
                f"{self._reader.version}); nothing of the new one was handed out. Open it again."
            )
        self._at += count
        return count

    def readall(self) -> bytes:
        rest, memory = fresh_bytes(max(0, self.size - self._at))
        if rest and self.readinto(memory) != len(rest):
            raise OSError("a file became shorter while it was read")
        return rest

    def close(self) -> None:
        if not self.closed:
            self._reader.close()
        super().close()
