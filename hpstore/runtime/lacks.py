"""What this process lacked when it used a device: file descriptors, or rights.

Then the device was not asked, which looks as if it were gone. So each lack is noted here, and where
an error is about to say that something is lost, the lack is named in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from hpstore.errors import DeviceError, HpstoreError, IntegrityError, RedundancyError

_numbers = itertools.count(1)
_last: list[tuple[int, type[DeviceError], str]] = [(0, DeviceError, "")]  # exchanged as a whole
_kinds: set[type[DeviceError]] = set()


def note_lack(kind: type[DeviceError], hint: str) -> bool:
    """A call was not made for a lack of the process; whether it is the first of its kind. Any
    thread."""
    first = kind not in _kinds
    _kinds.add(kind)
    _last[0] = (next(_numbers), kind, hint)
    return first


def lacks_total() -> int:
    """How often that was so in this process."""
    return _last[0][0]


@contextmanager
def naming_lacks(before: int) -> Iterator[None]:
    """What the block raises, as blamed() has it."""
    try:
        yield
    except HpstoreError as error:
        made = blamed(error, before)
        if made is error:
            raise
        raise made from error


def blamed(error: Exception, before: int) -> Exception:
    """`error`, or one of the lack that was noted since lacks_total() was `before`: what seemed to
    be lost was not looked at."""
    total, kind, hint = _last[0]
    if total in (0, before) or not isinstance(error, (RedundancyError, IntegrityError)):
        return error
    made = kind(f"{hint} (It showed as: {error})")
    made.__cause__ = error
    made.maybe_visible = getattr(error, "maybe_visible", False)
    return made
