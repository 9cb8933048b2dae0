"""A directory on a mounted filesystem, O_DIRECT where it works."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterator

import numpy as np

from hpstore.buffers import aligned_array
from hpstore.codec.galois import Bytes
from hpstore.devices.base import (
    DIRECTORIES,
    ORPHAN_SECONDS,
    QUARANTINE,
    RECYCLE,
    RECYCLE_MIN_BYTES,
    TMP,
    Entry,
    Stamp,
    Usage,
    raise_device_error,
    recycled_bytes,
    recycled_path,
)
from hpstore.devices.direct import statx_alignment
from hpstore.devices.holds import LocalHold, hold_range
from hpstore.devices.local_counters import LocalCounters
from hpstore.devices.local_io import (
    LocalReader,
    LocalWriter,
    allocate,
    gone,
    names_fold,
    note_names,
    open_root,
    temporary_path,
    unlock_and_close,
)  # fmt: skip
from hpstore.errors import DeviceError, DeviceMissing
from hpstore.geometry import ALIGNMENT_BYTES
from hpstore.keys import OBJECTS

_log = logging.getLogger(__name__)
_PUBLISH_TRIES = 16


class LocalDevice(LocalCounters):
    """Files under `path`, reached through a directory descriptor that is held open.

    The held descriptor keeps every operation on the filesystem that was opened: after a lazy
    unmount the path silently names the parent filesystem, the descriptor does not. After a fork
    the child opens its own and refuses when `st_dev` or the inode changed.
    """

    def __init__(
        self,
        path: str,
        *,
        direct: bool = True,
        file_mode: int = 0o600,
        directory_mode: int = 0o700,
        recycle_bytes: int = 0,
    ) -> None:
        self.url = os.path.abspath(path)
        self.mode = "direct" if direct else "buffered"
        self.folds_names = False
        self._file_mode, self._directory_mode = file_mode, directory_mode
        self._recycle_bytes = recycle_bytes
        self.memory_alignment = ALIGNMENT_BYTES if direct else 1
        self._roots: dict[int, int] = {}  # process id -> root descriptor; see root_fd
        self._identity: tuple[int, int] | None = None
        self.root_fd()

    def root_fd(self) -> int:
        """The root descriptor of this process; a forked child opens its own at first use.

        No lock, since one could be held at the fork: threads that open at the same time agree on
        one descriptor by an atomic setdefault.
        """
        known = self._roots.get(os.getpid())
        if known is not None:
            return known
        fd, found = open_root(self.url)
        if self._identity not in (None, found):
            os.close(fd)
            raise DeviceMissing(
                f"device {self.url} is another directory than before the fork: was it unmounted?",
                device=self.url,
            )
        self._identity = found
        winner = self._roots.setdefault(os.getpid(), fd)
        if winner != fd:
            os.close(fd)
        return winner

    @contextlib.contextmanager
    def _guard(self, operation: str, *, absent_is_gone: bool = False) -> Iterator[int]:
        """Turn OSErrors into DeviceErrors; where nothing may be absent, ENOENT is a lost device."""
        try:
            yield self.root_fd()
        except FileNotFoundError as error:
            if absent_is_gone and not isinstance(error, DeviceError):
                raise gone(self.url, operation) from error
            raise
        except OSError as error:
            raise_device_error(error, self.url, operation)

    def check_mounted(self) -> None:
        """Raise DeviceMissing when the path no longer names the filesystem that was opened."""
        with self._guard("check", absent_is_gone=True):
            status = os.stat(self.url)
            if (status.st_dev, status.st_ino) != self._identity:
                raise DeviceMissing(
                    f"device {self.url}: another filesystem lies under the path now; it was "
                    "unmounted or mounted over. Nothing was written there.",
                    device=self.url,
                )

    def prepare(self) -> None:
        """Make the directories of a device root, find out what the filesystem can do."""
        with self._guard("prepare", absent_is_gone=True) as root:
            for name in DIRECTORIES:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, self._directory_mode, dir_fd=root)
            note_names(root, self._file_mode)
            os.fsync(root)

    def create(self, size_bytes: int) -> LocalWriter:
        with self._guard("create", absent_is_gone=True) as root:
            name = temporary_path()
            fd = self._reuse(root, name, size_bytes)
            writer = self._new(name) if fd is None else LocalWriter(self, fd, name, recycled=True)
            with writer.aborted_on_error():
                self._reserve(root, writer.fileno(), size_bytes)
            return writer

    def create_spare(self, size_bytes: int) -> LocalWriter:
        with self._guard("create of a spare file", absent_is_gone=True):
            writer = self._new(temporary_path())
            with writer.aborted_on_error():
                allocate(writer.fileno(), size_bytes)
            return writer

    def _new(self, name: str) -> LocalWriter:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        writer = LocalWriter(self, self._open(name, flags, self._file_mode), name)
        with writer.aborted_on_error():
            fcntl.flock(writer.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return writer

    def _open(self, name: str, flags: int, mode: int = 0o600) -> int:
        if self.mode != "direct":
            return os.open(name, flags, mode, dir_fd=self.root_fd())
        try:
            return os.open(name, flags | os.O_DIRECT, mode, dir_fd=self.root_fd())
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fall_back(error.strerror)  # a read-only probe could not find out before
            return os.open(name, flags & ~os.O_EXCL, mode, dir_fd=self.root_fd())

    def _reserve(self, root: int, fd: int, size_bytes: int) -> None:
        """Allocate before any data moves; free recycled files first when space is short."""
        if not size_bytes:
            return
        try:
            allocate(fd, size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._free_recycled(root):
                raise
            allocate(fd, size_bytes)
        if os.fstat(fd).st_size > size_bytes:
            os.ftruncate(fd, size_bytes)

    def _reuse(self, root: int, name: str, size_bytes: int) -> int | None:
        """Take a file of recycle/ as the new file `name`, or None. PROTOCOL 11."""
        if size_bytes < RECYCLE_MIN_BYTES:
            return None
        kept = sorted(self._recycled(root), key=lambda item: (item[0] < size_bytes, item[0]))
        for _, old in kept[:4]:
            try:
                fd = self._open(f"{RECYCLE}/{old}", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another writer took it
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(f"{RECYCLE}/{old}", name, src_dir_fd=root, dst_dir_fd=root)
                self._blank_header(fd)
            except (BlockingIOError, FileNotFoundError):
                os.close(fd)
                continue
            except OSError:
                os.close(fd)
                raise
            return fd
        return None

    def _recycled(self, root: int) -> list[tuple[int, str]]:
        """(size, name) of files in recycle/; the name starts with the size."""
        names = [entry.name for entry in self._scan(RECYCLE)]
        return [(size, name) for name in names if (size := recycled_bytes(name)) is not None]

    def _free_recycled(self, root: int) -> bool:
        """Delete recycled files; True when there was one."""
        kept = self._recycled(root)
        for _, name in kept:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{RECYCLE}/{name}", dir_fd=root)
        if kept:
            _log.warning("device %s is full: %d recycled files freed", self.url, len(kept))
        return bool(kept)

    def _blank_header(self, fd: int) -> None:
        page = aligned_array(ALIGNMENT_BYTES)
        if os.preadv(fd, [page.data], 0) and page.any():
            page[:] = 0
            os.pwritev(fd, [page.data], 0)
            os.fdatasync(fd)

    def write_small(self, path: str, data: bytes) -> None:
        with self._guard(f"write of {path}", absent_is_gone=True) as root:
            name = temporary_path()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(name, flags, self._file_mode, dir_fd=root)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                os.fsync(fd)
                self.rename_into_place(name, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=root)
                raise
            finally:
                os.close(fd)
            self._sync_directory(path)

    def rename_into_place(self, old: str, new: str) -> None:
        """Rename, making directories; retries when a pruner removes them underneath."""
        root = self.root_fd()
        for attempt in range(_PUBLISH_TRIES):
            try:
                os.rename(old, new, src_dir_fd=root, dst_dir_fd=root)
            except FileNotFoundError:
                if attempt == _PUBLISH_TRIES - 1:
                    raise
                self._make_parents(new)
            else:
                return

    def _make_parents(self, path: str) -> None:
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkdir("/".join(parts[:depth]), self._directory_mode, dir_fd=self.root_fd())

    def sync_directory(self, path: str) -> None:
        with self._guard(f"sync of the directory of {path}"):
            self._sync_directory(path)

    def _sync_directory(self, path: str) -> None:
        """fsync the directory of path and its ancestors up to the first level below the root.

        Always all of them: another process may have made one a moment ago and not synced it yet,
        and neither names nor inode numbers tell a new directory from an old one.
        """
        parts = path.split("/")[:-1]
        for depth in range(len(parts), 0, -1):
            flags = os.O_RDONLY | os.O_DIRECTORY
            fd = os.open("/".join(parts[:depth]), flags, dir_fd=self.root_fd())
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        if not parts:
            os.fsync(self.root_fd())

    def entries(self, path: str) -> list[Entry]:
        with self._guard(f"list of {path}"):
            return self._scan(path)

    def _scan(self, path: str) -> list[Entry]:
        try:
            fd = os.open(
                path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.root_fd()
            )
        except (FileNotFoundError, NotADirectoryError):
            if path.startswith(OBJECTS):
                self._require_objects()
            return []
        try:
            with os.scandir(fd) as entries:
                return [Entry(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
        finally:
            os.close(fd)

    def _require_objects(self) -> None:
        """A directory may be absent, but not the one that holds them all (half-way through rm)."""
        try:
            os.stat(OBJECTS, dir_fd=self.root_fd())
        except FileNotFoundError as error:
            raise gone(self.url, "list") from error

    def stamp(self, path: str) -> Stamp | None:
        with self._guard(f"stat of {path}") as root:
            try:
                status = os.stat(path, dir_fd=root, follow_symlinks=False)
            except FileNotFoundError:
                return None
            return (status.st_ino, status.st_mtime_ns, status.st_size)

    def delete(self, path: str) -> None:
        with self._guard(f"delete of {path}") as root:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path, dir_fd=root)
            self._prune(path)

    def _prune(self, path: str) -> None:
        """Remove directories that became empty, below the top ones."""
        parts = path.split("/")[:-1]
        while len(parts) > 1:
            try:
                os.rmdir("/".join(parts), dir_fd=self.root_fd())
            except OSError:
                return
            parts.pop()

    def retire(self, path: str) -> None:
        """PROTOCOL 11: lock, rename into recycle/, sync both directories, blank the header."""
        with self._guard(f"retire of {path}") as root:
            try:
                fd = self._open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                size = os.fstat(fd).st_size
                if not self._may_recycle(root, fd, size):
                    os.unlink(path, dir_fd=root)
                else:
                    new = recycled_path(size)
                    os.rename(path, new, src_dir_fd=root, dst_dir_fd=root)
                    self._sync_directory(path)
                    self._sync_directory(new)
                    self._blank_header(fd)
            except FileNotFoundError:
                return
            finally:
                unlock_and_close(fd)
            self._prune(path)

    def _may_recycle(self, root: int, fd: int, size: int) -> bool:
        if size < RECYCLE_MIN_BYTES or not self._recycle_bytes:
            return False
        if sum(kept for kept, _ in self._recycled(root)) + size > self._recycle_bytes:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # a reader still holds it: unlink, the reader keeps the bytes
        return True

    def quarantine(self, path: str) -> None:
        with self._guard(f"quarantine of {path}") as root:
            new = f"{QUARANTINE}/{secrets.token_hex(4)}-{path.rsplit('/', 1)[-1]}"
            os.rename(path, new, src_dir_fd=root, dst_dir_fd=root)
            self._sync_directory(new)
            self._sync_directory(path)
            self._prune(path)

    def sweep(self) -> int:
        with self._guard("sweep", absent_is_gone=True) as root:
            removed = 0
            os.stat(TMP, dir_fd=root)
            for name in (f"{TMP}/{entry.name}" for entry in self._scan(TMP)):
                try:
                    status = os.stat(name, dir_fd=root, follow_symlinks=False)
                    if time.time() - status.st_mtime < ORPHAN_SECONDS:
                        continue
                    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=root)
                except (FileNotFoundError, IsADirectoryError):
                    continue
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=root)
                    removed += 1
                except (BlockingIOError, FileNotFoundError):
                    pass  # a living writer's
                finally:
                    unlock_and_close(fd)
            return removed

    def open(self, path: str) -> LocalReader:
        with self._guard(f"open of {path}"):
            fd = self._open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                size = os.fstat(fd).st_size
            except BlockingIOError as error:
                os.close(fd)
                raise FileNotFoundError(f"{path} is being recycled") from error
            except OSError:
                os.close(fd)
                raise
            return LocalReader(self.url, fd, size)

    def read_small(self, path: str, max_bytes: int) -> bytes:
        with self._guard(f"read of {path}") as root:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root)
            try:
                if os.fstat(fd).st_size > max_bytes:
                    raise DeviceError(f"{path} on {self.url} is larger than {max_bytes} bytes")
                parts = []
                while part := os.read(fd, 1 << 20):
                    parts.append(part)
                return b"".join(parts)
            finally:
                os.close(fd)

    def usage(self) -> Usage:
        with self._guard("statvfs") as root:
            found = os.fstatvfs(root)
            kept = sum(size for size, _ in self._recycled(root))  # given up when space is short
            free = found.f_bavail * found.f_frsize + kept
            return Usage(total=found.f_blocks * found.f_frsize, free=free, kept=kept,
                         read_only=bool(found.f_flag & os.ST_RDONLY))  # fmt: skip

    def hold(self, offset: int, nbytes: int) -> LocalHold:
        with self._guard("lock of the registers", absent_is_gone=True) as root:
            return hold_range(root, self.url, offset, nbytes, self._file_mode)

    def probe(self, *, write: bool) -> None:
        self.check_mounted()
        with self._guard("probe", absent_is_gone=True) as root:
            self.folds_names = names_fold(root)
            if not write:
                self._require_objects()
                return
            name = f"{TMP}/{time.time_ns():020d}-probe-{secrets.token_hex(6)}"
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode, dir_fd=root)
            try:
                self._probe_direct(name, fd)
            finally:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=root)

    def _probe_direct(self, name: str, fd: int) -> None:
        """Write, sync, read back; fall back to buffered I/O, said once, where O_DIRECT fails."""
        page = aligned_array(ALIGNMENT_BYTES)
        page[:] = np.frombuffer(secrets.token_bytes(ALIGNMENT_BYTES), np.uint8)
        told = statx_alignment(fd)
        if self.mode == "direct" and told is not None:
            memory, offset = told
            if not 0 < offset <= ALIGNMENT_BYTES or ALIGNMENT_BYTES % offset:
                self._fall_back(f"the filesystem asks for offsets aligned to {offset} bytes")
            else:
                self.memory_alignment = max(memory, 1)
        try:
            back = self._write_and_read(name, page)
        except OSError as error:
            if self.mode != "direct" or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fall_back(error.strerror)
            back = self._write_and_read(name, page)
        if not np.array_equal(back, page):
            raise DeviceError(f"device {self.url} returns other bytes than were written")

    def _write_and_read(self, name: str, page: Bytes) -> Bytes:
        fd = self._open(name, os.O_RDWR)
        try:
            if os.pwritev(fd, [page.data], 0) != len(page):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
            back = aligned_array(len(page))
            os.preadv(fd, [back.data], 0)
            return back
        finally:
            os.close(fd)

    def _fall_back(self, reason: str | None) -> None:
        self.mode, self.memory_alignment = "buffered", 1
        _log.warning("device %s: O_DIRECT does not work (%s); buffered I/O", self.url, reason)

    def close(self) -> None:
        fd = self._roots.pop(os.getpid(), -1)
        if fd >= 0:
            os.close(fd)


__all__ = ["LocalDevice"]
