"""A device that goes back to what it held some time ago, such as a volume restored from a snapshot.

Nothing marks it: it is a member as before, and lacks what was written since. See docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.devices.base import TMP
from hpstore.devices.horizon_guard import HORIZON
from hpstore.devices.memory import MemoryDevice, _File


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was durable on a device."""

    files: dict[str, bytes]
    registers: bytes
    horizon: int

    @classmethod
    def of(cls, device: MemoryDevice) -> Snapshot:
        """As it is now."""
        files = {n: f.durable for n, f in device._durable_names.items() if f.durable is not None}
        return cls(files=files, registers=bytes(device.registers), horizon=device.counter(HORIZON))

    def restore(self, device: MemoryDevice) -> bool:
        """Put it back; whether a sweep has passed the device since. Files that are being written
        stay: their writers have them open."""
        missing, device.missing = device.missing, False
        swept = device.counter(HORIZON) > self.horizon
        device.missing = missing
        device._let_go()
        writing = {n: f for n, f in device.files.items() if n.startswith(TMP) and f.locked}
        device.files.clear()
        device._durable_names.clear()
        for name, data in self.files.items():
            file = _File(0, next(device._numbers))
            file.bytes, file.durable, file.locked = bytearray(data), data, False
            device.files[name] = device._durable_names[name] = file
        device.files |= writing
        device.registers[:] = self.registers
        return swept
