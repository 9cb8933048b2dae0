"""What a host's service does with bytes that no client of ours sends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

from hpstore.devices.host_device import HostDevice
from hpstore.devices.local import LocalDevice
from hpstore.errors import DeviceError, DeviceTimeout
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_service import HostService
from hpstore.testing import PAGE, fetch, pattern, store

SESSION = "0" * 32
LIMITS = HostLimits(
    connections=6,
    connections_of_peer=6,
    calls_of_disk=2,
    handles=3,
    idle_seconds=0.5,
    head_seconds=0.5,
    body_seconds=0.5,
)


class HungDevice(LocalDevice):
    """Hangs in stat() until it is let go."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.free = threading.Event()
        self.entered = threading.Semaphore(0)

    def stamp(self, path: str) -> tuple[int, int, int] | None:
        self.entered.release()
        self.free.wait(30)
        return super().stamp(path)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[HostService]:
    with HostService("127.0.0.1", 0, limits=LIMITS) as made:
        for name in ("d0", "d1"):
            (tmp_path / name).mkdir()
            device = (LocalDevice if name == "d0" else HungDevice)(str(tmp_path / name))
            device.prepare()
            made.export(device)
        yield made


def call(operation: str = "usage", disk: int = 0, *, body: bytes = b"", **args: object) -> bytes:
    """A request that is right."""
    text = json.dumps(args)
    return (
        f"POST /v1/{disk}/{operation} HTTP/1.1\r\nHost: x\r\nHpd-Session: {SESSION}\r\n"
        f"Hpd-Deadline-Ms: 500\r\nHpd-Args: {text}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode("ascii") + body


def connect(service: HostService) -> socket.socket:
    return socket.create_connection(service.address, 10)


def answer(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body; (0, b"") when the connection ends first."""
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            part = sock.recv(65536)
            if not part:
                return 0, b""
            data += part
    except ConnectionError:
        return 0, b""
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return int(head[9:12]), body


def ended(sock: socket.socket) -> bool:
    """Whether the service closes the connection."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


RIGHT = call()
WRONG: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200 + b"\r\n\r\n",
    "GET": RIGHT.replace(b"POST", b"GET"),
    "HTTP/1.0": RIGHT.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\n",
    "bare line feeds": RIGHT.replace(b"\r\n", b"\n", 2),
    "chunked": RIGHT.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"),
    "chunked and a length": RIGHT.replace(b"Host: x", b"Transfer-Encoding: chunked"),
    "two lengths": RIGHT.replace(b"Host: x", b"Content-Length: 0"),
    "a negative length": RIGHT.replace(b"Length: 0", b"Length: -1"),
    "a length in hex": RIGHT.replace(b"Length: 0", b"Length: 0x0"),
    "a length of 20 digits": RIGHT.replace(b"Length: 0", b"Length: " + b"9" * 20),
    "a huge body": RIGHT.replace(b"Length: 0", b"Length: 99999999999"),
    "a body where none is": call(body=b"x"),
    "a folded field": RIGHT.replace(b"Host: x", b"Host: x\r\n y"),
    "a NUL": RIGHT.replace(b"Host: x", b"Host: \0"),
    "no ASCII": RIGHT.replace(b"Host: x", b"Host: \xff"),
    "a field twice": RIGHT.replace(b"Host: x", b"Hpd-Args: {}"),
    "an upgrade": RIGHT.replace(b"Host: x", b"Connection: upgrade\r\nUpgrade: h2c"),
    "no session": RIGHT.replace(SESSION.encode(), b"1"),
    "no deadline": RIGHT.replace(b"Hpd-Deadline-Ms", b"Hpd-Other"),
    "a deadline of no number": RIGHT.replace(b"-Ms: 500", b"-Ms: soon"),
    "handles that are none": RIGHT.replace(b"Host: x", b"Hpd-Close: ../../x"),
    "arguments that are no JSON": RIGHT.replace(b"{}", b"{"),
    "nested arguments": RIGHT.replace(b"{}", b"[" * 3000),
    "arguments of another type": RIGHT.replace(b"{}", b"[]"),
    "another target": RIGHT.replace(b"/v1/0/", b"/v1/0/../"),
    "a disk of minus one": RIGHT.replace(b"/v1/0/", b"/v1/-1/"),
    "an operation that is none": call("__class__"),
    "an argument too many": call("usage", path="objects/a"),
    "an argument too few": call("stamp"),
    "a size of no number": call("create", handle="0" * 32, nbytes="1e9", vital=False),
    "a size that is a flag": call("create", handle="0" * 32, nbytes=True, vital=False),
    "a negative size": call("create", handle="0" * 32, nbytes=-1, vital=False),
    "a handle that is none": call("sync", handle="x"),
    "a write that is not aligned": call("write", handle="0" * 32, offset=0, body=b"x" * 100),
    "a counter that is none": call("counter_sector", name="pool.json"),
    "a sector that is none": call(
        "swap_counter_sector", name="mark.json", expected_bytes=0, body=b"x" * 512
    ),
    "too many directories": call("listings", body=json.dumps(["objects"] * 2000).encode()),
    "a look at no disk": call("look", usage=False, body=b"[]"),
    "a look at a disk twice": call("look", usage=False, body=b"[[0,[]],[0,[]]]"),
    "a look at a disk of minus one": call("look", usage=False, body=b"[[-1,[]]]"),
    "a look at too many directories": call(
        "look", usage=False, body=json.dumps([[0, ["objects"] * 2000]]).encode()
    ),
    "a file of no whole pages": call(
        "new_file", handle="0" * 32, vital=False, sync=True, body=b"x" * 100
    ),
    "ends of a file that are no whole pages": call(
        "seal", handle="0" * 32, offset=4096, first=4096, body=bytes(4097)
    ),
    "a file without its end": call(
        "seal", handle="0" * 32, offset=4096, first=4096, body=bytes(4096)
    ),
    "a file of nothing": call("new_file", handle="0" * 32, vital=False, sync=True),
    "a file that is too large for one request": call(
        "new_file", handle="0" * 32, vital=False, sync=True, body=bytes(513 << 10)
    ),
    "more ahead than there may be": call(
        "open", handle="0" * 32, path="objects/a/@1", ahead=1 << 20, tail=0
    ),
    "a name into tmp": call("delete", path="tmp/x"),
    "a commit beside objects": call(
        "commit", handle="0" * 32, path="debts/x", guarded=False, record=None
    ),
}
PATHS = (
    "/etc/passwd",
    "..",
    "../d1/hpstore.json",
    "objects/../../x",
    "objects//x",
    "objects/./x",
    "objects/a\0b",
    "",
    "objects",
    "objects/",
    "x/y",
    "Objects/x",
    "a" * 5000,
    "objects/" + "a" * 256,
    ".hidden",
    "hpstore.json/x",
)


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_is_no_request_is_refused(service: HostService, what: str) -> None:
    """With a status of 400 or so, and the connection ends; the service goes on."""
    with connect(service) as sock:
        sock.sendall(WRONG[what])
        status, _ = answer(sock)
        assert status in (400, 413), what
        assert ended(sock)
    with connect(service) as sock:
        sock.sendall(RIGHT)
        assert answer(sock)[0] == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_path_stays_below_the_disk(service: HostService, path: str, tmp_path: Path) -> None:
    """Every operation that takes one refuses another form; nothing is made or removed."""
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    handle = "0" * 32
    for request in (
        call("stamp", path=path),
        call("open", handle=handle, path=path, ahead=0, tail=0),
        call("read_small", path=path, most=100),
        call("write_small", path=path, body=b"x"),
        call("delete", path=path),
        call("retire", path=path),
        call("quarantine", path=path),
        call("sync_directory", path=path),
        call("commit", handle=handle, path=path, guarded=False, record=None),
        call(
            "listings", body=json.dumps([path if path not in ("", "objects") else "x/y"]).encode()
        ),
        call(
            "look",
            usage=False,
            body=json.dumps([[0, [path if path not in ("", "objects") else "x/y"]]]).encode(),
        ),
    ):
        with connect(service) as sock:
            sock.sendall(request)
            assert answer(sock)[0] in (0, 400), request
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_links_on_a_disk_lead_nowhere(service: HostService, tmp_path: Path) -> None:
    """A symbolic link below objects/ is an error, not a file of the host."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "d0/objects/a").symlink_to(tmp_path)
    with connect(service) as sock:
        sock.sendall(call("read_small", path="objects/a/secret", most=100))
        status, body = answer(sock)
    assert status == 409
    assert b"secret" not in body.replace(b"objects/a/secret", b"")


def test_a_head_without_end_is_cut(service: HostService) -> None:
    """At 8 KiB, and after head_seconds however slowly it comes."""
    with connect(service) as sock:
        sock.sendall(b"POST /v1/0/usage HTTP/1.1\r\nX: " + b"a" * 9000)
        assert answer(sock)[0] in (0, 400)
    with connect(service) as sock:
        began = time.monotonic()
        while time.monotonic() < began + 20 and sends(sock, b"P"):
            time.sleep(0.05)  # the peer is slow: that is what is tested
        assert time.monotonic() - began < 15


def sends(sock: socket.socket, data: bytes) -> bool:
    """Whether the connection takes it."""
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


def test_a_body_that_does_not_come_is_cut(service: HostService) -> None:
    with connect(service) as sock:
        sock.sendall(call("write_small", path="debts/x", body=b"x" * 100)[:-50])
        assert ended(sock)


@pytest.mark.parametrize(("connections", "of_peer"), [(4, 99), (99, 4)])
def test_connections_have_a_limit(connections: int, of_peer: int, tmp_path: Path) -> None:
    """One more, of all or of one address, is closed at once; when one of them ends there is room
    again."""
    limits = replace(LIMITS, connections=connections, connections_of_peer=of_peer, idle_seconds=60)
    with HostService("127.0.0.1", 0, limits=limits) as service:
        device = LocalDevice(str(tmp_path))
        device.prepare()
        service.export(device)
        others = [connect(service) for _ in range(4)]
        for sock in others:
            sock.sendall(RIGHT)
            assert answer(sock)[0] == 200
        with connect(service) as sock:
            assert not sends(sock, RIGHT) or answer(sock)[0] == 0
        for sock in others:
            sock.close()
        assert until(lambda: answers(service))


def answers(service: HostService) -> bool:
    with connect(service) as sock:
        sock.sendall(RIGHT)
        return answer(sock)[0] == 200


def until(true: Callable[[], bool]) -> bool:
    """Wait for what another thread makes true."""
    limit = time.monotonic() + 60
    while not true() and time.monotonic() < limit:
        time.sleep(0.01)
    return true()


def held(service: HostService) -> int:
    return service._shared.sessions._count


def test_what_a_process_held_is_given_up_with_its_last_connection(
    service: HostService, tmp_path: Path
) -> None:
    """Readers' locks and unfinished files; while one connection is open, nothing is. A connection
    that is idle stays while the session holds something."""
    host, port = service.address
    device = HostDevice(f"hpd://{host}:{port}/0", seconds=5.0)
    store(device, "objects/a/@1", pattern(64 * PAGE))
    writer, reader = device.create(PAGE), device.open("objects/a/@1")
    writer.write(0, [pattern(PAGE)])
    assert held(service) == 2
    time.sleep(3 * LIMITS.idle_seconds)  # of idleness
    assert held(service) == 2
    assert len(os.listdir(tmp_path / "d0/tmp")) == 1
    device.close()  # as the kernel does for a process that dies
    assert until(lambda: held(service) == 0)
    assert os.listdir(tmp_path / "d0/tmp") == []
    target = pattern(PAGE, 1)
    reader.read_into(PAGE, target)  # opened again: it is the same file
    assert target.tobytes() == pattern(64 * PAGE)[PAGE : 2 * PAGE].tobytes()
    store(device, "objects/a/@1", pattern(64 * PAGE, 2))
    device.close()
    assert until(lambda: held(service) == 0)
    with pytest.raises(DeviceError, match="not the file any more"):
        reader.read_into(PAGE, target)
    with pytest.raises(DeviceError, match="no such handle"):
        writer.sync()


def test_an_idle_connection_that_holds_nothing_is_closed(service: HostService) -> None:
    with connect(service) as sock:
        sock.sendall(RIGHT)
        assert answer(sock)[0] == 200
        assert ended(sock)


def test_handles_belong_to_their_session_and_disk(service: HostService) -> None:
    """Those of another process are unknown, and there is a limit on all together."""
    handle, other = "1" * 32, RIGHT.replace(SESSION.encode(), b"f" * 32)
    with connect(service) as sock, connect(service) as stranger:
        sock.sendall(call("create", handle=handle, nbytes=PAGE, vital=False))
        assert answer(sock)[0] == 200
        for disk, session in ((1, SESSION), (0, "f" * 32)):
            with connect(service) as third:
                third.sendall(
                    call("sync", disk, handle=handle).replace(SESSION.encode(), session.encode())
                )
                assert answer(third)[0] == 410
        sock.sendall(call("create", handle=handle, nbytes=PAGE, vital=False))
        assert b"in use" in answer(sock)[1]
        sock.sendall(call("create", handle="2" * 32, nbytes=PAGE, vital=False))
        assert answer(sock)[0] == 200
        sock.sendall(call("create", handle="3" * 32, nbytes=PAGE, vital=False))
        assert answer(sock)[0] == 200
        stranger.sendall(other.replace(b"usage", b"hello"))
        assert answer(stranger)[0] == 200
        sock.sendall(call("create", handle="4" * 32, nbytes=PAGE, vital=False))
        assert b"limit of this service" in answer(sock)[1]
        sock.sendall(call("read", handle=handle, offset=0, nbytes=PAGE, whole=False))
        assert b"not of what the call is for" in answer(sock)[1]
        sock.sendall(other)
        assert answer(sock)[0] == 400  # a connection belongs to one session
        assert ended(sock)


def test_a_hung_disk_holds_no_other_and_so_many_threads(
    service: HostService, tmp_path: Path
) -> None:
    """Two calls hang in it; a third is not made, and says so at its deadline; the other disk
    answers all the time."""
    device = service._disks[1].device
    assert isinstance(device, HungDevice)
    with connect(service) as first, connect(service) as second, connect(service) as third:
        for sock in (first, second):
            sock.sendall(call("stamp", 1, path="pool.json"))
            assert device.entered.acquire(timeout=10)
        third.sendall(call("stamp", 1, path="pool.json"))
        assert answers(service)
        status, body = answer(third)
        assert (status, json.loads(body)["error"]) == (409, DeviceTimeout.__name__)
        device.free.set()
        assert answer(first) == (200, b"null")
        assert answer(second) == (200, b"null")


def test_an_error_within_a_body_leaves_the_connection_in_step(service: HostService) -> None:
    """What is sent to a handle that is gone is received and thrown away; the next call is read from
    its beginning."""
    with connect(service) as sock:
        sock.sendall(call("write", handle="9" * 32, offset=0, body=RIGHT.ljust(64 * PAGE)))
        assert answer(sock)[0] == 410
        sock.sendall(RIGHT)
        assert answer(sock)[0] == 200


def test_a_read_that_fails_in_its_middle_says_why(service: HostService, tmp_path: Path) -> None:
    """A file that was cut: the answer is cut, too, and the second try has the error."""
    host, port = service.address
    device = HostDevice(f"hpd://{host}:{port}/0", seconds=5.0)
    store(device, "objects/a/@1", pattern(1024 * PAGE))
    reader = device.open("objects/a/@1")
    os.truncate(tmp_path / "d0/objects/a/@1", 700 * PAGE)
    with pytest.raises(DeviceError, match="file ends at"):
        reader.read_into(0, pattern(1024 * PAGE))
    assert held(service) == 1  # a cut answer costs no handle
    assert fetch(device, "objects/a/@1") == pattern(1024 * PAGE).tobytes()[: 700 * PAGE]
    device.close()


def test_a_fork_while_a_call_is_counted_leaves_the_child_its_calls(service: HostService) -> None:
    """The thread that holds the lock of the counters is not in the child."""
    host, port = service.address
    device = HostDevice(f"hpd://{host}:{port}/0", seconds=5.0)
    with device.link._lock:
        pid = os.fork()
        if not pid:  # the child
            signal.alarm(10)
            status = 1
            with contextlib.suppress(BaseException):
                device.usage()
                status = 0
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    device.close()


def test_a_forked_child_is_another_process(service: HostService) -> None:
    """It has connections and a session of its own, reads what the parent had open by opening it
    again, and does not keep the parent's session alive."""
    host, port = service.address
    device = HostDevice(f"hpd://{host}:{port}/0", seconds=5.0)
    store(device, "objects/a/@1", pattern(64 * PAGE))
    reader = device.open("objects/a/@1")
    here, there = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:  # the child
        os.close(there[1])
        status = 1
        with contextlib.suppress(BaseException):
            target = pattern(PAGE, 1)
            reader.read_into(PAGE, target)
            status = int(target.tobytes() != pattern(64 * PAGE)[PAGE : 2 * PAGE].tobytes())
            os.write(here[1], b"x")
            os.read(there[0], 1)  # it lives on
        os._exit(status)
    try:
        assert os.read(here[0], 1) == b"x"
        assert held(service) == 2  # the parent's, and its own
        target = pattern(PAGE, 2)
        reader.read_into(PAGE, target)
        assert target.tobytes() == pattern(64 * PAGE)[PAGE : 2 * PAGE].tobytes()
        device.close()
        assert until(lambda: held(service) == 1)  # its copies of the connections are closed
        os.write(there[1], b"x")
        assert until(lambda: held(service) == 0)
    finally:
        os.close(there[1])  # the child ends
        ended_as = os.waitpid(pid, 0)[1]
    assert ended_as == 0
    for descriptor in (*here, there[0]):
        os.close(descriptor)
