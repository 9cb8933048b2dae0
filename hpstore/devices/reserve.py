"""How much of a device is kept for deletes and records, and what a device lacks. Pure.

New columns leave a reserve of bytes and of inodes, so that the pool's own puts never fill a device
up. Small columns (manifests, notes, journals) may take half of it, deletes and records all of it.
Where other programs fill the filesystem, spare files and directories are left (decisions/0061).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpstore.devices.base import Usage
from hpstore.units import GIB, KIB, MIB, format_bytes

SMALL_COLUMN_BYTES = MIB  # files up to this may take half of the reserve
RESERVE_BYTES_MOST = GIB
RESERVE_INODES_LEAST, RESERVE_INODES_MOST = 16, 10_000

SPARE_BYTES = 16 * KIB  # a tombstone takes 4 KiB, the record of 50 members 13 KiB
SPARES_LEAST, SPARES_MOST = 4, 64
SPARE_SHARE = 500  # so small a part of the filesystem, more where that is fewer than the least
RECORD_SPARES = 2  # the last ones are for records in the device's root, such as pool.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Spares:
    """What is made ahead on a device."""

    files: int  # of SPARE_BYTES each
    directories: int


def reserve_bytes(usage: Usage) -> int:
    """Space that new columns leave on a device, for what deletes: 1 % or 1 GiB, the smaller."""
    return min(usage.total // 100, RESERVE_BYTES_MOST)


def reserve_inodes(usage: Usage) -> int:
    """Inodes that new columns leave: 1 %, from 16 to 10,000, never more than an eighth; 0 where
    the filesystem does not count them."""
    wanted = min(max(usage.inodes // 100, RESERVE_INODES_LEAST), RESERVE_INODES_MOST)
    return min(wanted, usage.inodes // 8)


def shortage(usage: Usage, *, file_bytes: int = 0, inodes: int = 1) -> str:
    """What a device lacks for a new column that takes `inodes`; "" where it fits.

    `file_bytes`: of its file, 0 for one of any size. For an error: how much is free, and how much
    of it is kept.
    """
    if not usage.known:
        return ""  # the device itself says when a write does not fit
    spare_bytes, spare_inodes = usage.free - file_bytes, usage.free_inodes - inodes
    if spare_bytes > RESERVE_BYTES_MOST and (
        spare_inodes > RESERVE_INODES_MOST or not usage.inodes
    ):
        return ""  # as nearly always: each put asks this of each device
    part = 2 if 0 < file_bytes <= SMALL_COLUMN_BYTES else 1
    kept = reserve_bytes(usage) // part
    if spare_bytes < kept:
        return (
            f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free, of which "
            f"{format_bytes(kept)} are kept for deletes"
            + (f"; {format_bytes(file_bytes)} are needed" if file_bytes else "")
        )
    kept = reserve_inodes(usage) // part
    if usage.inodes and spare_inodes < kept:
        return (
            f"{usage.free_inodes} of {usage.inodes} inodes are free, of which {kept} are kept for "
            "deletes"
        )
    return ""


def plan_spares(total_bytes: int, inodes: int) -> Spares:
    """How many files and directories to make ahead on a filesystem of that size.

    `inodes`: 0 where the filesystem does not count them.
    """
    files = max(SPARES_LEAST, min(SPARES_MOST, total_bytes // SPARE_SHARE // SPARE_BYTES))
    if inodes:
        files = min(files, max(SPARES_LEAST, inodes // 100))
    return Spares(files=files, directories=max(2, files // 4))
