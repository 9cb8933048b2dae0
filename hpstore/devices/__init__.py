"""One device: a directory, memory, or any fsspec URL. Stripes are unknown here."""

from __future__ import annotations

from hpstore.devices.base import Device, DirectoryEntry, ReadHandle, Stamp, Usage, WriteHandle
from hpstore.devices.local import LocalDevice
from hpstore.devices.memory import MemoryDevice
from hpstore.devices.remote import RemoteDevice

__all__ = [
    "Device",
    "DirectoryEntry",
    "LocalDevice",
    "MemoryDevice",
    "ReadHandle",
    "RemoteDevice",
    "Stamp",
    "Usage",
    "WriteHandle",
]
