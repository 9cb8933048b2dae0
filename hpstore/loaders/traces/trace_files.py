"""Recorded traces of requests, as others publish them: oracleGeneral, CSV, MSR Cambridge.

Bytes are read in pieces; of the file only 8 bytes a request stay, up to a limit of requests.
Whatever the file holds, the outcome is a trace or one ConfigError that names the place.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from gzip import GzipFile
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from hpstore.errors import ConfigError
from hpstore.loaders.policy.cache_plan import Int64s
from hpstore.units import KIB

if TYPE_CHECKING:
    import zstandard

FORMATS = ("auto", "oracle", "csv", "msr")
MOST_REQUESTS = 20_000_000
BLOCK_BYTES = 4 * KIB
_PIECE = 1 << 16  # records read at a time
_MOST_LINE = 1 << 16  # bytes
_MOST_SPAN = 1 << 18  # blocks of one request: 1 GiB of 4 KiB
_MOST_BLOCK, _MOST_VOLUMES = 1 << 44, 1 << 16
_MOST_WINDOW = 1 << 26  # bytes, of zstd
_FED = 1 << 10  # bytes given to zstd at a time: they become 32 MiB at most
_PRINTED = bytes(range(32, 127)) + b"\t\r\n"
_SPLITS = ",\t;| "
_TEXT = 1 << 62  # numbers of objects that have none
_ORACLE = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
_ID_NAMES = ("obj_id", "object_id", "objid", "id", "key", "block", "lbn", "lba", "object", "obj")


class _Stream(Protocol):
    """What GzipFile and _Frames have in common."""

    def read(self, size: int, /) -> bytes | memoryview: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrace:
    """A trace that was read.

    `requests` int64[n]: blocks, numbered from 0 by rising number in the file;
    `blocks`: how many different ones; `cut`: the file has more requests than the limit.
    """

    format: str
    requests: Int64s
    blocks: int
    cut: bool


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",  # noqa: A002 (the option's name)
    column: str = "",
    block_bytes: int = BLOCK_BYTES,
    limit: int = MOST_REQUESTS,
) -> RecordedTrace:
    """Read a trace file.

    Parameters
    ----------
    path : str or Path
        The file; names that end in .gz or .zst are decompressed (.zst needs zstandard).
    format : str
        One of FORMATS. "oracle" is libCacheSim's oracleGeneral: records of 24 bytes. "msr" is that
        of the MSR Cambridge block traces: a request becomes one of each block that it touches.
        "auto" goes by the name, and for text by the first line.
    column : str
        Of CSV: name or number (from 1) of the column with the object. By default the first column
        with a usual name such as obj_id, else the second of three and more, else the first.
    block_bytes : int
        Of MSR: bytes of a block.
    limit : int
        Most requests that are read; 8 bytes each stay in memory, 40 while they are numbered.

    Returns
    -------
    RecordedTrace
        At least one request.

    Raises
    ------
    ConfigError
        The file cannot be read or is of another format, with the record or line.
    """
    path = Path(path)
    if format not in FORMATS:
        raise ConfigError(f"no trace format is called {format!r}; there are {', '.join(FORMATS)}")
    if block_bytes < 1 or limit < 1:
        raise ConfigError(f"block_bytes {block_bytes}, limit {limit}: at least 1")
    try:
        with closing(_opened(path)) as file:
            kind = _kind(path, file, format)
            numbers = _numbers(path, file, kind, column, block_bytes)
            found, cut = _gathered(numbers, limit)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from error
    if not len(found):
        raise ConfigError(f"{path} has no requests: give a file with at least one")
    names, requests = np.unique(found, return_inverse=True)
    return RecordedTrace(
        format=kind, requests=requests.reshape(-1).astype(np.int64), blocks=len(names), cut=cut
    )


def _opened(path: Path) -> BufferedReader:
    raw = path.open("rb")
    if path.suffix not in (".gz", ".zst"):
        return raw
    if path.suffix == ".gz":
        return BufferedReader(_Inflated(GzipFile(fileobj=raw), raw, zlib.error))
    try:
        import zstandard
    except ImportError:
        raw.close()
        raise ConfigError(
            f"{path} is compressed with zstd: pip install zstandard (extra traces), or decompress "
            "the file"
        ) from None
    # a file whose window is larger is refused: the window is memory
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    return BufferedReader(_Inflated(_Frames(raw, decompressor), raw, zstandard.ZstdError))


class _Frames:
    """The contents of a file of zstd frames.

    A file that ends within a frame is an EOFError: zstandard's own reader takes that for the end.
    """

    def __init__(self, raw: BufferedReader, decompressor: zstandard.ZstdDecompressor) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: zstandard.ZstdDecompressionObj | None = None  # the one that has begun
        self._rest = b""  # read from the file, of the next frame
        self._ready = memoryview(b"")

    def read(self, size: int, /) -> memoryview:
        while not self._ready:
            piece = self._rest or self._raw.read(_FED)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError("the file ends within a zstd frame: it is cut")
                break
            frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(frame.decompress(piece))
            self._rest, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        found, self._ready = self._ready[:size], self._ready[size:]
        return found

    def close(self) -> None:
        """The file is closed by who gave it."""


class _Inflated(RawIOBase):
    """What a decompressor reads from a file, with its errors as OSError; closes both."""

    def __init__(self, stream: _Stream, raw: BufferedReader, error: type[Exception]) -> None:
        self._stream, self._raw, self._error = stream, raw, error

    def readable(self) -> bool:
        return True

    def readinto(self, room: memoryview) -> int:  # type: ignore[override]  # a narrower buffer
        try:
            piece = self._stream.read(len(room))
        except (self._error, EOFError) as error:
            raise OSError(str(error)) from error
        room[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._stream.close()
        self._raw.close()
        super().close()


def _kind(path: Path, file: BufferedReader, given: str) -> str:
    if given != "auto":
        return given
    head = file.peek(_MOST_LINE)[:_MOST_LINE]
    wide = _is_wide(head[:4096])
    # the name alone decides only where the bytes are no text
    if "oracle" in path.name.lower() and not (wide or _is_text(head)):
        return "oracle"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or wide:
        raise ConfigError(f"{path} is text in UTF-16: write it as UTF-8, or name its format")
    for line in head.split(b"\n", 2)[:2]:  # the first one may be a header
        cells = line.strip().split(b",")
        if len(cells) == 7 and cells[3].strip().lower() in (b"read", b"write"):
            return "msr"
    return "oracle" if b"\0" in head[:4096] else "csv"


def _is_text(head: bytes) -> bool:
    """Whether it is UTF-8 without zeros; the last character may be cut. False for no bytes."""
    try:
        return bool(codecs.getincrementaldecoder("utf-8")().decode(head)) and b"\0" not in head
    except UnicodeDecodeError:
        return False


def _is_wide(head: bytes) -> bool:
    """Whether every second byte is 0 and the others are text: UTF-16 without its mark."""
    for first in (0, 1):
        others, zeros = head[first::2], head[1 - first :: 2]
        if zeros and not any(zeros) and not others.translate(None, _PRINTED):
            return True
    return False


def _numbers(
    path: Path, file: BufferedReader, kind: str, column: str, block_bytes: int
) -> Iterator[Int64s]:
    """Numbers of objects as the file has them, some at a time."""
    if kind == "oracle":
        return _oracle(path, file)
    return _msr(path, file, block_bytes) if kind == "msr" else _csv(path, file, column)


def _gathered(numbers: Iterator[Int64s], limit: int) -> tuple[Int64s, bool]:
    parts: list[Int64s] = []
    count = 0
    for part in numbers:
        parts.append(part[: limit - count])
        count += len(part)
        if count > limit:
            break
    return np.concatenate(parts) if parts else np.empty(0, np.int64), count > limit


def _oracle(path: Path, file: IO[bytes]) -> Iterator[Int64s]:
    read = 0
    while piece := file.read(_PIECE * _ORACLE.itemsize):
        if len(piece) % _ORACLE.itemsize:
            raise ConfigError(
                f"{path} ends within record {read + len(piece) // _ORACLE.itemsize}: oracleGeneral "
                f"has records of {_ORACLE.itemsize} bytes; the file is cut, or of another format"
            )
        records = np.frombuffer(piece, _ORACLE)
        wrong = np.flatnonzero(records["next"] < -1)
        if len(wrong):
            raise ConfigError(
                f"{path}, record {read + wrong[0]}: its next request would be number "
                f"{records['next'][wrong[0]]}; this is no oracleGeneral: name its format"
            )
        read += len(records)
        yield records["id"].astype(np.uint64).view(np.int64)


def _lines(path: Path, file: BufferedReader) -> Iterator[tuple[int, str]]:
    for number in itertools.count(1):
        raw = file.readline(_MOST_LINE)
        if not raw:
            return
        if len(raw) >= _MOST_LINE:
            raise ConfigError(
                f"{path}, line {number} has {_MOST_LINE} bytes and more: this is no trace"
            )
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace")
        if line.strip():
            yield number, line


def _msr(path: Path, file: BufferedReader, block_bytes: int) -> Iterator[Int64s]:
    """Timestamp, host, disk, Read or Write, offset, bytes, response time."""
    found: list[Int64s] = []
    volumes: dict[str, int] = {}
    held = 0
    for number, line in _lines(path, file):
        parts = line.split(",")
        try:
            offset, size = int(parts[4]), int(parts[5])
        except (IndexError, ValueError):
            if number == 1 and "offset" in line.lower():
                continue  # a header
            raise ConfigError(
                f"{path}, line {number} has no offset and bytes in columns 5 and 6: "
                "this is no MSR trace: name its format"
            ) from None
        first, last = offset // block_bytes, (offset + max(size, 1) - 1) // block_bytes
        volume = volumes.setdefault(",".join(parts[1:3])[:64], len(volumes))
        if size < 0 or not 0 <= first <= last < min(_MOST_BLOCK, first + _MOST_SPAN):
            raise ConfigError(
                f"{path}, line {number}: a request of {size} bytes at {offset} cannot be, or is "
                f"of more than {_MOST_SPAN} blocks"
            )
        if volume >= _MOST_VOLUMES:
            raise ConfigError(f"{path}, line {number} has volume {volume + 1}: this is no trace")
        found.append(np.arange(first, last + 1, dtype=np.int64) + volume * _MOST_BLOCK)
        held += int(last - first) + 1
        if held >= _PIECE:
            yield np.concatenate(found)
            found, held = [], 0
    if found:
        yield np.concatenate(found)


def _csv(path: Path, file: BufferedReader, column: str) -> Iterator[Int64s]:
    """Objects by their text."""
    lines = _lines(path, file)
    begin = list(itertools.islice(lines, 2))
    if not begin:
        return
    number, line = begin[0]
    split = next((c for c in _SPLITS if c in line.strip()), ",")
    head = [cell.strip() for cell in _cells(line, split)]
    if not head:
        raise ConfigError(f"{path}, line {number} is no CSV: name the format, or give another file")
    at = _column(path, head, column)
    second = _cells(begin[1][1], split) if len(begin) > 1 else []
    if _is_header(head, second, at, column):
        begin = begin[1:]
    found: list[int] = []
    for number, line in itertools.chain(begin, lines):
        cells = _cells(line, split)
        if len(cells) <= at:
            raise ConfigError(f"{path}, line {number} has no column {at + 1} as the first line has")
        if not (cell := cells[at].strip()):
            raise ConfigError(f"{path}, line {number} has nothing in column {at + 1}: no object")
        found.append(_named(cell))
        if len(found) >= _PIECE:
            yield np.array(found, np.int64)
            found = []
    yield np.array(found, np.int64)


def _cells(line: str, split: str) -> list[str]:
    """Of one line; none where it is not CSV. Several spaces are one delimiter."""
    if split == " ":
        return line.split()
    try:
        return next(csv.reader([line], delimiter=split), [])
    except csv.Error:
        return []


def _is_header(head: Sequence[str], second: Sequence[str], at: int, wanted: str) -> bool:
    """Whether the first line names columns: the object's, by a usual name or the one wanted; or it
    has no number, but the second line has one.
    """
    name = head[at].lower()
    if name in _ID_NAMES or (wanted and name == wanted.lower() and not wanted.isdecimal()):
        return True
    return not any(map(_is_number, head)) and any(map(_is_number, second))


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _named(cell: str) -> int:
    """A whole number as it is, other text by its hash: 8 bytes, however long it is."""
    if len(cell) < 19 and cell.isascii() and cell.isdecimal():
        return int(cell)
    return _TEXT | xxhash.xxh3_64_intdigest(cell.encode()) >> 2


def _column(path: Path, head: list[str], wanted: str) -> int:
    names = [name.lower() for name in head]
    if wanted:
        if wanted.isdecimal() and 1 <= int(wanted[:9]) <= len(head):
            return int(wanted[:9]) - 1
        if wanted.lower() in names:
            return names.index(wanted.lower())
        raise ConfigError(f"{path} has no column {wanted!r}: its first line is {head[:8]}")
    usual = [names.index(name) for name in _ID_NAMES if name in names]
    return usual[0] if usual else 1 if len(head) >= 3 else 0
