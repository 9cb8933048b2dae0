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
    from hpstore.hosts.caller_sessions import CallerSessions
    from hpstore.hosts.exported_disk import ExportedDisk
    from hpstore.hosts.host_limits import HostLimits
    from hpstore.runtime.budget import ByteBudget
    from hpstore.runtime.buffers import BufferPool
    from hpstore.runtime.wire_stream import WireStream

import socket

import numpy as np

from hpstore.devices.file_handles import LocalWriter
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceFull, HpstoreError
from hpstore.format.host_calls import decode_listings, encode_listings
from hpstore.units import MIB
from tests.fuzz.engine import Target

_SESSION = "0" * 32
_HANDLE = "0123456789abcdef"


class CannedSocket:
    """A connected socket that has received some bytes, and no more come."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv(self, nbytes: int) -> bytes:
        part, self.data = self.data[:nbytes], self.data[nbytes:]
        return part

    def recv_into(self, target: memoryview, nbytes: int, flags: int) -> int:
        part = self.recv(len(target))
        target[: len(part)] = part
        return len(part)

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        return sum(map(len, parts))

    def setsockopt(self, *_: object) -> None:
        """Nothing is to wait for."""

    settimeout = shutdown = setsockopt

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
    limits = HostLimits()
    return Shared(
        disks={0: ExportedDisk(0, device, 4)},
        sessions=CallerSessions(16),
        arena=BufferPool(ByteBudget(16 * MIB)),
        limits=limits,
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
        _request("open", handle=_HANDLE, path="objects/a/@1"),
        _request("read", handle=_HANDLE, offset=0, nbytes=4096, whole=False),
        _request("close", handle=_HANDLE),
    ]
    others = [
        _request("hello"),
        _request("usage"),
        _request("stamp", path="pool.json"),
        _request("listings", json.dumps(["objects", "objects/a"]).encode()),
        _request("write_small", b"{}", path="debts/x.json"),
        _request("read_small", path="debts/x.json", most=100),
        _request("counter_sector", name="horizon.json"),
        _request("hold", handle=_HANDLE, offset=0, nbytes=512),
        _request("delete", path="objects/a/@1"),
    ]
    return [b"".join(made), *made, *others, b"".join(others)]


def take_answers(data: bytes) -> None:
    """A caller of a service that answers so."""

    class CannedStream(WireStream):
        def silent(self) -> bool:
            return True

    def connected(_: object) -> WireStream:
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
    )
    for call in calls:
        with contextlib.suppress(HpstoreError, FileNotFoundError):
            call()
    device.close()


def _answer(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def answer_seeds() -> list[bytes]:
    hello = _answer(b'{"protocol":1,"mode":"direct","folds_names":false}')
    return [
        hello,
        hello + _answer(b"[1000,500,0,10,5,false]"),
        hello + _answer(b"[1,2,4096]") * 3,
        hello + _answer(b"f@1\0da\0\0") * 3,
        hello + _answer(b'{"error":"DeviceFull","text":"no room"}', 409) * 3,
        hello + _answer(b'{"error":"FileNotFoundError","text":"x"}', 409),
    ]


def take_listings(data: bytes) -> None:
    found = decode_listings(data)
    assert encode_listings(found) == data


HOST_TARGETS = (
    Target(
        name="host-listings",
        run=take_listings,
        seeds=lambda: [encode_listings([[("@1", False), ("a", True)], [], [("b\udc80", False)]])],
    ),
    *(
        (
            Target(name="host-requests", run=take_requests, seeds=request_seeds),
            Target(name="host-answers", run=take_answers, seeds=answer_seeds),
        )
        if HOSTS
        else ()
    ),
)
