"""What a hostile device does that knows the formats and not the pool's key."""

from __future__ import annotations

import contextlib
import json

from hpstore.devices.memory import MemoryDevice
from hpstore.errors import DeviceError
from hpstore.format.column_header import ColumnHeader, encode_header, encode_table
from hpstore.format.geometry import Code, Geometry
from hpstore.format.keys import ColumnName, Kind, Version, parse_column_name, unescape
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import POOL_FILE, PoolRecord

POOL_KEY = PoolKey(bytes(range(32)))
FORGED_NONCE = 0xF0F0_F0F0_F0F0_F0F0  # by which an oracle knows them


def forge_files(device: MemoryDevice, number: int) -> None:
    """Beside every object: an empty tombstone, and a small copy with all public checksums right,
    both of a higher version. `number`: another one each time."""
    found: dict[str, ColumnName] = {}
    for path in list(device.files):
        directory, _, file = path.rpartition("/")
        name = parse_column_name(file) if directory.startswith("objects/") else None
        if name is not None and name.version.nonce != FORGED_NONCE:
            found[directory] = max(found.get(directory, name), name)
    for directory, name in found.items():
        version = Version(name.version.counter + 1, FORGED_NONCE, number)
        gone = ColumnName(version, Kind.TOMBSTONE, 0, 1, name.parity)
        copy = gone._replace(kind=Kind.COPY)
        key = unescape(directory.removeprefix("objects/"))
        with contextlib.suppress(DeviceError):  # it is full, or read-only
            device.write_small(f"{directory}/{gone}", b"")
            device.write_small(
                f"{directory}/{copy}", forged_copy(_pool_id(device), key, version, name.parity)
            )


def forged_copy(pool_id: str, key: str, version: Version, parity: int) -> bytes:
    """The file of a small copy, as a pool without a key takes it."""
    geometry = Geometry(data=1, parity=parity, unit_bytes=65536, size=7, code=Code.COPIES)
    header = ColumnHeader(
        pool_id=pool_id,
        key=key,
        version=version,
        kind=Kind.COPY,
        column=0,
        geometry=geometry,
        devices=("d",) * geometry.width,
        generation=1,
        created_ms=1,
    )
    column = b"forged!".ljust(geometry.column_bytes, b"\0")
    table = header.checks().digests(0, memoryview(column))
    return encode_header(header) + column + encode_table(header, table)


def _pool_id(device: MemoryDevice) -> str:
    data = bytes(device.files[POOL_FILE].bytes)
    return str(json.loads(data)["pool"])


def is_forged(name: ColumnName) -> bool:
    """Whether a simulated device has made it."""
    return name.version.nonce == FORGED_NONCE


def read_record(device: MemoryDevice) -> PoolRecord | None:
    """The membership that is durable on a device, of a pool with the simulations' key or none."""
    file = device._durable_names.get(POOL_FILE)
    if file is None:
        return None
    data = bytes(file.bytes)
    key = POOL_KEY if json.loads(data).get("key") else None
    return PoolRecord.decode(data, where=device.url, pool_key=key)
