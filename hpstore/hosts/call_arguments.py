"""What an argument of a call must be: each of these returns it, or raises ValueError."""

from __future__ import annotations

from collections.abc import Callable

from hpstore.devices.base import REGISTERS_BYTES, TMP
from hpstore.devices.horizon_guard import HORIZON, MARK, RecordStamp
from hpstore.format.geometry import ALIGNMENT_BYTES
from hpstore.format.host_calls import MOST_AHEAD_BYTES, MOST_BODY_BYTES, Json, check_file_path
from hpstore.format.untrusted_bytes import whole

_MOST = 1 << 64  # of an inode's number
_MOST_FILE_BYTES = 1 << 50


def as_offset(value: object) -> int:
    """A byte of a file, or a file's size."""
    return whole(value, "an offset", most=_MOST_FILE_BYTES)


def as_aligned(value: object) -> int:
    """The same in whole pages."""
    found = as_offset(value)
    if found % ALIGNMENT_BYTES:
        raise ValueError(f"an offset or a size is a multiple of {ALIGNMENT_BYTES}")
    return found


def as_piece(value: object) -> int:
    """Bytes of one request, in whole pages."""
    return whole(as_aligned(value), "a size", least=ALIGNMENT_BYTES, most=MOST_BODY_BYTES)


def as_size(value: object) -> int:
    """Bytes of one request; 0, too."""
    return whole(value, "a size", most=MOST_BODY_BYTES)


def as_ahead(value: object) -> int:
    """Bytes of one end of a file that is opened, in whole pages; 0, too."""
    return whole(as_aligned(value), "a size", most=MOST_AHEAD_BYTES)


def as_held_size(value: object) -> int:
    """Bytes of registers that one hold reads."""
    return whole(value, "a size", least=1, most=REGISTERS_BYTES)


def as_flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("a flag is true or false")
    return value


def as_stamp(value: object) -> RecordStamp | None:
    """Inode, time and size of a file; None where there is none."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError("a stamp is three numbers")
    inode, changed, size = (whole(part, "a stamp", most=_MOST) for part in value)
    return inode, changed, size


def as_counter(value: object) -> str:
    """The name of a counter of a device."""
    if value not in (HORIZON, MARK):
        raise ValueError("no such counter")
    return str(value)


def number(args: Json, name: str) -> int:
    """An argument that was checked to be one."""
    value = args[name]
    assert isinstance(value, int)
    return value


def below(*folders: str) -> Callable[[object], str]:
    """A check of paths below these folders."""

    def check(value: object) -> str:
        path = check_file_path(value)
        if not path.startswith(tuple(f"{folder}/" for folder in folders)):
            raise ValueError(f"the path is not below {' or '.join(folders)}")
        return path

    return check


def not_unfinished(value: object) -> str:
    """A path of no file that is being written: those are their writers'."""
    path = check_file_path(value)
    if path.startswith(f"{TMP}/"):
        raise ValueError("the path is below tmp")
    return path
