"""A connection without TLS for bodies alone, beside control by mutual TLS (tls = "control").

What a caller may do here is what the handle in its request stands for: it was opened over TLS, by a
caller whose role allowed that, who drew its 128 random bits. Nothing else can be named.
"""

from __future__ import annotations

import math
import time

from hpstore.errors import IntegrityError
from hpstore.format.host_calls import ARGS, check_handle, deadline_of, decode_args, parse_target
from hpstore.format.untrusted_bytes import parsing
from hpstore.hosts.admission import Admitted
from hpstore.hosts.caller_roles import CallerRole
from hpstore.hosts.device_calls import OPERATIONS, READ, WRITE, DiskOperation, Request
from hpstore.hosts.exported_disk import ExportedDisk
from hpstore.hosts.served_connection import ServedConnection, Shared, require_whole_pages
from hpstore.runtime.http_heads import Head
from hpstore.runtime.wire_stream import WireStream


class DataConnection(ServedConnection):
    """Serves reads and writes of open files by their handles, on the caller's thread.

    A caller that shows no handle soon is not kept: every process of the network can connect here.
    """

    def __init__(self, shared: Shared, stream: WireStream, admitted: Admitted) -> None:
        super().__init__(shared, stream, admitted)
        self._idle_seconds = shared.limits.head_seconds
        self._ends = time.monotonic() + shared.limits.head_seconds  # until it shows a handle

    def _one(self) -> bool:
        return super()._one() and time.monotonic() < self._ends

    def _admitted(self, head: Head) -> tuple[ExportedDisk, DiskOperation, Request]:
        """As of its parent. Raises UnknownHandle, too."""
        shared = self._shared
        number, name = parse_target(head.target)
        self._until = time.monotonic() + deadline_of(head.fields, shared.limits.deadline_seconds)
        if name not in (READ, WRITE):
            raise IntegrityError("this port is for bodies of open files alone")
        operation, disk = OPERATIONS[name], shared.disks.get(number)
        if head.body_bytes > operation.body_bytes:
            raise IntegrityError(f"a body of {name} is at most {operation.body_bytes} bytes")
        args = operation.checked(decode_args(head.fields.get(ARGS, "")))
        require_whole_pages(name, head)
        with parsing("a handle"):
            handle = check_handle(args["handle"])
        session = shared.sessions.holder(handle, number)
        self._idle_seconds, self._ends = shared.limits.idle_seconds, math.inf
        assert disk is not None  # the handle is of one that is there
        role = CallerRole.READER if name == READ else CallerRole.WRITER
        return disk, operation, Request(session=session, role=role, disk=number, args=args)
