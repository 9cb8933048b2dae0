"""WebDataset shards: tars whose consecutive files of one basename are a sample.

Plain tars are read at random, after a scan of their headers; compressed ones one after another.
Fields are the endings of the files. Where the user does not say what they are, those that
WebDataset takes for numbers are ints (text, where they are none), those that it takes for text or
JSON are str, and all others stay bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

from hpstore.format.untrusted_bytes import most_inflated
from hpstore.loaders.dataset.fields import MAX_VALUE_BYTES, Field, too_large
from hpstore.loaders.dataset.json_values import parse_value
from hpstore.loaders.dataset.many_ranges import decimals
from hpstore.loaders.dataset.stored_values import StoredValues
from hpstore.loaders.dataset.value_rows import Int64s, ValueRows
from hpstore.loaders.ingestion.compressed_files import STREAM_ERRORS, FilePosition, decompressed
from hpstore.loaders.ingestion.image_checks import CHECKED, any_problem, image_problem
from hpstore.loaders.ingestion.sample_source import (
    BLOCK_SHIFT,
    BlockwiseSource,
    IndexedSource,
    Source,
    digest_of,
    in_order,
    printable,
    sliced,
)
from hpstore.loaders.ingestion.source_paths import SourceFile, file_facts, source_files
from hpstore.loaders.ingestion.source_rows import (
    GROUP_BYTES,
    Column,
    ColumnRows,
    SourceItem,
    SourceRows,
    grouped,
)
from hpstore.loaders.ingestion.tar_headers import TarDamaged, TarHeaders
from hpstore.loaders.ingestion.tar_index import (
    APART,
    MOST_ENDINGS,
    MemberTable,
    SampleFile,
    TarIndex,
    members,
    too_many_endings,
)
from hpstore.loaders.ingestion.tar_members import BadMember, read_members
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import format_bytes

KEY = "__key__"  # the field of a sample's key, for who asks for it
_TEXT = {"txt", "text", "transcript", "json", "jsn"}
_NUMBERS = {"cls", "cls2", "class", "count", "index", "inx", "id"}
PLAIN = (".tar",)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
SLICE_ROWS = 4096  # read by a thread at a time
_WHOLE = Field("int64")
_SHOWN = 40  # bytes of a file in a message
_BOOLS = {b"true": True, b"1": True, b"false": False, b"0": False}
_STREAM_ERRORS = (TarDamaged, *STREAM_ERRORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFiles:
    """Which files of a sample are taken, and as what. `check`: images must be whole."""

    check: bool
    names: frozenset[str] | None = None  # None: all but the key
    types: Mapping[str, Field] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """Whether the file with this ending is taken."""
        return self.names is None or name in self.names

    def decoded(self, name: str, origin: int, key: str, parts: Mapping[str, bytes]) -> SourceItem:
        """The sample of a key's files, or what is wrong with it."""
        sample: dict[str, object] = {}
        if self.names is not None and KEY in self.names:
            sample[KEY] = printable(key)
        for extension, data in parts.items():
            if not self.takes(extension):
                continue
            suffix = "." + extension.rpartition(".")[2]
            try:
                sample[extension] = _value(suffix[1:], data, self.types.get(extension))
            except ValueError as error:
                problem = (
                    f".{extension}: {error}; fields={{{extension!r}: Field('bytes'), ...}} "
                    "takes it as it is"
                )
                return SourceItem(name=name, origin=origin, problem=problem)
            if self.check and suffix in CHECKED and (problem := image_problem(data, suffix)):
                return SourceItem(name=name, origin=origin, problem=f".{extension}: {problem}")
        return SourceItem(name=name, origin=origin, sample=sample)

    def columns(self, table: MemberTable, members: Mapping[str, ValueRows]) -> dict[str, Column]:
        """The fields of many samples; raises BadMember where decoded() finds something wrong."""
        found: dict[str, Column] = {}
        for ending in table.endings:
            if ending in members:
                found[ending] = self._column(ending, members[ending])
        return found

    def _column(self, ending: str, rows: ValueRows) -> Column:
        suffix = ending.rpartition(".")[2]
        made = self.types.get(ending)
        kind = made.dtype if made is not None else "str" if suffix in _TEXT else "bytes"
        text = kind == "str" and (made is None or not made.shape)
        raw = made.is_bytes if made is not None else kind == "bytes"
        if not (text or raw) or (made is None and suffix in _NUMBERS):
            return self._numbers(suffix, rows, made)
        if int(rows.lengths.max(initial=0)) > MAX_VALUE_BYTES:
            raise BadMember
        if text:
            _require_text(rows)
        elif self.check and "." + suffix in CHECKED and any_problem(rows, lambda _: "." + suffix):
            raise BadMember
        return StoredValues(text=text, rows=rows)

    def _numbers(self, suffix: str, rows: ValueRows, made: Field | None) -> Column:
        whole = made is None or made == _WHOLE
        if whole and (found := decimals(rows)) is not None:
            return found
        data = [bytes(one) for one in rows.views()]
        if made is None and suffix in _NUMBERS:
            with contextlib.suppress(ValueError):
                return list(map(int, data))
        try:
            return [_value(suffix, one, made) for one in data]
        except ValueError:
            raise BadMember from None


def _require_text(rows: ValueRows) -> None:
    try:
        for one in rows.views():
            str(one, "utf-8")
    except UnicodeDecodeError:
        raise BadMember from None


def _value(ending: str, data: bytes, made: Field | None) -> object:
    """What a file of a sample is: by its field, else by its ending. Raises ValueError."""
    if made is not None and (made.is_bytes or made.is_json):
        return data if made.is_bytes else parse_value(made.dtype, data)
    if made is not None and made.dtype == "str":
        return data.decode()
    if made is not None and made.shape == ():
        return _number(made.dtype, data)
    if ending in _NUMBERS:
        try:
            return int(data)
        except ValueError:
            return data.decode()
    return data.decode() if ending in _TEXT else data


def _number(dtype: str, data: bytes) -> complex:
    """A number of a file's text. Raises ValueError."""
    if dtype == "bool":
        said = data.strip().lower()
        if said not in _BOOLS:
            raise ValueError(f"{data[:_SHOWN]!r} is none of true, false, 1 and 0")
        return _BOOLS[said]
    if dtype.startswith("complex"):
        return complex(data.decode())
    return float(data) if "float" in dtype else int(data)


def webdataset(
    where: str | os.PathLike[str],
    *,
    check: bool = True,
    storage: Mapping[str, object] | None = None,
) -> Source:
    """The tars of a file, folder, pattern or URL. With `check`, cut images are bad records."""
    files = source_files(where, PLAIN + COMPRESSED, storage or {})
    local = [file for file in files if isinstance(file, Path)]
    if len(local) < len(files) or any(f.name.lower().endswith(COMPRESSED) for f in files):
        return TarStreams(str(where), files, check=check)
    return TarShards(str(where), local, check=check)


class TarShards(IndexedSource):
    """Samples of plain tars by number, in the order of the files."""

    kind = "webdataset"
    by_files = True
    threads = 2

    def __init__(self, where: str, files: Sequence[Path], *, check: bool) -> None:
        self.where = where
        self._files, self._wanted = files, WantedFiles(check=check)
        self._index = TarIndex()
        for number, file in enumerate(files):
            self._index.scan(number, file)
        self._sizes = self._index.sample_bytes()
        self.length, self.total_bytes = len(self._index), int(self._sizes.sum())
        self.ignored = self._index.ignored

    @property
    def broken(self) -> Mapping[int, str]:
        return self._index.broken

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        self._wanted = replace(self._wanted, names=frozenset(names), types=types)

    def keep_whole(self) -> None:
        self._wanted = replace(self._wanted, names=None)

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every tar."""
        return digest_of([self.kind, *file_facts(self._files)])

    def name_of(self, index: int) -> str:
        tar, key = self._files[self._index.shard(index)].name, self._index.key(index)
        return printable(f"{tar}: {key}" if key else tar)

    def bytes_of(self, index: int) -> int:
        return int(self._sizes[index])

    def load(self, index: int) -> SourceItem:
        name = self.name_of(index)
        if index in self.broken:
            return SourceItem(name=name, origin=index, problem=self.broken[index])
        parts: dict[str, bytes] = {}
        try:
            with self._files[self._index.shard(index)].open("rb") as file:
                for member in self._index.members(index):
                    if not self._wanted.takes(member.extension):
                        continue
                    if member.nbytes > MAX_VALUE_BYTES:
                        problem = f".{member.extension} {too_large(member.nbytes)}"
                        return SourceItem(name=name, origin=index, problem=problem)
                    file.seek(member.offset)
                    parts[member.extension] = file.read(member.nbytes)
                    if len(parts[member.extension]) < member.nbytes:
                        problem = f".{member.extension} is cut short: the tar has changed"
                        return SourceItem(name=name, origin=index, problem=problem)
        except OSError as error:
            return SourceItem(
                name=name, origin=index, problem=f"it cannot be read: {error.strerror}"
            )
        return self._wanted.decoded(name, index, self._index.key(index), parts)

    def read(self, indices: Iterable[int], workers: int) -> Iterator[SourceItem]:
        for rows in self.read_rows(indices, workers):
            yield from rows.items()

    def read_rows(self, indices: Iterable[int], workers: int) -> Iterator[SourceRows]:
        """Slices of the samples, `workers` at a time; each by ranges of the tars."""
        slices = sliced(indices, self._sizes, rows=SLICE_ROWS, nbytes=GROUP_BYTES)
        if workers <= 1:
            for some, _ in slices:
                yield from self._read_slice(some)
            return
        pool = WorkerThreads(workers, "hpstore-ingest")

        def submit(some: tuple[Int64s, int]) -> Future[list[SourceRows]]:
            return pool.submit(self._read_slice, some[0])

        try:
            for found in in_order(submit, slices, ahead=workers + 1, bytes_of=itemgetter(1)):
                yield from found
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_slice(self, samples: Int64s) -> list[SourceRows]:
        """These samples by columns, or one by one where they differ or one of them is bad."""
        indices: list[int] = samples.tolist()
        table = None
        if self.broken.keys().isdisjoint(indices):
            table = self._index.table(samples)
        if table is not None and int(table.sizes.max(initial=0)) <= MAX_VALUE_BYTES:
            with contextlib.suppress(OSError, BadMember):
                members = read_members(self._files, table, self._wanted.takes)
                columns = self._wanted.columns(table, members)
                if KEY in (self._wanted.names or ()):
                    columns[KEY] = [printable(self._index.key(index)) for index in indices]
                return [ColumnRows(columns, samples, lambda row: self.name_of(indices[row]))]
        return list(grouped(map(self.load, indices)))


@dataclass(slots=True)
class _Open:
    """A sample of which more files may come."""

    key: str
    number: int
    parts: dict[str, bytes]
    problem: str = ""


class TarStreams(BlockwiseSource):
    """Samples of tars of which some are compressed or remote; a block is a tar."""

    kind = "webdataset"
    by_files = True

    def __init__(self, where: str, files: Sequence[SourceFile], *, check: bool) -> None:
        self.where = where
        self._files, self._wanted = files, WantedFiles(check=check)
        self.blocks = len(files)
        self._position = FilePosition()

    def block_bytes(self, block: int) -> int:
        return self._files[block].stat().st_size

    def bytes_read(self) -> int:
        return self._position.reached()

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        self._wanted = replace(self._wanted, names=frozenset(names), types=types)

    def keep_whole(self) -> None:
        self._wanted = replace(self._wanted, names=None)

    def fingerprint(self) -> str:
        """Over the path, size and time of change of every tar."""
        return digest_of([self.kind, *file_facts(self._files)])

    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        path = self._files[block]
        for opened in _samples(path, self._position):
            if opened.number >= start:
                yield self._item(path, block, opened)

    def _item(self, path: SourceFile, block: int, sample: _Open) -> SourceItem:
        name = f"{path.name}: {sample.key}" if sample.key else path.name
        origin = block << BLOCK_SHIFT | sample.number
        if sample.problem:
            return SourceItem(name=name, origin=origin, problem=sample.problem)
        return self._wanted.decoded(name, origin, sample.key, sample.parts)


def _samples(path: SourceFile, position: FilePosition) -> Iterator[_Open]:
    """Samples of a tar as they come; last, a broken one where the tar is damaged."""
    sample: _Open | None = None
    number = 0
    problem = ""
    keys: set[str] = set()
    most = most_inflated(path.stat().st_size)
    try:
        with decompressed(path, position) as file:
            tar = TarHeaders(file)
            for member, _ in members(tar):
                if member is None:
                    continue
                if sample is None or sample.key != member.key:
                    if sample is not None:
                        yield sample
                    sample = _Open(member.key, number, {})
                    if member.key in keys:
                        sample.problem = APART
                    keys.add(member.key)
                    number += 1
                if member.extension in sample.parts:
                    sample.problem = f"it has two members .{member.extension}"
                elif len(sample.parts) == MOST_ENDINGS:
                    raise too_many_endings(member.extension)
                _take(sample, member, tar, most)
            problem = tar.problem
    except _STREAM_ERRORS as error:
        problem = f"it cannot be read past sample {number}: {error or type(error).__name__}"
    if problem and sample is not None and not problem.startswith("it ends"):
        sample.problem = sample.problem or "it is cut short or damaged"
    if sample is not None:
        yield sample
    if problem:
        yield _Open("", number, {}, problem)


def _take(sample: _Open, member: SampleFile, tar: TarHeaders, most: int) -> None:
    """Read a file of a sample, unless the sample would take more memory than `most`."""
    held = sum(map(len, sample.parts.values()))
    if held + member.nbytes > most:
        sample.parts[member.extension] = b""
        sample.problem = (
            f".{member.extension} has {format_bytes(member.nbytes)}, far more than this tar; of a "
            f"sample in a compressed one {format_bytes(most)} are read: write the tar without "
            "compression"
        )
        return
    data = tar.read(member.offset, member.nbytes)
    if len(data) < member.nbytes:
        raise TarDamaged(f".{member.extension} is cut short")
    sample.parts[member.extension] = data
