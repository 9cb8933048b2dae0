"""Disks of other hosts beneath their wrappers, and what several of one host do with one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Device, Hold, ReadHandle, Stamp, WriteHandle
from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.devices.wrappers import DeviceWrapper, WrappedHold, WrappedReader, WrappedWriter
from hpstore.errors import DeviceError, IntegrityError
from hpstore.format.disk_looks import DiskLook, decode_looks, encode_wanted
from hpstore.format.host_calls import MOST_LISTED, MOST_NEW_FILE_BYTES
from hpstore.format.records import POOL_FILE
from hpstore.runtime.split_calls import Sent

T = TypeVar("T")
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

    def begin_ask(self, operation: str, args: dict[str, object], body: bytes) -> Sent[bytes] | None:
        """The same in two halves, as SplitCall has it."""

    def new_file(self, buffers: Sequence[Bytes], *, vital: bool, sync: bool) -> WriteHandle:
        """A file of these bytes, with `sync` durable, by one request."""

    def begin_file(
        self, buffers: Sequence[Bytes], *, vital: bool, sync: bool
    ) -> Sent[WriteHandle] | None:
        """The same in two halves."""

    def begin_open(self, path: str, *, tail_bytes: int) -> Sent[ReadHandle] | None:
        """Device.open in two halves; so many bytes of the file's end come along."""

    def begin_retire(self, path: str) -> Sent[None] | None:
        """Device.retire in two halves."""

    def begin_stamp(self, path: str) -> Sent[Stamp | None] | None:
        """Device.stamp in two halves."""

    def begin_hold(self, offset: int, nbytes: int) -> Sent[Hold] | None:
        """Device.hold in two halves."""

    def error_of(self, name: str, text: str) -> Exception:
        """What the service says of a call on this disk, as what it raises."""


class ReadAhead(Protocol):
    """An open file of which bytes of both ends came with the answer that it is open."""

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether a read of these bytes asks the device nothing."""


class SplitWriter(Protocol):
    """A new file whose name can be given in two halves."""

    def seal(self, first: Bytes, offset: int, last: Bytes) -> None:
        """As seal_file, by one request."""

    def begin_publish(self, path: str, guard: HorizonGuard | None = None) -> Sent[None] | None:
        """WriteHandle.publish; the name is durable when it has ended."""


class SplitHold(Protocol):
    """A range of registers that can be written and released in two halves."""

    def begin_finish(self, offset: int, data: bytes) -> Sent[None] | None:
        """Hold.finish; one that fails has to be released."""


def read_ahead(handle: ReadHandle) -> ReadAhead | None:
    """An open file that is one. By its method: to compare with a protocol takes ten times as
    long."""
    return cast(ReadAhead, handle) if hasattr(handle, "holds") else None


def holds_ahead(handle: ReadHandle, nbytes: int) -> bool:
    """Whether the first bytes of an open file came with the answer that it is open, so many."""
    ahead = read_ahead(handle.inner if isinstance(handle, WrappedReader) else handle)
    return ahead is not None and ahead.holds(0, nbytes)


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
    share = max(1, MOST_LISTED // len(wanted))
    rounds = max(1, *(-(-len(paths) // share) for _, paths in wanted))
    found: list[DiskLook | Exception] = []
    for turn in range(rounds):
        part = [(disk, paths[turn * share : (turn + 1) * share]) for disk, paths in wanted]
        answer = part[0][0].ask("look", {"usage": usage and not turn}, _rows(part))
        looks = _looks(part, answer)
        found = looks if not turn else [_joined(a, b) for a, b in zip(found, looks, strict=True)]
    return found


def begin_look(wanted: Wanted, *, usage: bool) -> Sent[list[DiskLook | Exception]] | None:
    """The same in two halves, where it is one request."""
    names = sum(len(paths) for _, paths in wanted)
    if names > MOST_LISTED:
        return None
    if len(wanted) == 1 and not names and not usage:  # the stamp alone, which costs less
        stamped = wanted[0][0].begin_stamp(POOL_FILE)
        return None if stamped is None else stamped.then(lambda stamp: [DiskLook(stamp=stamp)])
    sent = wanted[0][0].begin_ask("look", {"usage": usage}, _rows(wanted))
    return None if sent is None else sent.then(partial(_looks, wanted))


def _rows(wanted: Wanted) -> bytes:
    return encode_wanted([(disk.number, paths) for disk, paths in wanted])


def _looks(wanted: Wanted, answer: bytes) -> list[DiskLook | Exception]:
    url = wanted[0][0].url
    try:
        looks = decode_looks(answer, [len(paths) for _, paths in wanted])
    except IntegrityError as error:
        raise DeviceError(f"device {url}: {error}", device=url) from error
    return [_said(disk, look) for (disk, _), look in zip(wanted, looks, strict=True)]


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


def seal_file(device: Device, handle: WriteHandle, first: Bytes, offset: int, last: Bytes) -> None:
    """Write the first bytes of a new file and those from `offset`, and make all of it durable. One
    request where the device is a disk of another host and they are few."""
    nbytes = len(first) + len(last)
    if host_disk(device) is None or nbytes > MOST_NEW_FILE_BYTES:
        handle.write(0, [first])
        handle.write(offset, [last])
        handle.sync()
        return
    seal = partial(_split_writer(handle).seal, first, offset, last)
    if isinstance(device, DeviceWrapper):
        device.around("sync", nbytes, seal)
    else:
        seal()


def begin_file(
    device: Device, size_bytes: int, buffers: Sequence[Bytes], *, vital: bool, sync: bool
) -> Sent[WriteHandle] | None:
    """make_file in two halves; None where it is more than one request."""
    disk = host_disk(device)
    if disk is None or size_bytes > MOST_NEW_FILE_BYTES or sum(map(len, buffers)) != size_bytes:
        return None
    begin = partial(disk.begin_file, buffers, vital=vital, sync=sync)
    return _begun(device, "write", size_bytes, begin, WrappedWriter)


def begin_open(device: Device, path: str, *, tail_bytes: int) -> Sent[ReadHandle] | None:
    """Device.open in two halves, `tail_bytes` as HostDisk has it; None where it has none."""
    disk = host_disk(device)
    if disk is None:
        return None
    begin = partial(disk.begin_open, path, tail_bytes=tail_bytes)
    return _begun(device, "open", 0, begin, lambda wrapper, handle: wrapper.wrapped(handle))


def begin_publish(
    device: Device, handle: WriteHandle, path: str, guard: HorizonGuard
) -> Sent[None] | None:
    """WriteHandle.publish of a file of this device in two halves; None where it has none."""
    if host_disk(device) is None:
        return None
    return _begun(device, "publish", 0, partial(_split_writer(handle).begin_publish, path, guard))


def begin_retire(device: Device, path: str) -> Sent[None] | None:
    """Device.retire in two halves; None where it has none."""
    disk = host_disk(device)
    if disk is None:
        return None
    return _begun(device, "retire", 0, partial(disk.begin_retire, path))


def begin_hold(device: Device, offset: int, nbytes: int) -> Sent[Hold] | None:
    """Device.hold in two halves; None where it has none."""
    disk = host_disk(device)
    if disk is None:
        return None
    return _begun(device, "lock", 0, partial(disk.begin_hold, offset, nbytes), WrappedHold)


def begin_finish(device: Device | None, hold: Hold, offset: int, data: bytes) -> Sent[None] | None:
    """Hold.finish on this device in two halves; None where it has none."""
    if device is None or host_disk(device) is None:
        return None
    inner = cast(SplitHold, hold.inner if isinstance(hold, WrappedHold) else hold)
    return _begun(device, "register", len(data), partial(inner.begin_finish, offset, data))


def _begun(
    device: Device,
    operation: str,
    nbytes: int,
    begin: Callable[[], Sent[T] | None],
    wrap: Callable[[DeviceWrapper, T], T] = lambda _, made: made,
) -> Sent[T] | None:
    """A call that is begun, through the wrapper of its device where it has one; what comes of it is
    wrapped, too."""
    if not isinstance(device, DeviceWrapper):
        return begin()
    sent = device.around_sent(operation, nbytes, begin)
    return sent and sent.then(partial(wrap, device))


def _split_writer(handle: WriteHandle) -> SplitWriter:
    """A new file on a disk of another host, beneath its wrapper."""
    return cast(SplitWriter, handle.inner if isinstance(handle, WrappedWriter) else handle)
