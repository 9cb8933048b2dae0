"""How many files this process may have open, and room for more."""

from __future__ import annotations

import logging
import resource
import threading

_log = logging.getLogger(__name__)
_lock = threading.Lock()  # reading and setting the limit are two calls


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


__all__ = ["may_open"]
