"""Calls on a disk of another host, as they stand in heads and bodies. Pure: values <-> text, bytes.

    POST /v1/<disk>/<operation> HTTP/1.1
    Hpd-Session: 32 hex digits, of the process that calls
    Hpd-Args: {"path": "objects/a/@..."}       JSON in ASCII
    Hpd-Deadline-Ms: 30000                     what is left of the caller's patience; no clock
    Hpd-Close: 32 hex digits, ...              handles that the caller has given up
    Content-Length: 8388608                    raw bytes

An answer is 200 with raw bytes or JSON, else a status of `FAILED` with {"error", "text"} in JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from hpstore.errors import IntegrityError
from hpstore.format.keys import MAX_KEY_BYTES, MAX_NAME_BYTES
from hpstore.format.untrusted_bytes import parsing
from hpstore.units import KIB, MIB

PROTOCOL = 4
DEFAULT_PORT = 7200
SCHEME = "hpd://"
MOST_BODY_BYTES = 8 * MIB  # of one request; more is several
MOST_NEW_FILE_BYTES = 512 * KIB  # of a file that is made by one request
MOST_AHEAD_BYTES = 256 * KIB  # of either end of a file, with the answer that it is open
MOST_ANSWER_BYTES = 256 * MIB  # of names: a directory of some million objects
MOST_CLOSED = 64  # handles that one request gives up
MOST_LISTED = 1024  # directories that one request names
SESSION, ARGS, DEADLINE, CLOSE = "hpd-session", "hpd-args", "hpd-deadline-ms", "hpd-close"

REFUSED, NO_SUCH, FAILED, GONE, BUSY = 403, 404, 409, 410, 503
ABSENT = "FileNotFoundError"
DATA_PORT = "data_port"  # the operation that asks no disk, so it shows whether a host is there

_TARGET = re.compile(r"/v1/(0|[1-9][0-9]{0,3})/([a-z_]{1,32})")
_MILLISECONDS = re.compile("[1-9][0-9]{0,8}")
_SESSION = re.compile(r"[0-9a-f]{32}")
_HANDLE = re.compile(r"[0-9a-f]{32}")
# a path has at most a key, escaped threefold, and a file's name
_MOST_PATH_BYTES = 3 * MAX_KEY_BYTES + 2 * MAX_NAME_BYTES
_ROOT_FILE = re.compile(r"[a-z][a-z-]{0,40}(?:\.json)?")
_FOLDERS = ("objects", "tmp", "recycle", "debts", "quarantine")
_OPENED = re.compile(rb"([0-9]{1,20}) (-?[0-9]{1,20}) ([0-9]{1,20}) ([0-9]{1,7})\n")
_HELD = re.compile(rb"([+-])(?:([0-9]{1,20}) (-?[0-9]{1,20}) ([0-9]{1,20}))?\n")
_DIRECTORY, _FILE = b"d", b"f"

_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps makes one for each call
Json = dict[str, object]
Names = list[tuple[str, bool]]


def parse_target(target: str) -> tuple[int, str]:
    """Disk number and operation. Raises IntegrityError."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise IntegrityError("a target is /v1/<disk>/<operation>")
    return int(match[1]), match[2]


def parse_url(url: str) -> tuple[str, int, int]:
    """Host, port and disk number of hpd://host[:port]/disk. Raises ValueError."""
    match = re.fullmatch(
        r"hpd://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([1-9][0-9]{0,4}))?"
        r"/(0|[1-9][0-9]{0,3})/?",
        url,
    )
    if match is None or int(match[2] or DEFAULT_PORT) > 65535:
        raise ValueError("a disk of a host is hpd://HOST:PORT/NUMBER, such as hpd://b:7200/0")
    return match[1].strip("[]"), int(match[2] or DEFAULT_PORT), int(match[3])


def host_domain(url: str) -> str | None:
    """The failure domain of a disk of another host, unless the pool says otherwise: the host. None
    for any other URL."""
    if not url.startswith(SCHEME):
        return None
    try:
        return f"host-{parse_url(url)[0]}"
    except ValueError:
        return None


def encode_json(value: object) -> bytes:
    """JSON in ASCII, without spaces; what a name holds that is no text is escaped, too."""
    return _encode(value).encode("ascii")


def decode_json(data: bytes | str) -> object:
    """Raises IntegrityError."""
    with parsing("JSON of a call"):
        return json.loads(data)


def decode_args(text: str) -> Json:
    """The arguments of a call. Raises IntegrityError."""
    found = decode_json(text) if text else {}
    if not isinstance(found, dict):
        raise IntegrityError("arguments are an object")
    return found


def session_of(fields: Mapping[str, str]) -> str:
    """Raises IntegrityError."""
    found = fields.get(SESSION, "")
    if not _SESSION.fullmatch(found):
        raise IntegrityError("a session is 32 hexadecimal digits")
    return found


def deadline_of(fields: Mapping[str, str], most_seconds: float) -> float:
    """Seconds that are left to the caller. Raises IntegrityError."""
    text = fields.get(DEADLINE, "")
    if not _MILLISECONDS.fullmatch(text):
        raise IntegrityError("a deadline is a number of milliseconds")
    return min(int(text) / 1000, most_seconds)


def closed_of(fields: Mapping[str, str]) -> list[str]:
    """Handles that are given up. Raises IntegrityError."""
    text = fields.get(CLOSE, "")
    found = text.split(",") if text else []
    if len(found) > MOST_CLOSED or not all(_HANDLE.fullmatch(one) for one in found):
        raise IntegrityError("handles are 32 hexadecimal digits each")
    return found


def check_handle(value: object) -> str:
    """Raises ValueError."""
    if isinstance(value, str) and _HANDLE.fullmatch(value):
        return value
    raise ValueError("a handle is 32 hexadecimal digits")


def check_file_path(value: object) -> str:
    """A path of a file of a device: a record in its root, or one below a folder of it.

    Raises ValueError.
    """
    path = check_directory_path(value)
    if "/" not in path and (path in _FOLDERS or not path):
        raise ValueError("the path is a folder")
    return path


def check_directory_path(value: object) -> str:
    """A path of a directory: "" is the root. Raises ValueError for every other form, such as one
    that begins with '/' or has a component '..'."""
    if not isinstance(value, str) or len(os.fsencode(value)) > _MOST_PATH_BYTES or "\0" in value:
        raise ValueError("a path is text without NUL, not too long")
    first, *rest = value.split("/")
    for part in rest:
        if part in ("", ".", "..") or len(os.fsencode(part)) > MAX_NAME_BYTES:
            raise ValueError("a path has a component that names nothing below its folder")
    if rest and first not in _FOLDERS:
        raise ValueError("a path is below a folder of the device")
    if value and not rest and not _ROOT_FILE.fullmatch(first):
        raise ValueError("a path is not a record of the device")
    return value


def encode_opened(stamp: tuple[int, int, int], first: bytes, last: bytes) -> bytes:
    """What is answered of a file that was opened: inode, time, size, its first and last bytes."""
    return b"%d %d %d %d\n%b%b" % (*stamp, len(first), first, last)


def decode_opened(data: bytes) -> tuple[tuple[int, int, int], bytes, bytes]:
    """Inverse of encode_opened. Raises IntegrityError."""
    match = _OPENED.match(data)
    if match is None:
        raise IntegrityError("a file that was opened has no inode, time and size")
    inode, changed, size, border = map(int, match.groups())
    border += match.end()
    first, last = data[match.end() : border], data[border:]
    most = min(size, MOST_AHEAD_BYTES)
    if border > len(data) or len(first) > most or len(last) > most:
        raise IntegrityError("a file has more bytes than its size")
    return (inode, changed, size), first, last


def encode_held(taken: bool, record: tuple[int, int, int] | None, content: bytes) -> bytes:
    """What is answered of a range of registers: whether it is locked, the stamp of the record of
    membership, and the bytes."""
    line = b"%d %d %d" % record if record is not None else b""
    return b"%c%b\n%b" % (b"+" if taken else b"-", line, content)


def decode_held(data: bytes) -> tuple[bool, tuple[int, int, int] | None, bytes]:
    """Inverse of encode_held. Raises IntegrityError."""
    match = _HELD.match(data)
    if match is None:
        raise IntegrityError("a range of registers is neither locked nor not")
    record = None if match[2] is None else (int(match[2]), int(match[3]), int(match[4]))
    return match[1] == b"+", record, data[match.end() :]


def encode_listings(listings: Iterable[Sequence[tuple[str, bool]]]) -> bytes:
    """Names of directories: each 'd' or 'f', the name, NUL; a NUL ends a directory."""
    parts: list[bytes] = []
    for names in listings:
        for name, is_directory in names:
            parts += (_DIRECTORY if is_directory else _FILE, os.fsencode(name), b"\0")
        parts.append(b"\0")
    return b"".join(parts)


def decode_listings(data: bytes) -> list[Names]:
    """Inverse of encode_listings. Raises IntegrityError."""
    found: list[Names] = []
    names: Names = []
    if data[-1:] not in (b"", b"\0"):
        raise IntegrityError("a listing is cut")
    for row in data.split(b"\0")[:-1]:
        kind, name = row[:1], os.fsdecode(row[1:])
        if not kind:
            found.append(names)
            names = []
        elif kind not in (_DIRECTORY, _FILE) or name in ("", ".", "..") or "/" in name:
            raise IntegrityError("a listing holds something that is not a name")
        else:
            names.append((name, kind == _DIRECTORY))
    if names:
        raise IntegrityError("a listing is cut")
    return found
