"""What a commit looks at before its manifest is put (PROTOCOL 19)."""

from __future__ import annotations

from hpstore.errors import CheckpointError, HpstoreError, ObjectNotFound
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.pool import Pool


def existing_version(pool: Pool, key: str) -> str | None:
    """The version of what is there; None when nothing is."""
    try:
        return pool.stat(key).version
    except ObjectNotFound:
        return None


def require_safe(
    pool: Pool, key: str, *, version: str | None = None, info: ObjectInfo | None = None
) -> int:
    """PROTOCOL 19: a segment must be readable with one more loss, else it is repaired first.

    Returns the columns it may lose. Raises CheckpointError, also when it is another `version`.
    `info`: what its put has said just now.
    """
    info = pool.stat(key) if info is None else info
    if info.spare_columns < 1:
        pool.admin.settle(key)
        info = pool.stat(key)
    if info.spare_columns < 1:
        raise CheckpointError(f"segment {key} would not survive one more lost device")
    if version is not None and info.version != version:
        raise CheckpointError(f"segment {key} was replaced by version {info.version}")
    return info.spare_columns


def is_there(pool: Pool, key: str) -> bool:
    """Whether a segment can be referred to."""
    try:
        return pool.exists(key)
    except (HpstoreError, OSError):
        return False  # it is written anew
