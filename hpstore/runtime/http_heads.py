"""Heads of HTTP/1.1 messages: llhttp reads them, in its strict mode. Bodies never come here.

Those that hpstore sends itself are known by their form, to the byte, and not parsed.

A head is bounded before it is parsed. Each one gets a parser of its own, so nothing of a message
can reach into the next; a body is what Content-Length says, and no other framing is understood
(docs/decisions/0135).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httptools

from hpstore.errors import IntegrityError
from hpstore.format.host_calls import ARGS, CLOSE, DEADLINE, SESSION
from hpstore.format.untrusted_bytes import brief

MOST_HEAD_BYTES = 8192
END = b"\r\n\r\n"
_NUMBER = re.compile(rb"(?:0|[1-9][0-9]{0,15})")
# what hpstore itself sends, to the byte, and nothing else: these take a tenth of llhttp's time
_OWN_REQUEST = re.compile(
    rb"POST (/v1/[0-9]{1,4}/[a-z_]{1,32}) HTTP/1\.1\r\nHost: [!-~]{1,255}\r\n"
    rb"Hpd-Session: ([0-9a-f]{32})\r\nHpd-Deadline-Ms: ([1-9][0-9]{0,8})\r\n"
    rb"Hpd-Args: (\{[ -~]*\})\r\n(?:Hpd-Close: ([0-9a-f,]{32,})\r\n)?"
    rb"Content-Length: (0|[1-9][0-9]{0,15})\r\n\r\n"
)
_OWN_ANSWER = re.compile(
    rb"HTTP/1\.1 ([1-9][0-9]{2}) -\r\nContent-Length: (0|[1-9][0-9]{0,15})\r\n\r\n"
)
_ASCII = re.compile(rb"[\r\n\x20-\x7e]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a head says. `target` is that of a request, `status` that of an answer."""

    target: str = ""
    status: int = 0
    body_bytes: int = 0
    fields: dict[str, str] = field(default_factory=dict)  # by lower-case name


class _Collector:
    """What llhttp calls while it reads one head."""

    def __init__(self) -> None:
        self.target = b""
        self.fields: dict[str, str] = {}
        self.messages = 0

    def on_url(self, part: bytes) -> None:
        self.target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("ascii").lower()
        if key in self.fields:
            raise ValueError(f"the field {key} is there twice")
        self.fields[key] = value.decode("ascii").strip()

    def on_headers_complete(self) -> None:
        self.messages += 1


def request_head(data: bytes) -> Head:
    """The head of a request, with its blank line. Raises IntegrityError for any but one POST."""
    own = _OWN_REQUEST.fullmatch(data) if len(data) <= MOST_HEAD_BYTES else None
    if own is None:
        return any_request_head(data)
    target, session, deadline, args, close, length = own.groups()
    fields = {SESSION: session.decode(), DEADLINE: deadline.decode(), ARGS: args.decode()}
    if close is not None:
        fields[CLOSE] = close.decode()
    return Head(target=target.decode(), body_bytes=int(length), fields=fields)


def any_request_head(data: bytes) -> Head:
    """The same by llhttp, whatever has sent it."""
    found = _Collector()
    parser = httptools.HttpRequestParser(found)
    fields = _parsed(parser, found, data)
    if parser.get_method() != b"POST" or parser.should_upgrade():
        raise IntegrityError("a request is a POST")
    return Head(target=found.target.decode("ascii"), body_bytes=_body_bytes(fields), fields=fields)


def answer_head(data: bytes) -> Head:
    """The head of an answer. Raises IntegrityError."""
    own = _OWN_ANSWER.fullmatch(data)
    if own is not None:
        return Head(status=int(own[1]), body_bytes=int(own[2]))
    return any_answer_head(data)


def any_answer_head(data: bytes) -> Head:
    """The same by llhttp."""
    found = _Collector()
    parser = httptools.HttpResponseParser(found)
    fields = _parsed(parser, found, data)
    if "content-length" not in fields:
        raise IntegrityError("an answer has no Content-Length")
    return Head(status=parser.get_status_code(), body_bytes=_body_bytes(fields), fields=fields)


def _parsed(
    parser: httptools.HttpRequestParser | httptools.HttpResponseParser,
    found: _Collector,
    data: bytes,
) -> dict[str, str]:
    """Run the parser over exactly one head; its fields. Raises IntegrityError."""
    if len(data) > MOST_HEAD_BYTES or not data.endswith(END) or data.find(END) != len(data) - 4:
        raise IntegrityError(f"a head is up to {MOST_HEAD_BYTES} bytes and one blank line")
    if not _ASCII.fullmatch(data):
        raise IntegrityError("a head is printable ASCII")
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
        raise IntegrityError(f"a head is malformed: {brief(error)}") from error
    if found.messages != 1 or parser.get_http_version() != "1.1":
        raise IntegrityError("a message is HTTP/1.1")
    if "transfer-encoding" in found.fields:
        raise IntegrityError("a body is as long as Content-Length says; nothing is chunked")
    return found.fields


def _body_bytes(fields: dict[str, str]) -> int:
    text = fields.get("content-length", "0")
    if not _NUMBER.fullmatch(text.encode("ascii")):
        raise IntegrityError("Content-Length is not a number")
    return int(text)
