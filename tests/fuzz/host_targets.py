"""What a host's service receives from a network, and what its callers do."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

try:
    from hpstore.hosts.served_connection import ServedConnection, Shared
except ImportError:  # without the extra hosts
    HOSTS = False
else:
    HOSTS = True
    from hpstore.devices.host_device import HostDevice
    from hpstore.hosts.admission import admit_all
    from hpstore.hosts.caller_sessions import CallerSessions, HeldFile
    from hpstore.hosts.data_connection import DataConnection
    from hpstore.hosts.exported_disk import ExportedDisk
    from hpstore.hosts.host_limits import HostLimits
    from hpstore.hosts.host_looks import HostLooks
    from hpstore.hosts.record_file import RecordFile
    from hpstore.runtime.budget import ByteBudget
    from hpstore.runtime.buffers import BufferPool
    from hpstore.runtime.wire_stream import WireStream

import socket

import numpy as np

from hpstore.devices.file_handles import LocalWriter
from hpstore.devices.host_disks import begin_look, look_at_disks
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceFull, HpstoreError
from hpstore.format.disk_looks import (
    DiskLook,
    decode_looks,
    decode_wanted,
    encode_looks,
    encode_wanted,
)
from hpstore.format.host_calls import (
    PROTOCOL,
    decode_held,
    decode_listings,
    decode_opened,
    encode_held,
    encode_listings,
    encode_opened,
)
from hpstore.format.record_calls import (
    HostRecord,
    RecordSwap,
    decode_names,
    decode_records,
    decode_swaps,
    encode_names,
    encode_records,
    encode_swaps,
)
from hpstore.runtime.split_calls import Sent, Unfinished
from hpstore.units import MIB
from tests.fuzz.engine import Target

_SESSION = "0" * 32
_HANDLE = "0123456789abcdef" * 2
_RECORD = "0a-1/0123456789abcdef/key-0001"


_LOOK = DiskLook(
    stamp=(1, 2, 3),
    listings=[[("@1", False), ("a", True)]],
    mark=b"{}",
    usage=(9, 8, 0, 7, 6, 0),
    seconds=0.25,
)


class CannedSocket:
    """A connected socket that has received some bytes, and no more come."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        part, self.data = self.data[:nbytes], self.data[nbytes:]
        return part

    def recv_into(self, target: memoryview, nbytes: int, flags: int) -> int:
        part = self.recv(len(target))
        target[: len(part)] = part
        return len(part)

    def sendmsg(self, parts: Sequence[bytes | memoryview], *_: object) -> int:
        return sum(map(len, parts))

    def setsockopt(self, *_: object) -> None:
        """Nothing is to wait for."""

    settimeout = shutdown = setsockopt

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        self.data = b""


class SmallDevice(LocalDevice):
    """Of a machine that must not be filled."""

    def create(self, size_bytes: int, *, vital: bool = False) -> LocalWriter:
        if size_bytes > MIB:
            raise DeviceFull("too large for this test")
        return super().create(size_bytes, vital=vital)

    def create_spare(self, size_bytes: int) -> LocalWriter:
        return self.create(size_bytes)


@cache
def _shared() -> Shared:
    place = tempfile.mkdtemp(prefix="fuzz-host-")
    device = SmallDevice(place, recycle_bytes=2 * MIB)
    device.prepare()
    limits, disks = HostLimits(), {0: ExportedDisk(0, device, 4)}
    return Shared(
        disks=disks,
        sessions=CallerSessions(16),
        arena=BufferPool(ByteBudget(16 * MIB)),
        limits=limits,
        looks=HostLooks(disks),
        records=RecordFile(tempfile.mkdtemp(prefix="fuzz-records-")),
    )


def take_requests(data: bytes) -> None:
    """A connection on which these bytes come. What it must not do: raise, or hold anything on."""
    shared = _shared()
    sock = cast(socket.socket, CannedSocket(data))
    ServedConnection(shared, WireStream(sock), admit_all(sock, "fuzz")).serve()
    assert not shared.sessions._sessions
    assert shared.sessions._count == 0
    assert shared.arena.budget.used_bytes == 0
    assert not [p for p in Path(shared.disks[0].device.url, "tmp").iterdir() if "probe" in p.name]


def take_bodies(data: bytes) -> None:
    """The same on the port for bodies: a handle that another connection has opened is all that
    there is, and what is not about it ends the connection."""
    shared, session = _shared(), ("fuzz", _SESSION)
    shared.sessions.join(session)
    writer = shared.disks[0].device.create(8192)
    shared.sessions.keep(session, _HANDLE, HeldFile(writer, 0, writer.abort))
    sock = cast(socket.socket, CannedSocket(data))
    try:
        DataConnection(shared, WireStream(sock), admit_all(sock, "fuzz")).serve()
        assert shared.sessions.holder(_HANDLE, 0) == session
    finally:
        shared.sessions.leave(session)
    assert shared.arena.budget.used_bytes == 0


def body_seeds() -> list[bytes]:
    made = [
        _request("write", b"x" * 4096, handle=_HANDLE, offset=0),
        _request("read", handle=_HANDLE, offset=0, nbytes=4096, whole=False),
        _request("write", b"x" * 4096, handle="f" * 32, offset=4096),
        _request("hello"),
    ]
    return [*made, b"".join(made)]


def _request(operation: str, body: bytes = b"", **args: object) -> bytes:
    return (
        f"POST /v1/0/{operation} HTTP/1.1\r\nHost: x\r\nHpd-Session: {_SESSION}\r\n"
        f"Hpd-Deadline-Ms: 50\r\nHpd-Args: {json.dumps(args)}\r\nContent-Length: {len(body)}"
        "\r\n\r\n"
    ).encode("ascii") + body


def request_seeds() -> list[bytes]:
    made = [
        _request("create", handle=_HANDLE, nbytes=4096, vital=False),
        _request("write", b"x" * 4096, handle=_HANDLE, offset=0),
        _request("sync", handle=_HANDLE),
        _request(
            "commit", bytes(512), handle=_HANDLE, path="objects/a/@1", guarded=False, record=None
        ),
        _request("open", handle=_HANDLE, path="objects/a/@1", ahead=8192, tail=4096),
        _request("read", handle=_HANDLE, offset=0, nbytes=4096, whole=False),
        _request("close", handle=_HANDLE),
    ]
    others = [
        _request("hello"),
        _request("look", encode_wanted([(0, ["objects", "objects/a"]), (7, [])]), usage=True),
        _request("new_file", b"x" * 4096, handle=_HANDLE, vital=False, sync=True),
        _request("records_read", encode_names([_RECORD])),
        _request("records_swap", encode_swaps([RecordSwap(name=_RECORD, revision=0, data=b"x")])),
        _request("records_remove", encode_names([_RECORD])),
        _request("usage"),
        _request("stamp", path="pool.json"),
        _request("listings", json.dumps(["objects", "objects/a"]).encode()),
        _request("write_small", b"{}", path="debts/x.json"),
        _request("read_small", path="debts/x.json", most=100),
        _request("counter_sector", name="horizon.json"),
        _request("hold", handle=_HANDLE, offset=0, nbytes=512),
        _request("seal", bytes(8192), handle=_HANDLE, offset=4096, first=4096),
        _request("write_hold", bytes(256), handle=_HANDLE, offset=0, last=True),
        _request("delete", path="objects/a/@1"),
    ]
    return [b"".join(made), *made, *others, b"".join(others)]


def take_answers(data: bytes) -> None:
    """A caller of a service that answers so."""

    class CannedStream(WireStream):
        def silent(self) -> bool:
            return True

    def connected(_: object, __: float) -> WireStream:
        return CannedStream(cast(socket.socket, CannedSocket(data)))

    import hpstore.devices.host_links as host_links

    plain = host_links.HostLinks._connected
    host_links.HostLinks._connected = connected  # type: ignore[method-assign,assignment]
    try:
        with contextlib.suppress(FileNotFoundError):
            _use(HostDevice("hpd://x:1/0", seconds=1.0))
    finally:
        host_links.HostLinks._connected = plain  # type: ignore[method-assign]


def _use(device: HostDevice) -> None:
    calls = (
        lambda: device.usage(),
        lambda: device.stamp("pool.json"),
        lambda: device.entries("objects"),
        lambda: device.read_small("pool.json", 4096),
        lambda: device.open("objects/a/@1").read_into(0, np.zeros(4096, np.uint8)),
        lambda: device.counter("horizon.json"),
        lambda: device.hold(0, 512).release(),
        lambda: look_at_disks([(device, ["objects/a"])], usage=True),
        lambda: _collected(begin_look([(device, ["objects/a"])], usage=True)),
        lambda: _collected(device.begin_open("objects/a/@1", tail_bytes=4096)),
    )
    for call in calls:
        with contextlib.suppress(HpstoreError, FileNotFoundError, Unfinished):
            call()
    device.close()


def _collected(sent: Sent[object] | None) -> None:
    """The answer to a call in two halves, received as one thread receives several."""
    if sent is not None:
        sent.arrived()
        sent.finish()


def _answer(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def answer_seeds() -> list[bytes]:
    hello = _answer(b'{"protocol":%d,"mode":"direct","folds_names":false}' % PROTOCOL)
    return [
        hello,
        hello + _answer(b"[1000,500,0,10,5,false]"),
        hello + _answer(b"[1,2,4096]") * 3,
        hello + _answer(encode_opened((1, 2, 8192), bytes(4096), b"")) * 8,
        hello + _answer(encode_held(True, (1, 2, 3), bytes(512))) * 8,
        hello + _answer(encode_looks([_LOOK])) * 8,
        hello + _answer(b"f@1\0da\0\0") * 3,
        hello + _answer(b'{"error":"DeviceFull","text":"no room"}', 409) * 3,
        hello + _answer(b'{"error":"FileNotFoundError","text":"x"}', 409),
    ]


def take_listings(data: bytes) -> None:
    found = decode_listings(data)
    assert encode_listings(found) == data


def take_looks(data: bytes) -> None:
    found = decode_looks(data, [1, 0])
    assert decode_looks(encode_looks(found), [len(look.listings) for look in found]) == found


def take_wanted(data: bytes) -> None:
    found = decode_wanted(data)
    assert decode_wanted(encode_wanted(found)) == found


def take_opened(data: bytes) -> None:
    found = decode_opened(data)
    assert decode_opened(encode_opened(*found)) == found


def take_held(data: bytes) -> None:
    found = decode_held(data)
    assert decode_held(encode_held(*found)) == found


def take_swaps(data: bytes) -> None:
    found = decode_swaps(data)
    assert decode_swaps(encode_swaps(found)) == found


def take_records(data: bytes) -> None:
    found = decode_records(data, 2)
    assert decode_records(encode_records(found), 2) == found


HOST_TARGETS = (
    Target(
        name="host-looks",
        run=take_looks,
        seeds=lambda: [
            encode_looks([_LOOK, DiskLook(late=True)]),
            encode_looks([_LOOK, DiskLook(error=("DeviceError", "x"))]),
        ],
    ),
    Target(
        name="host-wanted",
        run=take_wanted,
        seeds=lambda: [encode_wanted([(0, ["objects/a"]), (3, [])])],
    ),
    Target(
        name="host-opened",
        run=take_opened,
        seeds=lambda: [encode_opened((1, 2, 4096), b"x" * 64, b"y" * 8)],
    ),
    Target(
        name="host-held",
        run=take_held,
        seeds=lambda: [encode_held(True, (1, -2, 4096), b"x" * 64), encode_held(False, None, b"")],
    ),
    Target(
        name="host-record-swaps",
        run=take_swaps,
        seeds=lambda: [encode_swaps([RecordSwap(name=_RECORD, revision=7, data=b"x")])],
    ),
    Target(name="host-record-names", run=decode_names, seeds=lambda: [encode_names([_RECORD])]),
    Target(
        name="host-records",
        run=take_records,
        seeds=lambda: [encode_records([HostRecord(revision=3, data=b"xyz"), HostRecord()])],
    ),
    Target(
        name="host-listings",
        run=take_listings,
        seeds=lambda: [encode_listings([[("@1", False), ("a", True)], [], [("b\udc80", False)]])],
    ),
    *(
        (
            Target(name="host-requests", run=take_requests, seeds=request_seeds),
            Target(name="host-bodies", run=take_bodies, seeds=body_seeds),
            Target(name="host-answers", run=take_answers, seeds=answer_seeds),
        )
        if HOSTS
        else ()
    ),
)
