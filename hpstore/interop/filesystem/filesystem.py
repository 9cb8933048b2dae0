"""The fsspec file system of pools: `hpstore://NAME/key`, or bare keys over one pool.

Objects are files, immutable and replaced as wholes; directories are what stands before a slash.
What holds and what does not is in docs/fsspec.md.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from fsspec.callbacks import DEFAULT_CALLBACK

from hpstore.errors import ObjectNotFound, RedundancyWarning, VersionConflict
from hpstore.interop.filesystem.directory_tree import dot_files_and_others, metadata_first
from hpstore.interop.filesystem.file_streams import (
    READ_BUFFER_BYTES,
    ReadStream,
    TextWriter,
    UpdateStream,
    WriteStream,
)
from hpstore.interop.filesystem.move_plan import Selection, plan_move
from hpstore.interop.filesystem.open_pools import Mount
from hpstore.interop.filesystem.paths import ParsedPath
from hpstore.interop.filesystem.pool_directories import PoolListing
from hpstore.interop.filesystem.small_files import Pairs, SmallFiles
from hpstore.interop.filesystem.write_buffer import Spool
from hpstore.interop.parallel_calls import keys_there, read_ranges, read_slice
from hpstore.objects.object_info import ObjectInfo
from hpstore.objects.read.pooled_reader import PooledReader

_CALLER = 4  # frames above a warning: the caller of most methods that write
_MODES = {"rb+": "r+b", "wb+": "w+b", "ab+": "a+b"}  # other ways to write the same


class PoolFileSystem(PoolListing):
    """Pools as a file system. Thread-safe; survives fork; pickles as its arguments.

    `pool`: path of a pool.toml, a pool's name or a Pool; paths are then keys of that pool. Without
    it the first component of a path is the name of a pool (docs/fsspec.md: where names are
    looked up). Pools are opened on first use, shared by all file systems of the process, and
    closed at its end; a Pool that was passed stays the caller's to close.

    `spool_bytes`: how much of a write stream waits in memory; the rest waits in an unlinked file
    in `spool_directory` (default: the machine's place for temporary files).

    `min_losses_tolerated`: further lost devices that a write must survive, else it is refused with
    TooFewDevices (default: as the pool's settings say, 0). What is stored with less than the pool's
    parity is a RedundancyWarning, once for each pool.

    Errors of hpstore go through as they are; ObjectNotFound is a FileNotFoundError, and an
    exclusive write that finds an object raises FileExistsError.
    """

    # --- reading ----------------------------------------------------------------------------

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """A stream, binary or text (fsspec's arguments). See ReadStream and WriteStream."""
        writes = any(letter in mode for letter in "wxa+")
        if writes and kwargs.get("compression") is not None:
            raise io.UnsupportedOperation(
                "a compressor does not close what it writes to; use fsspec.open(url, mode, "
                "compression=...), which does"
            )
        if writes and "b" not in mode:
            layout = {n: kwargs.pop(n) for n in ("encoding", "errors", "newline") if n in kwargs}
            binary = self.open(path, mode.replace("t", "") + "b", **kwargs)
            return TextWriter(binary, **layout)
        return super().open(path, mode, **kwargs)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: object = None,
        **kwargs: Any,
    ) -> ReadStream | WriteStream:
        mode = _MODES.get(mode, mode)
        if mode not in ("rb", "wb", "xb", "ab", "a+b", "r+b", "w+b"):
            raise io.UnsupportedOperation(f"mode {mode!r} is none of rb, wb, xb, ab, r+b, w+b, a+b")
        place = self._object(path)
        if mode == "rb":
            reader = self._reader(place, path)
            return ReadStream(reader, path, block_size or READ_BUFFER_BYTES, self)
        if mode in ("ab", "a+b", "r+b", "w+b"):
            return self._update(place, path, mode, autocommit=autocommit)
        if mode == "xb" and self._is_object(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

        def put(file: BinaryIO) -> None:
            self._put(place, file, exclusive=mode == "xb")

        return WriteStream(path, self._spool(), put, autocommit=autocommit, mode=mode, fs=self)

    def _reader(self, place: ParsedPath, path: str) -> PooledReader:
        try:
            return place.mount.pool.open(place.key)
        except ObjectNotFound:
            if self._is_directory(place):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
            raise

    def reopened(self, path: str, version: str, position: int, buffer_bytes: int) -> ReadStream:
        """A stream over that version of an object, where another process had got to. Raises
        VersionConflict when it is gone."""
        place = self._object(path)
        try:
            reader = place.mount.pool.open(place.key, version=version)
        except ObjectNotFound as error:
            raise VersionConflict(
                f"{path} was replaced or deleted since it was opened (version {version}). Open it "
                "again.",
                key=place.key,
            ) from error
        stream = ReadStream(reader, path, buffer_bytes, self)
        stream.seek(position)
        return stream

    def _update(self, place: ParsedPath, path: str, mode: str, *, autocommit: bool) -> UpdateStream:
        """A stream that begins with what is there; it is put only in the place of that."""
        spool, before = self._spool(), None
        try:
            if "w" not in mode:
                before = self._copied(place, spool, must="r" in mode)
            spool.file.seek(0, io.SEEK_END if "a" in mode else io.SEEK_SET)
        except BaseException:
            spool.close()
            raise

        def put(file: BinaryIO) -> None:
            if "w" in mode:
                self._put(place, file)
                return
            self._stored(
                place,
                place.mount.pool.put(
                    place.key,
                    file,
                    None if before is None else before.metadata,
                    if_absent=before is None,
                    if_version=None if before is None else before.version,
                    min_losses_tolerated=self._least,
                ),
            )

        stream = UpdateStream(path, spool, put, autocommit=autocommit, mode=mode, fs=self)
        if not autocommit and "r" in mode:  # fsspec takes only streams without r for writing
            self.transaction.files.append(stream)
        return stream

    def _copied(self, place: ParsedPath, spool: Spool, *, must: bool) -> ObjectInfo | None:
        """Facts of the version whose bytes are in the spool now; None when there is no object."""
        try:
            reader = place.mount.pool.open(place.key)
        except ObjectNotFound:
            if must:
                raise
            return None
        with ReadStream(reader, place.path(place.key)) as stream:
            while part := stream.read(self.blocksize):
                spool.write(part)
            return place.mount.pool.stat(place.key, version=stream.version)

    def _spool(self) -> Spool:
        return Spool(
            self.mounts.budget, memory_bytes=self._spool_bytes, directory=self._spool_directory
        )

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Bytes [start, end) as of a slice, of one version."""
        place = self._object(path)
        with place.mount.pool.open(place.key) as reader:
            return read_slice(reader, start, end)

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:  # Any: bytes, or a dict of them by path
        """As fsspec's; with `recursive` of all files below, without the directories."""
        if not recursive:
            return super().cat(path, on_error=on_error, **kwargs)
        files = sorted(self._select(self._matches(path), True, None).files)
        return super().cat(files, on_error=on_error, **kwargs)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,  # Any: an int, None or a list of them
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Many ranges, several at a time; errors stand in the list unless `on_error` is "raise".

        Each range is of one version. `max_gap` is a hint that is not needed.
        """
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        firsts = starts if isinstance(starts, list) else [starts] * len(paths)
        lasts = ends if isinstance(ends, list) else [ends] * len(paths)
        if not len(firsts) == len(lasts) == len(paths):
            raise ValueError("as many starts and ends as paths are needed")
        results = read_ranges(self._opener, paths, firsts, lasts)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed and on_error == "raise":
            raise failed[0]
        return results

    def _opener(self, path: str) -> Any:  # Any: a context manager of PooledReader
        place = self._object(path)
        return place.mount.pool.open(place.key)

    # --- writing ----------------------------------------------------------------------------

    def _put(
        self, place: ParsedPath, data: object, *, exclusive: bool = False, metadata: Any = None
    ) -> None:
        """Pool.put, with a conflict of an exclusive write as FileExistsError."""
        try:
            info = place.mount.pool.put(
                place.key, data, metadata, if_absent=exclusive, min_losses_tolerated=self._least
            )
        except VersionConflict as error:
            raise FileExistsError(errno.EEXIST, str(error), place.path(place.key)) from error
        self._stored(place, info)

    def _stored(self, place: ParsedPath, info: ObjectInfo) -> None:
        """Warn once of a pool in which writes survive less than its parity."""
        mount, parity = place.mount, place.mount.pool.parity
        if info.losses_tolerated < parity and not mount.warned:
            mount.warned = True
            warnings.warn(
                f"{place.path(place.key)} is stored, and survives {info.losses_tolerated} further "
                f"lost devices, not {parity}: devices are away. `hpstore status "
                f"{mount.pool.config.path}` says which; min_losses_tolerated refuses such writes.",
                RedundancyWarning,
                stacklevel=_CALLER,
            )

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Put bytes; with mode "create" only where no object is. Durable on return."""
        exclusive = mode == "create"
        if self._intrans:
            with self.open(path, "xb" if exclusive else "wb") as stream:
                stream.write(value)
            return
        self._put(self._object(path), value, exclusive=exclusive)

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **kwargs: Any,
    ) -> None:
        """Put a local file without a copy on the way. Durable on return."""
        exclusive = mode == "create"
        if os.path.isdir(lpath):
            self.makedirs(rpath, exist_ok=True)
            return
        with open(lpath, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            callback.set_size(size)
            if self._intrans:
                with self.open(rpath, "xb" if exclusive else "wb") as stream:
                    shutil.copyfileobj(file, stream, READ_BUFFER_BYTES)
            else:
                self._put(self._object(rpath), file, exclusive=exclusive)
            callback.relative_update(size)

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Put bytes; of a dict all values, several together. All are durable on return.

        Raises SomeFailed when all were tried and some are not stored.
        """
        if isinstance(path, dict) and not self._intrans and not kwargs:
            self._put_all({self._strip_protocol(name): data for name, data in path.items()})
        else:
            super().pipe(path, value, **kwargs)

    def put(
        self,
        lpath: Any,  # Any: a path or a list of them
        rpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Put local files, as fsspec's; small ones several together. All are durable on return.

        `callback` counts a small file when it is read. Raises SomeFailed when small files were
        tried together and some are not stored.
        """
        pairs = Pairs()
        super().put(lpath, rpath, recursive, pairs, maxdepth, **kwargs)
        together = SmallFiles(self._put_all)
        callback.set_size(len(pairs.found))
        for local, remote in callback.wrap(pairs.found):
            with callback.branched(local, remote) as child:
                if self._intrans or kwargs or not together.takes(local, remote, child):
                    self.put_file(local, remote, callback=child, **kwargs)
        together.flush()

    def _put_all(self, objects: Mapping[str, object]) -> None:
        """Put data by path, those of a pool together."""
        for mount, paths in self._by_mount(objects).items():
            data = {key: objects[path] for key, path in paths.items()}
            stored = mount.pool.put_many(data, min_losses_tolerated=self._least)
            for key, info in stored.items():
                self._stored(self._object(paths[key]), info)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy an object with its metadata, or make the directory. Durable on return."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        if self._intrans:
            with self.open(path1, "rb") as source, self.open(path2, "wb") as stream:
                shutil.copyfileobj(source, stream, READ_BUFFER_BYTES)
            return
        self._copy(self._object(path1), self._object(path2))

    def _copy(self, source: ParsedPath, target: ParsedPath) -> ObjectInfo:
        """Copy through a spool; returns what was copied."""
        spool = self._spool()
        try:
            reader = source.mount.pool.open(source.key)
            with ReadStream(reader, source.path(source.key)) as stream:
                while part := stream.read(self.blocksize):
                    spool.write(part)
                spool.file.flush()
                facts = source.mount.pool.stat(source.key)
                if facts.version != stream.version:
                    raise VersionConflict(
                        f"object {facts.key!r} was replaced while it was copied; nothing was put",
                        key=facts.key,
                    )
                self._put(target, spool.file, metadata=facts.metadata)
                return facts
        finally:
            spool.close()

    # --- removing, moving -------------------------------------------------------------------

    def rm_file(self, path: str) -> None:
        """Delete an object. Durable on return. Raises FileNotFoundError."""
        place = self._object(path)
        place.mount.pool.delete(place.key)

    _rm = rm_file

    def _select(self, paths: Iterable[str], recursive: bool, maxdepth: int | None) -> Selection:
        """What `rm` and `mv` mean by paths. Raises before anything is touched."""
        files: set[str] = set()
        directories: set[str] = set()
        paths = list(paths)
        for path in paths:
            if not (self._where is not None or self._strip_protocol(path)):
                raise ValueError("the list of all pools is not removed or moved")
        objects = self._objects_among(paths) if not recursive and len(paths) > 1 else set()
        files |= objects
        for path in [path for path in paths if path not in objects]:
            facts = self.info(path)
            name = str(facts["name"])
            if facts["type"] == "directory":
                if not recursive:
                    raise IsADirectoryError(errno.EISDIR, "recursive=True is needed", path)
                directories.add(name)
            else:
                files.add(name)
            if recursive:
                place = self._place(path)
                tree = self._tree(place, maxdepth)
                files |= {place.path(key) for key in tree.files}
                directories |= {place.path(key) for key in tree.directories}
        return Selection(files=frozenset(files), directories=frozenset(directories))

    def _objects_among(self, paths: Iterable[str]) -> set[str]:
        """Those that are surely objects, looked at many together. What is left out may be one."""
        own = [p for p in paths if (at := self._place(p)).key and at.path(at.key) == p]
        found: set[str] = set()
        for mount, names in self._by_mount(own).items():
            found.update(names[key] for key in keys_there(mount.pool, list(names)))
        return found

    def _matches(self, path: Any) -> list[str]:  # Any: a path or a list of them
        """Paths and patterns as paths. Raises FileNotFoundError when a pattern finds nothing."""
        return list(self.expand_path(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete objects, and with `recursive` directories: dot files such as `.metadata` first,
        all of them, then the others, several together. Durable on return.

        An object that another process deletes at the same time is no error under `recursive`.
        Raises SomeFailed when all were tried and some are not deleted.
        """
        chosen = self._select(self._matches(path), recursive, maxdepth)
        if len(chosen.files) == 1 and not recursive:
            self.rm_file(*chosen.files)
        else:
            dots, others = dot_files_and_others(chosen.files)
            self._delete_all(dots, missing_ok=recursive)
            self._delete_all(others, missing_ok=recursive)
        self._forget(chosen.directories)

    def _delete_all(self, paths: Iterable[str], *, missing_ok: bool) -> None:
        for mount, names in self._by_mount(paths).items():
            mount.pool.delete_many(list(names), missing_ok=missing_ok)

    def _by_mount(self, paths: Iterable[str]) -> dict[Mount, dict[str, str]]:
        """Paths of objects by key, for each pool."""
        found: dict[Mount, dict[str, str]] = {}
        for path in paths:
            place = self._object(path)
            found.setdefault(place.mount, {})[place.key] = path
        return found

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copy everything, dot files last; then delete the sources, dot files first.

        A crash leaves the sources, or both. A source that was replaced meanwhile stays, and
        VersionConflict is raised. Not atomic: others may see both.
        """
        if isinstance(path1, list) and isinstance(path2, list):
            for one, other in zip(path1, path2, strict=True):
                self.mv(one, other, recursive, maxdepth)
            return
        roots = self._matches(path1)
        into = str(path2).endswith("/") or self.isdir(path2) or len(roots) > 1
        within = not (isinstance(path1, str) and path1.endswith("/"))
        moves = plan_move(
            roots,
            self._select(roots, recursive, maxdepth),
            self._strip_protocol(path2),
            into=into and within,
        )
        if moves is None:
            return
        for directory in moves.directories.values():
            self.makedirs(directory, exist_ok=True)
        copied = {
            source: self._copy(self._object(source), self._object(moves.files[source])).version
            for source in reversed(metadata_first(moves.files))
        }
        for source in metadata_first(copied):
            self._delete_version(source, copied[source])
        self._forget(moves.directories)

    def _delete_version(self, path: str, version: str) -> None:
        now = self._stat(path)
        if now.version != version:
            raise VersionConflict(
                f"object {now.key!r} was replaced while it was moved: the copy has the version "
                f"before, the object stays as {now.version}",
                key=now.key,
            )
        self.rm_file(path)
