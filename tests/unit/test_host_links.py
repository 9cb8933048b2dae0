"""Connections to a host's service and what goes wrong on them, without a service."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

import pytest

from hpstore.devices.horizon_guard import HORIZON
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_links import HostLinks
from hpstore.devices.link_errors import LinkErrors
from hpstore.errors import DeviceError, DeviceMissing, LockTimeout
from hpstore.format.host_calls import FAILED, REFUSED
from hpstore.runtime.wire_stream import WireStream, keep_alive

URL = "hpd://host/0"


def links() -> HostLinks:
    return HostLinks(URL, ("localhost", 1, 0), 1.0, None)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("localhost", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


def test_the_kernel_gives_a_silent_host_up_with_an_answer_under_way() -> None:
    """No probes are sent while bytes are not acknowledged: the limit of these counts then."""
    with socket.socket() as sock:
        keep_alive(sock)
        limit_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == 30_000


@pytest.mark.parametrize("operation", ["hello", "stamp", "usage", "probe", "read_small"])
@pytest.mark.parametrize(
    "kind", ["LockTimeout", "RecordReplaced", "HorizonPassed", "ReadAbandoned", "KeyError", ""]
)
def test_a_host_that_answers_nonsense_is_one_disk_that_failed(operation: str, kind: str) -> None:
    """Whatever it calls its error: any other kind would keep a pool shut that can do without it."""
    data = json.dumps({"error": kind, "text": "no"}).encode()
    with pytest.raises(DeviceError, match="no"):
        LinkErrors(URL).raise_answer(operation, FAILED, data)


def test_absent_is_said_of_files_alone() -> None:
    data = json.dumps({"error": "FileNotFoundError", "text": "no"}).encode()
    for operation in ("open", "read_small"):
        with pytest.raises(FileNotFoundError):
            LinkErrors(URL).raise_answer(operation, FAILED, data)
    for operation in ("hello", "stamp", "listings"):
        with pytest.raises(DeviceError):
            LinkErrors(URL).raise_answer(operation, FAILED, data)
    told = json.dumps({"error": "LockTimeout", "text": "no"}).encode()
    with pytest.raises(LockTimeout):
        LinkErrors(URL).raise_answer("hold", FAILED, told)


def test_a_name_that_no_host_can_have_is_a_missing_device() -> None:
    for host in ("a..b", "x" * 64 + ".net"):
        with pytest.raises(DeviceMissing):
            HostLinks(URL, (host, 1, 0), 1.0, None).call("hello")


def test_a_child_lets_go_of_connections_in_calls_of_other_threads() -> None:
    """And closing takes no lock that a thread of the parent may have had."""
    ours, theirs = tcp_pair()
    made = links()
    made._streams.add(stream := WireStream(ours))
    with made._lock:
        child = os.fork()
        if not child:
            made.close()
            os._exit(0 if stream._sock.fileno() < 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream.close()
    theirs.settimeout(5)
    assert theirs.recv(1) == b""
    theirs.close()


def test_what_a_refused_call_gave_up_is_given_up_again() -> None:
    """The service looks at who calls before it looks at that."""
    ours, theirs = tcp_pair()
    theirs.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % REFUSED)
    made = links()
    made._receive(WireStream(ours), "open", ["a", "b"], None, 5.0)
    assert list(made._closed) == ["a", "b"]
    made.close()
    theirs.close()


def test_the_sector_that_is_sent_is_the_one_that_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PROTOCOL 12: another thread notes a newer horizon in between, which was not judged."""
    device: Any = HostDevice.__new__(HostDevice)
    device.url, device._sectors = URL, {HORIZON: b"old"}

    def fetched(_: str) -> bytes:
        raising = threading.Thread(target=lambda: device._sectors.update({HORIZON: b"raised"}))
        raising.start()
        raising.join()
        return b"now"

    monkeypatch.setattr(device, "_sector", fetched)
    looked_at: list[bytes] = []

    class Guard:
        def check_sector(self, sector: bytes, _: str) -> None:
            looked_at.append(sector)
            if sector == b"old":
                raise LockTimeout("too old")

    assert device.checked_horizon(Guard()) == b"now"
    assert looked_at == [b"old", b"now"]
