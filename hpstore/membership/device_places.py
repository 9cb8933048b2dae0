"""Where local devices lie: on which disk, and whether a path is a mount that is not there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from hpstore.devices.mount_table import unescape
from hpstore.errors import ConfigError
from hpstore.runtime.text_files import checked_path


def filesystem_of(url: str) -> int | None:
    """Number of the filesystem that a local path lies on, or will: a new one lies on its folder's.
    None for a store, and for a path that is not there."""
    path = local_path(url)
    if path is None:
        return None
    for place in (path, os.path.dirname(path)):
        try:
            return os.stat(place).st_dev
        except OSError:
            continue
    return None


def disk_of(url: str, *, sys: str = "/sys") -> str | None:
    """What names the disk below a local path: its partitions have one name. None as above."""
    number = filesystem_of(url)
    if number is None:
        return None
    name = f"{os.major(number)}:{os.minor(number)}"
    block = os.path.realpath(f"{sys}/dev/block/{name}")
    if os.path.exists(f"{block}/partition"):
        return os.path.dirname(block)
    return block if os.path.exists(block) else name


def sharing_a_disk(urls: Collection[str]) -> list[str]:
    """Local paths that lie on the disk of another one: its death takes them together."""
    disks = {url: disk for url in urls if (disk := disk_of(url)) is not None}
    shared = Counter(disks.values())
    return [url for url, disk in disks.items() if shared[disk] > 1]


def sharing_note(urls: Collection[str]) -> str:
    """That devices share a disk, in a line; "" where none do."""
    shared = sharing_a_disk(urls)
    if not shared:
        return ""
    disks = len({disk_of(url) for url in shared})
    plural = "s" * (disks > 1)
    return (
        f"{len(shared)} of {len(urls)} devices share {disks} disk{plural}: one disk's "
        "death takes them together"
    )


def require_mounted(
    new: Sequence[str], others: Collection[str] = (), *, root: str = "/", fstab: str = "/etc/fstab"
) -> None:
    """Raise ConfigError where a new device would silently lie on the disk of the system.

    That is so for a path at or below a mount point of fstab where nothing is mounted, and for one
    on the root filesystem while the pool's other devices, more than these and two at least, have a
    filesystem each. Where all lie on one, as in a trial, nothing is refused.
    """
    for url in new:
        if (path := local_path(url)) and (place := _unmounted(path, fstab)):
            raise ConfigError(
                f"device {path}: {fstab} has a mount at {place}, and nothing is mounted there. "
                f"Nothing was changed. Mount it, or say --allow-root-disk if it is meant so."
            )
    system = filesystem_of(root)
    places = {url: filesystem_of(url) for url in (*others, *new)}
    elsewhere = [number for number in places.values() if number not in (None, system)]
    suspects = [url for url in new if places[url] == system]
    own = len(set(elsewhere)) == len(elsewhere) >= 2
    if suspects and own and len(elsewhere) > sum(n == system for n in places.values()):
        raise ConfigError(
            f"device {', '.join(suspects)} lies on the root filesystem, while the {len(elsewhere)} "
            "others have a filesystem each: a mount that is mistyped, or not there? Nothing was "
            "changed. Look at `findmnt`, or say --allow-root-disk if it is meant so."
        )


def checked_place(given: str | os.PathLike[str]) -> str:
    """A device's URL as it is given, a path made absolute. Raises ConfigError for text that is
    neither: it is written into the pool's records, which are UTF-8."""
    given = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(given, str) or "://" not in given:
        return os.path.abspath(checked_path(given, "a device", recorded=True))
    if given.startswith("file://"):
        checked_path(given.removeprefix("file://"), "a device", recorded=True)
    if "\0" in given:
        raise ConfigError(f"a device {given!r} cannot be used: it holds a NUL")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a device {given!r} cannot be used: {given[error.start]!r} cannot be written as "
            "utf-8. Nothing was opened or made."
        ) from error
    return given


def checked_places(given: Sequence[str | os.PathLike[str]]) -> list[str]:
    """checked_place() of each. Raises ConfigError for a single path, whose characters would be
    taken for paths."""
    if isinstance(given, str | bytes | os.PathLike):
        raise ConfigError(f"devices must be a list of paths and URLs, not {given!r} alone")
    return list(map(checked_place, given))


def local_path(url: str) -> str | None:
    """The absolute path of a local device; None for a store."""
    path = url.removeprefix("file://")
    return None if "://" in path else os.path.abspath(path)


def _unmounted(path: str, fstab: str) -> str:
    """A mount point of fstab, at a path or above, where nothing is mounted; "" where none is."""
    try:
        lines = Path(fstab).read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return ""
    for line in lines:
        words = line.split("#")[0].split()
        if len(words) < 3 or not words[1].startswith("/") or words[1] == "/":
            continue
        place = unescape(words[1]).rstrip("/")
        if f"{path}/".startswith(f"{place}/") and not os.path.ismount(place):
            return place
    return ""
