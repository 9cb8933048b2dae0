"""Parsers of what register servers answer, and of what registers hold."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from hpstore.agreement.etcd_gateway import decode_range, decode_ranges, decode_swap
from hpstore.agreement.record_holds import HoldNote
from hpstore.agreement.register_url import parse_register_url
from hpstore.agreement.registers import Register, Successor
from hpstore.agreement.swap_store import Envelope
from hpstore.format.records import seal
from tests.fuzz.engine import Target

_KEY = base64.b64encode(b"hpstore/pool/epoch/key-0001").decode()
_HEADER = {"cluster_id": "1", "member_id": "2", "revision": "7", "raft_term": "2"}
_ROW = {"key": _KEY, "create_revision": "4", "mod_revision": "7", "version": "2", "value": "eA=="}


def _range() -> list[bytes]:
    return [
        json.dumps({"header": _HEADER, "kvs": [_ROW], "count": "1"}).encode(),
        json.dumps({"header": _HEADER}).encode(),
    ]


def _ranges() -> list[bytes]:
    answers = [{"response_range": {"header": _HEADER, "kvs": [_ROW], "count": "1"}}]
    return [json.dumps({"header": _HEADER, "succeeded": True, "responses": answers}).encode()]


def _swap() -> list[bytes]:
    return [
        json.dumps({"header": _HEADER, "succeeded": True, "responses": [{}]}).encode(),
        json.dumps({"header": _HEADER}).encode(),
    ]


def _take_envelope(data: bytes) -> None:
    found = Envelope.decode(data, where="x")
    again = Envelope.decode(found.followed_by(b"v", "n").encode(), where="x")
    assert again.sequence == found.sequence + 1


def _take_note(data: bytes) -> None:
    found = HoldNote.of(Register(order=(0, 1), value=data))
    assert HoldNote.of(Register(order=(0, 2), value=found.encode())) == found


def _take_successor(data: bytes) -> None:
    found = Successor.decode(data)
    assert Successor.decode(found.encode()) == found


def _envelopes() -> Sequence[bytes]:
    return [Envelope().followed_by(b'{"c": 1}', "ab").followed_by(b"two", "cd").encode()]


def _open(data: bytes) -> list[bytes]:
    body = json.loads(data)
    body.pop("digest", None)
    return [json.dumps(body).encode()]


def _close(parts: Sequence[bytes]) -> bytes:
    return seal(json.loads(parts[0]))


REGISTER_TARGETS = (
    Target(name="etcd-range", seeds=_range, run=lambda data: decode_range(data, _KEY)),
    Target(name="etcd-ranges", seeds=_ranges, run=lambda data: decode_ranges(data, [_KEY])),
    Target(name="etcd-swap", seeds=_swap, run=decode_swap),
    Target(
        name="register-envelope",
        seeds=_envelopes,
        run=_take_envelope,
        take_apart=_open,
        put_together=_close,
    ),
    Target(name="hold-note", seeds=lambda: [HoldNote(nonce="a").encode()], run=_take_note),
    Target(
        name="membership-register",
        seeds=lambda: [Successor(order=(2, "b"), parent=(1, "a"), data=b"{}").encode()],
        run=_take_successor,
    ),
    Target(
        name="register-url",
        seeds=lambda: [b"etcds://a:2379,[::1]:1/p", b"s3://bucket/p?endpoint=http://a&region=x"],
        run=lambda data: parse_register_url(data.decode(errors="replace")),
    ),
)
