"""Calls in two halves: one thread sends all requests, then receives what is answered soon."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import DeviceError, DeviceTimeout
from hpstore.runtime import split_calls
from hpstore.runtime.scheduler import Scheduler
from hpstore.runtime.split_calls import Sent, SplitCall, Unfinished
from hpstore.runtime.wire_stream import WireStream

LIMIT_SECONDS = 20.0
ANSWER = b"HTTP/1.1 200 -\r\nContent-Length: 2\r\n\r\nok"


def soon(what: Callable[[], bool]) -> bool:
    """Whether it comes true."""
    until, pause = time.monotonic() + LIMIT_SECONDS, threading.Event()
    while not what():
        if time.monotonic() > until:
            return False
        pause.wait(0.001)
    return True


class Peer:
    """A device at the other end of a connection, and a call on it."""

    def __init__(self, log: list[str], name: str) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.stream = WireStream(socket.create_connection(listener.getsockname()))
        self.stream.limit(LIMIT_SECONDS)
        self.side = listener.accept()[0]
        listener.close()
        self.log, self.name, self.dropped = log, name, False
        self.idle = True
        self.then: Callable[[bytes], Any] = bytes
        self.thread = ""
        self.unjudged = self.waited_for = False

    def call(self) -> SplitCall[Any]:
        return SplitCall(self.begin, self.whole)

    def begin(self) -> Sent[Any] | None:
        if not self.idle:
            return None
        self.log.append(f"send {self.name}")
        sent: Sent[bytes] = Sent(
            self.stream.fileno(), self.stream.arrived, self.finish, self.drop, self.leave
        )
        return sent.then(lambda answer: self.then(answer))

    def finish(self) -> bytes:
        self.waited_for = True
        assert self.stream.head(LIMIT_SECONDS, LIMIT_SECONDS)
        answer = bytearray(2)
        self.stream.fill(memoryview(answer))
        self.log.append(f"answer {self.name}")
        self.thread = threading.current_thread().name
        return bytes(answer)

    def drop(self) -> None:
        self.dropped = True

    def leave(self) -> None:
        self.unjudged = True

    def whole(self) -> str:
        self.thread = threading.current_thread().name
        return f"whole {self.name}"

    def close(self) -> None:
        self.stream.close()
        self.side.close()


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def peers(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Peer]]:
    """Three; what comes at all comes soon."""
    monkeypatch.setattr(split_calls, "SOON_SECONDS", LIMIT_SECONDS)
    made = {name: Peer(log, name) for name in "abc"}
    yield made
    for peer in made.values():
        peer.close()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    made = Scheduler(workers_per_device=1, queue_depth=8, compute_threads=1, threads=True)
    yield made
    made.close()


def calls(peers: dict[str, Peer]) -> dict[str, Callable[[], Any]]:
    return {name: peer.call() for name, peer in peers.items()}


def test_all_requests_are_sent_before_an_answer_is_waited_for(
    peers: dict[str, Peer], scheduler: Scheduler, log: list[str]
) -> None:
    """By the thread that asks, in whatever order the answers come; it starts no other."""
    for name in "cab":
        peers[name].side.sendall(ANSWER)
    before = threading.active_count()
    found = scheduler.gather(calls(peers), LIMIT_SECONDS, brief="look")
    assert found == {"a": b"ok", "b": b"ok", "c": b"ok"}
    assert log[:3] == ["send a", "send b", "send c"]
    assert sorted(log[3:]) == ["answer a", "answer b", "answer c"]
    assert threading.active_count() == before
    assert {peer.thread for peer in peers.values()} == {threading.current_thread().name}


def test_what_is_late_goes_on_elsewhere(
    peers: dict[str, Peer], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have their answers; so has this one when it comes, an answer that came in part
    and one that needs more included."""

    def more(answer: bytes) -> bytes:
        raise Unfinished(lambda: answer + b" and more")

    monkeypatch.setattr(split_calls, "SOON_SECONDS", 0.05)
    peers["a"].side.sendall(ANSWER)
    peers["b"].side.sendall(ANSWER[:-1])
    futures = scheduler.start(calls(peers), brief="look")
    assert futures["a"].result(0) == b"ok"
    assert not futures["b"].done()
    assert not futures["c"].done()
    peers["b"].side.sendall(ANSWER[-1:])
    assert futures["b"].result(LIMIT_SECONDS) == b"ok"
    peers["c"].then = more
    peers["c"].side.sendall(ANSWER)
    assert futures["c"].result(LIMIT_SECONDS) == b"ok and more"
    assert peers["c"].thread.startswith("hpstore-c")


def test_errors_are_answers_and_a_crash_goes_up(
    peers: dict[str, Peer], scheduler: Scheduler
) -> None:
    def fail(_: bytes) -> bytes:
        raise DeviceError("broken")

    def crash(_: bytes) -> bytes:
        raise SimulatedCrash

    for peer in peers.values():
        peer.side.sendall(ANSWER)
    peers["b"].then = fail
    found = scheduler.gather(calls(peers), LIMIT_SECONDS, brief="look")
    assert str(found["b"]) == "broken"
    assert found["a"] == found["c"] == b"ok"
    peers["a"].side.sendall(ANSWER)
    peers["a"].then = crash
    futures: dict[str, Future[Any]] = {}
    with pytest.raises(SimulatedCrash):
        scheduler.start(calls(peers), brief="look", into=futures)
    assert [name for name, peer in peers.items() if peer.dropped] == ["b", "c"]
    assert futures == {}


def test_what_needs_more_than_an_answer_is_made_on_a_lane(
    peers: dict[str, Peer], scheduler: Scheduler
) -> None:
    """The rest of a call, all of a call of which nothing was carried out, and one that could not be
    begun."""

    def more(answer: bytes) -> bytes:
        raise Unfinished(lambda: answer + b" and more")

    def again(_: bytes) -> bytes:
        raise Unfinished

    peers["a"].then, peers["b"].then, peers["c"].idle = more, again, False
    peers["a"].side.sendall(ANSWER)
    peers["b"].side.sendall(ANSWER)
    found = scheduler.gather(calls(peers), LIMIT_SECONDS, brief="look")
    assert found == {"a": b"ok and more", "b": "whole b", "c": "whole c"}
    assert {peers[name].thread[:9] for name in "bc"} == {"hpstore-b", "hpstore-c"}


def test_a_call_that_no_lane_finishes_is_given_up(
    peers: dict[str, Peer], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent: what the other side holds for it by now, such as a lock, must not stay."""
    monkeypatch.setattr(split_calls, "SOON_SECONDS", 0.01)
    busy = threading.Event()
    try:
        before = scheduler.submit("a", busy.wait)
        late = scheduler.start({"a": peers["a"].call()}, brief="look")["a"]
        assert late.cancel()
        assert not peers["a"].dropped
    finally:
        busy.set()
    before.result(LIMIT_SECONDS)
    del late
    assert soon(lambda: peers["a"].dropped)


def test_an_answer_that_waited_for_its_lane_says_nothing_of_the_device(
    peers: dict[str, Peer], scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_calls, "SOON_SECONDS", 0.01)
    busy = threading.Event()
    try:
        scheduler.submit("a", busy.wait)
        both = {name: peers[name].call() for name in "ab"}
        found = scheduler.start(both, brief="look")
        peers["a"].side.sendall(ANSWER)
        assert soon(lambda: peers["a"].stream.arrived() is True)
    finally:
        busy.set()
    assert found["a"].result(LIMIT_SECONDS) == b"ok"
    assert soon(lambda: peers["b"].waited_for)  # its lane has begun
    peers["b"].side.sendall(ANSWER)
    assert found["b"].result(LIMIT_SECONDS) == b"ok"
    assert (peers["a"].unjudged, peers["b"].unjudged) == (True, False)


def test_other_calls_are_made_as_ever(peers: dict[str, Peer], scheduler: Scheduler) -> None:
    """Where they are not brief, and where one of them has no halves."""
    assert scheduler.gather(calls(peers), LIMIT_SECONDS) == {n: f"whole {n}" for n in "abc"}
    mixed = {**calls(peers), "d": lambda: 4}
    assert scheduler.gather(mixed, LIMIT_SECONDS, brief="look")["d"] == 4
    assert all(peer.thread != threading.current_thread().name for peer in peers.values())


def test_a_device_that_hangs_is_not_asked_together(peers: dict[str, Peer]) -> None:
    """Its lane refuses the call at once; the others are asked."""
    stuck = threading.Event()
    scheduler = Scheduler(
        workers_per_device=1, queue_depth=8, compute_threads=1, threads=True, stuck_seconds=0.0
    )
    try:
        hung = scheduler.submit("b", stuck.wait)
        assert soon(lambda: not scheduler.answers("b"))
        for name in "ac":
            peers[name].side.sendall(ANSWER)
        found = scheduler.gather(calls(peers), LIMIT_SECONDS, brief="look")
        assert isinstance(found["b"], DeviceTimeout)
        assert found["a"] == found["c"] == b"ok"
        stuck.set()
        hung.result(LIMIT_SECONDS)
    finally:
        stuck.set()
        scheduler.close()


def test_an_answer_is_collected_without_waiting(peers: dict[str, Peer]) -> None:
    """Piece by piece; then head and body are there. One that ends early is no reason to wait, and
    one that is large is not collected."""
    first, second, third = peers.values()
    for at in range(len(ANSWER)):
        assert first.stream.arrived() is False
        first.side.sendall(ANSWER[at : at + 1])
        if at + 1 < len(ANSWER):
            assert soon(lambda: _has_collected(first, at + 1))  # noqa: B023 (called at once)
    assert soon(lambda: first.stream.arrived() is True)
    assert first.finish() == b"ok"
    second.side.sendall(ANSWER[:10])
    second.side.close()
    assert soon(lambda: second.stream.arrived() is True)
    with pytest.raises(ConnectionResetError):
        second.finish()
    third.side.sendall(b"HTTP/1.1 200 -\r\ncontent-length: 999999\r\n\r\n")
    for _ in range(5):
        assert third.stream.arrived() is False
        third.side.sendall(bytes(60_000))
    assert soon(lambda: third.stream.arrived() is None)


def test_a_head_of_another_form_is_not_waited_for(peers: dict[str, Peer]) -> None:
    """Its body, of whatever length, may not have come."""
    peer = peers["a"]
    peer.side.sendall(b"HTTP/1.1 200 -\r\nContent-Length:\t9\r\n\r\n")
    assert soon(lambda: peer.stream.arrived() is None)


def test_a_closed_connection_is_not_silent(peers: dict[str, Peer]) -> None:
    """Another thread may have closed it; poll() takes no closed socket."""
    assert peers["a"].stream.silent()
    peers["a"].stream.close()
    assert not peers["a"].stream.silent()


def _has_collected(peer: Peer, count: int) -> bool:
    return peer.stream.arrived() is False and len(peer.stream._ahead) == count
