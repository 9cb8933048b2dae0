"""Connections of one process to a host's service, and calls over them.

A call that is the same when it is made twice is made again once on a fresh connection where the old
one has ended; every other one fails then, and may have been carried out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from hpstore.devices.link_counters import FAILED_CALLS, LinkCounters, counted
from hpstore.devices.link_errors import LinkErrors
from hpstore.errors import DeviceError, DeviceMissing, DeviceTimeout, HpstoreError, IntegrityError
from hpstore.format.host_calls import (
    DATA_PORT,
    MOST_ANSWER_BYTES,
    MOST_CLOSED,
    PROTOCOL,
    REFUSED,
    Json,
    decode_json,
    encode_json,
)
from hpstore.runtime.forks import call_in_children
from hpstore.runtime.http_heads import MOST_HEAD_BYTES, Head, answer_head
from hpstore.runtime.split_calls import Sent, Unfinished
from hpstore.runtime.wire_stream import WireStream
from hpstore.units import KIB

Secure = Callable[[socket.socket, str], socket.socket]  # a connected socket, the host's name
_CONNECT_SECONDS = 10.0
_DOUBT_SECONDS = 0.5  # for an answer, after a call that got none
_KEPT_IDLE = 4  # connections of a disk that wait for the next call
_CLOSED_MOST = 4096  # handles that wait for a call to take them along
_MOST_SENT_BYTES = 72 * KIB  # of a body: what the kernel takes at once on a fresh connection


def require_protocol(answer: object, url: str) -> dict[str, object]:
    """What a service answers to `hello`. Raises DeviceError where it speaks another protocol."""
    found = answer if isinstance(answer, dict) else {}
    if found.get("protocol") != PROTOCOL:
        raise DeviceError(
            f"device {url}: the host's service speaks protocol {str(found.get('protocol'))[:20]}, "
            f"this process {PROTOCOL}. Nothing was changed; upgrade the older one",
            device=url,
        )
    return found


class HostLinks:
    """What a disk of a host is reached by. Thread-safe; a forked child has connections of its own.

    `seconds`: how long the other side may take for each step of a call. After a call that got no
    answer it has _DOUBT_SECONDS, until one is answered: what works through many objects beside a
    host that is stopped would wait for each of them, since a survey that must be whole asks it.
    The host is asked then whether it is there, without its disk, before it gets a call: else that
    it is stopped or cut off would be an error of each of its disks. `by`: the links that ask this,
    where these here carry bodies alone; they count the bytes, too.
    """

    def __init__(
        self,
        url: str,
        place: tuple[str, int, int],
        seconds: float,
        secure: Secure | None,
        *,
        by: HostLinks | None = None,
    ) -> None:
        self.url, self._seconds, self._secure = url, seconds, secure
        self.errors = LinkErrors(url)
        self._by = by  # None for itself: it is closed when the last user drops it, not in a cycle
        self.counters: LinkCounters = LinkCounters() if by is None else by.counters
        self._host, self._port, self._disk = place
        self._doubted = False  # the last call got no answer; set by any thread, a hint
        self._renew()
        call_in_children(self.after_fork)

    def _renew(self) -> None:
        self._anchor: WireStream | None = (
            None  # makes no calls: it keeps the session, whatever ends
        )
        self._idle: list[WireStream] = []
        self._streams: weakref.WeakSet[WireStream] = weakref.WeakSet()  # all that are open
        self._closed: deque[str] = deque(maxlen=_CLOSED_MOST)
        self._session, self._pid = secrets.token_hex(16), os.getpid()
        self._lock = threading.Lock()  # guards _idle and _anchor

    def after_fork(self) -> None:
        """In the child: the connections are the parent's. Its copies go, those in calls of other
        threads too, or the service would take the parent for alive as long as the child lives."""
        for stream in list(self._streams):
            stream.close()
        self.counters.after_fork()
        self._renew()

    def keeps_session(self) -> bool:
        """Whether a connection that makes no calls keeps the session now."""
        with self._lock:
            anchor = self._anchor
        return anchor is not None and anchor.silent()

    def keep_session(self) -> None:
        """Before a call that opens something there: all that this process has open on the disk goes
        with the last connection, and any that makes calls may end. Raises as call()."""
        if self.keeps_session():
            return
        with self._lock:
            anchor = self._anchor
        limit = self._patience(None)
        fresh = self._connected(limit)
        try:
            status, answer, _ = self._exchange(fresh, "hello", {}, (), None, limit, keep=False)
            if status == 200:  # else the next call says what is wrong
                require_protocol(self.decoded(answer), self.url)  # it may have been upgraded
        except HpstoreError:
            fresh.close()
            raise
        except TimeoutError as error:
            fresh.close()
            raise self._timeout("hello", limit) from error
        except OSError as error:
            fresh.close()
            self.errors.raise_broken(error, "hello")
        with self._lock:
            if self._anchor is anchor:
                self._anchor, fresh = fresh, anchor  # type: ignore[assignment]  # closed if any
        if fresh is not None:
            fresh.close()

    @counted
    def call(
        self,
        operation: str,
        args: Json | None = None,
        *,
        bodies: Sequence[memoryview | bytes] = (),
        into: memoryview | None = None,
        again: bool = False,
        seconds: float | None = None,
    ) -> bytes:
        """Make a call; the answer's body, which is put `into` memory of just its length if given.

        `again`: it may be made twice. `seconds`: for each step of this call. Raises what the device
        raised there, HandleGone, DeviceDenied, DeviceTimeout, and DeviceMissing when the host
        cannot be reached.
        """
        limit = self._patience(seconds)
        if self._doubted:
            (self._by or self).require_host(limit)
        for last in (False, True):
            stream = self._take(limit, fresh=last)
            args = args if not (last and into is not None) else {**(args or {}), "whole": True}
            try:
                status, found, ends = self._exchange(
                    stream, operation, args or {}, bodies, into, limit
                )
            except HpstoreError:
                stream.close()
                raise
            except TimeoutError as error:
                stream.close()
                raise self._timeout(operation, limit) from error
            except OSError as error:
                stream.close()
                if last or not again:
                    self.errors.raise_broken(error, operation, again=again)
            except BaseException:
                stream.close()  # in the middle of a message
                raise
            else:
                self._doubted = False
                if status == REFUSED and ends and not last:
                    continue  # the certificate of then has ended, and may have been renewed
                if status != 200:
                    self.errors.raise_answer(operation, status, found)
                return found
        raise AssertionError("the second try returns or raises")

    def require_host(self, limit: float) -> None:
        """Raise DeviceMissing unless the service answers a call about no disk within `limit`
        seconds for each step."""
        stream = self._take(limit, fresh=False)
        try:
            self._exchange(stream, DATA_PORT, {}, (), None, limit)
        except HpstoreError:
            stream.close()
            raise
        except TimeoutError as error:
            stream.close()
            raise self._unreachable(limit) from error
        except OSError as error:
            stream.close()
            self.errors.raise_broken(error, DATA_PORT)
        except BaseException:
            stream.close()
            raise

    def json(
        self,
        operation: str,
        args: Json | None = None,
        *,
        bodies: Sequence[memoryview | bytes] = (),
        again: bool = False,
    ) -> object:
        """As call, of one that answers in JSON."""
        return self.decoded(self.call(operation, args, bodies=bodies, again=again))

    def decoded(self, data: bytes) -> object:
        """An answer in JSON. Raises DeviceError for one that is none."""
        try:
            return decode_json(data)
        except IntegrityError as error:
            raise self.errors.nonsense("a call", error) from error

    def _patience(self, seconds: float | None) -> float:
        limit = self._seconds if seconds is None else seconds
        return min(limit, _DOUBT_SECONDS) if self._doubted else limit

    def give_up(self, handle: str) -> None:
        """Let the next call give a handle up. Never waits, never raises."""
        self._closed.append(handle)

    def begin(
        self,
        operation: str,
        args: Json,
        *,
        bodies: Sequence[memoryview | bytes] = (),
        again: bool = False,
    ) -> Sent[bytes] | None:
        """Send a small call, whose answer is received by what is returned. None where that may wait
        for something: no connection is idle, or the last call got no answer. As call() else."""
        nbytes = sum(map(len, bodies))
        stream = None if self._doubted or nbytes > _MOST_SENT_BYTES else self._idle_one()
        if stream is None:
            return None
        limit, began = self._seconds, time.monotonic()
        try:
            closed = self._send(stream, operation, args, bodies, limit, now=True)
        except OSError:  # what was not sent to its end is not carried out
            stream.close()
            return None
        except BaseException:
            stream.close()
            raise

        def finish() -> bytes:
            try:
                answer = self._finished(stream, operation, closed, limit, again=again)
            except FAILED_CALLS:
                self.counters.add(nbytes, 0, time.monotonic() - began, failed=True)
                raise
            self.counters.add(nbytes, len(answer), time.monotonic() - began, failed=False)
            return answer

        def drop() -> None:
            self._closed.extend(closed)
            stream.close()

        return Sent(stream.fileno(), stream.arrived, finish, drop)

    def _finished(
        self, stream: WireStream, operation: str, closed: list[str], limit: float, *, again: bool
    ) -> bytes:
        """The answer to a call that was begun. Raises as call(), and Unfinished where a fresh
        connection may help."""
        try:
            status, found, ends = self._receive(stream, operation, closed, None, limit)
        except TimeoutError as error:
            stream.close()
            raise self._timeout(operation, limit) from error
        except OSError as error:
            stream.close()
            if again:
                raise Unfinished from error
            self.errors.raise_broken(error, operation, again=False)
        except BaseException:
            stream.close()
            raise
        self._doubted = False
        if status == REFUSED and ends:
            raise Unfinished  # the certificate of then has ended, and may have been renewed
        if status != 200:
            self.errors.raise_answer(operation, status, found)
        return found

    def _exchange(
        self,
        stream: WireStream,
        operation: str,
        args: Json,
        bodies: Sequence[memoryview | bytes],
        into: memoryview | None,
        seconds: float,
        *,
        keep: bool = True,
    ) -> tuple[int, bytes, bool]:
        """As _receive, after the request is sent."""
        closed = self._send(stream, operation, args, bodies, seconds)
        return self._receive(stream, operation, closed, into, seconds, keep=keep)

    def _send(
        self,
        stream: WireStream,
        operation: str,
        args: Json,
        bodies: Sequence[memoryview | bytes],
        seconds: float,
        *,
        now: bool = False,
    ) -> list[str]:
        """Send a request, `now`: without waiting; the handles that it gives up."""
        stream.limit(seconds)
        closed = self._closing()
        try:
            nbytes = sum(map(len, bodies))
            send = stream.send_now if now else stream.send
            send([self._head(operation, args, closed, nbytes, seconds), *bodies])
        except BaseException:
            self._closed.extend(closed)  # twice does no harm
            raise
        return closed

    def _receive(
        self,
        stream: WireStream,
        operation: str,
        closed: list[str],
        into: memoryview | None,
        seconds: float,
        *,
        keep: bool = True,
    ) -> tuple[int, bytes, bool]:
        """The status and the body of the answer, and whether the connection ends with it."""
        stream.limit(seconds)
        try:
            data = stream.head(seconds, seconds)
            if data is None:
                raise ConnectionResetError("closed")
        except BaseException:
            self._closed.extend(closed)
            raise
        try:
            head = answer_head(data)
        except IntegrityError as error:
            raise self.errors.nonsense(operation, error) from error
        stream.limit(seconds)
        found = self._body(stream, head, into, operation)
        if head.status == REFUSED:  # before it looked at what was given up
            self._closed.extend(closed)
        ends = head.fields.get("connection", "").lower() == "close"
        if keep:
            self._put_back(stream, ends=ends)
        return head.status, found, ends

    def _head(
        self, operation: str, args: Json, closed: list[str], nbytes: int, seconds: float
    ) -> bytes:
        head = (
            f"POST /v1/{self._disk}/{operation} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Hpd-Session: {self._session}\r\nHpd-Deadline-Ms: {max(1, int(seconds * 1e3))}"
            f"\r\nHpd-Args: {encode_json(args).decode()}\r\n"
        )
        if closed:
            head += f"Hpd-Close: {','.join(closed)}\r\n"
        made = f"{head}Content-Length: {nbytes}\r\n\r\n".encode("ascii")
        if len(made) > MOST_HEAD_BYTES:
            raise DeviceError(f"device {self.url}: a name is too long for a call", device=self.url)
        return made

    def _closing(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(IndexError):
            while len(found) < MOST_CLOSED:
                found.append(self._closed.popleft())
        return found

    def _body(
        self, stream: WireStream, head: Head, into: memoryview | None, operation: str
    ) -> bytes:
        if into is not None and head.status == 200:
            if head.body_bytes != len(into):
                raise self.errors.nonsense(operation, f"{head.body_bytes} of {len(into)} bytes")
            stream.fill(into)
            return b""
        if head.body_bytes > MOST_ANSWER_BYTES:
            raise self.errors.nonsense(operation, f"an answer of {head.body_bytes} bytes")
        data = bytearray(head.body_bytes)
        stream.fill(memoryview(data))
        return bytes(data)

    def _take(self, limit: float, *, fresh: bool) -> WireStream:
        """An idle connection that has not ended meanwhile, or a new one."""
        stream = None if fresh else self._idle_one()
        return self._connected(limit) if stream is None else stream

    def _idle_one(self) -> WireStream | None:
        """A connection that waits for a call and has not ended meanwhile."""
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
            if stream is None or stream.silent():
                return stream
            stream.close()

    def _connected(self, limit: float) -> WireStream:
        """A new connection. Raises DeviceError."""
        seconds = min(_CONNECT_SECONDS, limit)
        try:
            sock = socket.create_connection((self._host, self._port), seconds)
        except TimeoutError as error:
            raise self._unreachable(seconds) from error
        except OSError as error:
            self.errors.raise_broken(error, "connecting")
        except UnicodeError as error:
            raise DeviceMissing(
                f"device {self.url}: {self._host!r} is no name that a host can have: {error}",
                device=self.url,
            ) from error
        try:
            made = WireStream(sock if self._secure is None else self._secure(sock, self._host))
            self._streams.add(made)
            return made
        except TimeoutError as error:
            sock.close()
            raise self._unreachable(seconds) from error
        except OSError as error:
            sock.close()
            self.errors.raise_broken(error, "connecting")
        except BaseException:
            sock.close()
            raise

    def _put_back(self, stream: WireStream, *, ends: bool) -> None:
        with self._lock:
            keep = not ends and len(self._idle) < _KEPT_IDLE
            if keep:
                self._idle.append(stream)
        if not keep:
            stream.close()

    def _timeout(self, operation: str, seconds: float) -> DeviceTimeout:
        """What a call raises that got no answer: its disk hangs, or the host. The connections that
        wait are given up: the next call makes one, and so finds out whether the host is there."""
        self._doubted = self._doubted or seconds >= _DOUBT_SECONDS
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()
        return DeviceTimeout(
            f"device {self.url}: no answer to {operation} within {seconds:.1f} s; the host or the "
            "disk hangs, or the host cannot be reached. The call may still be carried out",
            device=self.url,
        )

    def _unreachable(self, seconds: float) -> DeviceMissing:
        self._doubted = self._doubted or seconds >= _DOUBT_SECONDS
        return DeviceMissing(
            f"device {self.url}: the host does not answer within {seconds:.1f} s: it hangs, or "
            "cannot be reached",
            device=self.url,
        )

    def close(self) -> None:
        """Close the connections, which ends the session; a later call makes others. In a forked
        child those of the parent are let go, whoever had the lock."""
        if os.getpid() != self._pid:
            self.after_fork()
            return
        with self._lock:
            idle, self._idle = self._idle, []
            idle += filter(None, [self._anchor])
            self._anchor = None
        for stream in idle:
            stream.close()

    def __del__(self) -> None:
        """Readers that outlive their device make connections that only they use."""
        self.close()
