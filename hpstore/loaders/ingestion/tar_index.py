"""Where the samples of WebDataset tars lie: a scan of headers, kept as flat arrays.

About 24 bytes a member and 40 and its key a sample, so that tens of millions fit.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpstore.errors import IngestError
from hpstore.loaders.ingestion.tar_headers import TarDamaged, TarHeaders, TarMember

_MEMBER = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")
APART = (
    "its files are not next to each other in the tar, as the files of one sample must be: write "
    "the tar again in the order of the names (tar --sort=name)"
)
MOST_ENDINGS = 1000


@dataclass(frozen=True, slots=True)
class SampleFile:
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


def members(tar: TarHeaders) -> Iterator[tuple[SampleFile | None, TarMember]]:
    """Files of a tar in order, with None for what is no record."""
    for found in tar:
        if found.is_folder:
            continue
        names = split_name(found.name) if found.is_file else None
        if names is None:
            yield None, found
        else:
            yield SampleFile(*names, found.data_offset, found.nbytes), found


def too_many_endings(ending: str) -> IngestError:
    """The error of tars whose files have more endings than any dataset has fields."""
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
            with path.open("rb") as file:
                tar = TarHeaders(file)
                for member, found in members(tar):
                    at = found.offset
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
                problem = tar.problem
        except (TarDamaged, OSError) as error:
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

    def _add(self, member: SampleFile, tar_bytes: int) -> None:
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

    def members(self, sample: int) -> list[SampleFile]:
        """Where the files of a sample are."""
        return [
            SampleFile("", self.extensions[self._extension[i]], self._offsets[i], self._sizes[i])
            for i in range(self._first[sample], self._first[sample + 1])
        ]

    def nbytes(self, sample: int) -> int:
        """Bytes of a sample's files."""
        return sum(self._sizes[self._first[sample] : self._first[sample + 1]])

    def total_bytes(self) -> int:
        """Bytes of all samples' files."""
        return sum(self._sizes)
