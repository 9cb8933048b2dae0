"""What the calls of a Pool that store and read one object do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpstore.format.column_header import Metadata, encode_metadata
from hpstore.format.keys import check_key
from hpstore.membership.members import check_unit
from hpstore.objects.object_info import ObjectInfo, object_info
from hpstore.objects.read.object_reader import ObjectReader
from hpstore.objects.read.pooled_reader import PooledReader, read_up_to_end, writable_bytes
from hpstore.objects.version_listing import parse_token
from hpstore.objects.write.conditional_put import put_if
from hpstore.objects.write.put import put_object
from hpstore.objects.write.put_source import as_source
from hpstore.objects.write.stripe_writer import Throttle
from hpstore.pool.loss_tolerance import require_stored, require_tolerance, wanted_losses
from hpstore.pool.session import PoolSession
from hpstore.runtime.clock import Clock
from hpstore.runtime.fresh_bytes import fresh_bytes
from hpstore.runtime.rate_limit import RateLimit

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PutConditions:
    """What must hold for a put, and how it is stored."""

    if_absent: bool = False
    if_version: str | None = None
    unit_bytes: int | None = None
    min_losses_tolerated: int | None = None


def put_one(
    session: PoolSession,
    key: str,
    data: object,
    metadata: Metadata,
    asked: PutConditions,
    throttle: Throttle,
) -> ObjectInfo:
    """Pool.put."""
    session.require_writable()
    store = session.store
    check_key(key)
    encode_metadata(metadata)
    if asked.unit_bytes is not None:
        record = store.view.record
        check_unit(session.config, record.data + record.parity, asked.unit_bytes)
    source, wanted = as_source(data), wanted_losses(store, asked.min_losses_tolerated)
    require_tolerance(store, wanted, repr(key))
    with session.naming_lacks():
        if not asked.if_absent and asked.if_version is None:
            info = put_object(
                store,
                key,
                source,
                metadata=metadata,
                throttle=throttle,
                unit_bytes=asked.unit_bytes,
            )
        else:
            info = put_if(
                store,
                session.claims,
                key,
                source,
                metadata=metadata,
                throttle=throttle,
                if_absent=asked.if_absent,
                if_version=asked.if_version,
                unit_bytes=asked.unit_bytes,
            )
    require_stored(info, wanted)
    return info


def throttled(
    clock: Clock, bytes_per_second: float | None, progress: Callable[[int], None] | None
) -> Throttle:
    """Spreads the work of a put, and reports the bytes about to be written."""
    limit = RateLimit(bytes_per_second, clock) if bytes_per_second else None

    def throttle(count: int) -> None:
        if limit is not None:
            limit(count)
        if progress is not None:
            progress(count)

    return throttle


def get_bytes(
    session: PoolSession, key: str, start: int, end: int | None, version: str | None
) -> bytes:
    """Pool.get."""
    start, end = operator.index(start), None if end is None else operator.index(end)

    def read(reader: ObjectReader) -> bytes:
        size = reader.header.geometry.size
        stop = size if end is None else min(end, size)
        if start < 0 or stop < 0:
            raise ValueError(f"range [{start}, {end}) is negative")
        found, memory = fresh_bytes(max(0, stop - start))
        if found:
            reader.read_into(start, memory)
        return found

    return _read(session, key, read, version)


def read_buffer(
    session: PoolSession, key: str, buffer: object, offset: int, version: str | None
) -> int:
    """Pool.read_into."""
    target, offset = writable_bytes(buffer), operator.index(offset)

    def read(reader: ObjectReader) -> int:
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        return read_up_to_end(reader, offset, target)

    return _read(session, key, read, version)


def facts(session: PoolSession, key: str, version: str | None) -> ObjectInfo:
    """Pool.stat."""

    def look(reader: ObjectReader) -> ObjectInfo:
        may_leave = session.store.view.may_leave(reader.unknown)
        columns = len(reader.layout.columns)
        return object_info(reader.header, columns, may_leave=may_leave)

    return _read(session, key, look, version, whole=False)


def _read(
    session: PoolSession,
    key: str,
    read: Callable[[ObjectReader], T],
    version: str | None,
    *,
    whole: bool = True,
) -> T:
    """Run `read` on an open object; again when that changes underneath."""
    session.require_open()
    content = None if version is None else parse_token(version)
    with session.naming_lacks():
        opened = PooledReader(session.store, check_key(key), content=content, whole=whole)
        with opened:
            return opened.run(read)
