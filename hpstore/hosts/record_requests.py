"""Requests about the registers that a host's service keeps (record_file.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpstore.errors import DeviceError
from hpstore.format.host_calls import MOST_BODY_BYTES, encode_json
from hpstore.format.record_calls import decode_names, decode_swaps, encode_records, register_of
from hpstore.hosts.caller_roles import CallerRole, require
from hpstore.hosts.record_file import RecordFile

_MEMBERSHIP = "record"  # agreement/registers.py: the membership of a pool
_GROWTH_BYTES = 1024  # of a record between two looks: one of claims is no longer


def use_records(
    file: RecordFile | None,
    operation: str,
    role: CallerRole,
    body: bytes,
    reserve: Callable[[int], None],
) -> bytes:
    """Carry one out. `reserve(nbytes)`: memory for the answer until it is sent, before there is
    one. Raises what it raises, IntegrityError for another form, DeviceDenied, DeviceError."""
    if file is None:
        raise DeviceError(
            "this host's service keeps no registers: start it with --registers DIRECTORY"
        )
    if operation == "records_swap":
        swaps = decode_swaps(body)
        _require_keeper([one.name for one in swaps], role)
        return encode_json(file.swap(swaps))
    names = decode_names(body)
    if operation == "records_read":
        return _read(file, names, reserve)
    _require_keeper(names, role)
    file.remove(names)
    return b""


def _read(file: RecordFile, names: Sequence[str], reserve: Callable[[int], None]) -> bytes:
    nbytes = file.nbytes(names) + _GROWTH_BYTES * len(names)
    if nbytes > MOST_BODY_BYTES:
        raise DeviceError(
            f"{len(names)} registers are {nbytes} bytes, {MOST_BODY_BYTES} at most in an answer: "
            "ask for fewer at once"
        )
    reserve(2 * nbytes)  # as they are, and in base64
    return encode_records(file.read(names, most_bytes=nbytes))


def _require_keeper(names: Sequence[str], role: CallerRole) -> None:
    """The membership is the keeper's, as its records on disks are."""
    if any(register_of(name) == _MEMBERSHIP for name in names):
        require(role, CallerRole.KEEPER, "changing the membership")
