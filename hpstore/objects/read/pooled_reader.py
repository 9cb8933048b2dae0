"""Range reads of one open object."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hpstore.codec.galois import Bytes
from hpstore.errors import AlreadyClosed, TooManyErasures
from hpstore.format.keys import ContentId
from hpstore.objects.context import PoolContext
from hpstore.objects.object_info import version_token
from hpstore.objects.read.object_reader import Changed, Deliver, ObjectReader
from hpstore.objects.read.open_many import MOST_KEYS, open_objects
from hpstore.objects.read.record_batch_read import Scatter, Scattered
from hpstore.objects.read.resolve import open_object
from hpstore.objects.read.unit_batch_read import Filled, UnitFill
from hpstore.runtime.closing import Closing

READ_TRIES = 8
RETAKE_SECONDS = 30.0  # between looks of a reader that has lost columns
T = TypeVar("T")
Readers = dict[str, "PooledReader | Exception"]  # by key; why there is none
Int64s = npt.NDArray[np.int64]


class RangeReads(Protocol):
    """What takes ranges of many open objects, to read them at once: Scatter, UnitFill, others."""

    def add(self, reader: ObjectReader, starts: Int64s, numbers: Int64s) -> None:
        """Range numbers[i] begins at byte starts[i] of an open object."""


class PooledReader(Closing):
    """Range reads of one object without looking it up each time.

    When the object is replaced underneath, the newest version is opened and read on; when it was
    deleted, reads raise ObjectNotFound. A reader that has lost columns looks again before a read
    fails for them, and every `RETAKE_SECONDS`: the pool may have healed them since.
    """

    def __init__(
        self,
        store: PoolContext,
        key: str,
        reader: ObjectReader | None = None,
        content: ContentId | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """`content`: of the version that is read, and no other; the newest unless given. `whole` as
        of ObjectReader."""
        self._store, self._key, self._content, self._whole = store, key, content, whole
        self._reader = self._opened(patient=False) if reader is None else reader
        self._looked_at = store.clock.monotonic()
        self._closed = False

    def share(self) -> PooledReader:
        """Another reader over the same open files, for another thread; this one is not in use."""
        return PooledReader(self._store, self._key, self._reader.share(), self._content)

    @property
    def pinned(self) -> bool:
        """Whether this version is read, and no other, when the object is replaced."""
        return self._content is not None

    @property
    def size(self) -> int:
        """Bytes in the object."""
        return self._reader.header.geometry.size

    @property
    def version(self) -> str:
        """Version of the object that is open, as ObjectInfo.version."""
        return version_token(*self._reader.header.version.content)

    def read_into(self, buffer: object, offset: int = 0) -> int:
        """As Pool.read_into."""
        target, offset = writable_bytes(buffer), operator.index(offset)
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")

        def read(reader: ObjectReader) -> int:
            return read_up_to_end(reader, offset, target)

        return self.run(read)

    def read_ranges(self, ranges: Sequence[tuple[int, int]], deliver: Deliver) -> None:
        """Hand the verified bytes of all [start, end) to `deliver(offset, bytes)`, in order.

        Called by this thread; the bytes are good until `deliver` returns. When the object is
        replaced underneath, ranges are delivered again from the first. Raises ValueError for a
        range outside the object.
        """
        ranges = [(operator.index(start), operator.index(end)) for start, end in ranges]

        def read(reader: ObjectReader) -> None:
            for start, end in ranges:
                if not 0 <= start <= end <= self.size:
                    raise ValueError(f"range [{start}, {end}) is outside of {self.size} bytes")
            reader.read_ranges(ranges, deliver)

        self.run(read)

    def add_to(self, reads: RangeReads, starts: Int64s, numbers: Int64s) -> None:
        """As Scatter.add or UnitFill.add, for this object.

        Then `run_scatter`, `run_fill` or what else runs it. What is not good after it is to be read
        again by read_into or read_ranges, which verify by blocks, decode and repair.
        """
        if self._closed:
            raise AlreadyClosed(f"the reader of {self._key!r} is closed")
        self.run(lambda reader: reader.open_enough())
        reads.add(self._reader, starts, numbers)

    def run_scatter(self, scatter: Scatter) -> Scattered:
        """Read what readers of this pool have added."""
        return scatter.run(self._store)

    def run_fill(self, fill: UnitFill) -> Filled:
        """Read what readers of this pool have added."""
        return fill.run(self._store)

    def run(self, read: Callable[[ObjectReader], T]) -> T:
        """Run `read`; again on the newest version when the object changes underneath, and when it
        needs a device that was not waited for."""
        if self._closed:
            raise AlreadyClosed(f"the reader of {self._key!r} is closed")
        self._take_back()
        looked = False
        for _ in range(READ_TRIES):
            try:
                return read(self._reader)
            except Changed:
                self._store.metrics.count("read_resolved_again_total")
            except TooManyErasures:
                if looked:
                    raise
                looked = True  # healed since, or on a device that was not waited for
                self._store.metrics.count("read_looked_again_total")
            self._look_again(patient=looked)
        raise TooManyErasures(f"object {self._key!r} changed {READ_TRIES} times while it was read")

    def _take_back(self) -> None:
        """Open the object again when columns are lost and the last look is some time ago."""
        if not self._reader.impaired:
            return
        if self._store.clock.monotonic() - self._looked_at < RETAKE_SECONDS:
            return
        self._looked_at = self._store.clock.monotonic()
        with contextlib.suppress(TooManyErasures):  # what is open may still serve
            self._look_again(patient=False)

    def _look_again(self, *, patient: bool) -> None:
        fresh = self._opened(patient=patient)
        self._reader.close()
        self._reader, self._looked_at = fresh, self._store.clock.monotonic()

    def _opened(self, *, patient: bool) -> ObjectReader:
        return open_object(
            self._store, self._key, self._content, whole=self._whole, patient=patient
        )

    def close(self) -> None:
        """Release the files. Idempotent."""
        self._closed = True
        self._reader.close()


def open_readers(store: PoolContext, keys: Sequence[str], *, whole: bool = False) -> Readers:
    """A reader of each key, or why there is none; opened with a few calls on each device for all.

    All are the caller's to close. `whole`: as open_column has it, for several keys whose newest
    versions can be opened so: beside the memory budget, and until they are closed, up to 256 KiB
    of data each, and 8 KiB a column.
    """
    opened: dict[str, ObjectReader] = {}
    found: Readers = {}
    different = list(dict.fromkeys(keys))
    try:
        for first in range(0, len(different) if len(different) > 1 else 0, MOST_KEYS):
            opened |= open_objects(store, different[first : first + MOST_KEYS], whole=whole)
        for key in different:
            try:
                found[key] = PooledReader(store, key, opened.pop(key, None))
            except Exception as error:  # noqa: BLE001 (handed to whoever asked)
                found[key] = error
    except BaseException:
        for reader in (*opened.values(), *found.values()):
            if not isinstance(reader, Exception):
                reader.close()
        raise
    return found


def read_up_to_end(reader: ObjectReader, offset: int, target: Bytes) -> int:
    """Fill `target` from `offset`, as far as the object has bytes; how many there were."""
    count = max(0, min(len(target), reader.header.geometry.size - offset))
    if count:
        reader.read_into(offset, target[:count])
    return count


def writable_bytes(buffer: object) -> Bytes:
    """A writable buffer as (n,) uint8. Raises TypeError."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # raises TypeError for what is no buffer
    if view.readonly:
        raise TypeError("reading needs a writable buffer")
    return np.frombuffer(view.cast("B"), np.uint8)
