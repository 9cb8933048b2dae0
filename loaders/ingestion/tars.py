"""WebDataset shards: tars whose consecutive files of one basename are a sample.

Plain tars are read at random, after a scan of their headers; compressed ones one after another.
Bytes are kept; .cls becomes an int64, .txt a str.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from hpstore.loaders.ingestion.image_checks import CHECKED, image_problem
from hpstore.loaders.ingestion.paths import file_facts, source_files
from hpstore.loaders.ingestion.source import (
    BLOCK_SHIFT,
    BlockSource,
    IndexedSource,
    Item,
    Source,
    digest_of,
    printable,
)
from hpstore.loaders.ingestion.tar_index import TAR_ERRORS, Recorded, TarIndex, members, opened_tar

PLAIN = (".tar",)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_STREAM_ERRORS = (*TAR_ERRORS, zlib.error, lzma.LZMAError)


def webdataset(where: str | os.PathLike[str], *, check: bool = True) -> Source:
    """The tars of a file, folder or pattern. With `check`, cut images are bad records."""
    files = source_files(where, PLAIN + COMPRESSED)
    if any(file.name.lower().endswith(COMPRESSED) for file in files):
        return TarStreams(str(where), files, check=check)
    return TarShards(str(where), files, check=check)


class TarShards(IndexedSource):
    """Samples of plain tars by number, in the order of the files."""

    kind = "webdataset"
    threads = 4

    def __init__(self, where: str, files: Sequence[Path], *, check: bool) -> None:
        self.where = where
        self._files, self._check = files, check
        self._index = TarIndex()
        for number, file in enumerate(files):
            self._index.scan(number, file)
        self.length, self.total_bytes = len(self._index), self._index.total_bytes()
        self.ignored = self._index.ignored

    @property
    def broken(self) -> Mapping[int, str]:
        return self._index.broken

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every tar."""
        return digest_of([self.kind, *file_facts(self._files)])

    def name_of(self, index: int) -> str:
        tar, key = self._files[self._index.shard(index)].name, self._index.key(index)
        return printable(f"{tar}: {key}" if key else tar)

    def bytes_of(self, index: int) -> int:
        return self._index.nbytes(index)

    def load(self, index: int) -> Item:
        name = self.name_of(index)
        if index in self.broken:
            return Item(name=name, origin=index, problem=self.broken[index])
        parts: dict[str, bytes] = {}
        try:
            with self._files[self._index.shard(index)].open("rb") as file:
                for member in self._index.members(index):
                    file.seek(member.offset)
                    parts[member.extension] = file.read(member.nbytes)
                    if len(parts[member.extension]) < member.nbytes:
                        problem = f".{member.extension} is cut short: the tar has changed"
                        return Item(name=name, origin=index, problem=problem)
        except OSError as error:
            return Item(name=name, origin=index, problem=f"it cannot be read: {error.strerror}")
        return decoded(name, index, parts, check=self._check)


@dataclass(slots=True)
class _Open:
    """A sample of which more files may come."""

    key: str
    number: int
    parts: dict[str, bytes]
    problem: str = ""


class TarStreams(BlockSource):
    """Samples of tars of which some are compressed; a block is a tar."""

    kind = "webdataset"

    def __init__(self, where: str, files: Sequence[Path], *, check: bool) -> None:
        self.where = where
        self._files, self._check = files, check
        self.blocks = len(files)

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every tar."""
        return digest_of([self.kind, *file_facts(self._files)])

    def read_block(self, block: int, start: int) -> Iterator[Item]:
        path = self._files[block]
        for opened in _samples(path):
            if opened.number >= start:
                yield self._item(path, block, opened)

    def _item(self, path: Path, block: int, sample: _Open) -> Item:
        name = f"{path.name}: {sample.key}" if sample.key else path.name
        origin = block << BLOCK_SHIFT | sample.number
        if sample.problem:
            return Item(name=name, origin=origin, problem=sample.problem)
        return decoded(name, origin, sample.parts, check=self._check)


def _samples(path: Path) -> Iterator[_Open]:
    """Samples of a tar as they come; last, a broken one where the tar is damaged."""
    sample: _Open | None = None
    number = 0
    problem = ""
    try:
        with _decompressed(path) as file, opened_tar(recorded := Recorded(file)) as tar:
            for member, info in members(tar):
                tar.members = []  # type: ignore[attr-defined]
                if member is None:
                    continue
                if sample is None or sample.key != member.key:
                    if sample is not None:
                        yield sample
                    sample = _Open(member.key, number, {})
                    number += 1
                if member.extension in sample.parts:
                    sample.problem = f"it has two members .{member.extension}"
                found = tar.extractfile(info)
                sample.parts[member.extension] = found.read() if found else b""
            problem = recorded.end_problem(tar.offset)
    except _STREAM_ERRORS as error:
        problem = f"it cannot be read past sample {number}: {error or type(error).__name__}"
    if problem and sample is not None and not problem.startswith("it ends"):
        sample.problem = sample.problem or "it is cut short or damaged"
    if sample is not None:
        yield sample
    if problem:
        yield _Open("", number, {}, problem)


def _decompressed(path: Path) -> IO[bytes]:
    """A tar's bytes, by the ending of its name."""
    name = path.name.lower()
    if name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.open(path))
    if name.endswith(".bz2"):
        return cast("IO[bytes]", bz2.open(path))
    return cast("IO[bytes]", lzma.open(path)) if name.endswith(".xz") else path.open("rb")


def decoded(name: str, origin: int, parts: Mapping[str, bytes], *, check: bool) -> Item:
    """The sample of a key's files: .cls as int, .txt as str, anything else as bytes."""
    sample: dict[str, object] = {}
    for extension, data in parts.items():
        suffix = "." + extension.rpartition(".")[2]
        try:
            if extension == "cls":
                sample[extension] = int(data)
            elif extension == "txt":
                sample[extension] = data.decode()
            else:
                sample[extension] = data
        except ValueError as error:
            return Item(name=name, origin=origin, problem=f".{extension}: {error}")
        if check and suffix in CHECKED and (problem := image_problem(data, suffix)):
            return Item(name=name, origin=origin, problem=f".{extension}: {problem}")
    return Item(name=name, origin=origin, sample=sample)


__all__ = ["COMPRESSED", "PLAIN", "TarShards", "TarStreams", "webdataset"]
