"""Which process of this node wrote something, and whether it may still live."""

from __future__ import annotations

import os
from pathlib import Path


def started(pid: int) -> str:
    """Start time of a process in ticks since boot (proc(5), stat, field 22); "" when there is none.

    The name before it may hold anything, also what is not UTF-8.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _namespace() -> str:
    """What process ids mean here: another container has others."""
    try:
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return ""


def this_process() -> str:
    """A name for this process that no later one has: "PID-START-NAMESPACE"."""
    pid = os.getpid()
    return f"{pid}-{started(pid)}-{_namespace()}"


def may_live(name: str) -> bool:
    """Whether the process of a name may be running. One of another container may, and one of
    which nothing is known."""
    pid, _, rest = name.partition("-")
    start, _, namespace = rest.partition("-")
    if not pid.isdecimal() or not start or namespace != _namespace():
        return True
    return started(int(pid)) == start
