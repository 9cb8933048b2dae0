"""What a commit looks at before and after its manifest is put (PROTOCOL 18, 19)."""

from __future__ import annotations

from hpstore.checkpoint.attempts import ATTEMPT_SECONDS
from hpstore.checkpoint.steps import Steps
from hpstore.errors import CheckpointError, HpstoreError, ObjectNotFound
from hpstore.pool import Pool


def withdrawn(pool: Pool, key: str, version: str, old: bytes | None) -> CheckpointError:
    """Take a manifest back that this process has just put as `version`, for the one that it
    replaced where there was one; returns the error to be raised. Raises what the pool raises: then
    it is unclear what is there."""
    if old is not None:
        pool.put(key, old, if_version=version)
    else:
        pool.delete(key)
    return CheckpointError(
        "another process took this save for dead: another session has begun to save here, or this "
        f"machine was stopped for more than {ATTEMPT_SECONDS / 60:.0f} minutes. The step is "
        "withdrawn, what was committed before is untouched. Save it again."
    )


def bytes_of(pool: Pool, key: str) -> bytes | None:
    """What is there, to be put back; None when it cannot be read, so there is nothing to lose."""
    try:
        return pool.get(key)
    except HpstoreError:
        return None


def existing_version(pool: Pool, key: str) -> str | None:
    """The version of what is there; None when nothing is."""
    try:
        return pool.stat(key).version
    except ObjectNotFound:
        return None


def require_safe(pool: Pool, key: str, *, version: str | None = None) -> int:
    """PROTOCOL 19: a segment must be readable with one more loss, else it is repaired first.

    Returns the columns it may lose. Raises CheckpointError, also when it is another `version`.
    """
    info = pool.stat(key)
    if info.spare_columns < 1:
        pool.settle(key)
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


def standing(pool: Pool, prefix: str) -> str:
    """Which step is good now, for the message of a save that failed."""
    try:
        steps = Steps(pool, prefix).all()
    except (HpstoreError, OSError):
        return "what was committed before is untouched"
    return f"step {steps[-1]} is still current" if steps else "no step was committed before"


__all__ = ["bytes_of", "existing_version", "is_there", "require_safe", "standing", "withdrawn"]
