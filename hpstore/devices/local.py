"""A directory on a mounted filesystem, O_DIRECT where it works."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import (
    DIRECTORIES,
    ORPHAN_SECONDS,
    QUARANTINE,
    RECYCLE,
    RECYCLE_MIN_BYTES,
    TMP,
    Usage,
    denied,
    recycled_bytes,
    recycled_path,
)
from hpstore.devices.confined_names import is_foreign, open_beneath, rename_beneath
from hpstore.devices.file_handles import (
    LocalReader,
    LocalWriter,
    allocate,
    is_full,
    names_fold,
    note_names,
    temporary_path,
    unlock_and_close,
)
from hpstore.devices.file_modes import share_root, widen_directory
from hpstore.devices.holds import LocalHold, hold_range, make_registers
from hpstore.devices.local_files import LocalFiles
from hpstore.devices.o_direct import statx_alignment
from hpstore.devices.probe_reads import read_last_page, some_file, stopped_writing
from hpstore.devices.reserve import RECORD_SPARES, SPARE_BYTES
from hpstore.errors import DeviceDenied, DeviceError, DeviceReadOnly, LockTimeout
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.keys import OBJECTS
from hpstore.format.records import IDENTITY_FILE
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.rights import group_number

T = TypeVar("T")
_log = logging.getLogger(__name__)


class LocalDevice(LocalFiles):
    """Files under `path`: new ones, kept ones, small ones; space, locks and probes."""

    def __init__(
        self,
        path: str,
        *,
        direct: bool = True,
        file_mode: int = 0o600,
        directory_mode: int = 0o700,
        recycle_bytes: int = 0,
        group: str = "",
    ) -> None:
        super().__init__(path, direct=direct, file_mode=file_mode, directory_mode=directory_mode)
        self._group = group
        self._recycle_bytes = recycle_bytes
        self._room_problem = ""

    def prepare(self) -> None:
        """Make the directories of a device root, find out what the filesystem can do."""
        with self._guard("prepare", absent_is_gone=True) as root:
            share_root(root, self._settings, group_number(self._group) if self._group else -1)
            for name in DIRECTORIES:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, self._directory_mode, dir_fd=root)
                widen_directory(root, name, self._directory_mode)
            self._take_modes(root)
            note_names(root, self._file_mode)
            os.fsync(root)
            self._keep_room(root)
            make_registers(root, self._file_mode)

    def _keep_room(self, root: int) -> None:
        """Make ahead what deletes and records need on a full filesystem, while it has room.

        Best effort: another user's process may have the rights for it, and on a full one nothing
        can be done now. Logged once.
        """
        problem = ""
        try:
            self.make_counters()
            self._ballast.fill(root)
        except (OSError, LockTimeout) as error:
            problem = str(error)
        if problem and not self._room_problem:
            _log.warning("device %s keeps no room for deletes: %s", self.url, problem)
        self._room_problem = problem

    def create(self, size_bytes: int, *, vital: bool = False) -> LocalWriter:
        with self._guard("create", absent_is_gone=True) as root:
            name = temporary_path()
            try:
                return self._without_recycled(root, lambda: self._create(root, name, size_bytes))
            except OSError as error:
                if not (vital and is_full(error)):
                    raise
                fd = self._ballast.take(root, name, size_bytes, self._reopen, leave=RECORD_SPARES)
                if fd is None:
                    raise
            writer = LocalWriter(self, fd, name, vital=True)
            with writer.aborted_on_error():
                os.ftruncate(fd, size_bytes)
                self._blank_header(fd)
            return writer

    def _reopen(self, path: str) -> int:
        return self._open(path, os.O_RDWR | os.O_CLOEXEC)

    def _reopen_buffered(self, path: str) -> int:
        return open_beneath(self.root_fd(), path, os.O_RDWR)

    def _create(self, root: int, name: str, size_bytes: int) -> LocalWriter:
        fd = self._reuse(root, name, size_bytes)
        writer = self._new(name) if fd is None else LocalWriter(self, fd, name, recycled=True)
        with writer.aborted_on_error():
            if size_bytes:
                allocate(writer.fileno(), size_bytes)
                if os.fstat(writer.fileno()).st_size > size_bytes:
                    os.ftruncate(writer.fileno(), size_bytes)
        return writer

    def _without_recycled(self, root: int, make: Callable[[], T]) -> T:
        """Free recycled files, and make it again, when there is no space for it."""
        try:
            return make()
        except OSError as error:
            if not is_full(error) or not self._free_recycled(root):
                raise
        return make()

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

    def _reuse(self, root: int, name: str, size_bytes: int) -> int | None:
        """Take a file of recycle/ as the new file `name`, or None. PROTOCOL 11."""
        if size_bytes < RECYCLE_MIN_BYTES:
            return None
        kept = sorted(self._recycled(root), key=lambda item: (item[0] < size_bytes, item[0]))
        for _, old in kept[:4]:
            try:
                fd = self._reopen(f"{RECYCLE}/{old}")
            except FileNotFoundError:
                continue  # another writer took it
            except OSError as error:
                if not is_foreign(error):
                    raise
                self._forget_foreign(root, f"{RECYCLE}/{old}")
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink > 1:  # it has another name, perhaps outside: not ours
                    self._forget_foreign(root, f"{RECYCLE}/{old}")
                    raise FileNotFoundError(old)
                rename_beneath(root, f"{RECYCLE}/{old}", name)
                self._blank_header(fd)
            except (BlockingIOError, FileNotFoundError):
                os.close(fd)
                continue
            except OSError:
                os.close(fd)
                raise
            return fd
        return None

    def _forget_foreign(self, root: int, path: str) -> None:
        """Take away a name that leads to what is not ours; that is not touched."""
        _log.warning(
            "device %s: %s was not a file of hpstore; its name was removed", self.url, path
        )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=root)

    def _recycled(self, root: int) -> list[tuple[int, str]]:
        """(size, name) of files in recycle/; the name starts with the size."""
        names = [entry.name for entry in self._scan(RECYCLE, root)]
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

            def anew() -> None:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                fd = open_beneath(root, name, flags, self._file_mode)
                self._write_small(root, fd, name, path, data)

            try:
                self._without_recycled(root, anew)
            except OSError as error:
                if not is_full(error):
                    raise
                leave = RECORD_SPARES if "/" in path else 0
                fd = self._ballast.take(root, name, len(data), self._reopen_buffered, leave=leave)
                if fd is None:
                    raise
                self._write_small(root, fd, name, path, data)
            self._sync_directory(path)
            self._ballast.refill(root)

    def _write_small(self, root: int, fd: int, name: str, path: str, data: bytes) -> None:
        """Fill a file in tmp/ and give it its name; nothing is left of it on an error."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            os.ftruncate(fd, len(data))
            os.fsync(fd)
            self.rename_vital(name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=root)
            raise
        finally:
            os.close(fd)

    def takes_records(self) -> bool:
        with self._guard("look for space", absent_is_gone=True) as root:
            if self._ballast.count(root):
                return True
            name = temporary_path()
            try:
                fd = open_beneath(root, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
            except OSError as error:
                if not is_full(error):
                    raise
                return False
            try:
                allocate(fd, SPARE_BYTES)
            except OSError as error:
                if not is_full(error):
                    raise
                return False
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=root)
            return True

    def delete(self, path: str) -> None:
        super().delete(path)
        with self._guard("use of the room of a deleted file") as root:
            self._ballast.refill(root)

    def retire(self, path: str) -> None:
        """PROTOCOL 11: lock, rename into recycle/, sync both directories, blank the header."""
        with self._guard(f"retire of {path}") as root:
            try:
                fd = self._reopen(path)
            except FileNotFoundError:
                return
            try:
                facts = os.fstat(fd)
                size = facts.st_size
                if facts.st_nlink > 1:  # another name, of a backup perhaps: its bytes stay
                    self._unlink(root, path)
                elif self._ballast.wants(root, size) and _unread(fd):
                    self._keep(root, fd, path, self._ballast.place())
                    os.ftruncate(fd, min(size, SPARE_BYTES))
                elif self._may_recycle(root, size) and _unread(fd):
                    self._keep(root, fd, path, recycled_path(size))
                else:
                    self._unlink(root, path)
            except FileNotFoundError:
                return
            finally:
                unlock_and_close(fd)
            self._prune(path)
            self._ballast.refill(root)

    def _keep(self, root: int, fd: int, path: str, new: str) -> None:
        rename_beneath(root, path, new)
        self._sync_directory(path)
        self._sync_directory(new)
        self._blank_header(fd)

    def _may_recycle(self, root: int, size: int) -> bool:
        if size < RECYCLE_MIN_BYTES or not self._recycle_bytes:
            return False
        return sum(kept for kept, _ in self._recycled(root)) + size <= self._recycle_bytes

    def quarantine(self, path: str) -> None:
        with self._guard(f"quarantine of {path}") as root:
            new = f"{QUARANTINE}/{secrets.token_hex(4)}-{path.rsplit('/', 1)[-1]}"
            rename_beneath(root, path, new)
            self._sync_directory(new)
            self._sync_directory(path)
            self._prune(path)

    def sweep(self) -> int:
        with self._guard("sweep", absent_is_gone=True) as root:
            removed = 0
            os.stat(TMP, dir_fd=root)
            for name in (f"{TMP}/{entry.name}" for entry in self._scan(TMP, root)):
                try:
                    status = os.stat(name, dir_fd=root, follow_symlinks=False)
                    if time.time() - status.st_mtime < ORPHAN_SECONDS:
                        continue
                    fd = open_beneath(root, name, os.O_RDWR)
                except IsADirectoryError:
                    with contextlib.suppress(OSError):  # one that was to be shared
                        os.rmdir(name, dir_fd=root)
                    continue
                except (FileNotFoundError, PermissionError):  # another user's, who sweeps it
                    continue
                except OSError as error:
                    if not is_foreign(error):
                        raise
                    os.unlink(name, dir_fd=root)  # the link, not what it leads to
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
            fd = self._open(path, os.O_RDONLY)
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
            fd = open_beneath(root, path, os.O_RDONLY)
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
            return Usage(
                total=found.f_blocks * found.f_frsize,
                free=free,
                kept=kept,
                inodes=found.f_files,
                free_inodes=found.f_favail,
                read_only=bool(found.f_flag & os.ST_RDONLY),
            )

    def hold(self, offset: int, nbytes: int) -> LocalHold:
        with self._guard("lock of the registers", absent_is_gone=True) as root:
            return hold_range(root, self.url, offset, nbytes, self._file_mode)

    def probe(self, *, write: bool) -> None:
        self.check_mounted()
        with self._guard("probe", absent_is_gone=True) as root:
            self.folds_names = names_fold(root)
            if not write:
                self.require_objects()
                self._read_back(root)
                return
            name = f"{TMP}/{time.time_ns():020d}-probe-{secrets.token_hex(6)}"
            try:
                fd = open_beneath(root, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
            except PermissionError as error:
                self._only_read(root, denied(error, self.url, "write"))
            try:
                self._probe_direct(name, fd)
            finally:
                os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=root)
            self._keep_room(root)

    def _only_read(self, root: int, refused: DeviceDenied) -> NoReturn:
        """Of a user without the right to write: raise DeviceReadOnly where it can be read."""
        self.require_objects()
        self._read_back(root)
        raise DeviceReadOnly(str(refused), device=self.url) from refused

    def _read_back(self, root: int) -> None:
        """Read a page of a record and of one column past the page cache: a stat and a listing of a
        dead disk come out of caches. Raises DeviceReadOnly where the filesystem has stopped taking
        writes by itself, without a word in statvfs."""
        for name in filter(None, (IDENTITY_FILE, some_file(root, OBJECTS))):
            with contextlib.suppress(FileNotFoundError):  # moved or removed meanwhile
                fd = self._open(name, os.O_RDONLY)
                read_last_page(fd, self.url, past_cache=self.mode == "direct")
        if reason := stopped_writing(root):
            raise DeviceReadOnly(f"device {self.url} takes no writes: {reason}", device=self.url)

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


def _unread(fd: int) -> bool:
    """Lock a file to be overwritten; False while a reader holds it, which keeps the bytes."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
