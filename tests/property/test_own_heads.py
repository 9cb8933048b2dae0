"""Heads that are known by their form say what llhttp reads in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools", reason="needs the extra hosts")

from hpstore.errors import IntegrityError
from hpstore.format.host_calls import ARGS, CLOSE, DEADLINE, SESSION, encode_json
from hpstore.runtime.http_heads import (
    Head,
    answer_head,
    any_answer_head,
    any_request_head,
    request_head,
)

HEX = st.text("0123456789abcdef", min_size=32, max_size=32)
REQUEST = (
    "POST /v1/{disk}/{operation} HTTP/1.1\r\nHost: {host}\r\nHpd-Session: {session}\r\n"
    "Hpd-Deadline-Ms: {deadline}\r\nHpd-Args: {args}\r\n{close}Content-Length: {length}\r\n\r\n"
)
PARTS = st.fixed_dictionaries(
    {
        "disk": st.integers(0, 9999),
        "operation": st.sampled_from(["look", "new_file", "read"]),
        "host": st.sampled_from(["10.0.0.1", "b", "fd00::2"]),
        "session": HEX,
        "deadline": st.integers(1, 10**9 - 1),
        "args": st.dictionaries(st.text(max_size=5), st.text(max_size=9) | st.integers()).map(
            lambda args: encode_json(args).decode()
        ),
        "close": st.lists(HEX, max_size=3).map(
            lambda found: f"Hpd-Close: {','.join(found)}\r\n" if found else ""
        ),
        "length": st.integers(0, 10**9),
    }
)


def read(data: bytes) -> tuple[Head | None, Head | None]:
    """What both ways read, without fields that no call looks at."""
    found: list[Head | None] = []
    for way in (request_head, any_request_head):
        try:
            head = way(data)
        except IntegrityError:
            found.append(None)
            continue
        fields = {n: head.fields[n] for n in (SESSION, DEADLINE, ARGS, CLOSE) if n in head.fields}
        found.append(Head(target=head.target, body_bytes=head.body_bytes, fields=fields))
    return found[0], found[1]


@given(PARTS)
def test_a_request_of_ours_is_read_as_llhttp_reads_it(parts: dict[str, object]) -> None:
    own, other = read(REQUEST.format(**parts).encode("ascii"))
    assert own is not None
    assert own == other


@given(PARTS, st.data())
def test_a_request_that_was_changed_is_read_alike_or_refused_alike(
    parts: dict[str, object], data: st.DataObject
) -> None:
    """A byte is replaced, left out or put in, anywhere."""
    head = REQUEST.format(**parts).encode("ascii")
    at, count = data.draw(st.integers(0, len(head) - 1)), data.draw(st.integers(0, 1))
    changed = head[:at] + data.draw(st.binary(max_size=1)) + head[at + count :]
    own, other = read(changed)
    assert own == other


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Length: 7", "Length: 07"),
        ("Length: 7", "Length: 7 "),
        ("Length: 7", "Length: +7"),
        ("Length: 7", "Length: 7\r\nContent-Length: 8"),
        ("Length: 7", "Length: 7\r\nTransfer-Encoding: chunked"),
        ("HTTP/1.1", "HTTP/1.0"),
        ("POST", "GET"),
        ("Host: b", "Host: b\r\n folded"),
        ("{}", "{}\r\nUpgrade: h2c"),
        ("{}", "{\x7f}"),
    ],
)
def test_a_request_that_is_nearly_ours_is_read_as_llhttp_reads_it(old: str, new: str) -> None:
    plain = REQUEST.format(
        disk=0,
        operation="look",
        host="b",
        session="0" * 32,
        deadline=5,
        args="{}",
        close="",
        length=7,
    )
    assert old in plain
    own, other = read(plain.replace(old, new).encode("latin-1"))
    assert own == other


@given(st.integers(100, 999), st.integers(0, 10**15), st.binary(max_size=1), st.integers(0, 30))
def test_an_answer_is_read_as_llhttp_reads_it(
    status: int, length: int, more: bytes, at: int
) -> None:
    """As we send it, and with a byte put in."""
    plain = b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n" % (status, length)
    for data in (plain, plain[:at] + more + plain[at:]):
        found: list[tuple[int, int] | None] = []
        for way in (answer_head, any_answer_head):
            try:
                head = way(data)
                found.append((head.status, head.body_bytes))
            except IntegrityError:
                found.append(None)
        assert found[0] == found[1]
