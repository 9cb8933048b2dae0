"""What a caller learns about an object."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpstore.header import ColumnHeader, Metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object. `version` is a token for `if_version`; it stays the same when the object is
    laid out anew. `losses_tolerated` counts further devices that may be lost now."""

    key: str
    size: int
    version: str
    data: int
    parity: int
    losses_tolerated: int
    created: float  # seconds since 1970
    metadata: Metadata

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def version_token(counter: int, nonce: int) -> str:
    """The text form of a version's content."""
    return f"{counter:016x}-{nonce:016x}"


def object_info(header: ColumnHeader, columns_alive: int) -> ObjectInfo:
    """Facts of a stored object of which so many distinct columns are there."""
    geometry = header.geometry
    return ObjectInfo(
        key=header.key,
        size=geometry.size,
        version=version_token(*header.version.content),
        data=geometry.data,
        parity=geometry.parity,
        losses_tolerated=max(0, min(columns_alive, geometry.width) - geometry.data),
        created=header.created_ms / 1000,
        metadata=dict(header.metadata),
    )


__all__ = ["ObjectInfo", "object_info", "version_token"]
