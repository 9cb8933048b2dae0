"""Which disk lies below a directory, and which processes have it open: for people at a rack."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpstore.devices.mount_table import MOUNTS, read_mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A disk: what the kernel calls it now, what is printed on it, names that do not change."""

    disk: str  # /dev/sdb; "" where none is known
    serial: str
    by_id: tuple[str, ...]

    def __str__(self) -> str:
        if not self.disk:
            return "no disk of its own is known"
        serial = f", serial {self.serial}" if self.serial else ""
        names = f", {', '.join(self.by_id)}" if self.by_id else ""
        return f"{self.disk}{serial}{names}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """A process that has something open below a directory."""

    pid: int
    command: str
    files: int


def locate(url: str, *, root: str = "/") -> Location:
    """The disk of a local device, from the table of mounts: the disk itself is not touched, so one
    that hangs can be located, too."""
    path = url.removeprefix("file://")
    source = "" if "://" in path else _source(os.path.realpath(path), f"{root}{MOUNTS[1:]}")
    if not source.startswith("/dev/"):
        return Location(disk="", serial="", by_id=())
    name = os.path.basename(os.path.realpath(f"{root}{source.lstrip('/')}"))
    folder = f"{root}dev/disk/by-id"
    by_id = (
        [
            f"/dev/disk/by-id/{link}"
            for link in sorted(os.listdir(folder))
            if os.path.basename(os.path.realpath(f"{folder}/{link}")) == name
        ]
        if os.path.isdir(folder)
        else []
    )
    block = os.path.realpath(f"{root}sys/class/block/{name}")
    whole = block if os.path.exists(f"{block}/queue") else os.path.dirname(block)
    serial = _text(f"{whole}/device/serial") or _text(f"{whole}/serial")
    return Location(disk=source, serial=serial, by_id=tuple(by_id))


def _source(path: str, mounts: str) -> str:
    """What is mounted where a path lies; the latest mount of the longest place."""
    best, source = "", ""
    try:
        table = read_mounts(mounts)
    except OSError:
        return ""
    for mount in table:
        inside = path == mount.place or path.startswith(mount.place.rstrip("/") + "/")
        if inside and len(mount.place) >= len(best):
            best, source = mount.place, mount.source
    return source


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def openers(path: str, *, proc: str = "/proc") -> list[Opener]:
    """Processes with files or their working directory below a directory, as far as this user may
    see: of other users' processes only root learns that."""
    inside, found = f"{os.path.realpath(path)}/", []
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        links = [f"{proc}/{pid}/cwd"]
        try:
            links += [f"{proc}/{pid}/fd/{fd}" for fd in os.listdir(f"{proc}/{pid}/fd")]
        except OSError:
            continue  # another user's, or it has ended
        count = sum(
            f"{_link(link).removesuffix(' (deleted)')}/".startswith(inside) for link in links
        )
        if count:
            found.append(Opener(pid=pid, command=_text(f"{proc}/{pid}/comm"), files=count))
    return found


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
