"""Open files and held registers of a disk of another host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Stamp
from hpstore.devices.horizon_guard import NameGuard
from hpstore.devices.host_links import HostLinks
from hpstore.devices.link_errors import HandleGone
from hpstore.errors import DeviceError, HpstoreError, LockTimeout, ReadAbandoned
from hpstore.format.host_calls import MOST_BODY_BYTES
from hpstore.runtime.split_calls import Sent, Unfinished

_COMMIT_TRIES = 16  # while sweeps raise the horizon


class OpenFile(NamedTuple):
    """What was answered of a file that was opened: bytes of both its ends come along."""

    handle: str
    stamp: Stamp
    first: bytes
    last: bytes


class HostRoot(Protocol):
    """What an open file needs of its device."""

    url: str
    bodies: HostLinks  # for bytes of open files

    def open_handle(self, path: str) -> OpenFile:
        """A file that is open from now on, and its first bytes."""

    def checked_horizon(self, guard: NameGuard) -> bytes:
        """The sector by which a guard allows a name."""

    def known_horizon(self, guard: NameGuard) -> bytes:
        """The same of what was seen last. Raises what the guard raises."""

    def note_horizon(self, sector: bytes) -> None:
        """What it is now."""

    def note_durable(self, path: str) -> None:
        """A name is durable."""


class HostReader:
    """A file open for reading there, held by the session of this process.

    A service that was restarted has given all handles up: the file is opened again, and must be the
    same one.
    """

    descriptor = -1

    def __init__(self, device: HostRoot, links: HostLinks, path: str, opened: OpenFile) -> None:
        self._device, self._links, self._path = device, links, path
        self._closed = False
        self._handle, self._stamp, self._first, self._last = opened
        self.size_bytes = self._stamp[2]
        self._lock = threading.Lock()  # guards _handle while it is replaced

    def holds(self, offset: int, nbytes: int) -> bool:
        """As ReadAhead has it."""
        return self._came_along(offset, nbytes) is not None

    def _came_along(self, offset: int, nbytes: int) -> bytes | None:
        """Bytes that came with the answer that it is open."""
        end, first, last = offset + nbytes, self._first, self._last
        if end <= len(first):
            return first[offset:end]
        start = offset - (self.size_bytes - len(last))
        return last[start : start + nbytes] if start >= 0 and end <= self.size_bytes else None

    def read_into(self, offset: int, target: Bytes) -> None:
        view = target.data.cast("B")
        found = self._came_along(offset, len(view))
        if found is not None:
            self._open_handle()
            view[:] = found
            return
        self._first = b""  # what is read on needs it no more
        for start in range(0, len(view), MOST_BODY_BYTES):
            part = view[start : start + MOST_BODY_BYTES]
            handle = self._open_handle()
            try:
                self._read(handle, offset + start, part)
            except HandleGone:
                self._read(self._reopened(handle), offset + start, part)

    def _open_handle(self) -> str:
        if self._closed:
            raise ReadAbandoned(f"a read of device {self._device.url} came too late")
        return self._handle

    def _read(self, handle: str, offset: int, part: memoryview) -> None:
        args: dict[str, object] = {"handle": handle, "offset": offset, "nbytes": len(part)}
        args["whole"] = False
        self._device.bodies.call("read", args, into=part, again=True)

    def _reopened(self, gone: str) -> str:
        with self._lock:
            if self._open_handle() != gone:
                return self._handle  # another thread was here
            try:
                handle, stamp, *_ = self._device.open_handle(self._path)
            except FileNotFoundError as error:
                raise self._replaced() from error
            if stamp != self._stamp:
                self._links.give_up(handle)
                raise self._replaced()
            self._handle = handle
            if self._closed:  # meanwhile
                self._links.give_up(handle)
            return self._open_handle()

    def _replaced(self) -> DeviceError:
        return DeviceError(
            f"device {self._device.url}: the host's service was restarted, and {self._path} is not "
            "the file any more that was open",
            device=self._device.url,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._links.give_up(self._handle)

    def __del__(self) -> None:
        """Who forgets to close a reader holds no lock there for good."""
        self.close()


class HostWriter:
    """A new file in tmp/ there. Its name is given, compared and synced in one call."""

    def __init__(self, device: HostRoot, links: HostLinks, handle: str, recycled: bool) -> None:
        self._device, self._links, self._handle, self.recycled = device, links, handle, recycled

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        for parts in _requests(buffers):
            args: dict[str, object] = {"handle": self._handle, "offset": offset}
            self._device.bodies.call("write", args, bodies=parts, again=True)
            offset += sum(map(len, parts))

    def sync(self) -> None:
        self._links.call("sync", {"handle": self._handle}, again=True)

    def seal(self, first: Bytes, offset: int, last: Bytes) -> None:
        """As SplitWriter has it."""
        args: dict[str, object] = {"handle": self._handle, "offset": offset}
        parts = [np.ascontiguousarray(part).data.cast("B") for part in (first, last)]
        self._links.call("seal", {**args, "first": len(first)}, bodies=parts, again=True)

    def publish(self, path: str, guard: NameGuard | None = None) -> None:
        """As of any device; the name is durable on return."""
        record = None if guard is None else guard.record
        args: dict[str, object] = {"handle": self._handle, "path": path, "record": record}
        for _ in range(_COMMIT_TRIES):
            sector = b"" if guard is None else self._device.checked_horizon(guard)
            moved = self._links.call(
                "commit", {**args, "guarded": guard is not None}, bodies=[sector]
            )
            if not moved:
                self._handle = ""
                self._device.note_durable(path)
                return
            self._device.note_horizon(moved[1:])
        raise LockTimeout(
            f"the horizon of device {self._device.url} is raised all the time; {path} has no name"
        )

    def begin_publish(self, path: str, guard: NameGuard | None = None) -> Sent[None] | None:
        """As SplitWriter has it."""
        try:
            sector = b"" if guard is None else self._device.known_horizon(guard)
        except HpstoreError:  # what was seen last may be old: publish() looks
            return None
        record = None if guard is None else guard.record
        args: dict[str, object] = {"handle": self._handle, "path": path, "record": record}
        sent = self._links.begin("commit", {**args, "guarded": guard is not None}, bodies=[sector])
        return None if sent is None else sent.then(self._begun_publish)

    def _begun_publish(self, moved: bytes) -> None:
        if moved:
            self._device.note_horizon(moved[1:])
            raise Unfinished
        self._handle = ""

    def abort(self) -> None:
        handle, self._handle = self._handle, ""
        if handle:
            try:
                self._links.call("abort", {"handle": handle}, again=True)
            except (HpstoreError, OSError):
                self._links.give_up(handle)


class HostHold:
    """A range of registers there, held by the session of this process: when the service is
    restarted, or has lost this process, a write is refused."""

    def __init__(self, links: HostLinks, handle: str, content: bytes, record: Stamp | None) -> None:
        self._links, self._handle = links, handle
        self.content, self.record = content, record

    @property
    def taken(self) -> bool:
        return bool(self._handle)

    def write(self, offset: int, data: bytes) -> None:
        self._write(offset, data, last=False)

    def _write(self, offset: int, data: bytes, *, last: bool) -> None:
        args: dict[str, object] = {"handle": self._handle, "offset": offset, "last": last}
        self._links.call("write_hold", args, bodies=[data])

    def begin_finish(self, offset: int, data: bytes) -> Sent[None] | None:
        """As SplitHold has it."""
        args: dict[str, object] = {"handle": self._handle, "offset": offset, "last": True}
        sent = self._links.begin("write_hold", args, bodies=[data])
        return None if sent is None else sent.then(self._finished)

    def _finished(self, _: bytes) -> None:
        self._handle = ""

    def finish(self, offset: int, data: bytes) -> None:
        """By one request."""
        try:
            self._write(offset, data, last=True)
        except BaseException:
            self.release()
            raise
        self._handle = ""

    def release(self) -> None:
        handle, self._handle = self._handle, ""
        if handle:
            try:
                self._links.call("release", {"handle": handle}, again=True)
            except (HpstoreError, OSError):
                self._links.give_up(handle)

    def forget(self) -> None:
        self._handle = ""

    def __del__(self) -> None:
        """Give up a lock that was granted to a call which was cut short."""
        handle, self._handle = self._handle, ""
        if handle:
            self._links.give_up(handle)


def _requests(buffers: Sequence[Bytes]) -> Iterator[list[memoryview]]:
    """Buffers, back to back, as bodies of requests of at most MOST_BODY_BYTES."""
    parts: list[memoryview] = []
    room = MOST_BODY_BYTES
    for buffer in buffers:
        view = np.ascontiguousarray(buffer).data.cast("B")
        while len(view):
            part = view[:room]
            parts.append(part)
            room -= len(part)
            view = view[len(part) :]
            if not room:
                yield parts
                parts, room = [], MOST_BODY_BYTES
    if parts:
        yield parts
