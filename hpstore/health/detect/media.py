"""What kind of disk a directory lies on, from /sys. Reads no disk."""

from __future__ import annotations

import os

from hpstore.health.detect.evidence import Media, Traits

# virtual disks often say that they rotate
_VIRTUAL = ("loop", "ram", "zram", "nbd", "vd", "xvd")
_STACKED = ("dm-", "md")  # of the disks below, if these are of one kind
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs")
_DEEPEST = 4  # stacked on each other


def traits_of(url: str, *, sys_root: str = "/sys", mounts: str = "/proc/self/mountinfo") -> Traits:
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
        if _on_network(f"{os.major(number)}:{os.minor(number)}", mounts):
            return Traits(media=Media.REMOTE)
        block = os.path.realpath(f"{sys_root}/dev/block/{os.major(number)}:{os.minor(number)}")
        return _of_block(block, _DEEPEST)
    except OSError:  # overlay, tmpfs: no block device of their own
        return Traits()


def _of_block(block: str, deepest: int) -> Traits:
    """Of a disk, or of those that it is made of. Raises OSError."""
    if not os.path.exists(f"{block}/queue"):
        block = os.path.dirname(block)  # a partition lies in its disk
    rotates = _text(f"{block}/queue/rotational")
    name, model = os.path.basename(block), _text(f"{block}/device/model", "")
    if name.startswith(_STACKED) and deepest:
        below = sorted(os.listdir(f"{block}/slaves"))
        kinds = {_of_block(os.path.realpath(f"{block}/slaves/{x}"), deepest - 1) for x in below}
        return kinds.pop() if len(kinds) == 1 else Traits()
    if name.startswith((*_VIRTUAL, *_STACKED)):
        return Traits()
    if rotates == "1":
        return Traits(media=Media.HDD, model=model)
    return Traits(media=Media.NVME if name.startswith("nvme") else Media.SSD, model=model)


def _on_network(number: str, mounts: str) -> bool:
    """Whether a file system of that device number is one of a network."""
    for line in _text(mounts, "").splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split()[2:3] == [number]:
            return kind.split(" ")[0] in _NETWORK
    return False


def _text(path: str, otherwise: str | None = None) -> str:
    """A small file of the kernel. Raises OSError unless there is an `otherwise`."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        if otherwise is None:
            raise
        return otherwise
