"""Where the columns of a new version go, and the header of each (PROTOCOL 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpstore.devices.base import Usage
from hpstore.devices.reserve import shortage
from hpstore.errors import PoolFull, TooFewDevices
from hpstore.format.column_header import ColumnHeader, Metadata, column_file_bytes, encode_header
from hpstore.format.geometry import Code, Geometry, plan_geometry
from hpstore.format.keys import Kind, Version
from hpstore.format.placement import Candidate, choose, placeable
from hpstore.objects.context import PoolContext
from hpstore.objects.survey import empty_geometry
from hpstore.units import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PutContent:
    """What is to be stored under a version, wherever its columns go."""

    key: str
    version: Version
    kind: Kind
    created_ms: int
    metadata: Metadata = field(default_factory=dict)


def plan_columns(
    store: PoolContext,
    key: str,
    size: int,
    *,
    exclude: Iterable[str],
    kind: Kind = Kind.COLUMN,
    unit_bytes: int | None = None,
    offered: Mapping[str, Usage | None] | None = None,
) -> tuple[Geometry, list[str]]:
    """Geometry and devices for a new object: k' = min(k, usable - m), full parity.

    `unit_bytes`: of this object, the pool's unless given. `offered`: as Store.offers has `seen`.
    Raises PoolFull, or TooFewDevices, when not even one data column fits. A tombstone goes where
    there is room while that is enough.
    """
    record, inodes = store.view.record, 1 + len(key.split("/"))  # a directory for each part
    offers = store.offers(exclude, seen=offered)

    def shape(found: list[Candidate]) -> Geometry:
        usable = placeable([c.domain for c in found], record.spread)
        if usable <= record.parity:
            raise _too_few(store, len(found), file_bytes, inodes)
        if kind is Kind.TOMBSTONE:
            return empty_geometry(record.parity)
        return plan_geometry(
            size,
            data=record.data,
            parity=record.parity,
            unit_bytes=unit_bytes or record.unit_bytes,
            usable=usable,
        )

    candidates, file_bytes = store.without_slow([offer.candidate for offer in offers]), 0
    geometry = shape(candidates)
    most = size + size // KIB + MIB  # more than any column's file: mostly there is room for that
    tight = any(shortage(o.usage, file_bytes=most, inodes=inodes) for o in offers)
    # fewer devices make larger columns
    while tight and (needed := column_file_bytes(geometry)) > file_bytes:
        file_bytes = needed
        roomy = [o for o in offers if not shortage(o.usage, file_bytes=needed, inodes=inodes)]
        left = store.without_slow([offer.candidate for offer in roomy])
        enough = placeable([c.domain for c in left], record.spread) > record.parity
        if kind is Kind.TOMBSTONE and not enough:
            break  # the reserve and the spares are for it: else a full pool could delete nothing
        candidates = left
        geometry = shape(candidates)
    chosen = choose(key, candidates, geometry.width, parity=record.parity, spread=record.spread)
    return geometry, [candidate.device for candidate in chosen]


def _too_few(store: PoolContext, found: int, file_bytes: int, inodes: int) -> TooFewDevices:
    """The error for a put or delete that has too few devices to go to."""
    record = store.view.record
    full = store.why_full(file_bytes=file_bytes, inodes=inodes)
    return (PoolFull if full else TooFewDevices)(
        f"{found} of {len(record.members)} devices can take new data; {record.parity + 1} are "
        f"needed to keep {record.parity} parity units; reading goes on. {full}Add devices, or "
        "bring missing ones back."
    )


def make_header(
    store: PoolContext, content: PutContent, geometry: Geometry, devices: list[str], column: int
) -> ColumnHeader:
    """The header of one column. `devices`: the device of every column."""
    kind = content.kind
    if kind is Kind.COLUMN and geometry.code is Code.COPIES:
        kind = Kind.COPY
    return ColumnHeader(
        pool_id=store.view.record.pool_id,
        key=content.key,
        version=content.version,
        kind=kind,
        column=column,
        geometry=geometry,
        devices=tuple(devices),
        generation=store.view.record.generation,
        created_ms=content.created_ms,
        metadata=content.metadata,
    )


def make_headers(
    store: PoolContext, content: PutContent, geometry: Geometry, devices: list[str]
) -> dict[str, ColumnHeader]:
    """The headers of all columns, by device. Raises ConfigError where one does not fit, before
    anything is written: they differ by the column's number."""
    headers = {
        device: make_header(store, content, geometry, devices, column)
        for column, device in enumerate(devices)
    }
    encode_header(headers[devices[-1]], store.pool_key)
    return headers
