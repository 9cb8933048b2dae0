"""The promise that every device keeps, and what they share.

A device stores named files under one root. It knows nothing of stripes or objects. All calls are
synchronous and thread-safe, may block for as long as the hardware does (deadlines are the
scheduler's), and raise DeviceError subclasses for what the device did wrong. A file that is not
there is FileNotFoundError; a directory that is not there lists as empty.

Directories of a device root: `objects/` (columns), `tmp/` (being written), `recycle/` (files to
overwrite), `debts/`, `quarantine/`. Files begin in `tmp/` under an exclusive lock and reach their
name by `publish`; nothing is durable before `sync` (bytes) and `sync_directory` (name). Beside them
lies `registers`, a few MiB that are written in place under locks (`hold`).
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

from hpstore.codec.galois import Bytes
from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.errors import (
    DescriptorsExhausted,
    DeviceDenied,
    DeviceError,
    DeviceFull,
    DeviceMissing,
    DeviceReadOnly,
    DeviceTimeout,
    ReadAbandoned,
)
from hpstore.format.keys import OBJECTS
from hpstore.format.pool_key import PoolKey
from hpstore.runtime.lacks import note_lack
from hpstore.runtime.open_file_limit import exhausted_hint, note_exhausted
from hpstore.runtime.rights import denied_path, rights_hint

TMP, RECYCLE, DEBTS, QUARANTINE = "tmp", "recycle", "debts", "quarantine"
DIRECTORIES = (OBJECTS, TMP, RECYCLE, DEBTS, QUARANTINE)
ORPHAN_SECONDS = 60.0  # an unlocked file in tmp/ older than this has lost its writer
RECYCLE_MIN_BYTES = 1 << 20  # below this a fresh file is as cheap

REGISTERS = "registers"  # 4,096 records for claims and 32 others, 512 bytes each
REGISTERS_BYTES = (4096 + 32) * 512

RELEASED = "released"  # of a local device that all processes close, for maintenance

BLAMELESS = (ReadAbandoned, DescriptorsExhausted, DeviceDenied)  # the device was not asked
READABLE = (DeviceFull, DeviceReadOnly)  # writes are refused, what is there can be read

Stamp = tuple[int, int, int]


class DirectoryEntry(NamedTuple):
    """One name in a directory. Made by the hundred thousand: a tuple."""

    name: str
    is_directory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Space on a device: bytes, and files and directories where their number is limited."""

    total: int  # 0: not known, as of a store without a quota; then nothing counts as full
    free: int  # what new files may take, kept ones given up
    kept: int = 0  # of it in files that are kept for overwriting
    inodes: int = 0  # 0: not limited, or not known
    free_inodes: int = 0
    read_only: bool = False  # mounted so; a filesystem that refuses writes need not say it

    @property
    def numbers(self) -> tuple[int, ...]:
        """All of it as whole numbers, for Usage.of_numbers()."""
        return (
            self.total,
            self.free,
            self.kept,
            self.inodes,
            self.free_inodes,
            int(self.read_only),
        )

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Usage:
        """Inverse of `numbers`."""
        total, free, kept, inodes, free_inodes, read_only = numbers
        return cls(
            total=total,
            free=free,
            kept=kept,
            inodes=inodes,
            free_inodes=free_inodes,
            read_only=bool(read_only),
        )

    @property
    def known(self) -> bool:
        """Whether the device says what space it has."""
        return self.total > 0


class ReadHandle(Protocol):
    """An open file. Holds it against recycling until close() (PROTOCOL 11).

    `descriptor`: for reads that are made many at a time (ring.py); -1 where each must pass through
    read_into.
    """

    size_bytes: int

    @property
    def descriptor(self) -> int:
        """A file descriptor or -1."""

    def read_into(self, offset: int, target: Bytes) -> None:
        """Fill `target` from `offset`. The target belongs to this call until it returns.

        Offset, length and address are multiples of 4 KiB. Raises DeviceError when the file ends
        before the target is full.
        """

    def close(self) -> None:
        """Idempotent."""


class WriteHandle(Protocol):
    """A new file in tmp/. One thread at a time."""

    @property
    def recycled(self) -> bool:
        """It overwrites a file that was kept for that."""

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Write `buffers` back to back at `offset`, whole or DeviceError.

        Offset and lengths are multiples of 4 KiB; addresses need not be aligned (an unaligned one
        costs a copy). The buffers are only read, until the call returns.
        """

    def sync(self) -> None:
        """Make the bytes durable."""

    def publish(self, path: str, guard: HorizonGuard | None = None) -> None:
        """Give the file its name, replacing what is there. Durable after sync_directory(path).

        Directories are made as needed. The handle is closed. With a `guard` only where the device's
        horizon allows it, compared in one step with the rename; else HorizonPassed, and the file
        has no name.
        """

    def abort(self) -> None:
        """Close and remove the file unless it was published. Idempotent; never raises."""


class Hold(Protocol):
    """A range of a device's registers that `hold` was asked for. One thread at a time."""

    content: bytes  # of the range, when it was taken
    record: Stamp | None  # as Device.stamp of the record of membership, looked at after the lock

    @property
    def taken(self) -> bool:
        """Whether it is locked; else another one has it, and only `content` is of use."""

    def write(self, offset: int, data: bytes) -> None:
        """Replace bytes in place, `offset` from the beginning of the range. Durable on return."""

    def release(self) -> None:
        """Let others have it. Idempotent."""

    def finish(self, offset: int, data: bytes) -> None:
        """write(), then release(), also where that has failed."""

    def forget(self) -> None:
        """In the child of a fork: drop the copy; the lock stays the parent's."""


class Device(Protocol):
    """One place that stores files."""

    @property
    def url(self) -> str:
        """Where it is, as the pool's settings say."""

    @property
    def mode(self) -> str:
        """direct, buffered, memory or remote: shown in status."""

    @property
    def memory_alignment(self) -> int:
        """Of buffers that write() takes without a copy."""

    @property
    def folds_names(self) -> bool:
        """The filesystem folds case or normalises names."""

    def create(self, size_bytes: int, *, vital: bool = False) -> WriteHandle:
        """A new file of that size in tmp/, space reserved first, locked by this process.

        `vital`: a small file that makes room or keeps data safe (a tombstone). Where there is no
        space left, what the device has kept for that is used. DeviceFull leaves nothing behind.
        """

    def create_spare(self, size_bytes: int) -> WriteHandle | None:
        """A new file of new blocks, to be written and then published as recycled_path(size_bytes).

        create() may take it from then on. Kept files are neither taken nor freed for it (DeviceFull
        instead). None where overwriting is no faster than writing a new file.
        """

    def open(self, path: str) -> ReadHandle:
        """Open for reading under a shared lock. FileNotFoundError when absent or being recycled."""

    def read_small(self, path: str, max_bytes: int) -> bytes:
        """A whole small file, at most max_bytes (a larger one is a DeviceError)."""

    def write_small(self, path: str, data: bytes) -> None:
        """Atomically replace a small file. Durable on return.

        A record, so always vital, as in create(). DeviceFull leaves the old one.
        """

    def takes_records(self) -> bool:
        """Whether write_small of a record in the device's root would find space now.

        Asked before a change of several devices, which is better refused than half done.
        """

    def entries(self, path: str) -> list[DirectoryEntry]:
        """Names in a directory, unordered; empty when there is no such directory."""

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        """entries() of the first of these directories, of one at least: as many as a device lists
        at once without holding up others."""

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        """A counter of the device that only rises (horizons.py); 0 when it was never raised.

        Raises IntegrityError for a damaged one, or one without the MAC of `pool_key`.
        """

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        """Raise a counter to `value` at least; what it is now. Durable on return. A damaged one,
        or one without the MAC of `pool_key`, counts for nothing.

        No publish that was compared with a lower horizon is under way then.
        """

    def stamp(self, path: str) -> Stamp | None:
        """Changes whenever write_small or publish replaced the file; None when absent."""

    def delete(self, path: str) -> None:
        """Remove a file, on local devices also directories that became empty. Not synced.

        Absent is fine. Stores keep their directories: some remove a full one when asked to.
        """

    def retire(self, path: str) -> None:
        """Remove a file whose object is durably gone, keeping its blocks for reuse if it can."""

    def quarantine(self, path: str) -> None:
        """Move a file out of sight, under quarantine/. Durable on return."""

    def sync_directory(self, path: str) -> None:
        """Make the names in the directory of `path`, and its ancestors, durable."""

    def sync_removals(self) -> None:
        """Make durable what delete, retire and quarantine have removed so far."""

    def sweep(self) -> int:
        """Remove what dead writers left in tmp/; returns how many files."""

    def usage(self) -> Usage:
        """Space."""

    def hold(self, offset: int, nbytes: int) -> Hold:
        """Try to lock a range of the registers against every other hold, and read it.

        Never waits for another one: see `taken`. Excludes all processes that reach this device, and
        threads, until `release` or the end of the process. Beyond REGISTERS_BYTES there is nothing
        to read or write, only to lock. Raises DeviceError where locks do not work.
        """

    def probe(self, *, write: bool) -> None:
        """Raise DeviceError unless the device really answers: write, sync, read back."""

    def close(self) -> None:
        """Release descriptors. Idempotent."""


def recycled_path(size_bytes: int) -> str:
    """A new name for a file of that size to overwrite."""
    return f"{RECYCLE}/{size_bytes}-{secrets.token_hex(8)}"


def recycled_bytes(name: str) -> int | None:
    """Size of a file in recycle/ by its name; None for a name that is not ours."""
    size = name.split("-")[0]
    return int(size) if size.isdigit() else None


_BY_ERRNO = {
    errno.ENOSPC: DeviceFull,
    errno.EDQUOT: DeviceFull,
    errno.EROFS: DeviceReadOnly,
    errno.ENODEV: DeviceMissing,
    errno.ENXIO: DeviceMissing,
    errno.ENOTCONN: DeviceMissing,
    errno.ESTALE: DeviceMissing,
    errno.ETIMEDOUT: DeviceTimeout,
}


def raise_device_error(error: OSError, url: str, operation: str) -> NoReturn:
    """Turn an OSError into the DeviceError that fits. FileNotFoundError passes through."""
    if isinstance(error, (DeviceError, FileNotFoundError)):
        raise error
    if error.errno in (errno.EMFILE, errno.ENFILE):
        note_exhausted()
        raise DescriptorsExhausted(
            f"{operation} was not tried on device {url}: {error.strerror}. {exhausted_hint()}",
            device=url,
        ) from error
    if isinstance(error, PermissionError):
        raise denied(error, url, operation) from error
    kind = _BY_ERRNO.get(error.errno or 0, DeviceError)
    reason = error.strerror or str(error)
    raise kind(f"{operation} failed on device {url}: {reason}", device=url) from error


def denied(error: OSError, url: str, operation: str) -> DeviceDenied:
    """The error for what this user may not do; noted as a lack of this process."""
    if "://" in url:
        hint = (
            f"the user or the credentials of this process have no rights on {url}: "
            f"{error.strerror or error}"
        )
    else:
        hint = rights_hint(denied_path(url, DIRECTORIES))
    note_lack(DeviceDenied, hint)
    return DeviceDenied(f"{operation} was refused on device {url}: {hint}", device=url)
