"""The 4 KiB header of a column file and the table at its end. Pure; bytes in docs/format.md.

offset 0      magic "HPSTCOL1", u32 format version, u32 length n of the JSON
offset 16     n bytes of JSON: pool, key, version, kind, column, k, m, unit, size, devices, ...
...           zeros
offset 4064   format 2, of a pool with a key: MAC of magic, version, length and JSON
offset 4080   xxh3-128 of bytes 0..4079
offset 4096   the units
then          one u64 checksum per 64 KiB block, a 16-byte root, zeros to a multiple of 4 KiB
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hmac import compare_digest

import numpy as np
from numpy.typing import NDArray

from hpstore.errors import ConfigError, FormatTooNew, IntegrityError, NotAuthentic
from hpstore.format.checksum import DIGEST_BYTES, ROOT_BYTES, ColumnChecks, digest128
from hpstore.format.geometry import ALIGNMENT_BYTES, Code, Geometry
from hpstore.format.keys import ColumnName, Kind, Version, check_key
from hpstore.format.pool_key import MAC_BYTES, PoolKey, Use
from hpstore.format.untrusted_bytes import MALFORMED, brief
from hpstore.units import round_up

MAGIC = b"HPSTCOL1"
FORMAT, KEYED_FORMAT = 1, 2
HEADER_BYTES = 4096
MAX_METADATA_BYTES = 1024
_FIXED = struct.Struct("<8sII")
_DIGEST_AT = HEADER_BYTES - ROOT_BYTES
_MAC_AT = _DIGEST_AT - MAC_BYTES

Metadata = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnHeader:
    """Everything an object says of itself, repeated in each of its columns."""

    pool_id: str
    key: str
    version: Version
    kind: Kind
    column: int
    geometry: Geometry
    devices: tuple[str, ...]  # device of each column when it was put; a hint after a rebuild
    generation: int  # of the pool's membership when it was put
    created_ms: int  # milliseconds since 1970
    metadata: Metadata = field(default_factory=dict)

    @property
    def name(self) -> ColumnName:
        return ColumnName(
            version=self.version,
            kind=self.kind,
            column=self.column,
            data=self.geometry.data,
            parity=self.geometry.parity,
        )

    @property
    def seed(self) -> int:
        """Seed of this column's checksums in a pool without a key."""
        return self.checks().seed

    def checks(self, pool_key: PoolKey | None = None) -> ColumnChecks:
        """How this column is checked, in a pool with this key."""
        layout = f"{self.kind}{self.geometry.data}+{self.geometry.parity}"
        return ColumnChecks.of(
            self.pool_id,
            self.key,
            str(self.version),
            layout,
            self.column,
            copies=self.kind is not Kind.COLUMN,
            pool_key=pool_key,
        )

    @property
    def table_offset(self) -> int:
        return HEADER_BYTES + self.geometry.column_bytes

    @property
    def table_bytes(self) -> int:
        """Table, root and padding."""
        return table_bytes(self.geometry)

    @property
    def file_bytes(self) -> int:
        return column_file_bytes(self.geometry)


def table_bytes(geometry: Geometry) -> int:
    """Checksum table, root and padding of one column."""
    return round_up(geometry.block_count * DIGEST_BYTES + ROOT_BYTES, ALIGNMENT_BYTES)


def column_file_bytes(geometry: Geometry) -> int:
    """Size of the file of one column: header, units, table."""
    return HEADER_BYTES + geometry.column_bytes + table_bytes(geometry)


def encode_metadata(metadata: Metadata) -> bytes:
    """JSON of user metadata. Raises ConfigError when it is not JSON or over 1 KiB."""
    try:
        encoded = json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"metadata must be JSON: {error}") from error
    if len(encoded) > MAX_METADATA_BYTES:
        raise ConfigError(f"metadata of {len(encoded)} bytes: at most {MAX_METADATA_BYTES} fit")
    return encoded


def encode_header(header: ColumnHeader, pool_key: PoolKey | None = None) -> bytes:
    """The 4096 bytes of a header; with the MAC of a pool that has a key."""
    encode_metadata(header.metadata)
    body = json.dumps(
        {
            "pool": header.pool_id,
            "key": header.key,
            "version": str(header.version),
            "kind": header.kind,
            "column": header.column,
            "data": header.geometry.data,
            "parity": header.geometry.parity,
            "unit": header.geometry.unit_bytes,
            "size": header.geometry.size,
            "code": header.geometry.code,
            "devices": list(header.devices),
            "generation": header.generation,
            "created_ms": header.created_ms,
            "metadata": dict(header.metadata),
        },
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    if _FIXED.size + len(body) > (_DIGEST_AT if pool_key is None else _MAC_AT):
        raise ConfigError(
            f"header of {len(body)} bytes does not fit 4 KiB: shorten the key or the metadata"
        )
    if pool_key is None:
        page = (_FIXED.pack(MAGIC, FORMAT, len(body)) + body).ljust(_DIGEST_AT, b"\0")
    else:
        page = _FIXED.pack(MAGIC, KEYED_FORMAT, len(body)) + body
        page = page.ljust(_MAC_AT, b"\0") + pool_key.mac(Use.HEADER, page)
    return page + digest128(page)


def decode_header(
    page: bytes | memoryview, *, where: str, pool_key: PoolKey | None = None
) -> ColumnHeader:
    """Inverse of encode_header. Raises IntegrityError, or FormatTooNew for a later version.

    In a pool with a key, a header without its MAC is damage; so is one with a MAC in a pool that
    has none. Where the key is lost a header is believed.
    """
    page = bytes(page)
    if len(page) < HEADER_BYTES:
        raise IntegrityError(f"{where}: header of {len(page)} bytes is truncated")
    magic, version, length = _FIXED.unpack_from(page)
    if magic != MAGIC:
        raise IntegrityError(f"{where}: not a column file")
    if digest128(page[:_DIGEST_AT]) != page[_DIGEST_AT:HEADER_BYTES]:
        raise IntegrityError(f"{where}: header does not match its checksum")
    if version > KEYED_FORMAT:
        raise FormatTooNew(
            f"{where}: column format {version}, this hpstore reads up to {KEYED_FORMAT}"
        )
    if length > (_DIGEST_AT if version == FORMAT else _MAC_AT) - _FIXED.size:
        raise IntegrityError(f"{where}: header says {length} bytes of JSON")
    _check_mac(page, version, _FIXED.size + length, pool_key, where)
    try:
        return _parse(json.loads(page[_FIXED.size : _FIXED.size + length]))
    except MALFORMED as error:
        raise IntegrityError(f"{where}: header is malformed: {brief(error)}") from error


def _check_mac(page: bytes, version: int, end: int, pool_key: PoolKey | None, where: str) -> None:
    if (version == KEYED_FORMAT) != (pool_key is not None):
        carries = "carries a MAC, and this pool has no key" if pool_key is None else "has no MAC"
        raise NotAuthentic(f"{where}: header {carries}: no writer of this pool made it")
    if pool_key is None or pool_key.lost:
        return
    if not compare_digest(pool_key.mac(Use.HEADER, page[:end]), page[_MAC_AT:_DIGEST_AT]):
        raise NotAuthentic(
            f"{where}: header does not match its MAC: it was changed by who knows its checksum, "
            "not the pool's key"
        )


# Any: values of decoded JSON; each is checked by the type it is given to
def _parse(body: dict[str, object]) -> ColumnHeader:
    number = {
        name: body[name]
        for name in ("column", "data", "parity", "unit", "size", "generation", "created_ms")
    }
    for name, value in number.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} is {value!r}")
    integers: dict[str, int] = number  # type: ignore[assignment]  # checked just above
    geometry = Geometry(
        data=integers["data"],
        parity=integers["parity"],
        unit_bytes=integers["unit"],
        size=integers["size"],
        code=Code(str(body["code"])),
    )
    devices, metadata = body["devices"], body["metadata"]
    if not isinstance(devices, list) or not isinstance(metadata, dict):
        raise ValueError("devices or metadata have the wrong type")
    pool_id = str(body["pool"])
    pool_id.encode()  # raises for half a surrogate pair, of which no seed can be made
    if integers["column"] >= geometry.width:
        raise ValueError(f"column {integers['column']} of {geometry.width}")
    return ColumnHeader(
        pool_id=pool_id,
        key=check_key(str(body["key"])),
        version=Version.parse(str(body["version"])),
        kind=Kind(str(body["kind"])),
        column=integers["column"],
        geometry=geometry,
        devices=tuple(str(device) for device in devices),
        generation=integers["generation"],
        created_ms=integers["created_ms"],
        metadata=metadata,
    )


def encode_table(
    header: ColumnHeader, table: NDArray[np.uint64], checks: ColumnChecks | None = None
) -> bytes:
    """Checksum table with its root, padded to a multiple of 4 KiB. `checks`: as header.checks()
    gives them, those of a pool without a key unless given."""
    body = table.astype("<u8").tobytes() + (checks or header.checks()).root(table)
    return body.ljust(header.table_bytes, b"\0")


def decode_table(
    header: ColumnHeader,
    data: bytes | memoryview,
    *,
    where: str,
    checks: ColumnChecks | None = None,
) -> NDArray[np.uint64]:
    """The checksum table. Raises IntegrityError when it does not match its root. `checks` as of
    encode_table."""
    count = header.geometry.block_count
    raw = bytes(data[: count * DIGEST_BYTES + ROOT_BYTES])
    if len(raw) < count * DIGEST_BYTES + ROOT_BYTES:
        raise IntegrityError(f"{where}: checksum table is truncated")
    table = np.frombuffer(raw, "<u8", count).astype(np.uint64)
    checks = checks or header.checks()
    if not checks.blind and not compare_digest(checks.root(table), raw[-ROOT_BYTES:]):
        raise IntegrityError(f"{where}: checksum table does not match its root")
    return table
