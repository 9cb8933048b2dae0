"""tls = "control": calls by mutual TLS, bodies of open files by their handles without."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")
pytest.importorskip("cryptography", reason="needs the extra hosts")

import hpstore
from hpstore.config import Settings
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_links import HostLinks
from hpstore.devices.link_errors import HandleGone
from hpstore.devices.local import LocalDevice
from hpstore.errors import ConfigError, DeviceDenied, DeviceError, DeviceMissing
from hpstore.format.host_calls import Json
from hpstore.hosts.admission import admit_certified
from hpstore.hosts.caller_roles import CallerRole
from hpstore.hosts.caller_sessions import CallerSessions, HeldFile, UnknownHandle
from hpstore.hosts.certificates import make_caller, make_host
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_service import HostService
from hpstore.runtime.mutual_tls import TlsFiles
from hpstore.runtime.wire_stream import WireStream
from hpstore.testing import PAGE, fetch, pattern, store
from hpstore.units import MIB
from tests.hosts.rig import RigHost

PATH = "objects/a/@1"


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    make_host(tmp_path / "tls", "a", ["127.0.0.1"], 30)
    for role in CallerRole:
        make_caller(tmp_path / "tls", role.name.lower(), role, 30)
    return tmp_path / "tls"


@pytest.fixture
def service(tls: Path, tmp_path: Path) -> Iterator[HostService]:
    admit = admit_certified(TlsFiles(tls / "hosts/a", server=True))
    with HostService("127.0.0.1", 0, admit=admit, data_port=0) as made:
        (tmp_path / "disk").mkdir()
        device = LocalDevice(str(tmp_path / "disk"))
        device.prepare()
        made.export(device)
        yield made


def device_of(service: HostService, tls: Path, role: str, *, plain: bool = True) -> HostDevice:
    secure = TlsFiles(tls / "callers" / role, server=False).call
    url = f"hpd://127.0.0.1:{service.address[1]}/0"
    return HostDevice(url, seconds=10.0, secure=secure, plain_bodies=plain)


def data_port(service: HostService) -> int:
    port = service._shared.data_port
    assert port is not None
    return port


def test_bodies_go_by_their_own_port_and_all_else_by_tls(
    service: HostService, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by what either kind of connection is asked for; callers of "mutual" go on, too."""
    device = device_of(service, tls, "keeper")
    asked: dict[str, list[str]] = {"tls": [], "plain": []}
    plain = HostLinks.call

    def call(self: HostLinks, operation: str, *arguments: object, **options: object) -> bytes:
        asked["plain" if self is device.bodies else "tls"].append(operation)
        return plain(self, operation, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(HostLinks, "call", call)
    data = pattern(5 * MIB)
    store(device, PATH, data)
    assert fetch(device, PATH) == data.tobytes()
    assert set(asked["plain"]) == {"write", "read"}
    assert not {"write", "read"} & set(asked["tls"])
    assert {"create", "commit", "open"} <= set(asked["tls"])
    other = device_of(service, tls, "reader", plain=False)
    assert fetch(other, PATH) == data.tobytes()
    other.close()
    device.close()


def _answers(port: int, operation: str, args: Json, body: bytes = b"") -> tuple[int, bytes]:
    """What the port for bodies says to whoever connects."""
    head = (
        f"POST /v1/0/{operation} HTTP/1.1\r\nHpd-Session: {'0' * 32}\r\nHpd-Deadline-Ms: 5000\r\n"
        f"Hpd-Args: {json.dumps(args)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(head.encode() + body)
        stream = WireStream(sock)
        found = stream.head(10, 10)
        assert found is not None
        return int(found.split()[1]), found


def test_without_a_handle_the_port_for_bodies_gives_and_takes_nothing(
    service: HostService, tls: Path
) -> None:
    """No call but read and write; none with a handle that is not open, or of another kind; and one
    that was given up is over there, too."""
    device = device_of(service, tls, "keeper")
    store(device, PATH, pattern(2 * MIB))
    port, page = data_port(service), b"x" * PAGE
    calls: tuple[tuple[str, Json], ...] = (
        ("hello", {}),
        ("open", {"handle": "a" * 32, "path": PATH, "ahead": 0}),
        ("delete", {"path": PATH}),
        ("look", {"usage": True}),
        ("records_read", {}),
        ("data_port", {}),
    )
    for operation, args in calls:
        assert _answers(port, operation, args)[0] == 400
    wanted: Json = {"offset": 0, "nbytes": PAGE, "whole": False}
    assert _answers(port, "read", {"handle": "a" * 32, **wanted})[0] == 410
    assert _answers(port, "write", {"handle": "a" * 32, "offset": 0}, page)[0] == 410
    reader = device.open(PATH)
    handle = reader._handle
    assert _answers(port, "read", {"handle": handle, **wanted})[0] == 200
    assert (
        _answers(port, "write", {"handle": handle, "offset": 0}, page)[0] == 409
    )  # open for reading
    assert fetch(device, PATH) == pattern(2 * MIB).tobytes()
    reader.close()
    device.usage()  # takes the closed handle along
    assert _answers(port, "read", {"handle": handle, **wanted})[0] == 410
    device.close()


def test_handles_are_of_128_bits_that_the_caller_draws(service: HostService, tls: Path) -> None:
    """And no caller can take or use one of another session over TLS."""
    one, two = device_of(service, tls, "keeper"), device_of(service, tls, "writer")
    store(one, PATH, pattern(2 * MIB))
    readers = [one.open(PATH) for _ in range(20)]
    handles = {reader._handle for reader in readers}
    assert len(handles) == 20
    assert all(len(bytes.fromhex(handle)) == 16 for handle in handles)
    taken = readers[0]._handle
    two._links.keep_session()
    with pytest.raises(DeviceError, match="in use"):
        two._links.call("create", {"handle": taken, "nbytes": PAGE, "vital": False})
    with pytest.raises(DeviceError, match="no such handle"):
        two._links.call("read", {"handle": taken, "offset": 0, "nbytes": PAGE, "whole": False})
    two._links.call("close", {"handle": taken})
    target = pattern(PAGE)
    readers[0].read_into(MIB, target)  # it is open still
    for reader in readers:
        reader.close()
    one.close()
    two.close()


def test_a_session_that_ends_takes_its_handles_from_the_port_for_bodies(
    service: HostService, tls: Path
) -> None:
    device = device_of(service, tls, "keeper")
    store(device, PATH, pattern(2 * MIB))
    handle = device.open(PATH)._handle
    device._links.close()
    other = device_of(service, tls, "reader")
    for _ in range(200):  # until the service has seen the end of the connections
        status, _found = _answers(
            data_port(service),
            "read",
            {"handle": handle, "offset": 0, "nbytes": PAGE, "whole": False},
        )
        if status == 410:
            break
        other.usage()
    assert status == 410
    other.close()
    device.close()


def test_a_handle_whose_session_ends_between_two_looks_is_unknown() -> None:
    """On the port for bodies no connection keeps the session."""
    sessions, key = CallerSessions(4), ("who", "0" * 32)
    sessions.join(key)
    sessions.keep(key, "a" * 32, HeldFile("item", 0, lambda: None))
    assert sessions.holder("a" * 32, 0) == key
    with pytest.raises(UnknownHandle):
        sessions.holder("a" * 32, 1)
    sessions.leave(key)
    with pytest.raises(UnknownHandle), sessions.use(key, "a" * 32, 0):
        pass
    with pytest.raises(UnknownHandle):
        sessions.holder("a" * 32, 0)


def test_a_handle_that_was_given_up_before_it_was_there_is_not_held() -> None:
    """The call that makes it waits at the disk; who sent it has gone on, and named it no more."""
    sessions, key, ended = CallerSessions(4), ("who", "0" * 32), list[str]()
    sessions.join(key)
    sessions.drop(key, "a" * 32)
    with pytest.raises(DeviceError, match="given up"):
        sessions.keep(key, "a" * 32, HeldFile("item", 0, lambda: ended.append("a")))
    assert ended == ["a"]
    assert not sessions.holds(key)


def test_a_handle_is_good_no_longer_than_the_certificate_of_who_opened_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An idle connection over TLS keeps its session for good; a renewed certificate goes on."""
    sessions, key, now = CallerSessions(4), ("who", "0" * 32), [100.0]
    monkeypatch.setattr("hpstore.hosts.caller_sessions.time.monotonic", lambda: now[0])
    sessions.join(key, 200.0)
    sessions.keep(key, "a" * 32, HeldFile("item", 0, lambda: None))
    assert sessions.holder("a" * 32, 0) == key
    now[0] = 201.0
    with pytest.raises(UnknownHandle, match="certificate"):
        sessions.holder("a" * 32, 0)
    sessions.join(key, 300.0)
    assert sessions.holder("a" * 32, 0) == key


def test_the_service_tells_its_sessions_when_certificates_end(
    service: HostService, tls: Path
) -> None:
    device = device_of(service, tls, "keeper")
    store(device, PATH, pattern(2 * MIB))
    reader = device.open(PATH)
    (session,) = service._shared.sessions._sessions.values()
    assert session.until_seconds < time.monotonic() + 31 * 86400
    session.until_seconds = time.monotonic() - 1.0  # a month later
    with pytest.raises(HandleGone, match="certificate"):
        device.bodies.call(
            "read", {"handle": reader._handle, "offset": 0, "nbytes": PAGE, "whole": False}
        )
    reader.close()
    device.close()


@pytest.mark.parametrize("body_bytes", [0, 4 * MIB])
def test_who_shows_no_handle_is_not_kept_by_asking_again(tmp_path: Path, body_bytes: int) -> None:
    """Neither by handles that nobody has, nor by a body that comes a byte at a time."""
    limits = HostLimits(head_seconds=0.5)
    (tmp_path / "disk").mkdir()
    with HostService("127.0.0.1", 0, limits=limits, data_port=0) as made:
        made.export(LocalDevice(str(tmp_path / "disk")))
        args = json.dumps({"handle": "a" * 32, "offset": 0})
        head = (
            f"POST /v1/0/write HTTP/1.1\r\nHpd-Deadline-Ms: 5000\r\nHpd-Args: {args}\r\n"
            f"Content-Length: {body_bytes}\r\n\r\n"
        ).encode()
        with socket.create_connection(("127.0.0.1", data_port(made)), 10) as sock:
            sock.settimeout(0.1)
            if body_bytes:
                sock.sendall(head)
            ended = False
            for _ in range(50):
                with contextlib.suppress(OSError):
                    sock.sendall(b"x" if body_bytes else head)
                try:
                    ended = not sock.recv(65536)
                except TimeoutError:
                    continue
                except OSError:
                    ended = True
                if ended:
                    break
                time.sleep(0.1)
            assert ended


def test_roles_hold_for_control_and_a_service_without_the_port_is_refused(
    service: HostService, tls: Path, tmp_path: Path
) -> None:
    """No silent way round: neither TLS for bodies nor none for control."""
    reader = device_of(service, tls, "reader")
    with pytest.raises(DeviceDenied, match="needs the role writer"):
        reader.create(PAGE)
    reader.close()
    with pytest.raises((DeviceMissing, DeviceError)):
        HostDevice(f"hpd://127.0.0.1:{service.address[1]}/0", seconds=5.0)
    admit = admit_certified(TlsFiles(tls / "hosts/a", server=True))
    with HostService("127.0.0.1", 0, admit=admit) as mutual:
        (tmp_path / "other").mkdir()
        mutual.export(LocalDevice(str(tmp_path / "other")))
        with pytest.raises(DeviceError, match="--tls control"):
            device_of(mutual, tls, "reader")


def test_a_pool_over_hosts_with_plain_bodies(tls: Path, tmp_path: Path) -> None:
    """Put, get, conditional put, all with a certificate; no body of a column by TLS."""
    hosts = []
    for name in "abc":
        places = [tmp_path / f"{name}{i}" for i in range(2)]
        for place in places:
            place.mkdir()
        hosts.append(RigHost(name, places, tls="control", certificates=str(tls / "hosts/a")))
    data = pattern(20 * MIB).tobytes()
    try:
        for host in hosts:
            host.start()
        settings = Settings(
            memory_bytes=64 * MIB,
            run_directory=str(tmp_path / "run"),
            tls="control",
            certificates=str(tls / "callers/keeper"),
        )
        with hpstore.create(
            [url for host in hosts for url in host.urls()],
            data=4,
            parity=2,
            config=tmp_path / "pool.toml",
            domains=[name for name in "abc" for _ in range(2)],
            settings=settings,
        ) as pool:
            pool.put("big", data)
            pool.put("small", b"x", if_absent=True)
            assert bytes(pool.get("big")) == data
            assert bytes(pool.get("small")) == b"x"
    finally:
        for host in hosts:
            if host.process is not None:
                host.kill()


def test_a_setting_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match='"control"'):
        Settings(tls="some")
