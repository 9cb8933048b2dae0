"""What can be told without touching cuFile: libraries, modules, mounts (rungs 1 and 2)."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from hpstore.devices.mount_table import read_mounts

NO_DIRECT_IO = ("overlay", "tmpfs", "ramfs", "fuse", "proc", "sysfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Rung 1: what this machine and this Python have."""

    libcuda: bool
    bindings: bool  # cuda.bindings.cufile is installed
    nvfs_module: bool  # /proc/driver/nvidia-fs is there
    nvfs_nodes: bool  # /dev/nvidia-fs* is there
    p2pdma_kernel: bool  # the kernel can map PCI memory for peers, as far as it tells
    udev: bool  # /run/udev can be read: cuFile looks drives up there


@dataclass(frozen=True, slots=True, kw_only=True)
class MountFacts:
    """Rung 2: the filesystem and block device under a directory."""

    filesystem: str
    options: str
    source: str
    transport: str  # nvme, md, dm, virtio, other; none where no block device is below


def machine_facts() -> MachineFacts:
    """Look at this machine; loads libcuda, opens nothing of cuFile."""
    return MachineFacts(
        libcuda=_loads("libcuda.so.1"),
        bindings=_has_module("cuda.bindings.cufile"),
        nvfs_module=os.path.exists("/proc/driver/nvidia-fs/devcount"),
        nvfs_nodes=any(Path("/dev").glob("nvidia-fs*")),
        p2pdma_kernel=_kernel_has("p2pdma_pgmap_ops"),
        udev=os.access("/run/udev", os.R_OK),
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _kernel_has(symbol: str) -> bool:
    try:
        with open("/proc/kallsyms", encoding="utf-8", errors="replace") as symbols:
            return any(symbol in line for line in symbols)
    except OSError:
        return False


def mount_facts(directory: str) -> MountFacts:
    """Look at the mount of a directory. Raises OSError when there is none."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    found = [mount for mount in read_mounts() if mount.number == device]
    transport = _transport(device)
    if not found:
        return MountFacts(filesystem="unknown", options="", source="", transport=transport)
    last = found[-1]
    return MountFacts(
        filesystem=last.filesystem, options=last.options, source=last.source, transport=transport
    )


def _transport(device: str) -> str:
    try:
        path = os.path.realpath(f"/sys/dev/block/{device}", strict=True)
    except OSError:
        return "none"
    return transport_of(path)


def transport_of(path: str) -> str:
    """How a block device is reached, by its place in sysfs."""
    names = path.split("/")
    for name in reversed(names):
        for prefix, kind in (("nvme", "nvme"), ("md", "md"), ("dm-", "dm"), ("vd", "virtio")):
            if name.startswith(prefix) and any(c.isdigit() or c.islower() for c in name[2:]):
                return kind
    return "other"


def machine_obstacle(facts: MachineFacts) -> str | None:
    """Why cuFile must not even be tried, or None. Pure."""
    if not facts.libcuda:
        return "no NVIDIA driver: libcuda.so.1 does not load"
    if not facts.bindings:
        return "cuda.bindings is not installed: pip install 'hpstore[gpu]'"
    if facts.nvfs_module and not facts.nvfs_nodes:
        return (
            "the nvidia-fs module is loaded but /dev/nvidia-fs* is missing (a container without "
            "these nodes): cuFile would close descriptor 0 there"
        )
    return None


def mount_obstacle(facts: MountFacts) -> str | None:
    """Why files there cannot be read directly, or None. Pure."""
    if facts.filesystem.split(".")[0] in NO_DIRECT_IO:
        return f"{facts.filesystem} has no block device below that a GPU could reach"
    return None


def doubts(machine: MachineFacts, mount: MountFacts) -> tuple[str, ...]:
    """What probably makes cuFile bounce through host memory; the probe has the last word. Pure."""
    found = []
    if not machine.nvfs_module and not machine.p2pdma_kernel:
        found.append("neither nvidia-fs nor PCI P2PDMA in the kernel")
    if not machine.udev:
        found.append("/run/udev cannot be read")
    if mount.transport != "nvme":
        found.append(f"the drive is reached by {mount.transport}, not nvme")
    if mount.filesystem == "ext4" and "data=" in mount.options:
        if "data=ordered" not in mount.options:
            found.append("ext4 is not mounted with data=ordered")
    elif mount.filesystem not in ("ext4", "xfs"):
        found.append(f"{mount.filesystem} may not be supported")
    return tuple(found)
