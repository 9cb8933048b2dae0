"""What endpoints of etcd may answer, or not: bounds of size and time, and the next endpoint."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hpstore.agreement import etcd_gateway
from hpstore.agreement.etcd_gateway import (
    ClientCertificates,
    EtcdGateway,
    decode_range,
    decode_swap,
)
from hpstore.agreement.register_url import EtcdUrl, parse_register_url
from hpstore.errors import ConfigError, IntegrityError, RegistersUnavailable

LENGTH = b"Content-Length:"
HEADER = {"cluster_id": "1", "revision": "7"}
KEY = base64.b64encode(b"/hpstore/p/a").decode()


def http(body: bytes, *, status: str = "200 OK", length: int | None = None) -> bytes:
    """An answer of a server."""
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def found(value: bytes = b"v", **changed: object) -> bytes:
    """A record, as etcd answers."""
    row = {"key": KEY, "mod_revision": "7", "value": base64.b64encode(value).decode(), **changed}
    return json.dumps({"header": HEADER, "kvs": [row], "count": "1"}).encode()


class Server:
    """Answers each request with `answer`, a piece at a time; counts requests."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.requests, self._answer = 0, answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, name="server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5.0)
                with suppress(OSError), connection.makefile("rb") as received:
                    size = 0
                    for line in received:
                        if line.startswith(LENGTH):
                            size = int(line.removeprefix(LENGTH))
                        if line == b"\r\n":
                            received.read(size)
                            self.requests += 1
                            self._answer(connection)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10.0)


def saying(data: bytes) -> Callable[[socket.socket], None]:
    """All of it at once."""
    return lambda connection: connection.sendall(data)


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[socket.socket], None]], Server]]:
    with ExitStack() as stack:

        def start(answer: Callable[[socket.socket], None]) -> Server:
            server = Server(answer)
            stack.callback(server.close)
            return server

        yield start


Serve = Callable[[Callable[[socket.socket], None]], Server]


def gateway(*servers: Server) -> EtcdGateway:
    url = parse_register_url("etcd://" + ",".join(f"127.0.0.1:{s.port}" for s in servers))
    assert isinstance(url, EtcdUrl)
    return EtcdGateway(
        EtcdUrl(endpoints=url.endpoints, prefix="/hpstore", tls=False), "p", ClientCertificates()
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        http(b"", status="503 Service Unavailable"),
        http(b'{"error": "no leader"}', status="500 Internal"),
        http(b"<html>"),
        http(b"[]"),
        http(b'{"header": {}, "kvs": 7}'),
        http(found(mod_revision="x")),
        http(found(mod_revision="-1")),
        http(found(mod_revision="9" * 30)),
        http(found(key="other")),
        http(found(value=b"").replace(b'"value": ""', b'"value": "?"')),
        http(b"{", length=100),
    ],
)
def test_an_answer_that_is_none_is_unavailable_and_nothing_else(
    serve: Serve, answer: bytes
) -> None:
    """A retry may find another endpoint; a swap is not taken for made or refused."""

    def say(connection: socket.socket) -> None:
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)

    store = gateway(serve(say))
    with pytest.raises(RegistersUnavailable):
        store.read("a", 2.0)
    with pytest.raises(RegistersUnavailable):
        store.swap("a", b"x", "7", 2.0)
    store.close()


def test_an_answer_without_an_end_is_given_up_by_its_size_or_its_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes are announced and sent; or a byte now and then."""
    done = threading.Event()

    def flood(connection: socket.socket) -> None:
        connection.sendall(http(b"", length=1 << 40))
        while not done.is_set():
            connection.sendall(bytes(1 << 20))

    def drip(connection: socket.socket) -> None:
        connection.sendall(http(b"{", length=1 << 20))
        while not done.wait(0.05):
            connection.sendall(b" ")

    def drip_head(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not done.wait(0.05):
            connection.sendall(b"y")

    def drip_chunks(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not done.wait(0.05):
            connection.sendall(b"0")

    cases = [(flood, 30.0, "more than")]
    cases += [(one, 0.5, "did not end in time") for one in (drip, drip_head, drip_chunks)]
    for answer, seconds, reason in cases:
        monkeypatch.setattr(etcd_gateway, "ATTEMPT_SECONDS", seconds)
        store, began = gateway(serve(answer)), time.monotonic()
        with pytest.raises(RegistersUnavailable, match=f"{reason}|timed out"):
            store.swap("a", b"x", "7", seconds)
        assert time.monotonic() - began < 10.0
        store.close()
    done.set()


def test_a_swap_is_sent_to_one_endpoint_and_a_read_to_the_next_when_one_is_dead(
    serve: Serve,
) -> None:
    """What an endpoint may have done is not sent again behind the back of who decides that."""
    dead, good = serve(saying(b"no\r\n")), serve(saying(http(found())))
    store = gateway(dead, good)
    with pytest.raises(RegistersUnavailable):
        store.swap("a", b"x", "7", 2.0)
    assert (dead.requests, good.requests) == (1, 0)
    store.close()
    store = gateway(dead, good)
    assert store.read("a", 2.0).data == b"v"
    asked = dead.requests
    assert store.read("a", 2.0).revision == "7"
    assert dead.requests == asked  # the one that answered is asked first from then on
    store.close()


def test_an_endpoint_that_refuses_connections_was_not_asked(serve: Serve) -> None:
    """A swap goes to the next one."""
    gone = Server(saying(b""))
    gone.close()
    good = serve(saying(http(json.dumps({"header": HEADER, "succeeded": True}).encode())))
    store = gateway(gone, good)
    assert store.swap("a", b"x", "7", 2.0)
    assert next(iter(store.reachable(1.0).values()))
    store.close()


def test_connections_are_kept_and_one_that_the_server_has_closed_is_replaced(serve: Serve) -> None:
    """A restart of etcd costs no error of a read."""
    connections = []

    def once(connection: socket.socket) -> None:
        connections.append(connection)
        connection.sendall(http(found()))
        if len(connections) == 2:
            connection.shutdown(socket.SHUT_RDWR)

    store = gateway(serve(once))
    for _ in range(4):
        assert store.read("a", 2.0).data == b"v"
    assert len(set(map(id, connections))) == 2
    store.close()


def test_answers_of_etcd_are_read_as_they_are() -> None:
    """False is left out in JSON, as are empty lists and empty values."""
    assert decode_range(json.dumps({"header": HEADER}).encode(), KEY).revision == ""
    assert decode_range(found(b""), KEY).data == b""
    assert not decode_swap(json.dumps({"header": HEADER}).encode())
    assert decode_swap(json.dumps({"header": HEADER, "succeeded": True}).encode())
    for bad in (b"{}", b'{"header": 1}', b'{"header": {"revision": "1"}, "succeeded": "yes"}'):
        with pytest.raises(IntegrityError):
            decode_swap(bad)


def test_files_of_tls_that_are_missing_are_named() -> None:
    """With the settings that name them."""
    with pytest.raises(ConfigError, match=r"/none/ca.*registers_ca_file"):
        ClientCertificates(authority="/none/ca").context()


def test_an_encrypted_key_asks_nobody_for_its_passphrase(tmp_path: Path) -> None:
    """It was asked for on the terminal, while a lock was held."""
    x509 = pytest.importorskip("cryptography.x509", reason="needs the extra hosts")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (tmp_path / "crt").write_bytes(pem)
    (tmp_path / "key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    files = ClientCertificates(certificate=str(tmp_path / "crt"), private_key=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="the private key is encrypted"):
        files.context()
