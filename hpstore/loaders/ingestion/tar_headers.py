"""Headers of a tar (POSIX.1-2001 ustar and pax, GNU), one after another, in bounded memory.

tarfile trusts what it reads: a negative size sends it back to the beginning (CVE-2025-8194), a long
pax header costs quadratic time (CVE-2024-6232), and it reads as many bytes as a header says. Here a
header's numbers are checked before they are used, and nothing is read that is not asked for.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from hpstore.units import MIB, round_up

BLOCK_BYTES = 512
MOST_EXTENSION_BYTES = MIB  # of the headers in front of a file: its long name, its pax records
MOST_TAR_BYTES = 1 << 62
_PIECE_BYTES = MIB
_RECORD_BYTES = MIB  # behind the end mark: tar fills 10 KiB by default
_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK = b"xX", b"g", b"L", b"K"
_FILES = b"0\x007"  # types of ordinary files; a NUL is the oldest one
_WITHOUT_DATA = b"123456"  # links, devices, folders, FIFOs: their size counts no bytes that follow
_SPARSE, _FOLDER = b"S", b"5"


class TarDamaged(Exception):
    """A tar cannot be read any further."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """An entry of a tar. `is_file`: an ordinary file, whose bytes stand there as they are."""

    name: str
    offset: int  # of the first of its headers
    data_offset: int
    nbytes: int
    is_file: bool
    is_folder: bool


@dataclass(slots=True)
class _Raw:
    """The fields of one header block that are used."""

    kind: bytes
    name: str
    nbytes: int
    has_more: bool  # GNU sparse: another block of its map follows


class TarHeaders:
    """The entries of an open tar, in order. One pass; the file may only be able to go forward.

    Raises TarDamaged, OSError and what a decompressor raises. `problem`: after the last entry, what
    is wrong with the end of the archive, "".
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._global: dict[str, str] = {}
        self.problem = ""
        self.next_at = 0

    def __iter__(self) -> Iterator[TarMember]:
        return self.entries(0)

    @property
    def is_plain(self) -> bool:
        """Whether no header so far says something about all that follow."""
        return not self._global

    def entries(self, at: int) -> Iterator[TarMember]:
        """From the header at byte `at` on. `next_at`: where the one behind the last begins."""
        while True:
            raw, data_at, pax, long_name = self._next(at)
            if raw is None:
                return
            facts = {**self._global, **pax}
            nbytes = _size(facts["size"]) if "size" in facts else raw.nbytes
            name = facts.get("path", long_name if long_name is not None else raw.name)
            sparse = raw.kind in _SPARSE or any(key.startswith("GNU.sparse.") for key in facts)
            while raw.has_more:
                raw = _Raw(raw.kind, "", 0, has_more=self._sparse_block(data_at))
                data_at += BLOCK_BYTES
            folder = raw.kind == _FOLDER or (raw.kind == b"\0" and raw.name.endswith("/"))
            empty = folder or raw.kind in _WITHOUT_DATA
            self.next_at = data_at + (0 if empty else _padded(nbytes))
            yield TarMember(
                name=name.rstrip("/") if folder else name,
                offset=at,
                data_offset=data_at,
                nbytes=nbytes,
                is_file=raw.kind in _FILES and not sparse and not folder,
                is_folder=folder,
            )
            at = self.next_at

    def _next(self, at: int) -> tuple[_Raw | None, int, dict[str, str], str | None]:
        """The next header that is no extension, where its data begin, and what extensions say."""
        first, left = at, MOST_EXTENSION_BYTES
        pax: dict[str, str] = {}
        long_name: str | None = None
        while True:
            block = self.read(at, BLOCK_BYTES)
            raw = _parsed(block) if len(block) == BLOCK_BYTES else None
            if raw is None:
                self.problem = _end_problem(block, at) or self._behind(at + BLOCK_BYTES)
                if self.problem and (at == 0 or at != first):
                    raise TarDamaged(self.problem)
                return None, at, pax, long_name
            at += BLOCK_BYTES
            if raw.kind not in _PAX + _GLOBAL + _LONG_NAME + _LONG_LINK or not raw.kind:
                return raw, at, pax, long_name
            left -= BLOCK_BYTES + raw.nbytes
            if left < 0:
                raise TarDamaged(f"headers of more than {MOST_EXTENSION_BYTES} bytes for one file")
            body = self.read(at, raw.nbytes)
            if len(body) < raw.nbytes:
                raise TarDamaged("a header is cut short")
            at += _padded(raw.nbytes)
            if raw.kind in _LONG_NAME:
                long_name = _text(body)
            elif raw.kind in _GLOBAL:
                self._global.update(_pax_records(body))
            elif raw.kind in _PAX:
                pax.update(_pax_records(body))

    def _behind(self, at: int) -> str:
        """What is wrong where something lies behind the end mark: zeros fill the last record."""
        if not any(self.read(at, _RECORD_BYTES)):
            return ""
        return (
            f"more lies behind its end mark, byte {at}, as where tars were joined by cat, and is "
            "not read: join them by tar --concatenate"
        )

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the archive, fewer at its end; `at` not before what was read last."""
        self._file.seek(at)
        pieces: list[bytes] = []
        while nbytes > 0:
            piece = self._file.read(min(nbytes, _PIECE_BYTES))
            if not piece:
                break
            pieces.append(piece)
            nbytes -= len(piece)
        return b"".join(pieces)

    def _sparse_block(self, at: int) -> bool:
        block = self.read(at, BLOCK_BYTES)
        if len(block) < BLOCK_BYTES:
            raise TarDamaged("a header is cut short")
        return bool(block[504])


def _parsed(block: bytes) -> _Raw | None:
    """The fields of a header; None for a block that is none. Raises TarDamaged for a size that
    cannot be."""
    checksum = _number(block[148:156])
    if checksum is None or checksum not in tarfile.calc_chksums(block):  # type: ignore[attr-defined]
        return None
    kind, prefix = block[156:157], _text(block[345:500])
    name = _text(block[:100])
    if prefix and kind not in b"LKS":
        name = f"{prefix}/{name}"
    nbytes = _number(block[124:136])
    if nbytes is None:
        return None
    return _Raw(kind, name, _checked(nbytes), has_more=kind == _SPARSE and bool(block[482]))


def _number(field: bytes) -> int | None:
    """A number of a header, octal or of GNU's base 256; None when it is neither."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") - (1 << 88 if field[0] == 0xFF else 0)
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None


def _size(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise TarDamaged(f"a size of {text[:40]!r} bytes")
    return _checked(int(text))


def _checked(nbytes: int) -> int:
    if not 0 <= nbytes < MOST_TAR_BYTES:
        raise TarDamaged(f"a size of {nbytes} bytes")
    return nbytes


def _padded(nbytes: int) -> int:
    return round_up(nbytes, BLOCK_BYTES)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _pax_records(body: bytes) -> Mapping[str, str]:
    """Keywords and values. Raises TarDamaged."""
    found, at = {}, 0
    while at < len(body) and body[at] != 0:
        space = body.find(b" ", at, at + 20)
        digits = body[at:space] if space > at else b""
        end = at + int(digits) if digits.isdigit() else 0
        keyword, equals, value = body[space + 1 : end - 1].partition(b"=")
        if not at < space < end <= len(body) or not equals:  # each record leads on
            raise TarDamaged("a pax header is malformed")
        text = value.decode(errors="surrogateescape")
        found[keyword.decode(errors="surrogateescape")] = text
        at = end
    return found


def _end_problem(block: bytes, at: int) -> str:
    """What is wrong with a tar that ends with this block, or is said to."""
    if len(block) < BLOCK_BYTES:
        return f"it ends at byte {at + len(block)} without a tar's end mark: cut short"
    return f"no tar header at byte {at}: the rest cannot be read" if any(block) else ""
