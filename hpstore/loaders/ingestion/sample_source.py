"""What a source of samples is: records by number, or blocks of records one after another.

A source names its records, so that a bad one can be reported, and is the same for the same files:
record i, or record i of block b, is always the same one, which is what a resumed ingest relies on.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from json.encoder import encode_basestring_ascii
from typing import TypeVar

import numpy as np

from hpstore.errors import IngestError
from hpstore.loaders.dataset.fields import Field
from hpstore.loaders.dataset.record_layout import Int64s
from hpstore.loaders.ingestion.source_rows import SourceItem, SourceRows, grouped
from hpstore.runtime.threads import WorkerThreads
from hpstore.units import MIB

K = TypeVar("K")
T = TypeVar("T")
AHEAD_BYTES = 64 * MIB
SLICED_ROWS = 1 << 14  # records looked at together
BLOCK_SHIFT = 32  # origin of a record in blocks: block << 32 | number in the block


class FieldsChanged(IngestError):
    """A record shows that a source's fields are not what it had taken them for: what was written is
    thrown away and all is read again, with the fields that it has then."""


class Source(ABC):
    """Facts about a source. `length` and `total_bytes` are None where only reading would tell."""

    kind: str
    where: str
    length: int | None = None
    total_bytes: int | None = None
    ignored: int = 0  # entries that are no records, such as files with other endings
    by_files = False  # fingerprint() looks at facts of its files alone: asked again behind the last

    @property
    def metadata(self) -> dict[str, object]:
        """What the dataset should know of its source, such as names of classes."""
        return {}

    @property
    def fields(self) -> dict[str, Field] | None:
        """Fields by the source's own schema; None: they are inferred from samples."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for an unchanged source, in another process too."""

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        """Read only these fields, where that saves something; others may still come along. `types`:
        what the user says they are, for sources that do not know themselves."""
        del names, types

    def recall(self, fields: Mapping[str, Field]) -> None:
        """Read these fields, which an earlier run of the same ingest had from the source itself."""
        self.restrict(list(fields), fields)

    def keep_whole(self) -> None:  # noqa: B027 (one schema of all records says what there is)
        """After restrict() or recall() of fields that the user did not choose: a record that has
        others is a bad one, as it was before, not one without them. Raises ConfigError."""


def require_unchanged(source: Source, before: str) -> None:
    """Raise IngestError where files were changed while they were read. `before`: the fingerprint
    that the source had."""
    if not source.by_files:
        return
    try:
        now = source.fingerprint()
    except OSError as error:
        now = str(error)
    if now != before:
        raise IngestError(
            f"{source.where} was changed while it was read (fingerprint {before}, now {now}): "
            "samples may be of both. Nothing of them is visible; resume=False (--restart) reads it "
            "again"
        )


def printable(name: str) -> str:
    """The name of a file as text that can be recorded: bytes that are no UTF-8 with backslashes."""
    return name.encode(errors="backslashreplace").decode()


class IndexedSource(Source):
    """A source whose records are read by number, in any order."""

    length: int
    threads = 1  # that gain something by default

    @property
    def broken(self) -> Mapping[int, str]:
        """What is known to be wrong before anything is read, by number."""
        return {}

    @abstractmethod
    def name_of(self, index: int) -> str:
        """What to call record `index` in a message."""

    @abstractmethod
    def load(self, index: int) -> SourceItem:
        """Read one record. Called by several threads."""

    def bytes_of(self, index: int) -> int:
        """About how much memory the record takes."""
        return 0

    def read(self, indices: Iterable[int], workers: int) -> Iterator[SourceItem]:
        """Read records in the order given, up to `workers` at a time."""
        if workers <= 1:
            yield from map(self.load, indices)
            return
        pool = WorkerThreads(workers, "hpstore-ingest")
        try:
            yield from in_order(
                lambda index: pool.submit(self.load, index),
                indices,
                ahead=2 * workers,
                bytes_of=self.bytes_of,
            )
        finally:
            pool.shutdown(cancel_futures=True)

    def read_rows(self, indices: Iterable[int], workers: int) -> Iterator[SourceRows]:
        """As read(), many records at once: by columns where the source has some."""
        return grouped(self.read(indices, workers))


class BlockwiseSource(Source):
    """A source that is read block by block: row groups, compressed archives, one iterable."""

    blocks: int
    reads_ahead = False  # by a thread, while what was read is written

    def block_bytes(self, block: int) -> int:
        """About how many bytes of the source are one block; 1 where all blocks are about alike."""
        del block
        return 1

    def bytes_read(self) -> int:
        """About how many of these were read of the block that is read now, 0 where that is not
        known. Called by the thread that reads."""
        return 0

    @abstractmethod
    def read_block(self, block: int, start: int) -> Iterator[SourceItem]:
        """Records of a block from number `start` on, in their order."""

    def read_rows(self, block: int, start: int) -> Iterator[SourceRows]:
        """As read_block(), many records at once: by columns where the source has some."""
        return grouped(self.read_block(block, start))


class InferredFields(BlockwiseSource):
    """A source without a schema: its fields are inferred when they are asked for the first time.

    `_names`: the fields that the user takes, None: all; `_types`: what some of them are.
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._types: dict[str, Field] = {}
        self._fields: dict[str, Field] | None = None

    def restrict(self, names: Sequence[str], types: Mapping[str, Field]) -> None:
        self._names, self._types, self._fields = list(names), dict(types), None

    def keep_whole(self) -> None:
        self._fields, self._names = self.fields, None

    @property
    def fields(self) -> dict[str, Field]:
        if self._fields is None:
            self._fields = self._found()
        return self._fields

    @abstractmethod
    def _found(self) -> dict[str, Field]:
        """What the first records have, and what the user says. Raises ConfigError, IngestError."""


def in_order(
    submit: Callable[[K], Future[T]],
    indices: Iterable[K],
    *,
    ahead: int,
    bytes_of: Callable[[K], int],
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[T]:
    """Results in the order of `indices`, at most `ahead` records and `ahead_bytes` under way.

    A record larger than `ahead_bytes` is read alone.
    """
    pending: deque[tuple[Future[T], int]] = deque()
    held = 0
    for index in indices:
        nbytes = bytes_of(index)
        while pending and (len(pending) >= ahead or held + nbytes > ahead_bytes):
            future, done = pending.popleft()
            held -= done
            yield future.result()
        pending.append((submit(index), nbytes))
        held += nbytes
    while pending:
        yield pending.popleft()[0].result()


def sliced(
    indices: Iterable[int], sizes: Int64s, *, rows: int, nbytes: int
) -> Iterator[tuple[Int64s, int]]:
    """The indices in runs of at most so many, and of so many bytes; one at least. And the bytes.
    `sizes`: of all records."""
    left = iter(indices)
    while len(some := np.fromiter(islice(left, SLICED_ROWS), np.int64)):
        ends = np.cumsum(sizes[some])
        low = before = 0
        while low < len(some):
            fits = int(np.searchsorted(ends, before + nbytes, "right"))
            high = min(max(fits, low + 1), low + rows, len(some))
            yield some[low:high], int(ends[high - 1]) - before
            low, before = high, int(ends[high - 1])


def digest_of(rows: Iterable[object], files: Iterable[tuple[str, int, int]] = ()) -> str:
    """A fingerprint of JSON rows, and of files behind them: (path, size, time), as JSON, too."""
    digest = hashlib.blake2b(digest_size=16)
    encode = json.JSONEncoder(sort_keys=True).encode
    # JSON of millions of files as the encoder has it, in a tenth of its time
    lines = (f"[{encode_basestring_ascii(path)}, {size}, {time}]" for path, size, time in files)
    for some in batched(chain(map(encode, rows), lines), SLICED_ROWS):
        digest.update("\n".join([*some, ""]).encode())
    return digest.hexdigest()


def batched(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """The items in lists of so many, the last of fewer."""
    left = iter(items)
    while some := list(islice(left, most)):
        yield some
