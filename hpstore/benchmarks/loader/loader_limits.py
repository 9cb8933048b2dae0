"""A memory limit for readers, and an empty page cache: what a dataset larger than memory meets."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hpstore.benchmarks.harness.memory_use import drop_cache
from hpstore.units import GIB, MIB

LIMIT_BYTES = 800 * MIB
_ROOT = Path("/sys/fs/cgroup")
_DROP = Path("/proc/sys/vm/drop_caches")


class MemoryLimit:
    """A control group (version 1 or 2) whose processes, their page cache included, get `nbytes`.

    `problem` says why there is none, "" when there is. enter() is for the process that is limited.
    """

    def __init__(self, nbytes: int = LIMIT_BYTES) -> None:
        self.nbytes, self.problem = nbytes, ""
        self.path: Path | None = None
        first = _ROOT / "memory" if (_ROOT / "memory").is_dir() else _ROOT
        name = "memory.limit_in_bytes" if first.name == "memory" else "memory.max"
        path = first / f"hpstore-bench-{os.getpid()}"
        try:
            path.mkdir()
            self.path = path
            (path / name).write_text(str(nbytes))
        except OSError as error:
            self.problem = f"no memory control group can be made here: {error}"
            self.close()

    def close(self) -> None:
        """Remove the group; its processes have ended. Idempotent."""
        path, self.path = self.path, None
        if path is None:
            return
        for _ in range(50):
            with contextlib.suppress(OSError):
                path.rmdir()
                return
            time.sleep(0.1)


def enter(path: Path | None) -> None:
    """This process, from now on, in a group; nothing without one."""
    if path is not None:
        (path / "cgroup.procs").write_text(str(os.getpid()))


def drop_caches(directory: Path, nbytes: int) -> str:
    """Empty the page cache of a directory; return "", or the reason why not all of it is gone.

    The caches of the whole machine are dropped, its directory entries too, unless `nbytes` of data
    are few: then no other program is disturbed.
    """
    os.sync()
    drop_cache(directory)
    if nbytes < GIB:
        return "directory entries were kept"
    try:
        _DROP.write_text("3", encoding="utf-8")
    except OSError as error:
        return f"the page cache cannot be dropped: {error}"
    return ""


def read_all(directory: Path) -> None:
    """All files under a directory in the page cache."""
    buffer = bytearray(4 * MIB)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
