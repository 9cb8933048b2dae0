"""Disks of other hosts beneath their wrappers, and what several of one host do with one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Device, WriteHandle
from hpstore.devices.wrappers import DeviceWrapper, WrappedWriter
from hpstore.errors import DeviceError, IntegrityError
from hpstore.format.disk_looks import DiskLook, decode_looks, encode_wanted
from hpstore.format.host_calls import MOST_LISTED, MOST_NEW_FILE_BYTES

Wanted = Sequence[tuple["HostDisk", Sequence[str]]]  # disks, and directories on each


class HostDisk(Protocol):
    """A disk behind a host's service (host_device.py)."""

    @property
    def url(self) -> str:
        """Of the disk."""

    @property
    def host(self) -> str:
        """Its service; disks of one can be asked together."""

    @property
    def number(self) -> int:
        """Of the disk there."""

    def ask(self, operation: str, args: dict[str, object], body: bytes) -> bytes:
        """Make a call that is the same when it is made twice."""

    def new_file(self, buffers: Sequence[Bytes], *, vital: bool, sync: bool) -> WriteHandle:
        """A file of these bytes, with `sync` durable, by one request."""

    def error_of(self, name: str, text: str) -> Exception:
        """What the service says of a call on this disk, as what it raises."""


@runtime_checkable
class ReadAhead(Protocol):
    """An open file whose first bytes came with the answer that it is open."""

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether a read of these bytes asks the device nothing."""


def host_disk(device: Device) -> HostDisk | None:
    """The disk of another host that a device is, or that it measures; None for every other device,
    also where a wrapper must see each call."""
    found: HostDisk | None = getattr(device, "host_disk", None)
    return found


def look_at_disks(wanted: Wanted, *, usage: bool) -> list[DiskLook | Exception]:
    """What disks of one host say, by as few requests as the limits of one allow.

    The answer is in the order of `wanted`. A disk that hangs is `late` there and holds no other.
    Raises as calls do where the host does not answer.
    """
    disks = [disk for disk, _ in wanted]
    share = max(1, MOST_LISTED // len(wanted))
    rounds = max(1, *(-(-len(paths) // share) for _, paths in wanted))
    found: list[DiskLook | Exception] = []
    for turn in range(rounds):
        rows = [(disk.number, paths[turn * share : (turn + 1) * share]) for disk, paths in wanted]
        answer = disks[0].ask("look", {"usage": usage and not turn}, encode_wanted(rows))
        try:
            looks = decode_looks(answer, [len(paths) for _, paths in rows])
        except IntegrityError as error:
            raise DeviceError(f"device {disks[0].url}: {error}", device=disks[0].url) from error
        parts = [_said(disk, look) for disk, look in zip(disks, looks, strict=True)]
        found = parts if not turn else [_joined(a, b) for a, b in zip(found, parts, strict=True)]
    return found


def _said(disk: HostDisk, look: DiskLook) -> DiskLook | Exception:
    return look if look.error is None else disk.error_of(*look.error)


def _joined(first: DiskLook | Exception, second: DiskLook | Exception) -> DiskLook | Exception:
    """Two looks at one disk as one. What was seen first has the stamp: unless it is the same one,
    the second look does not belong to it, and the disk is asked by itself."""
    if not isinstance(first, DiskLook) or first.late:
        return first
    if not isinstance(second, DiskLook) or second.late:
        return second
    if first.stamp != second.stamp:
        return DiskLook(late=True)
    return DiskLook(
        stamp=first.stamp,
        listings=[*first.listings, *second.listings],
        mark=first.mark,
        usage=first.usage,
        seconds=first.seconds + second.seconds,
    )


def make_file(
    device: Device, size_bytes: int, buffers: Sequence[Bytes], *, vital: bool, sync: bool
) -> WriteHandle:
    """A new file of these bytes, `sync`: durable; it has no name yet. One request where the device
    is a disk of another host and the file is small."""
    disk = host_disk(device)
    if disk is None or size_bytes > MOST_NEW_FILE_BYTES or sum(map(len, buffers)) != size_bytes:
        handle = device.create(size_bytes, vital=vital)
        try:
            handle.write(0, buffers)
            if sync:
                handle.sync()
        except BaseException:
            handle.abort()
            raise
        return handle
    if not isinstance(device, DeviceWrapper):
        return disk.new_file(buffers, vital=vital, sync=sync)
    made = device.around(
        "write", size_bytes, lambda: disk.new_file(buffers, vital=vital, sync=sync)
    )
    return WrappedWriter(device, made)
