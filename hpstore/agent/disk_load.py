"""Whether others use the disks under the pool: /proc/diskstats, less what this process did."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from hpstore.health.smart.readout import DiskActivity, read_diskstats

_NOT_PHYSICAL = ("loop", "ram", "zram", "nbd", "dm-", "md")


def block_device(path: str, sys_root: str = "/sys") -> str | None:
    """Kernel name ("sda1", "nvme0n1") of what a directory lies on; None for tmpfs, NFS and such."""
    try:
        number = os.stat(path).st_dev
        link = os.path.realpath(f"{sys_root}/dev/block/{os.major(number)}:{os.minor(number)}")
    except OSError:
        return None
    return os.path.basename(link) if os.path.isdir(link) else None


def disks_below(name: str, sys_root: str = "/sys") -> list[str]:
    """Paths of the disks that a block device lies on: of a partition, a mapping, an array."""
    found: set[str] = set()
    pending = [name]
    for _ in range(64):  # mappings over mappings end somewhere
        if not pending:
            break
        one = pending.pop()
        place = os.path.realpath(f"{sys_root}/class/block/{one}")
        try:
            slaves = os.listdir(f"{place}/slaves")
        except OSError:
            slaves = []
        if slaves:
            pending += slaves
        elif os.path.exists(f"{place}/partition"):
            pending.append(os.path.basename(os.path.dirname(place)))
        elif not one.startswith(_NOT_PHYSICAL):
            found.add(f"/dev/{one}")
    return sorted(found)


def own_bytes(path: str = "/proc/self/io") -> int:
    """Return the bytes that this process read from and wrote to disks; 0 if unknown."""
    try:
        with open(path, encoding="ascii") as file:
            rows = dict(line.split(": ", 1) for line in file.read().splitlines())
        return int(rows["read_bytes"]) + int(rows["write_bytes"])
    except (OSError, KeyError, ValueError):
        return 0


class Foreground:
    """Bytes per second that other programs move on some disks, between two looks. One thread.

    `known` is False while this cannot be measured: then treat the disks as busy.
    """

    def __init__(
        self,
        *,
        activity: Callable[[], Mapping[str, DiskActivity]] = read_diskstats,
        own: Callable[[], int] = own_bytes,
    ) -> None:
        self._activity, self._own = activity, own
        self._before: tuple[float, frozenset[str | None], int, int] | None = None
        self.known = False
        self.bytes_per_second = 0.0

    def look(self, names: Iterable[str | None], now_seconds: float) -> None:
        """Compare with the look before. `names` of block devices; one that is None is unknown."""
        wanted, before = frozenset(names), self._before
        rows = self._activity()
        if not wanted or not all(name in rows for name in wanted):
            self._before, self.known = None, False
            return
        moved = sum(rows[name].read_bytes + rows[name].written_bytes for name in wanted if name)
        own = self._own()
        self._before = (now_seconds, wanted, moved, own)
        if before is None or before[1] != wanted or now_seconds <= before[0]:
            self.known = False
            return
        others = (moved - before[2]) - (own - before[3])
        self.bytes_per_second = max(0, others) / (now_seconds - before[0])
        self.known = True
