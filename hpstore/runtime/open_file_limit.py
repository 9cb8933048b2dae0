"""How many files this process may have open, room for more, and what becomes of the lack of it.

Without a descriptor no device can be asked: see lacks.py.
"""

from __future__ import annotations

import logging
import resource
import threading

from hpstore.errors import DescriptorsExhausted
from hpstore.runtime.lacks import note_lack

_log = logging.getLogger(__name__)
_lock = threading.Lock()  # reading and setting the limit are two calls


def note_exhausted() -> None:
    """A descriptor was wanted and not given. Any thread."""
    hint = exhausted_hint()
    if note_lack(DescriptorsExhausted, hint):
        _log.warning("%s", hint)


def exhausted_hint() -> str:
    """What it means and what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"This process may have {soft} files open (hard limit {hard}) and has no more left: no "
        "device is at fault for that, and it says nothing of what is stored. Raise `ulimit -n`, or "
        "close files, and try again."
    )


def may_open(wanted: int) -> int:
    """The soft limit of open files, raised towards the hard one where `wanted` are more.

    The limit that a shell gives (1024) is there for programs that use select(2), which cannot watch
    descriptors beyond; poll and epoll, which Python's selectors, asyncio and subprocess use, can.
    It is never lowered. Child processes inherit it.
    """
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return wanted
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if most <= soft:
            return soft
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError) as error:  # a sandbox may forbid it
            _log.info("the limit of open files stays %d: %s", soft, error)
            return soft
        _log.info("the limit of open files of this process is %d now, it was %d", most, soft)
        return most
