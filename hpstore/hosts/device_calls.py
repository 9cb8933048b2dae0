"""What can be called on an exported disk: who may, with which arguments, and what it does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hpstore.devices.base import RECYCLE, REGISTERS_BYTES
from hpstore.devices.file_handles import LocalReader, LocalWriter
from hpstore.devices.holds import LocalHold
from hpstore.devices.horizon_guard import (
    COUNTER_BYTES,
    HORIZON,
    SectorGuard,
    SectorMoved,
    decode_counter,
)
from hpstore.devices.local import LocalDevice
from hpstore.devices.o_direct import set_direct
from hpstore.errors import DeviceError, IntegrityError
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.host_calls import (
    DATA_PORT,
    MOST_BODY_BYTES,
    MOST_LISTED,
    MOST_NEW_FILE_BYTES,
    PROTOCOL,
    Json,
    check_directory_path,
    check_file_path,
    check_handle,
    decode_json,
    encode_held,
    encode_json,
    encode_listings,
    encode_opened,
)
from hpstore.format.keys import OBJECTS
from hpstore.format.records import MAX_RECORD_BYTES
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.hosts.call_arguments import (
    as_ahead,
    as_aligned,
    as_counter,
    as_flag,
    as_held_size,
    as_offset,
    as_piece,
    as_size,
    as_stamp,
    below,
    not_unfinished,
    number,
)
from hpstore.hosts.caller_roles import CallerRole, require
from hpstore.hosts.caller_sessions import CallerSessions, HeldFile
from hpstore.runtime.buffers import aligned_array

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call whose form was checked. `body`: bytes of a small one; large ones are streamed."""

    session: tuple[str, str]
    role: CallerRole
    disk: int
    args: Json
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOperation:
    """`checks`: what each argument must be, by name; all must be there and no other.

    `body_bytes`: the most that its body may be. Streamed ones have no `run`, and those `of_host`,
    which are about no disk or several, have their name there.
    """

    role: CallerRole
    checks: Mapping[str, Callable[[object], object]] = field(default_factory=dict)
    body_bytes: int = 0
    run: Callable[[LocalDevice, CallerSessions, Request], bytes] | None = None
    of_host: str = ""

    def checked(self, args: Json) -> Json:
        """The arguments. Raises IntegrityError."""
        if args.keys() != self.checks.keys():
            raise IntegrityError(f"arguments are {', '.join(self.checks) or 'none'}")
        try:
            return {name: check(args[name]) for name, check in self.checks.items()}
        except MALFORMED as error:
            raise IntegrityError(f"an argument is wrong: {brief(error)}") from error


def _require_for_record(request: Request, what: str) -> None:
    """Records in a device's root say who is a member: changing them is the keeper's."""
    if "/" not in str(request.args["path"]):
        require(request.role, CallerRole.KEEPER, what)


def describe(device: LocalDevice) -> bytes:
    """What a caller must know of a device."""
    return encode_json(
        {"protocol": PROTOCOL, "mode": device.mode, "folds_names": device.folds_names}
    )


def _hello(device: LocalDevice, _: CallerSessions, __: Request) -> bytes:
    return describe(device)


def _prepare(device: LocalDevice, _: CallerSessions, __: Request) -> bytes:
    device.prepare()
    return describe(device)


def _probe(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    write = request.args["write"] is True
    if write:
        require(request.role, CallerRole.WRITER, "a probe that writes")
    device.probe(write=write)
    return describe(device)


def _keep(sessions: CallerSessions, request: Request, held: HeldFile) -> None:
    sessions.keep(request.session, str(request.args["handle"]), held)


def _kept_writer(writer: LocalWriter, sessions: CallerSessions, request: Request) -> bytes:
    _keep(sessions, request, HeldFile(writer, request.disk, writer.abort))
    return encode_json({"recycled": writer.recycled})


def _create(device: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    vital = request.args["vital"] is True
    writer = device.create(number(request.args, "nbytes"), vital=vital)
    return _kept_writer(writer, sessions, request)


def _new_file(device: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    """Make a small file of these bytes, with `sync` durable; it has no name yet."""
    nbytes = len(request.body)
    if not nbytes or nbytes % ALIGNMENT_BYTES:
        raise IntegrityError(f"what is written is a multiple of {ALIGNMENT_BYTES} bytes")
    writer = device.create(nbytes, vital=request.args["vital"] is True)
    try:
        writer.write(0, [np.frombuffer(request.body, np.uint8)])
        if request.args["sync"] is True:
            writer.sync()
    except BaseException:
        writer.abort()
        raise
    return _kept_writer(writer, sessions, request)


def _create_spare(device: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    return _kept_writer(device.create_spare(number(request.args, "nbytes")), sessions, request)


def _open(device: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    """Answers a file's stamp, and, where it is small, its bytes; of a larger one a page, and as
    much of its end as is asked for."""
    reader = device.open(str(request.args["path"]))
    try:
        status = os.fstat(reader.descriptor)
        size, ahead = status.st_size, number(request.args, "ahead")
        first = _bytes_at(reader, size, 0, size if size <= ahead else min(ahead, ALIGNMENT_BYTES))
        tail = min(number(request.args, "tail"), size - len(first))
        last = _bytes_at(reader, size, size - tail, tail)
    except BaseException:
        reader.close()
        raise
    if device.in_memory:  # so that _read sends its pages as they are
        set_direct(reader.descriptor, on=False)
    _keep(sessions, request, HeldFile(reader, request.disk, reader.close, shared=True))
    return encode_opened((status.st_ino, status.st_mtime_ns, size), first, last)


def _bytes_at(reader: LocalReader, size: int, offset: int, nbytes: int) -> bytes:
    """Bytes of a file of `size`; none where it cannot be read so: the caller reads it then, and has
    the error."""
    if not nbytes or offset + nbytes > size or nbytes % ALIGNMENT_BYTES or offset % ALIGNMENT_BYTES:
        return b""
    page = aligned_array(nbytes)
    try:
        reader.read_into(offset, page)
    except DeviceError:
        return b""
    return page.tobytes()


def of_kind(item: object, kind: type[T]) -> T:
    """What a handle stands for, if it is that. Raises DeviceError."""
    if not isinstance(item, kind):
        raise DeviceError("the handle is not of what the call is for")
    return item


def _sync(_: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    with sessions.use(request.session, str(request.args["handle"]), request.disk) as item:
        of_kind(item, LocalWriter).sync()
    return b""


def _seal(_: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    """Write both ends of a new file, and make all of it durable."""
    border = number(request.args, "first")
    first, last = request.body[:border], request.body[border:]
    if not last or len(request.body) % ALIGNMENT_BYTES:
        raise IntegrityError(f"what is written is a multiple of {ALIGNMENT_BYTES} bytes")
    with sessions.use(request.session, str(request.args["handle"]), request.disk) as item:
        writer = of_kind(item, LocalWriter)
        writer.write(0, [np.frombuffer(first, np.uint8)])
        writer.write(number(request.args, "offset"), [np.frombuffer(last, np.uint8)])
        writer.sync()
    return b""


def _commit(device: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    """Give a file its name if the horizon's sector is what the caller judged, and the membership
    what it saw; durable when it is answered. Answers '!' and the sector where it has moved."""
    path, handle = str(request.args["path"]), str(request.args["handle"])
    guard = None
    if request.args["guarded"] is True:
        guard = SectorGuard(sector=request.body, record=as_stamp(request.args["record"]))
    with sessions.use(request.session, handle, request.disk) as item:
        writer = of_kind(item, LocalWriter)
        try:
            writer.publish(path, guard)
        except SectorMoved as moved:
            return b"!" + moved.sector
        device.sync_directory(path)
    sessions.drop(request.session, handle)
    return b""


def _give_up(_: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    sessions.drop(request.session, str(request.args["handle"]))
    return b""


def _read_small(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    return device.read_small(str(request.args["path"]), number(request.args, "most"))


def _write_small(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    _require_for_record(request, "writing a record of membership")
    device.write_small(str(request.args["path"]), request.body)
    return b""


def _takes_records(device: LocalDevice, _: CallerSessions, __: Request) -> bytes:
    return encode_json(device.takes_records())


def _listings(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    paths = decode_json(request.body)
    if not isinstance(paths, list) or not 0 < len(paths) <= MOST_LISTED:
        raise IntegrityError(f"what is listed is 1 to {MOST_LISTED} directories")
    try:
        checked = [check_directory_path(path) for path in paths]
    except MALFORMED as error:
        raise IntegrityError(f"a directory is wrong: {brief(error)}") from error
    return encode_listings(device.listings(checked))


def _counter_sector(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    return device.counter_sector(str(request.args["name"]))


def _swap_counter_sector(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    name, border = str(request.args["name"]), number(request.args, "expected_bytes")
    expected, new = request.body[:border], request.body[border:]
    if name == HORIZON:
        require(request.role, CallerRole.KEEPER, "raising the horizon")
    if len(new) != COUNTER_BYTES or border > COUNTER_BYTES:
        raise IntegrityError(f"a counter is {COUNTER_BYTES} bytes")
    decode_counter(name, new, where=name)  # raises; whether it has risen, the caller's key says
    return device.swap_counter_sector(name, expected, new)


def _stamp(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    return encode_json(device.stamp(str(request.args["path"])))


def _removal(
    act: Callable[[LocalDevice, str], None],
) -> Callable[[LocalDevice, CallerSessions, Request], bytes]:
    """A call that takes a file away."""

    def run(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
        _require_for_record(request, "removing a record of membership")
        act(device, str(request.args["path"]))
        return b""

    return run


def _sync_directory(device: LocalDevice, _: CallerSessions, request: Request) -> bytes:
    device.sync_directory(str(request.args["path"]))
    return b""


def _sync_removals(device: LocalDevice, _: CallerSessions, __: Request) -> bytes:
    device.sync_removals()
    return b""


def _sweep(device: LocalDevice, _: CallerSessions, __: Request) -> bytes:
    return encode_json(device.sweep())


def _usage(device: LocalDevice, _: CallerSessions, __: Request) -> bytes:
    return encode_json(device.usage().numbers)


def _hold(device: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    hold = device.hold(number(request.args, "offset"), number(request.args, "nbytes"))
    if hold.taken:
        _keep(sessions, request, HeldFile(hold, request.disk, hold.release))
    return encode_held(hold.taken, hold.record, hold.content)


def _write_hold(_: LocalDevice, sessions: CallerSessions, request: Request) -> bytes:
    """With `last` the range is given up, whatever becomes of the write."""
    offset, handle = number(request.args, "offset"), str(request.args["handle"])
    try:
        with sessions.use(request.session, handle, request.disk) as item:
            hold = of_kind(item, LocalHold)
            if offset + len(request.body) > len(hold.content):
                raise DeviceError("a write is beyond the range that is held")
            hold.write(offset, request.body)
    finally:
        if request.args["last"] is True:
            sessions.drop(request.session, handle)
    return b""


_PATH = {"path": check_file_path}
_NAMED = {"path": not_unfinished}
_HANDLE = {"handle": check_handle}
READ, WRITE, LOOK = "read", "write", "look"
_RECORDS = ("records_read", "records_swap", "records_remove")
OPERATIONS: Mapping[str, DiskOperation] = {
    "hello": DiskOperation(role=CallerRole.READER, run=_hello),
    DATA_PORT: DiskOperation(role=CallerRole.READER, of_host=DATA_PORT),
    LOOK: DiskOperation(
        role=CallerRole.READER, checks={"usage": as_flag}, body_bytes=MOST_BODY_BYTES, of_host=LOOK
    ),
    "open": DiskOperation(
        role=CallerRole.READER,
        checks={**_HANDLE, **_PATH, "ahead": as_ahead, "tail": as_ahead},
        run=_open,
    ),
    READ: DiskOperation(
        role=CallerRole.READER,
        checks={**_HANDLE, "offset": as_aligned, "nbytes": as_piece, "whole": as_flag},
    ),
    "read_small": DiskOperation(
        role=CallerRole.READER, checks={**_PATH, "most": as_size}, run=_read_small
    ),
    "listings": DiskOperation(role=CallerRole.READER, body_bytes=MOST_BODY_BYTES, run=_listings),
    "stamp": DiskOperation(role=CallerRole.READER, checks=_PATH, run=_stamp),
    "counter_sector": DiskOperation(
        role=CallerRole.READER, checks={"name": as_counter}, run=_counter_sector
    ),
    "usage": DiskOperation(role=CallerRole.READER, run=_usage),
    "probe": DiskOperation(role=CallerRole.READER, checks={"write": as_flag}, run=_probe),
    "close": DiskOperation(role=CallerRole.READER, checks=_HANDLE, run=_give_up),
    "create": DiskOperation(
        role=CallerRole.WRITER,
        checks={**_HANDLE, "nbytes": as_offset, "vital": as_flag},
        run=_create,
    ),
    "new_file": DiskOperation(
        role=CallerRole.WRITER,
        checks={**_HANDLE, "vital": as_flag, "sync": as_flag},
        body_bytes=MOST_NEW_FILE_BYTES,
        run=_new_file,
    ),
    "create_spare": DiskOperation(
        role=CallerRole.WRITER, checks={**_HANDLE, "nbytes": as_offset}, run=_create_spare
    ),
    WRITE: DiskOperation(
        role=CallerRole.WRITER, checks={**_HANDLE, "offset": as_aligned}, body_bytes=MOST_BODY_BYTES
    ),
    "sync": DiskOperation(role=CallerRole.WRITER, checks=_HANDLE, run=_sync),
    "seal": DiskOperation(
        role=CallerRole.WRITER,
        checks={**_HANDLE, "offset": as_aligned, "first": as_piece},
        body_bytes=MOST_NEW_FILE_BYTES,
        run=_seal,
    ),
    "commit": DiskOperation(
        role=CallerRole.WRITER,
        checks={**_HANDLE, "path": below(OBJECTS, RECYCLE), "guarded": as_flag, "record": as_stamp},
        body_bytes=COUNTER_BYTES,
        run=_commit,
    ),
    "abort": DiskOperation(role=CallerRole.WRITER, checks=_HANDLE, run=_give_up),
    "write_small": DiskOperation(
        role=CallerRole.WRITER, checks=_NAMED, body_bytes=MAX_RECORD_BYTES, run=_write_small
    ),
    "takes_records": DiskOperation(role=CallerRole.KEEPER, run=_takes_records),
    "swap_counter_sector": DiskOperation(
        role=CallerRole.WRITER,
        checks={"name": as_counter, "expected_bytes": as_size},
        body_bytes=2 * COUNTER_BYTES,
        run=_swap_counter_sector,
    ),
    "delete": DiskOperation(
        role=CallerRole.WRITER, checks=_NAMED, run=_removal(LocalDevice.delete)
    ),
    "retire": DiskOperation(
        role=CallerRole.WRITER, checks=_NAMED, run=_removal(LocalDevice.retire)
    ),
    "quarantine": DiskOperation(
        role=CallerRole.WRITER, checks=_NAMED, run=_removal(LocalDevice.quarantine)
    ),
    "sync_directory": DiskOperation(role=CallerRole.WRITER, checks=_PATH, run=_sync_directory),
    "sync_removals": DiskOperation(role=CallerRole.WRITER, run=_sync_removals),
    "sweep": DiskOperation(role=CallerRole.WRITER, run=_sweep),
    "hold": DiskOperation(
        role=CallerRole.WRITER,
        checks={**_HANDLE, "offset": as_offset, "nbytes": as_held_size},
        run=_hold,
    ),
    "write_hold": DiskOperation(
        role=CallerRole.WRITER,
        checks={**_HANDLE, "offset": as_offset, "last": as_flag},
        body_bytes=REGISTERS_BYTES,
        run=_write_hold,
    ),
    "release": DiskOperation(role=CallerRole.WRITER, checks=_HANDLE, run=_give_up),
    **{
        name: DiskOperation(
            role=CallerRole.READER if name == _RECORDS[0] else CallerRole.WRITER,
            body_bytes=MOST_BODY_BYTES,
            of_host=name,
        )
        for name in _RECORDS
    },
    "prepare": DiskOperation(role=CallerRole.KEEPER, run=_prepare),
}
