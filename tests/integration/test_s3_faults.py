"""What a store does wrong: hostile answers, faults in the middle, uploads that were left."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from hpstore.devices import multipart_sweep
from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.remote_opener import open_remote
from hpstore.errors import (
    DeviceDenied,
    DeviceError,
    DeviceFull,
    DeviceMissing,
    DeviceTimeout,
    HpstoreError,
)
from hpstore.format.store_settings import StoreSettings
from hpstore.runtime.buffers import aligned_array
from hpstore.testing import PAGE, fetch, pattern, store
from hpstore.testing.device_contract import PATH
from hpstore.units import MIB
from tests.s3_servers import KEY, SECRET, S3Server

pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
_OWN_HEADERS = {"transfer-encoding", "content-length", "date", "server", "connection"}
_CLOSE = {"Connection": "close"}
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAST_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("EAST_SECRET_ACCESS_KEY", SECRET)


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """A server that answers every request so; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self)
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # joined at the end

        def handle_error(self, *_: Any) -> None:
            """A client that hangs up is expected here."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def device(endpoint: str, *, seconds: float = 5.0, bucket: str = "bucket/p") -> ObjectStoreDevice:
    stores = {"east": StoreSettings(endpoint=endpoint, credentials="env:EAST", region="us-east-1")}
    made = open_remote(f"s3://east@{bucket}", stores, deadline_seconds=seconds)
    assert isinstance(made, ObjectStoreDevice)
    return made


def says(status: int, body: str = "", **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        data = b"" if request.command == "HEAD" else body.encode()
        request.send_response(status)
        for name, value in {**headers, **_CLOSE, "Content-Length": str(len(data))}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(data)

    return answer


def xml(code: str) -> str:
    return f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEY}</AWSAccessKeyId>{SECRET}</Error>"


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (403, "SignatureDoesNotMatch", DeviceDenied, "does not take the key"),
        (403, "InvalidAccessKeyId", DeviceDenied, "does not take the key"),
        (403, "ExpiredToken", DeviceDenied, "session is over"),
        (403, "RequestTimeTooSkewed", DeviceDenied, "Set the clocks"),
        (403, "AccessDenied", DeviceDenied, "allows it no access"),
        (403, "QuotaExceeded", DeviceFull, "no space left"),
        (507, "", DeviceFull, "no space left"),
        (404, "NoSuchBucket", DeviceMissing, "bucket does not exist"),
        (400, "Nonsense", DeviceError, "HTTP 400 Nonsense"),
        (400, "<b>" * 50_000, DeviceError, "HTTP 400"),
    ],
)
def test_answers_are_told_apart(status: int, code: str, kind: type[DeviceError], text: str) -> None:
    """By PUT and by GET; the device is named, what the server wrote beside is not."""
    with served(says(status, xml(code))) as endpoint:
        made = device(endpoint)
        for call in (lambda: made.write_small("a", b"1"), lambda: made.read_small("a", 10)):
            with pytest.raises(HpstoreError, match=text) as caught:
                call()
            assert type(caught.value) is kind
            assert "s3://east@bucket/p" in str(caught.value)
            assert SECRET not in str(caught.value)
            assert len(str(caught.value)) < 500
            assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


def test_a_bucket_that_is_gone_holds_no_absent_files() -> None:
    """Not "there is no such file": that would be an answer of a device that works."""
    with served(says(404, xml("NoSuchBucket"))) as endpoint:
        made = device(endpoint)
        for call in (
            lambda: made.stamp("a"),
            lambda: made.delete("a"),
            lambda: made.open("a"),
            lambda: made.entries("objects"),
            lambda: made.counter("mark.json"),
        ):
            with pytest.raises(DeviceMissing, match="bucket does not exist"):
                call()


def test_an_overloaded_store_is_tried_again() -> None:
    """Twice SlowDown, then the answer; for ever: an error that says so."""
    asked: list[str] = []

    def twice(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.command)
        says(503, xml("SlowDown"))(request) if len(asked) < 3 else says(200, ETag='"1"')(request)

    with served(twice) as endpoint:
        device(endpoint).write_small("a", b"1")
    assert len(asked) == 3
    with (
        served(says(503, xml("SlowDown"))) as endpoint,
        pytest.raises(DeviceError, match="overloaded"),
    ):
        device(endpoint).write_small("a", b"1")


def test_a_store_that_hangs_ends_by_the_deadline() -> None:
    """Each call; the error is a timeout, which may have been carried out."""
    over = threading.Event()

    def hang(_: BaseHTTPRequestHandler) -> None:
        over.wait(30)

    with served(hang) as endpoint:
        made, began = device(endpoint, seconds=0.5), time.monotonic()
        for call in (lambda: made.write_small("a", b"1"), lambda: made.entries("objects")):
            with pytest.raises(DeviceTimeout):
                call()
        assert time.monotonic() - began < 15
        over.set()


def test_no_server_is_a_missing_device() -> None:
    with pytest.raises(DeviceMissing, match=r"no connection to http://127\.0\.0\.1:1"):
        device("http://127.0.0.1:1").entries("objects")


def _ranged(body: bytes, total: int, start: int = 0) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(206)
        end = int(request.headers["Range"].split("-")[1])
        request.send_header("Content-Range", f"bytes {start}-{min(end, total - 1)}/{total}")
        request.send_header("Last-Modified", "Mon, 30 Nov 2026 05:00:00 GMT")
        request.send_header("ETag", '"1"')
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(body)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        _ranged(bytes(64 * MIB), 100),
        _ranged(bytes(10), 1 << 40),
        says(200, "x" * 5000, Last_Modified="Mon, 30 Nov 2026 05:00:00 GMT"),
        says(206, "x" * 10),
        says(206, "x", Content_Range="bytes 9-0/5", Last_Modified="x"),
        says(200, "", Last_Modified="Mon, 30 Nov 2026 05:00:00 GMT"),
    ],
)
def test_bytes_that_were_not_asked_for_are_an_error(answer: Answer) -> None:
    """More than the range, less, another range, none: never more in memory than was asked for."""
    with served(answer) as endpoint:
        made = device(endpoint)
        with pytest.raises((DeviceError, FileNotFoundError)):
            made.open(PATH).read_into(0, aligned_array(8 * PAGE))
        with pytest.raises((DeviceError, FileNotFoundError)):
            made.read_small("pool.json", 5)


def _listing(*, more: bool, names: list[str]) -> str:
    rows = "".join(
        f"<Contents><Key>{name}</Key><Size>1</Size><ETag>1</ETag>"
        "<LastModified>2026-11-30T05:00:00.000Z</LastModified></Contents>"
        for name in names
    )
    token = "<NextContinuationToken>t</NextContinuationToken>" if more else ""
    return (
        f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}"
        "</ListBucketResult>"
    )


def test_a_listing_without_an_end_ends_by_the_deadline() -> None:
    """A page that always promises another one."""
    body = _listing(more=True, names=["p/objects/a"])
    with (
        served(says(200, body)) as endpoint,
        pytest.raises(DeviceTimeout, match="names were still coming"),
    ):
        device(endpoint, seconds=1.0).entries("objects")


@pytest.mark.parametrize(
    "name", ["other/x", "p/objects/a/b", "p/objects/../x", "p/objects/a&#0;b", "p/objects//a", ""]
)
def test_names_that_are_not_in_the_directory_are_an_error(name: str) -> None:
    """A server's names reach paths of the pool: only plain ones below what was asked do."""
    answer = says(200, _listing(more=False, names=[name]))
    with served(answer) as endpoint, pytest.raises(DeviceError):
        device(endpoint).entries("objects")


# --- a real server behind a proxy that fails -----------------------------------------------------


@contextmanager
def through(server: S3Server, fails: Callable[[BaseHTTPRequestHandler], int]) -> Iterator[str]:
    """A proxy that answers with a status where `fails` gives one."""

    def answer(request: Any) -> None:
        if status := fails(request):
            says(status, xml("Nonsense"))(request)
            return
        connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        headers = dict(request.headers.items())
        with closing(connection):
            connection.request(request.command, request.path, request.body, headers)
            found = connection.getresponse()
            data = found.read()
        request.send_response(found.status)
        for name, value in found.getheaders():
            if name.lower() not in _OWN_HEADERS:
                request.send_header(name, value)
        length = found.getheader("Content-Length") if request.command == "HEAD" else len(data)
        request.send_header("Content-Length", str(length or 0))
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(data)

    with served(answer) as endpoint:
        yield endpoint


def test_a_part_that_fails_takes_the_whole_upload_back(s3_server: S3Server) -> None:
    """The old column stays, no upload is left in the bucket, and the next try succeeds."""
    bucket, failing = s3_server.make_bucket("parts"), [True]

    def fails(request: BaseHTTPRequestHandler) -> int:
        return 400 if failing[0] and "partNumber=2" in request.path else 0

    # the client signs the host that it connects to: it is the server's own name for it
    with through(s3_server, fails) as endpoint:
        made = device(endpoint, bucket=f"{bucket}/p", seconds=20.0)
        made.client.store = _signed_for(s3_server, bucket, endpoint)
        store(made, PATH, pattern(PAGE))
        with pytest.raises(DeviceError, match="PUT failed"):
            store(made, PATH, np.tile(pattern(MIB), 20))
        assert fetch(made, PATH) == pattern(PAGE).tobytes()
        assert s3_server.uploads(bucket) == []
        failing[0] = False
        store(made, PATH, np.tile(pattern(MIB), 20))
        assert fetch(made, PATH) == np.tile(pattern(MIB), 20).tobytes()


def _signed_for(server: S3Server, bucket: str, endpoint: str) -> Any:
    """SeaweedFS takes a signature for the Host that it sees, which the proxy passes on."""
    from obstore.store import S3Store

    assert server.endpoint != endpoint
    return S3Store(
        bucket,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
        client_options={"allow_http": True},
    )


def test_uploads_that_a_killed_writer_left_are_swept(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old ones below the device's prefix; a younger one, and another device's, stay."""
    bucket = s3_server.make_bucket("left")
    for key in ("p/objects/a b/@1", "other/objects/@2"):
        path = f"/{bucket}/{quote(key)}"
        status, _ = s3_server.request("POST", path, "uploads=")
        assert status == 200
    made = device(s3_server.endpoint, bucket=f"{bucket}/p")
    assert made.sweep() == 0
    assert len(s3_server.uploads(bucket)) == 2
    monkeypatch.setattr(multipart_sweep, "ABANDONED_SECONDS", -60.0)
    assert made.sweep() == 1
    assert s3_server.uploads(bucket) == ["other/objects/@2"]
    assert made.sweep() == 0
