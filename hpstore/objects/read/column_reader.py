"""One column file, open for reading: header, table, verified runs of bytes."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Device, ReadHandle
from hpstore.devices.host_disks import begin_open, holds_ahead
from hpstore.errors import BlocksDamaged, IntegrityError
from hpstore.format.checksum import ColumnChecks
from hpstore.format.column_header import HEADER_BYTES, ColumnHeader, decode_header, decode_table
from hpstore.format.geometry import ALIGNMENT_BYTES, BLOCK_BYTES
from hpstore.format.keys import ColumnName
from hpstore.format.pool_key import PoolKey
from hpstore.objects.context import PoolContext
from hpstore.objects.survey import path_on
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.split_calls import Sent, Unfinished
from hpstore.units import KIB

WHOLE_OBJECT_BYTES = 256 * KIB
"""Of objects up to about this size a column can be read whole when it is opened: one read, where
header, table and units would be three. See docs/decisions/0032."""


TAIL_BYTES = 8 * KIB
"""Of the end of a column on another host: the table of one of up to 64 MiB comes with the header
where it is read now. See docs/decisions/0170."""


class _Whole:
    """A small file, read whole; a ReadHandle. The `file` stays open, held against recycling."""

    def __init__(self, file: ReadHandle, page: Bytes) -> None:
        self.file, self._page = file, page
        self.size_bytes = len(page)

    @property
    def descriptor(self) -> int:
        return self.file.descriptor

    def read_into(self, offset: int, target: Bytes) -> None:
        target[:] = self._page[offset : offset + len(target)]

    def close(self) -> None:
        self.file.close()


class ColumnReader:
    """A column whose header was checked. Thread-safe; reads run on the device's lane, but for those
    of a column that is `in_memory`.

    It may have several users: who retains it closes it once more.
    """

    def __init__(
        self,
        device_id: str,
        device: Device,
        handle: ReadHandle,
        header: ColumnHeader,
        name: ColumnName,
        pool_key: PoolKey | None,
    ) -> None:
        self.device_id, self.header, self.name = device_id, header, name
        self.pool_key = pool_key
        self._device, self._handle = device, handle
        self._checks: tuple[ColumnChecks, NDArray[np.uint64]] | None = None  # and the table
        self._asked = False  # a thread has begun to read the table
        self._users = 1
        self._lock = threading.Lock()  # guards _users, _asked, changes of _handle, of _checks

    @property
    def in_memory(self) -> bool:
        """Whether reads touch the device no more: they can be made by any thread, and at once."""
        return isinstance(self._handle, _Whole)

    @property
    def url(self) -> str:
        """Of its device."""
        return self._device.url

    @property
    def where(self) -> str:
        """For messages."""
        return f"column {self.header.column} of {self.header.key!r} on {self._device.url}"

    @property
    def has_table(self) -> bool:
        """Whether the checksum table was read."""
        return self._checks is not None

    def table(self) -> NDArray[np.uint64]:
        """The checksum table, read once. Raises IntegrityError."""
        return self._checks_and_table()[1]

    def _checks_and_table(self) -> tuple[ColumnChecks, NDArray[np.uint64]]:
        if self._checks is None:
            raw = aligned_array(self.header.table_bytes)
            self._handle.read_into(self.header.table_offset, raw)
            checks = self.header.checks(self.pool_key)
            table = decode_table(self.header, raw.data, where=self.where, checks=checks)
            with self._lock:
                self._checks = checks, table
        return self._checks

    def read_into(self, start: int, target: Bytes) -> None:
        """Fill `target` with verified column bytes from `start`, a block border.

        Raises BlocksDamaged with all blocks that do not match.
        """
        with self._lock:
            first, self._asked = not self._asked, True
        if first:  # whoever reads beside it needs the table only when its bytes are there
            self._checks_and_table()
        self._handle.read_into(HEADER_BYTES + start, target)
        self.check(start, target)

    def check(self, start: int, target: Bytes) -> None:
        """Compare column bytes from `start`, a block border, with the table. Raises as read_into.

        Touches no device where `has_table`.
        """
        checks, table = self._checks_and_table()
        bad = checks.bad_blocks(start // BLOCK_BYTES, target.data, table)
        if bad:
            error = BlocksDamaged(
                f"{self.where}: {len(bad)} blocks, first at column byte {bad[0] * BLOCK_BYTES}, "
                "do not match their checksums; these rows are decoded from other columns. A "
                "process that has the pool open for writing repairs the object, or a scrub"
            )
            error.blocks = bad
            raise error

    def read_raw(self, start: int, target: Bytes) -> None:
        """Fill `target` with column bytes that nobody has verified. Multiples of 4 KiB, all."""
        self._handle.read_into(HEADER_BYTES + start, target)

    @property
    def descriptor(self) -> int:
        """As ReadHandle.descriptor; column bytes begin HEADER_BYTES into it."""
        return self._handle.descriptor

    def retain(self) -> ColumnReader:
        """For one user more. What several use stays open for long, without its copy in memory."""
        with self._lock:
            self._users += 1
            if isinstance(self._handle, _Whole):
                self._handle = self._handle.file
        return self

    def close(self) -> None:
        """Once by each user; the last one releases the file."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._handle.close()


def open_column(
    store: PoolContext,
    device_id: str,
    device: Device,
    key: str,
    name: ColumnName,
    *,
    whole: bool = False,
) -> ColumnReader:
    """Open a column and check that it is what its name says.

    `whole`: all of it is read at once, unless it is large; for who reads it now, and then closes.
    Raises FileNotFoundError when it is gone or being recycled, IntegrityError when it is damaged or
    holds something else.
    """
    return ColumnOpening(store, device_id, device, key, name, whole=whole).made()


class ColumnOpening:
    """A column that is opened, as open_column has it, in one half or in two."""

    def __init__(
        self,
        store: PoolContext,
        device_id: str,
        device: Device,
        key: str,
        name: ColumnName,
        *,
        whole: bool,
    ) -> None:
        self._pool_id, self._pool_key = store.view.record.pool_id, store.pool_key
        self._device_id, self._device = device_id, device
        self._key, self._name, self._whole = key, name, whole
        self._path = path_on(device, key, name)

    def made(self) -> ColumnReader:
        """Open it. Raises as open_column."""
        return self._finished(self._device.open(self._path))

    def begin(self) -> Sent[ColumnReader] | None:
        """The same in two halves; None where the device has none."""
        tail = TAIL_BYTES if self._whole else 0
        sent = begin_open(self._device, self._path, tail_bytes=tail)
        return None if sent is None else sent.then(self._opened)

    def _opened(self, handle: ReadHandle) -> ColumnReader:
        """Raises Unfinished where the device must be asked for more than came with the answer."""
        rest = partial(self._finished, handle)
        if not holds_ahead(handle, handle.size_bytes if self._is_whole(handle) else HEADER_BYTES):
            raise Unfinished(rest)
        try:
            return self._checked(handle)
        except IntegrityError as error:
            raise Unfinished(rest) from error

    def _finished(self, handle: ReadHandle) -> ColumnReader:
        try:
            return self._checked(handle)
        except IntegrityError as error:
            handle.close()
            # recycling renames a file before it blanks it: under its own name it is really damaged
            if self._device.stamp(self._path) is None:
                where = f"{self._path} on {self._device.url}"
                raise FileNotFoundError(f"{where} was recycled") from error
            raise
        except BaseException:
            handle.close()
            raise

    def _is_whole(self, handle: ReadHandle) -> bool:
        size = handle.size_bytes  # one that is cut short is no multiple: its header says so
        return self._whole and size <= _whole_bytes(self._name.data) and not size % ALIGNMENT_BYTES

    def _checked(self, handle: ReadHandle) -> ColumnReader:
        where, name = f"{self._path} on {self._device.url}", self._name
        if handle.size_bytes < HEADER_BYTES:
            raise IntegrityError(f"{where} is truncated")
        whole = self._is_whole(handle)
        page = aligned_array(handle.size_bytes if whole else HEADER_BYTES)
        handle.read_into(0, page)
        header = decode_header(page[:HEADER_BYTES].data, where=where, pool_key=self._pool_key)
        same = header.pool_id == self._pool_id and header.key == self._key
        if not same or header.name.plain != name.plain:
            raise IntegrityError(
                f"{where} holds {header.key!r} {header.name}, not what it is called"
            )
        if handle.size_bytes < header.file_bytes:
            raise IntegrityError(f"{where} has {handle.size_bytes} of {header.file_bytes} bytes")
        held = _Whole(handle, page) if whole else handle
        return ColumnReader(self._device_id, self._device, held, header, name, self._pool_key)


def _whole_bytes(data: int) -> int:
    """The largest file that is read whole, of an object of so many data columns. Pure."""
    return HEADER_BYTES + WHOLE_OBJECT_BYTES // data + ALIGNMENT_BYTES
