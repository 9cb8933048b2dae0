"""Where the samples of WebDataset tars lie: a scan of headers, kept as flat arrays.

About 24 bytes a member and 40 and its key a sample, so that tens of millions fit.
"""

from __future__ import annotations

import re
import tarfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from hpstore.errors import IngestError

_MEMBER = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
APART = (
    "its files are not next to each other in the tar, as the files of one sample must be: write "
    "the tar again in the order of the names (tar --sort=name)"
)
MOST_ENDINGS = 1000
# what a damaged or cut archive makes tarfile raise
TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError)


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a tar: its sample, its field, its bytes."""

    key: str
    extension: str
    offset: int
    nbytes: int


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member: "a/b.seg.png" is ("a/b", "seg.png"); None: no record."""
    found = _MEMBER.match(name)
    if found is None or found.group(1).startswith("__"):
        return None
    return found.group(1), found.group(2).lower()


def members(tar: tarfile.TarFile) -> Iterator[tuple[Member | None, tarfile.TarInfo]]:
    """Files of an open tar in order, with None for what is no record."""
    for info in tar:
        if info.isdir():
            continue
        names = split_name(info.name) if info.isreg() and not info.issparse() else None
        if names is None:
            yield None, info
        else:
            yield Member(*names, info.offset_data, info.size), info


class Recorded:
    """A file that remembers what was read last: of a tar, the header at which tarfile stopped.

    tarfile takes a damaged header for the end of the archive and says nothing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._last = b""
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        """As of the file."""
        self._last = self._file.read(size)
        return self._last

    def end_problem(self, at: int) -> str:
        """What is wrong with the end of the archive at byte `at`, ""."""
        if len(self._last) < tarfile.BLOCKSIZE:
            return f"it ends at byte {at + len(self._last)} without a tar's end mark: cut short"
        return f"no tar header at byte {at}: the rest cannot be read" if any(self._last) else ""


def opened_tar(file: Recorded) -> tarfile.TarFile:
    """A tar over an open file. Raises what TAR_ERRORS lists."""
    return tarfile.open(fileobj=cast("IO[bytes]", file), mode="r:")


def too_many_endings(ending: str) -> IngestError:
    """The error of tars whose files have more endings than any data set has fields."""
    return IngestError(
        f"the files have more than {MOST_ENDINGS} different endings, such as .{ending}: all behind "
        "the first dot of a name is its ending, so that a.001.jpg and a.002.jpg are one sample. "
        "Rename them without that dot"
    )


class TarIndex:
    """Samples of many plain tars by number. Grows while tars are scanned."""

    def __init__(self) -> None:
        self.extensions: list[str] = []
        self.broken: dict[int, str] = {}
        self.ignored = 0
        self._numbers: dict[str, int] = {}
        self._own: set[int] = set()  # endings of the last sample
        self._first = array("q", [0])  # first member of each sample
        self._shards = array("i")
        self._extension = array("H")
        self._offsets, self._sizes = array("q"), array("q")
        self._keys, self._key_ends = bytearray(), array("q", [0])

    def __len__(self) -> int:
        return len(self._shards)

    def scan(self, shard: int, path: Path) -> None:
        """Add the samples of one tar. What is damaged becomes a broken sample, named."""
        key: str | None = None
        keys: set[str] = set()
        at = 0
        size = path.stat().st_size
        try:
            with path.open("rb") as file, opened_tar(recorded := Recorded(file)) as tar:
                for member, info in members(tar):
                    at = info.offset
                    tar.members = []  # type: ignore[attr-defined]  # or tarfile keeps every header
                    if member is None:
                        self.ignored += 1
                        continue
                    if member.key != key:
                        self._begin(shard, member.key)
                        key = member.key
                        if key in keys:
                            self.broken[len(self) - 1] = APART
                        keys.add(key)
                    self._add(member, size)
                problem = recorded.end_problem(tar.offset)
        except TAR_ERRORS as error:
            problem = f"it cannot be read past byte {at}: {error}"
        if problem:
            self._begin(shard, "")
            self.broken[len(self) - 1] = problem

    def _begin(self, shard: int, key: str) -> None:
        self._shards.append(shard)
        self._first.append(self._first[-1])
        self._own = set()
        self._keys += key.encode(errors="surrogateescape")
        self._key_ends.append(len(self._keys))

    def _add(self, member: Member, tar_bytes: int) -> None:
        sample = len(self) - 1
        number = self._numbers.setdefault(member.extension, len(self._numbers))
        if number == len(self.extensions):
            if number == MOST_ENDINGS:
                raise too_many_endings(member.extension)
            self.extensions.append(member.extension)
        if number in self._own:
            self.broken[sample] = f"it has two members .{member.extension}"
        self._own.add(number)
        if member.offset + member.nbytes > tar_bytes:
            self.broken[sample] = f".{member.extension} is cut short by the end of the tar"
        self._extension.append(number)
        self._offsets.append(member.offset)
        self._sizes.append(member.nbytes)
        self._first[-1] += 1

    def shard(self, sample: int) -> int:
        """The tar of a sample."""
        return self._shards[sample]

    def key(self, sample: int) -> str:
        """The key of a sample; "" stands for a tar's unreadable rest."""
        raw = self._keys[self._key_ends[sample] : self._key_ends[sample + 1]]
        return raw.decode(errors="surrogateescape")

    def members(self, sample: int) -> list[Member]:
        """Where the files of a sample are."""
        return [
            Member("", self.extensions[self._extension[i]], self._offsets[i], self._sizes[i])
            for i in range(self._first[sample], self._first[sample + 1])
        ]

    def nbytes(self, sample: int) -> int:
        """Bytes of a sample's files."""
        return sum(self._sizes[self._first[sample] : self._first[sample + 1]])

    def total_bytes(self) -> int:
        """Bytes of all samples' files."""
        return sum(self._sizes)


__all__ = ["APART", "MOST_ENDINGS", "TAR_ERRORS", "Member", "Recorded", "TarIndex", "members",
           "opened_tar", "split_name", "too_many_endings"]  # fmt: skip
