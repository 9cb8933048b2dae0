"""One connection of another host's process: requests in, answers out, one after the other.

Bytes of a network come here. A head is bounded and parsed by llhttp, a target, arguments and sizes
are checked against a table before anything is done, and a body is received into leased memory in
pieces. What does not fit ends the connection.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpstore.devices.file_handles import LocalReader, LocalWriter
from hpstore.devices.o_direct import is_direct
from hpstore.errors import BudgetExceeded, DeviceError, HpstoreError, IntegrityError
from hpstore.format.disk_looks import DiskLook, decode_wanted, encode_looks
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.host_calls import (
    ABSENT,
    ARGS,
    DATA_PORT,
    FAILED,
    GONE,
    MOST_BODY_BYTES,
    NO_SUCH,
    REFUSED,
    closed_of,
    deadline_of,
    decode_args,
    encode_json,
    parse_target,
    session_of,
)
from hpstore.format.untrusted_bytes import brief
from hpstore.hosts.admission import Admitted
from hpstore.hosts.call_arguments import number
from hpstore.hosts.caller_roles import RoleTooLow, require
from hpstore.hosts.caller_sessions import CallerSessions, UnknownHandle
from hpstore.hosts.device_calls import (
    LOOK,
    OPERATIONS,
    READ,
    WRITE,
    DiskOperation,
    Request,
    of_kind,
)
from hpstore.hosts.exported_disk import ExportedDisk
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.host_looks import HostLooks
from hpstore.hosts.record_file import RecordFile
from hpstore.hosts.record_requests import use_records
from hpstore.runtime.buffers import BufferPool, Lease
from hpstore.runtime.http_heads import Head, request_head
from hpstore.runtime.wire_stream import Idle, WireStream

_log = logging.getLogger(__name__)
_MALFORMED, _TOO_LARGE, _BROKEN = 400, 413, 500
_PLAIN_BODY_BYTES = 64 * 1024  # up to this a body needs no lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the connections of a service have in common."""

    disks: Mapping[int, ExportedDisk]
    sessions: CallerSessions
    arena: BufferPool
    limits: HostLimits
    looks: HostLooks
    records: RecordFile | None = None  # None where the service keeps no registers
    data_port: int | None = None  # for bodies without TLS


class _Unwelcome(DeviceError):
    """The caller may do nothing here."""


class _Cut(OSError):
    """An answer cannot go on: the connection must end."""


class ServedConnection:
    """Serves one connection, on the caller's thread, until it ends."""

    def __init__(self, shared: Shared, stream: WireStream, admitted: Admitted) -> None:
        self._shared, self._stream, self._admitted_as = shared, stream, admitted
        self._who, self._role = admitted.who, admitted.role
        self._session: tuple[str, str] | None = None
        self._idle_seconds = shared.limits.idle_seconds  # between two requests
        self._ends = math.inf  # when the wait for a slow reader of an answer ends
        self._until = 0.0  # when the caller of this request gives up

    def serve(self) -> None:
        """Returns when the connection has ended. Raises nothing that the peer can cause."""
        try:
            while self._one():
                pass
        except OSError as error:
            _log.debug("a connection of %s ended: %s", self._who, error)
        finally:
            self._end()

    def _end(self) -> None:
        """Close the connection and leave its session. Idempotent; also by the thread that answers
        in this one's place, which may stand still for long."""
        self._stream.close()
        session, self._session = self._session, None
        if session is not None:
            self._shared.sessions.leave(session)

    def _one(self) -> bool:
        """One request; False when there is none any more, or the peer does not keep to the form."""
        limits, sessions = self._shared.limits, self._shared.sessions
        try:
            data = self._stream.head(self._idle_seconds, limits.head_seconds)
        except Idle:
            return self._session is not None and sessions.holds(self._session)
        except IntegrityError as error:
            return self._refuse(_MALFORMED, error)
        if data is None:
            return False
        left = [0]
        try:
            head = request_head(data)
            left[0] = head.body_bytes
            self._require_welcome()
            disk, operation, request = self._admitted(head)
        except (IntegrityError, DeviceError) as error:
            if left[0] > MOST_BODY_BYTES:
                return self._refuse(_TOO_LARGE, error)
            self._drain(left)  # what is not taken would overtake the answer by a reset
            if isinstance(error, _Unwelcome):
                return self._refuse(REFUSED, error)
            if isinstance(error, IntegrityError):
                return self._refuse(_MALFORMED, error)
            return self._answer_error(error)
        with contextlib.ExitStack() as reserved:  # memory for the answer
            return self._carry_out(disk, operation, request, left, reserved)

    def _require_welcome(self) -> None:
        if reason := self._admitted_as.refused:
            raise _Unwelcome(reason)
        if time.monotonic() > self._admitted_as.until_seconds:
            raise _Unwelcome("the caller's certificate has ended")

    def _admitted(self, head: Head) -> tuple[ExportedDisk, DiskOperation, Request]:
        """What a request asks for. Raises IntegrityError for another form, DeviceError for what is
        not there or not allowed."""
        shared = self._shared
        number_, name = parse_target(head.target)
        session = (self._who, session_of(head.fields))
        self._until = time.monotonic() + deadline_of(head.fields, shared.limits.deadline_seconds)
        closed = closed_of(head.fields)
        if self._session is None:
            shared.sessions.join(session, self._admitted_as.until_seconds)
            self._session = session
        if session != self._session:
            raise IntegrityError("a connection belongs to one session")
        for handle in closed:
            shared.sessions.drop(session, handle)
        disk, operation = shared.disks.get(number_), OPERATIONS.get(name)
        if operation is None:
            raise IntegrityError(f"there is no operation {name}")
        if head.body_bytes > operation.body_bytes:
            raise IntegrityError(f"a body of {name} is at most {operation.body_bytes} bytes")
        args = operation.checked(decode_args(head.fields.get(ARGS, "")))
        require(self._role, operation.role, name)
        if disk is None:
            raise _NoSuchDisk(f"this host has no disk {number_}")
        require_whole_pages(name, head)
        request = Request(session=session, role=self._role, disk=number_, args=args)
        return disk, operation, request

    def _carry_out(
        self,
        disk: ExportedDisk,
        operation: DiskOperation,
        request: Request,
        left: list[int],
        reserved: contextlib.ExitStack,
    ) -> bool:
        """Do it and answer. `left`: bytes of the body that were not received yet."""
        try:
            if operation is OPERATIONS[READ]:
                self._read(disk, request)
                return True
            if operation is OPERATIONS[WRITE]:
                self._write(disk, request, left)
                found = b""
            elif operation.of_host:
                found = self._of_host(operation.of_host, request, left, reserved)
            else:
                found = self._run(disk, operation, request, left)
                self._reserve(reserved, len(found))
        except _Cut:
            raise
        except (HpstoreError, FileNotFoundError) as error:
            self._drain(left)
            if isinstance(error, IntegrityError):
                return self._refuse(_MALFORMED, error)
            return self._answer_error(error)
        except OSError:  # of the connection
            raise
        except Exception as error:  # noqa: BLE001 (a fault of ours ends one connection)
            _log.exception("a call of %s failed", self._who)
            return self._refuse(_BROKEN, error)
        self._answer(200, [found])
        return True

    def _run(
        self, disk: ExportedDisk, operation: DiskOperation, request: Request, left: list[int]
    ) -> bytes:
        assert operation.run is not None
        with contextlib.ExitStack() as taken:  # memory for the body
            body = self._body(left, taken)
            whole = replace(request, body=body) if body else request
            with disk.call(self._left_seconds()) as device:
                return operation.run(device, self._shared.sessions, whole)

    def _of_host(
        self, operation: str, request: Request, left: list[int], reserved: contextlib.ExitStack
    ) -> bytes:
        """What is about no disk, or about several: one of them that hangs keeps none of the
        answer (host_looks.py)."""
        with contextlib.ExitStack() as taken:  # memory for the body

            def reserve(nbytes: int) -> None:
                taken.close()  # calls that hold memory and wait for more would wait for each other
                self._reserve(reserved, nbytes)

            return self._found_of_host(operation, request, self._body(left, taken), reserve)

    def _found_of_host(
        self, operation: str, request: Request, body: bytes, reserve: Callable[[int], None]
    ) -> bytes:
        if operation == DATA_PORT:
            return encode_json(self._shared.data_port)
        if operation != LOOK:
            return use_records(self._shared.records, operation, self._role, body, reserve)
        looks = self._shared.looks.look(
            decode_wanted(body),
            usage=request.args["usage"] is True,
            seconds=self._left_seconds(),
            answer=self._answer_last,
            end=self._end,
        )
        found = encode_looks(looks)
        reserve(len(found))
        return found

    def _answer_last(self, looks: Sequence[DiskLook]) -> None:
        """Answer a look in the place of this connection's thread, which stands still in it."""
        with contextlib.ExitStack() as reserved:
            found = encode_looks(looks)
            self._reserve(reserved, len(found))
            self._answer(200, [found], last=True)

    def _reserve(self, reserved: contextlib.ExitStack, nbytes: int) -> None:
        """Have a large body or answer count as memory under way until the answer is sent: a caller
        that does not read keeps it for long."""
        if nbytes > _PLAIN_BODY_BYTES:
            reserved.callback(self._lease(nbytes).release)

    def _left_seconds(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _body(self, left: list[int], reserved: contextlib.ExitStack) -> bytes:
        """A body that is taken whole. A large one counts as memory until the call has ended."""
        nbytes = left[0]
        if not nbytes:
            return b""
        self._reserve(reserved, nbytes)
        data = bytearray(nbytes)
        self._stream.limit(self._shared.limits.body_seconds)
        left[0] = 0  # of what is broken off here, no more comes
        self._stream.fill(memoryview(data))
        return bytes(data)

    def _lease(self, nbytes: int) -> Lease:
        try:
            return self._shared.arena.lease(nbytes, self._left_seconds())
        except BudgetExceeded as error:
            raise DeviceError(f"this host's service is short of memory: {error}") from error

    def _read(self, disk: ExportedDisk, request: Request) -> None:
        """Answer with bytes of a file, piece by piece. The first is read before the answer begins:
        an error of a later one can only cut it, and the caller asks for all at once then."""
        offset, nbytes = number(request.args, "offset"), number(request.args, "nbytes")
        whole = request.args["whole"] is True
        piece = nbytes if whole else min(nbytes, self._shared.limits.piece_bytes)
        if not whole and self._stream.sends_files:
            with self._reader(request) as reader:
                if not is_direct(reader.descriptor):
                    self._send_pages(disk, reader, offset, nbytes)
                    return
        lease = self._lease(piece)
        try:
            for start in range(0, nbytes, piece):
                target = lease.array[: min(piece, nbytes - start)]
                try:
                    self._read_piece(disk, request, offset + start, target.data)
                except (HpstoreError, OSError) as error:
                    if start:
                        raise _Cut(str(error)) from error
                    raise
                self._stream.limit(self._shared.limits.body_seconds)
                head = b"" if start else _head(200, nbytes)
                self._stream.send([head, target.data])
        finally:
            lease.release()

    @contextlib.contextmanager
    def _reader(self, request: Request) -> Iterator[LocalReader]:
        handle = str(request.args["handle"])
        with self._shared.sessions.use(request.session, handle, request.disk) as item:
            yield of_kind(item, LocalReader)

    def _send_pages(
        self, disk: ExportedDisk, reader: LocalReader, offset: int, nbytes: int
    ) -> None:
        """Answer with bytes of a file out of the page cache. Whatever goes wrong cuts the answer:
        the caller asks again then, for all at once."""
        limits = self._shared.limits
        self._stream.limit(limits.body_seconds)
        try:
            self._stream.send_file(
                _head(200, nbytes),
                reader.descriptor,
                offset,
                nbytes,
                lambda: disk.call(self._left_seconds()),
                piece_bytes=limits.piece_bytes,
            )
        except (HpstoreError, OSError) as error:
            raise _Cut(str(error)) from error

    def _read_piece(
        self, disk: ExportedDisk, request: Request, offset: int, target: memoryview
    ) -> None:
        with self._reader(request) as reader, disk.call(self._left_seconds()):
            reader.read_into(offset, np.frombuffer(target, np.uint8))

    def _write(self, disk: ExportedDisk, request: Request, left: list[int]) -> None:
        """Write a body to a new file, piece by piece; the kernel receives the next meanwhile."""
        sessions, handle = self._shared.sessions, str(request.args["handle"])
        offset, limits = number(request.args, "offset"), self._shared.limits
        with sessions.use(request.session, handle, request.disk) as item:
            writer = of_kind(item, LocalWriter)
            lease = self._lease(min(limits.piece_bytes, left[0] or 1))
            try:
                while left[0]:
                    part = lease.array[: min(limits.piece_bytes, left[0])]
                    self._stream.limit(limits.body_seconds)
                    self._stream.fill(part.data)
                    left[0] -= len(part)
                    with disk.call(self._left_seconds()):
                        writer.write(offset, [part])
                    offset += len(part)
            finally:
                lease.release()

    def _drain(self, left: list[int]) -> None:
        """Take the rest of a body, so that its sender comes to the answer."""
        waste = memoryview(bytearray(min(left[0], _PLAIN_BODY_BYTES)))
        while left[0]:
            part = waste[: min(left[0], len(waste))]
            ends = self._ends - time.monotonic()
            self._stream.limit(min(self._shared.limits.body_seconds, ends))
            self._stream.fill(part)
            left[0] -= len(part)

    def _answer(self, status: int, parts: list[bytes], *, last: bool = False) -> None:
        self._stream.limit(self._shared.limits.body_seconds)
        self._stream.send([_head(status, sum(map(len, parts)), last=last), *parts])

    def _answer_error(self, error: Exception) -> bool:
        """Say why a call was not carried out; the connection goes on."""
        name, status = type(error).__name__, FAILED
        if isinstance(error, FileNotFoundError) and not isinstance(error, HpstoreError):
            name = ABSENT
        elif isinstance(error, UnknownHandle):
            status = GONE
        elif isinstance(error, RoleTooLow):
            status = REFUSED
        elif isinstance(error, _NoSuchDisk):
            status = NO_SUCH
        self._answer(status, [encode_json({"error": name, "text": str(error)})])
        return True

    def _refuse(self, status: int, error: Exception) -> bool:
        """Answer a request that has not the form of one; the connection ends."""
        _log.info("a request of %s was refused: %s", self._who, brief(error))
        text = {"error": "DeviceError", "text": f"the request was refused: {brief(error)}"}
        self._answer(status, [encode_json(text)], last=True)
        return False


def require_whole_pages(operation: str, head: Head) -> None:
    """Raise IntegrityError for a write that no device could make."""
    if operation == WRITE and head.body_bytes % ALIGNMENT_BYTES:
        raise IntegrityError(f"what is written is a multiple of {ALIGNMENT_BYTES} bytes")


class _NoSuchDisk(DeviceError):
    """The service has no disk of that number."""


def _head(status: int, nbytes: int, *, last: bool = False) -> bytes:
    end = b"Connection: close\r\n" if last else b""
    return b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n%b\r\n" % (status, nbytes, end)
