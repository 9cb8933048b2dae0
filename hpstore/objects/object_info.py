"""What a caller learns about an object."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpstore.format.column_header import ColumnHeader, Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object. `version` is a token for `if_version`; it stays the same when the object is
    laid out anew. `losses_tolerated`: further devices that may be lost now, with the pool still
    opening and the object read. `spare_columns`: columns that may go before it cannot be decoded,
    more than that where members are away already: a pool opens with at most m away."""

    key: str
    size: int
    version: str
    data: int
    parity: int
    losses_tolerated: int
    spare_columns: int
    created: float  # seconds since 1970
    metadata: Metadata

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def version_token(counter: int, nonce: int) -> str:
    """The text form of a version's content."""
    return f"{counter:016x}-{nonce:016x}"


def object_info(header: ColumnHeader, columns_alive: int, *, may_leave: int) -> ObjectInfo:
    """Facts of a stored object of which so many distinct columns are there.

    `may_leave`: further members that may stop answering before the pool cannot be opened.
    """
    geometry = header.geometry
    spare = max(0, min(columns_alive, geometry.width) - geometry.data)
    return ObjectInfo(
        key=header.key,
        size=geometry.size,
        version=version_token(*header.version.content),
        data=geometry.data,
        parity=geometry.parity,
        losses_tolerated=min(spare, may_leave),
        spare_columns=spare,
        created=header.created_ms / 1000,
        metadata=dict(header.metadata),
    )
