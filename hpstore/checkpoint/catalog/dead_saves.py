"""The end of saves that are taken for dead: the manifest is there for good, or never comes.

PROTOCOL 18. A save looks for its note under the claim of its manifest's put; who collects removes
the note before it takes that claim. So either the save finds its note gone and puts nothing, or the
collector sees what it has put, or bars it. Nothing that could be read is ever withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable

from hpstore.checkpoint.catalog.segment_safety import require_safe
from hpstore.checkpoint.catalog.writer_fence import ATTEMPT_SECONDS
from hpstore.errors import CheckpointError, HpstoreError, ObjectNotFound, VersionConflict
from hpstore.pool.pool import Pool

_TRIES = 4  # notes, manifests that come and go under the collector, in a row
_UNREADABLE = b"the note of this save could not be read"


def taken_for_dead() -> CheckpointError:
    """The error of a save that finds its note gone."""
    return CheckpointError(
        "another process took this save for dead: another session has begun to save here, or this "
        f"machine was stopped for more than {ATTEMPT_SECONDS / 60:.0f} minutes. Nothing of it can "
        "be read, what was committed before is untouched. Save it again."
    )


def _all_count(_: str) -> bool:
    return True


def end_save(
    pool: Pool,
    key: str,
    *,
    manifest: str,
    replaces: bool,
    counts: Callable[[str], bool] = _all_count,
) -> None:
    """End a save that is taken for dead. On return its manifest is there to stay or never comes.

    `key`: of its note, or of the mark that a collector has left which was killed at this; the mark
    protects what the note did. `replaces`: its manifest may take the place of another one.
    `counts`: as decide() has it. Raises what the pool raises, CheckpointError: then it is not
    decided, and the note or mark is left.
    """
    before, kind, name = key.rsplit("/", 2)
    note, mark = f"{before}/attempts/{name}", f"{before}/condemned/{name}"
    if kind == "attempts":
        try:
            data = pool.get(note)
        except ObjectNotFound:
            return  # its process has ended it
        except (HpstoreError, OSError):
            data = _UNREADABLE
        pool.put(mark, data)
    _end_note(pool, note)
    decide(pool, manifest, replaces=replaces, counts=counts)
    _delete(pool, mark)


def _end_note(pool: Pool, note: str) -> None:
    """Remove it for good: a renewal that was stopped half-way does not bring it back."""
    for _ in range(_TRIES):
        _delete(pool, note)
        if pool.admin.bar(note):
            return
    raise CheckpointError(f"{note} was put again and again while it was removed")


def decide(
    pool: Pool, manifest: str, *, replaces: bool, counts: Callable[[str], bool] = _all_count
) -> None:
    """Let a manifest that others have begun to put be there to stay, or never come by their puts.

    `counts`: whether a manifest of this version is a step; else it goes. Raises what the pool
    raises, CheckpointError: then it is not decided.
    """
    for _ in range(_TRIES):
        if pool.admin.bar(manifest):
            return
        try:
            version = pool.stat(manifest).version
            if not counts(version):
                if not pool.admin.bar(manifest, removes=version):
                    continue
            elif replaces:  # what is under way replaces a version that is there no more
                pool.put(manifest, pool.get(manifest), if_version=version)
            else:
                require_safe(pool, manifest)
        except (ObjectNotFound, VersionConflict):
            continue
        return
    raise CheckpointError(f"{manifest} was replaced again and again while it was looked at")


def _delete(pool: Pool, key: str) -> None:
    try:
        pool.delete(key)
    except ObjectNotFound:
        return
