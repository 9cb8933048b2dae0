"""What kind of disk a directory lies on, from /sys. Reads no disk."""

from __future__ import annotations

import os

from hpstore.health.detect.evidence import Media, Traits

# what lies below is not told here; virtual disks often say that they rotate
_VIRTUAL = ("loop", "dm-", "md", "ram", "zram", "nbd", "vd", "xvd")


def traits_of(url: str, *, sys_root: str = "/sys") -> Traits:
    """Traits of a device by its URL; those of an unknown kind where the system does not tell.

    `os.stat` of the directory may wait for a filesystem that hangs: not for a thread that others
    need.
    """
    path = url.removeprefix("file://")
    if "://" in path:
        remote = not path.startswith("memory://")
        return Traits(media=Media.REMOTE if remote else Media.UNKNOWN)
    try:
        number = os.stat(path).st_dev
        block = os.path.realpath(f"{sys_root}/dev/block/{os.major(number)}:{os.minor(number)}")
        if not os.path.exists(f"{block}/queue"):
            block = os.path.dirname(block)  # a partition lies in its disk
        rotates = _text(f"{block}/queue/rotational")
    except OSError:  # overlay, NFS, tmpfs: no block device of their own
        return Traits()
    name, model = os.path.basename(block), _text(f"{block}/device/model", "")
    if name.startswith(_VIRTUAL):
        return Traits()
    if rotates == "1":
        return Traits(media=Media.HDD, model=model)
    return Traits(media=Media.NVME if name.startswith("nvme") else Media.SSD, model=model)


def _text(path: str, otherwise: str | None = None) -> str:
    """A small file of the kernel. Raises OSError unless there is an `otherwise`."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        if otherwise is None:
            raise
        return otherwise
