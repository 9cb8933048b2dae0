"""etcd v3 by its own JSON gateway, over the standard library's HTTP and TLS.

One client of a cluster in one process. Reads are linearizable; a swap is one transaction that
compares the record's mod_revision. What an endpoint answers is bytes from outside: of bounded size
and time, decoded strictly.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from hpstore.agreement.register_url import Endpoint, EtcdUrl
from hpstore.agreement.swap_store import STORED_BYTES_LIMIT, StoredRecord, Swap
from hpstore.errors import ConfigError, IntegrityError, RegistersUnavailable
from hpstore.format.untrusted_bytes import MALFORMED, brief, parsing
from hpstore.runtime.http_deadlines import end_by
from hpstore.runtime.mutual_tls import refuse_passphrase

ANSWER_BYTES_LIMIT = 2 * STORED_BYTES_LIMIT
ATTEMPT_SECONDS = 2.0  # an endpoint that does not answer by then gives way to the next
_IDLE_CONNECTIONS = 4
_READ_BYTES = 64 << 10
_REVISION_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCertificates:
    """Paths on this machine: of the authority that signs endpoints, and of this client. "" for
    none."""

    authority: str = ""
    certificate: str = ""
    private_key: str = ""

    def context(self) -> ssl.SSLContext:
        """What a connection needs. Raises ConfigError."""
        try:
            made = ssl.create_default_context(cafile=self.authority or None)
            made.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.certificate:
                made.load_cert_chain(self.certificate, self.private_key or None, refuse_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"TLS to the registers cannot begin with {self}: {error}. Nothing was changed. See "
                "registers_ca_file, registers_certificate_file and registers_key_file in pool.toml."
            ) from error
        return made


class _NotSent(Exception):
    """The endpoint has not seen the request."""


class _Unanswered(Exception):
    """The endpoint may have done what was asked."""


class EtcdGateway:
    """A SwapStore. Thread-safe. Endpoints are tried in turn, the one that answered last first."""

    batch = 100  # etcd takes 128 operations a transaction
    at_once = 8

    def __init__(self, url: EtcdUrl, prefix: str, tls: ClientCertificates) -> None:
        self._url, self._prefix = url, f"{url.prefix}/{prefix}/"
        self._tls = tls.context() if url.tls else None
        self._lock = threading.Lock()  # guards _idle and _first
        self._idle: dict[Endpoint, list[http.client.HTTPConnection]] = {}
        self._first = 0

    def read(self, name: str, limit_seconds: float) -> StoredRecord:
        key = self._key(name)
        answer = self._ask("/v3/kv/range", {"key": key}, limit_seconds, once=False)
        with _understood():
            return decode_range(answer, key)

    def swap(self, name: str, data: bytes, revision: str, limit_seconds: float) -> bool:
        swap = Swap(name=name, data=data, revision=revision)
        return self.swap_many([swap], limit_seconds)

    def read_many(self, names: Sequence[str], limit_seconds: float) -> list[StoredRecord]:
        keys = [self._key(name) for name in names]
        body: dict[str, object] = {"success": [{"request_range": {"key": key}} for key in keys]}
        answer = self._ask("/v3/kv/txn", body, limit_seconds, once=False)
        with _understood():
            return decode_ranges(answer, keys)

    def swap_many(self, swaps: Sequence[Swap], limit_seconds: float) -> bool:
        body: dict[str, object] = {
            "compare": [_condition(self._key(one.name), one.revision) for one in swaps],
            "success": [_put(self._key(one.name), one.data) for one in swaps],
        }
        answer = self._ask("/v3/kv/txn", body, limit_seconds, once=True)
        with _understood():
            return decode_swap(answer)

    def remove(self, name: str, limit_seconds: float) -> None:
        self._ask("/v3/kv/deleterange", {"key": self._key(name)}, limit_seconds, once=False)

    def reachable(self, limit_seconds: float) -> dict[str, str]:
        found = {}
        for endpoint in self._url.endpoints:
            try:
                until = time.monotonic() + min(ATTEMPT_SECONDS, limit_seconds)
                self._ask_one(endpoint, "/v3/kv/range", {"key": self._key("probe")}, until)
            except (_NotSent, _Unanswered) as error:
                found[str(endpoint)] = str(error)
            else:
                found[str(endpoint)] = ""
        return found

    def close(self) -> None:
        self._lock = threading.Lock()  # in the child of a fork another thread may have had it
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _key(self, name: str) -> str:
        return base64.b64encode((self._prefix + name).encode()).decode()

    def _ask(
        self, path: str, body: dict[str, object], limit_seconds: float, *, once: bool
    ) -> bytes:
        """What the first endpoint that answers says. `once`: a request that an endpoint may have
        seen is not made again."""
        until = time.monotonic() + limit_seconds
        endpoints, reasons = self._url.endpoints, []
        with self._lock:
            first = self._first
        for turn in range(len(endpoints) * (1 if once else 2)):  # an idle connection may be dead
            number = (first + turn) % len(endpoints)
            left = until - time.monotonic()
            if left <= 0:
                break
            limit = time.monotonic() + min(ATTEMPT_SECONDS, left)
            try:
                answer = self._ask_one(endpoints[number], path, body, limit)
            except _NotSent as error:
                reasons.append(f"{endpoints[number]}: {error}")
            except _Unanswered as error:
                reasons.append(f"{endpoints[number]}: {error}")
                self._prefer((number + 1) % len(endpoints))
                if once:
                    break
            else:
                self._prefer(number)
                return answer
        raise RegistersUnavailable(
            f"etcd does not answer ({'; '.join(reasons) or 'no time was left'})."
        )

    def _prefer(self, number: int) -> None:
        with self._lock:
            self._first = number

    def _ask_one(
        self, endpoint: Endpoint, path: str, body: dict[str, object], until: float
    ) -> bytes:
        """One request of one endpoint. Raises _NotSent, _Unanswered."""
        connection = self._connection(endpoint, until)
        good = False
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            end_by(connection, until)
            answer = connection.getresponse()
            with closing(answer):  # one that ends its connection has taken the socket along
                data = _read_all(answer)
            if answer.status != 200:
                raise _Unanswered(f"HTTP {answer.status}: {_reason(data)}")
            good = not answer.will_close
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Unanswered(brief(error)) from error
        finally:
            if good:
                self._keep(endpoint, connection)
            else:
                connection.close()
                self._forget(endpoint)
        return data

    def _forget(self, endpoint: Endpoint) -> None:
        """What fails on one connection has most often ended all others of that endpoint."""
        with self._lock:
            idle = self._idle.pop(endpoint, [])
        for connection in idle:
            connection.close()

    def _connection(self, endpoint: Endpoint, until: float) -> http.client.HTTPConnection:
        """One that is open: an idle one, or a new one. Raises _NotSent."""
        left = max(0.01, until - time.monotonic())
        with self._lock:
            idle = self._idle.get(endpoint, [])
            while idle:
                kept = idle.pop()
                if kept.sock is not None:
                    kept.sock.settimeout(left)
                    return kept
        made: http.client.HTTPConnection
        if self._tls is None:
            made = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=left)
        else:
            made = http.client.HTTPSConnection(
                endpoint.host, endpoint.port, timeout=left, context=self._tls
            )
        try:
            made.connect()
        except (OSError, ValueError) as error:  # a name that cannot be encoded, too
            made.close()
            raise _NotSent(brief(error)) from error
        return made

    def _keep(self, endpoint: Endpoint, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(endpoint, [])
            if len(idle) < _IDLE_CONNECTIONS:
                idle.append(connection)
                return
        connection.close()


def _read_all(answer: http.client.HTTPResponse) -> bytes:
    """The body, within its bounds. Raises _Unanswered, OSError, HTTPException."""
    parts: list[bytes] = []
    size = 0
    while True:
        part = answer.read1(_READ_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if size > ANSWER_BYTES_LIMIT:
            raise _Unanswered(f"its answer has more than {ANSWER_BYTES_LIMIT} bytes")


def _reason(data: bytes) -> str:
    """What an error of etcd says, for a message."""
    try:
        body = json.loads(data)
        text = str(body.get("error") or body.get("message") or "") if isinstance(body, dict) else ""
    except MALFORMED:
        text = ""
    return " ".join((text or data[:80].decode(errors="replace")).split())[:160]


@contextmanager
def _understood() -> Iterator[None]:
    """Treat an answer that cannot be read as no answer: the request may have been carried out."""
    try:
        yield
    except IntegrityError as error:
        raise RegistersUnavailable(f"etcd does not answer as etcd does: {error}.") from error


def _condition(key: str, revision: str) -> dict[str, str]:
    """That a record is of this revision; "0" in etcd where there is none."""
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision or "0"}


def _put(key: str, data: bytes) -> dict[str, dict[str, str]]:
    return {"request_put": {"key": key, "value": base64.b64encode(data).decode()}}


def decode_range(data: bytes, key: str) -> StoredRecord:
    """The answer to a read of one key. Raises IntegrityError."""
    with parsing("an answer of etcd"):
        return _record(_object(data), key)


def decode_ranges(data: bytes, keys: Sequence[str]) -> list[StoredRecord]:
    """The answer to reads of several keys at once. Raises IntegrityError."""
    with parsing("an answer of etcd"):
        answers = _object(data)["responses"]
        if not isinstance(answers, list) or len(answers) != len(keys):
            raise ValueError("it has other records than were asked for")
        return [_record(one["response_range"], key) for one, key in zip(answers, keys, strict=True)]


def _record(body: object, key: str) -> StoredRecord:
    """The record of a key in an answer to a range. Raises ValueError and the like."""
    rows = body.get("kvs", []) if isinstance(body, dict) else None
    if not isinstance(rows, list) or len(rows) > 1:
        raise ValueError("it is no range of one record")
    if not rows:
        return StoredRecord()
    row = rows[0]
    if row["key"] != key:
        raise ValueError("it has another record than was asked for")
    value = row.get("value", "")
    if not isinstance(value, str) or len(value) > 2 * STORED_BYTES_LIMIT:
        raise ValueError("a value is no text of a bounded size")
    revision = _revision(row["mod_revision"])
    return StoredRecord(data=base64.b64decode(value, validate=True), revision=revision)


def decode_swap(data: bytes) -> bool:
    """The answer to a transaction: whether its condition held. Raises IntegrityError."""
    with parsing("an answer of etcd"):
        body = _object(data)
        succeeded = body.get("succeeded", False)
        if not isinstance(succeeded, bool):
            raise ValueError("whether it succeeded is no boolean")
        header = body["header"]
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        _revision(header["revision"])  # an answer to something else has none
        return succeeded


def _object(data: bytes) -> dict[str, object]:
    body = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError("it is no object")
    return body


def _revision(text: object) -> str:
    """A revision as etcd writes them: 64 bits as text."""
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 19:
        raise ValueError(f"{str(text)[:40]!r} is no revision")
    if not 0 < int(text) <= _REVISION_MOST:
        raise ValueError(f"{text} is no revision")
    return str(int(text))
