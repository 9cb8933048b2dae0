"""How many files this process may have open, room for more, and what becomes of the lack of it.

Without a descriptor no device can be asked, which looks as if all devices were gone. So it is noted
here, and whoever is about to say that something is lost looks whether it was that.
"""

from __future__ import annotations

import itertools
import logging
import resource
import threading

from hpstore.errors import DescriptorsExhausted, IntegrityError, RedundancyError

_log = logging.getLogger(__name__)
_lock = threading.Lock()  # reading and setting the limit are two calls


_exhausted = itertools.count(1)
_exhausted_total = [0]  # of this process: its limit is the process' own, too


def note_exhausted() -> None:
    """A descriptor was wanted and not given. Any thread."""
    _exhausted_total[0] = next(_exhausted)
    if _exhausted_total[0] == 1:
        _log.warning("%s", exhausted_hint())


def exhausted_total() -> int:
    """How often that was so."""
    return _exhausted_total[0]


def exhausted_hint() -> str:
    """What it means and what to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"This process may have {soft} files open (hard limit {hard}) and has no more left: no "
        "device is at fault, and nothing is lost. Raise `ulimit -n`, or close files, and try again."
    )


def blamed(error: Exception, before: int) -> Exception:
    """`error`, or DescriptorsExhausted where descriptors have run out since exhausted_total() was
    `before`: what seemed to be lost was not looked at."""
    if exhausted_total() == before or not isinstance(error, (RedundancyError, IntegrityError)):
        return error
    made = DescriptorsExhausted(f"{exhausted_hint()} (It showed as: {error})")
    made.__cause__ = error
    return made


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


__all__ = ["blamed", "exhausted_hint", "exhausted_total", "may_open", "note_exhausted"]
