"""Keys, versions and the names that files of an object have on a device. Pure.

A key is a path: every component becomes a directory, so that an operator can look around with
`ls`. The files in a key's directory start with `@`, a character that a component never starts with
on disk, so `a` and `a/b` can both be objects (PROTOCOL 13):

    @<counter>-<nonce>-<revision>.c<column>.<k>+<m>      a column
    @<counter>-<nonce>-<revision>.r<copy>.1+<m>          a whole copy (small objects)
    @<counter>-<nonce>-<revision>.t<copy>.1+<m>          a tombstone

In a pool with a key (pool_key.py) a point and 24 hex digits follow: a MAC over the pool, the object
and what the name says.
"""

from __future__ import annotations

import re
import secrets
import struct
from enum import StrEnum
from functools import lru_cache
from hmac import compare_digest
from typing import NamedTuple

from hpstore.errors import IntegrityError, InvalidKey
from hpstore.format.pool_key import TAG_DIGITS, PoolKey, Use

MAX_KEY_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_COUNTER = 1 << 62  # versions beyond are nobody's: damage must not push counters out of range
OBJECTS = "objects"
_MAX_REVISION, _RANDOM_BITS = (1 << 32) - 1, 24
_HEX = "0123456789abcdef"
ContentId = tuple[int, int]  # (counter, nonce): equal for all revisions of the same bytes
_KEPT = 1024  # keys: each is asked for on all devices, and again when its columns are opened


class Version(NamedTuple):
    """(counter, nonce, revision) of an object, ordered so (PROTOCOL 1).

    `counter` is a hybrid clock in milliseconds, `nonce` 64 random bits of the writer, `revision`
    rises only when a stored object is laid out again.
    """

    counter: int
    nonce: int
    revision: int = 0

    def __str__(self) -> str:
        return f"{self.counter:016x}-{self.nonce:016x}-{self.revision:08x}"

    @property
    def content(self) -> ContentId:
        """Equal for all revisions, which hold the same bytes."""
        return (self.counter, self.nonce)

    def revised(self) -> Version:
        """A later revision of the same bytes. Its low 24 bits are random, so that two repairs that
        know nothing of each other never give two layouts one name; the bits above them order."""
        order = self.revision >> _RANDOM_BITS
        if order < _MAX_REVISION >> _RANDOM_BITS:
            low = (order + 1) << _RANDOM_BITS
            return Version(self.counter, self.nonce, low + secrets.randbits(_RANDOM_BITS))
        if self.revision == _MAX_REVISION:
            raise IntegrityError(f"version {self} has no later revision; put the object again")
        room = _MAX_REVISION - self.revision  # 255 layouts later: half of what is left, each time
        return Version(self.counter, self.nonce, self.revision + 1 + secrets.randbelow(room))

    @classmethod
    def parse(cls, text: str) -> Version:
        """Inverse of str(). Raises ValueError."""
        match = re.fullmatch(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{8})", text)
        if match is None:
            raise ValueError(f"{text!r} is not a version")
        return cls(*(int(part, 16) for part in match.groups()))


class Kind(StrEnum):
    """What a file of an object is."""

    COLUMN = "c"
    COPY = "r"
    TOMBSTONE = "t"


class ColumnName(NamedTuple):
    """The facts in a column's file name."""

    version: Version
    kind: Kind
    column: int
    data: int
    parity: int
    tag: str = ""  # the MAC of a pool with a key

    @property
    def plain(self) -> str:
        """The name without its tag."""
        return f"@{self.version}.{self.kind}{self.column:02d}.{self.data}+{self.parity}"

    def __str__(self) -> str:
        return f"{self.plain}.{self.tag}" if self.tag else self.plain

    @property
    def layout(self) -> tuple[Version, Kind, int, int]:
        """Columns of one layout belong together; others never mix with them."""
        return (self.version, self.kind, self.data, self.parity)


class NameTags:
    """Tags of the names that files of one object have in a pool. `pool_key`: None for a pool that
    has none, whose names have no tags."""

    def __init__(self, pool_key: PoolKey | None, pool_id: str, key: str) -> None:
        self._believes = pool_key is not None and pool_key.lost
        self._begun = None
        if pool_key is not None and not pool_key.lost:  # keys hold no NUL
            self._begun = pool_key.hasher(Use.NAME, f"{pool_id}\0{key}\0".encode())

    def tagged(self, name: ColumnName) -> ColumnName:
        """The name with its tag."""
        return name if self._begun is None else name._replace(tag=self._tag(name))

    def admits(self, name: ColumnName) -> bool:
        """Whether a writer of the pool gave this name to a file of this object. Where the pool has
        no key that cannot be told; where its key is lost, every name with a tag is believed."""
        if self._begun is None:
            return bool(name.tag) == self._believes
        return compare_digest(self._tag(name), name.tag)

    def _tag(self, name: ColumnName) -> str:
        assert self._begun is not None
        made = self._begun.copy()
        made.update(_FACTS.pack(*name.version, ord(name.kind), name.column, name.data, name.parity))
        return made.hexdigest()


_FACTS = struct.Struct("<QQIBBBB")  # a name is made of these, and in one form only
# no leading zeros: one name for one thing
_NAME = re.compile(
    r"@([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{8})\.([crt])([0-9]{2})\.([1-9][0-9]?)\+([1-8])"
    rf"(?:\.([0-9a-f]{{{TAG_DIGITS}}}))?"
)
_KINDS = {kind.value: kind for kind in Kind}


def parse_column_name(name: str) -> ColumnName | None:
    """The facts in a file name, or None for a name of another form."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    counter, nonce, revision, kind, column, data, parity, tag = match.groups("")
    version = Version(int(counter, 16), int(nonce, 16), int(revision, 16))
    found = ColumnName(version, _KINDS[kind], int(column), int(data), int(parity), tag)
    sane = found.column < found.data + found.parity <= 32 and found.version.counter < MAX_COUNTER
    return found if sane else None


def check_key(key: str) -> str:
    """Return `key` if it can name an object, else raise InvalidKey."""
    if not isinstance(key, str):
        raise InvalidKey(f"a key is a str, not {type(key).__name__}")
    return _check_text(key)


_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@lru_cache(_KEPT)
def _check_text(key: str) -> str:
    try:
        encoded = key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidKey(f"key {key!r} is not valid Unicode: {error.reason}") from error
    if len(encoded) > MAX_KEY_BYTES:
        raise InvalidKey(
            f"key of {len(encoded)} bytes ({key[:40]!r}...): at most {MAX_KEY_BYTES} are allowed"
        )
    if _CONTROL.search(key):
        raise InvalidKey(f"key {key!r} holds a control character")
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise InvalidKey(
                f"key {key!r} has the component {part!r}; components are not empty, '.' or '..', "
                "and a key neither begins nor ends with '/'"
            )
        if len(escape(part, folding=False).encode()) > MAX_NAME_BYTES:
            raise InvalidKey(
                f"key component {part[:40]!r}... is longer than {MAX_NAME_BYTES} bytes"
            )
    return key


def _quote(byte: int) -> str:
    return f"%{_HEX[byte >> 4]}{_HEX[byte & 15]}"


def escape(part: str, *, folding: bool) -> str:
    """Directory name of a key component.

    With `folding` (a filesystem that folds case or normalises), upper case and everything outside
    ASCII is escaped too, so that different keys never share a directory.
    """
    lower = not folding or (part.isascii() and part == part.lower())
    if lower and "%" not in part and not part.startswith("@"):
        return part
    out = []
    for index, character in enumerate(part):
        plain = character != "%" and not (index == 0 and character == "@")
        if folding:
            plain = plain and character.isascii() and not character.isupper()
        out.append(character if plain else "".join(_quote(b) for b in character.encode()))
    name = "".join(out)
    if folding and len(name) > MAX_NAME_BYTES:
        raise InvalidKey(
            f"key component {part[:40]!r}... needs {len(name)} bytes on a device that folds "
            f"case; at most {MAX_NAME_BYTES} fit"
        )
    return name


def unescape(name: str) -> str:
    """Inverse of escape()."""
    if "%" not in name:
        return name
    raw = re.sub(
        rb"%([0-9a-f]{2})",
        lambda match: bytes([int(match.group(1), 16)]),
        name.encode("utf-8", errors="surrogateescape"),
    )
    return raw.decode("utf-8", errors="surrogateescape")


def component_of(name: str, *, folding: bool) -> str | None:
    """The key component that escape() makes this directory name of; None for a foreign name."""
    if _PLAIN.fullmatch(name):
        return name
    part = unescape(name)
    try:
        check_key(part)
        return part if "/" not in part and escape(part, folding=folding) == name else None
    except InvalidKey:
        return None


# as they are on every device: what nearly all names are
_PLAIN = re.compile(rf"[0-9a-z_-][0-9a-z._-]{{0,{MAX_NAME_BYTES - 1}}}")


@lru_cache(_KEPT)
def object_directory(key: str, *, folding: bool = False) -> str:
    """Directory of a key, relative to the device root."""
    return "/".join([OBJECTS, *(escape(part, folding=folding) for part in key.split("/"))])


def column_path(key: str, name: ColumnName, *, folding: bool = False) -> str:
    """File of an object, relative to the device root."""
    return f"{object_directory(key, folding=folding)}/{name}"
