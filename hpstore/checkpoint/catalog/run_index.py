"""What moves the index of a run: a session begins, and takes steps out (PROTOCOL 18, 19)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress

from hpstore.checkpoint.catalog.fence_record import FenceRecord, counter_of, fence_key, read_fence
from hpstore.checkpoint.catalog.segment_safety import existing_version
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import (
    SaveAttempt,
    manifests_of,
    require_fence,
    take_fence,
    write_index,
)
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.errors import CheckpointError, IntegrityError, ObjectNotFound, VersionConflict
from hpstore.objects.object_info import ObjectInfo


def take_over(steps: StepCatalog, session: str, *, if_version: str | None = None) -> None:
    """Become the session that saves here. Raises what the pool raises, CheckpointError: then an
    older one may commit yet, if this was the first thing that failed."""
    take_fence(
        steps.pool,
        steps.prefix,
        session,
        if_version=if_version,
        end_replacements=lambda: end_replacements(steps, session),
    )


def take_over_from(steps: StepCatalog, boot: str, pid: int) -> None:
    """Take the fence from a process of this boot, for a session that saves nothing; not from
    another one, which may have taken it by then."""
    version = existing_version(steps.pool, fence_key(steps.prefix))
    found = read_fence(steps.pool, steps.prefix)
    if version is None or found is None or (found.boot, found.pid) != (boot, pid):
        return
    with suppress(VersionConflict):
        take_over(steps, f"restore-{secrets.token_hex(8)}", if_version=version)


def end_replacements(steps: StepCatalog, session: str) -> None:
    """End saves of other sessions that may put their manifest in the place of a step: that the step
    is written down would let theirs count. Raises CheckpointError."""
    listing = steps.listing()
    for key, (step, _) in (listing.attempts | listing.condemned).items():
        if step not in listing.steps:
            continue
        attempt: SaveAttempt | None = None
        with suppress(IntegrityError):
            try:
                attempt = SaveAttempt.decode(steps.pool.get(key), where=key)
            except ObjectNotFound:
                continue
        if attempt is not None and (not attempt.replaces or attempt.session in ("", session)):
            continue
        steps.end_attempt(key, attempt)
        if steps.pool.exists(key):
            raise CheckpointError(
                f"a save of step {step} under {steps.prefix!r} may be under way in another "
                "process, and could not be ended now. Nothing was saved. Stop that process, or try "
                "again"
            )


def put_manifest(
    steps: StepCatalog,
    step: int,
    data: bytes,
    *,
    before: str | None,
    look: Callable[[], FenceRecord | None],
    min_losses_tolerated: int | None = None,
) -> ObjectInfo:
    """Put the manifest of a step, which is the commit.

    `before`: the version that it replaces; None where no step is. `look`: called under the claim of
    the run, before anything is written; it raises if this may not be committed, and gives the
    record of the fence. Raises what it raises, what the pool raises, VersionConflict.
    """
    key, index = manifest_key(steps.prefix, step), list[FenceRecord | None]()
    replaces, tries = before, 2
    while True:
        tries -= 1
        try:
            info = steps.pool.put(
                key,
                data,
                if_absent=replaces is None,
                if_version=replaces,
                min_losses_tolerated=min_losses_tolerated,
                progress=lambda _: index.append(look()),
            )
            break
        except VersionConflict as error:
            if before is not None or error.maybe_visible or error.key != key or not tries:
                raise
            replaces = existing_version(steps.pool, key)
            if replaces is None or steps.counts(step, replaces):
                raise
    record = index[-1]
    if record is not None and not record.counts(step, info.version):
        raise CheckpointError(
            f"step {step} under {steps.prefix!r} is not committed: the pool's registers, which "
            "order commits, have lost their counters. What was committed before is untouched. "
            "Close this Checkpointer, then save with a new one",
            key=key,
        )
    return info


def take_out(
    steps: StepCatalog, going: Collection[int], committed: int, session: str
) -> dict[int, str]:
    """Remove these steps from the index, before any of their objects is deleted.

    Returns the steps that were removed, with the versions of their manifests.

    The session has committed the step `committed` before. Steps that were committed after it stay
    until the next call. Raises VersionConflict when another session saves here by now, and what the
    pool raises: nothing was changed, or all of it.
    """
    pool, prefix = steps.pool, steps.prefix
    version = existing_version(pool, fence_key(prefix))
    record = require_fence(pool, prefix, session)
    if record is None or version is None:
        raise VersionConflict(f"no session saves under {prefix!r}", key=fence_key(prefix))
    newest = existing_version(pool, manifest_key(prefix, committed))  # before the run is listed
    found = manifests_of(pool, prefix)  # not as another thread may have listed it before
    if newest is None or committed not in found:
        return {}  # another process has removed it
    epoch = max(counter_of(newest), record.epoch or 0)
    out = {s: found[s] for s in going if s in found and counter_of(found[s]) <= epoch}
    if out:
        write_index(pool, prefix, record, found, version=version, epoch=epoch, without=out)
    return out
