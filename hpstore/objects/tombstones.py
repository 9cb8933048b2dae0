"""Whether a file that is called a tombstone is one. A name is no delete (docs/decisions/0098)."""

from __future__ import annotations

from hpstore.devices.base import Device
from hpstore.errors import IntegrityError
from hpstore.format.column_header import HEADER_BYTES, decode_header
from hpstore.format.keys import ColumnName, column_path
from hpstore.format.pool_key import PoolKey
from hpstore.runtime.buffers import aligned_array


def is_blank(
    device: Device, key: str, name: ColumnName, pool_id: str, pool_key: PoolKey | None
) -> bool:
    """Whether what is called a tombstone of a key is none: empty, cut short, damaged, or another
    file. Not when it is gone. Raises DeviceError when it cannot be read."""
    try:
        _read(device, key, name, pool_id, pool_key)
    except FileNotFoundError:
        return False
    except IntegrityError:  # recycling renames before it blanks
        return device.stamp(column_path(key, name, folding=device.folds_names)) is not None
    return False


def _read(
    device: Device, key: str, name: ColumnName, pool_id: str, pool_key: PoolKey | None
) -> None:
    path = column_path(key, name, folding=device.folds_names)
    where = f"{path} on {device.url}"
    handle = device.open(path)
    try:
        if handle.size_bytes < HEADER_BYTES:
            raise IntegrityError(f"{where} has {handle.size_bytes} bytes")
        page = aligned_array(HEADER_BYTES)
        handle.read_into(0, page)
    finally:
        handle.close()
    header = decode_header(page.data, where=where, pool_key=pool_key)
    if (header.pool_id, header.key, header.name.plain) != (pool_id, key, name.plain):
        raise IntegrityError(f"{where} holds {header.key!r} {header.name}")
