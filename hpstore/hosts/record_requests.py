"""Requests about the registers that a host's service keeps (record_file.py)."""

from __future__ import annotations

from collections.abc import Sequence

from hpstore.errors import DeviceError
from hpstore.format.host_calls import encode_json
from hpstore.format.record_calls import decode_names, decode_swaps, encode_records, register_of
from hpstore.hosts.device_calls import CallerRole, require
from hpstore.hosts.record_file import RecordFile

_MEMBERSHIP = "record"  # agreement/registers.py: the membership of a pool


def use_records(file: RecordFile | None, operation: str, role: CallerRole, body: bytes) -> bytes:
    """Carry one out. Raises IntegrityError for another form, DeviceDenied, DeviceError."""
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
        return encode_records(file.read(names))
    _require_keeper(names, role)
    file.remove(names)
    return b""


def _require_keeper(names: Sequence[str], role: CallerRole) -> None:
    """The membership is the keeper's, as its records on disks are."""
    if any(register_of(name) == _MEMBERSHIP for name in names):
        require(role, CallerRole.KEEPER, "changing the membership")
