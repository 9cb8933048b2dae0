"""Go back to an earlier step: later ones are hidden, can be taken back, and go after a time.

PROTOCOL 24. A copy of each later manifest is put before any manifest is deleted, the newest first.
So a crash in the middle leaves a run that ends at a later step than was asked for, and whatever a
hidden step names is named at every moment by a manifest or its copy.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from hpstore.checkpoint.catalog.fence_record import FenceRecord, read_fence
from hpstore.checkpoint.catalog.hidden_steps import Rollback, RollbackState, copy_key, record_key
from hpstore.checkpoint.catalog.run_index import put_manifest
from hpstore.checkpoint.catalog.segment_safety import existing_version, require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog, decode_protection
from hpstore.checkpoint.catalog.step_watch import is_hold
from hpstore.checkpoint.catalog.writer_fence import SaveAttempt
from hpstore.checkpoint.format.checkpoint_manifest import Manifest, manifest_key
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    VersionConflict,
    without_promise,
)
from hpstore.maintenance.deferred_repair import note_key

_log = logging.getLogger(__name__)


def now_milliseconds() -> int:
    """Since 1970, by this machine's clock."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A record, and the version that the next state must replace."""

    rollback: Rollback
    version: str


def hide_later(
    steps: StepCatalog, step: int, *, session: str, grace_ms: int, now_ms: int, force: bool
) -> Rollback:
    """Hide what was committed after `step`. The caller has the fence as `session` (PROTOCOL 18),
    and no save under way.

    In force on return. Raises CheckpointError, what the pool raises: then the run ends at a later
    step than that, as the error says, or as before; call it again.
    """
    pool = steps.pool
    _end_saves(steps, session)
    later, names = may_hide(steps, step, force=force)
    steps.settle(step)
    made = Rollback(
        name=secrets.token_hex(8),
        step=step,
        hidden=tuple(later),
        created_ms=now_ms,
        until_ms=now_ms + grace_ms,
        protections=names,
    )
    if not later:
        return made
    record = pool.put(record_key(steps.prefix, made.name), made.encode(), if_absent=True)
    try:
        versions = {number: _copy(steps, made.name, number) for number in later}
        _require_both_ends(steps, made, record.version)
    except (HpstoreError, OSError):
        _abandon(steps, made)
        raise
    with _saying_what_stands(f"the later steps {later[-8:]} are hidden in part", made.name):
        for number in reversed(later):
            _remove_original(steps, number, versions[number])
        for name, kept in names.items():
            _let_go(steps, name, kept)
        pool.delete_many([note_key(steps.prefix)], missing_ok=True)  # it names what goes no more
        _require_end(steps, made)
    return made


@contextmanager
def _saying_what_stands(said: str, name: str) -> Iterator[None]:
    """Errors of devices begin with what is `said`: what they say themselves is of one object, and
    steps were moved before. A CheckpointError says it by itself."""
    try:
        yield
    except CheckpointError:
        raise
    except HpstoreError as error:
        raise type(error)(
            f"{said}: {without_promise(error)} All of them are kept, where they are now. When that "
            "is mended, call it again to go on; after a rollback steps.undo_rollback"
            f"({name!r}) brings them back",
            device=error.device,
            key=error.key,
        ) from error


def _require_both_ends(steps: StepCatalog, made: Rollback, version: str) -> None:
    """Raise CheckpointError, before anything is hidden, unless the run can go on from the step and
    the rollback can be taken back: both may have been removed while copies were put."""
    there = steps.all()
    if made.step not in there:
        raise CheckpointError(
            f"step {made.step} was removed by another process, such as the retention of a training "
            "that still runs. Nothing was hidden. Stop that process, then go back to another of "
            f"{there[-8:]}"
        )
    if existing_version(steps.pool, record_key(steps.prefix, made.name)) != version:
        raise CheckpointError(
            "the time for which steps are kept was over before they were hidden, by the clock of a "
            "process that collects garbage. Nothing was hidden. Give a longer grace_seconds, or "
            "set that machine's clock, and call rollback() again"
        )


def _abandon(steps: StepCatalog, made: Rollback) -> None:
    """Nothing was hidden: remove the copies and the record. Best effort, they expire."""
    copies = [copy_key(steps.prefix, made.name, step) for step in made.hidden]
    try:
        keys = [*copies, record_key(steps.prefix, made.name)]
        steps.pool.delete_many(keys, missing_ok=True)
    except (HpstoreError, OSError) as error:
        _log.warning("copies of a rollback that was given up are left until later: %s", error)


def _require_end(steps: StepCatalog, made: Rollback) -> None:
    """Raise CheckpointError unless the run ends at the step of the rollback now."""
    there = steps.all()
    if made.step not in there:
        raise CheckpointError(
            f"step {made.step} was removed by another process while the later steps "
            f"{made.hidden[-8:]} were hidden. These are kept. Stop that process, then "
            f"steps.undo_rollback({made.name!r}) brings them back"
        )
    left = [number for number in there if number > made.step]
    if left:
        raise CheckpointError(
            f"steps {left[:8]} were committed while {len(made.hidden)} others were hidden: another "
            "process saves here, or its save was stopped in the middle and went on. Stop it, then "
            "call rollback() again"
        )


def may_hide(
    steps: StepCatalog, step: int, *, force: bool
) -> tuple[Sequence[int], Mapping[str, int]]:
    """Steps after `step`, and the protections of these. Changes nothing.

    Raises CheckpointError for a protected one, and what keeps `step` from being restored: the run
    would have nothing to go on from.
    """
    for segment in steps.manifest(step).objects:
        steps.pool.stat(segment.key)
    later = [number for number in steps.all() if number > step]
    names = {name: kept for name, kept in steps.protected().items() if kept in later}
    if names and not force:
        name, kept = next(iter(names.items()))
        raise CheckpointError(
            f"step {kept} is protected as {name!r}: unprotect it first, or force=True hides it. "
            "Nothing was hidden"
        )
    return later, names


def _end_saves(steps: StepCatalog, session: str) -> None:
    """End saves of sessions that have lost the fence: none of them commits after this. And those of
    the caller's own `session`, which are over: a note is left where its delete has failed."""
    for key, (_, nonce) in steps.listing().attempts.items():
        with suppress(ObjectNotFound, IntegrityError):
            if SaveAttempt.decode(steps.pool.get(key), where=key).session == session:
                steps.unclear.add(nonce)
    steps.collect_garbage()
    listing = steps.listing()
    left = sorted({step for step, _ in (listing.attempts | listing.condemned).values()})
    if left:
        raise CheckpointError(
            f"saves of the steps {left[:8]} under {steps.prefix!r} may be under way in another "
            "process, and could not be ended now. Nothing was hidden or taken back. Stop that "
            "process, or wait 15 minutes if it is dead, and try again"
        )


def _copy(steps: StepCatalog, name: str, step: int) -> str:
    """Put a copy of a manifest that survives one more loss; the version that it is of."""
    pool, key = steps.pool, manifest_key(steps.prefix, step)
    version = pool.stat(key).version
    data = pool.get(key)
    Manifest.decode(data, where=key, facts_only=True)  # one that is damaged cannot be taken back
    copy = copy_key(steps.prefix, name, step)
    info = pool.put(copy, data, if_absent=True)
    require_safe(pool, copy, info=info)
    return version


def _remove_original(steps: StepCatalog, step: int, version: str) -> None:
    """Delete a manifest of which there is a copy."""
    if not steps.pool.admin.bar(manifest_key(steps.prefix, step), removes=version):
        raise CheckpointError(
            f"step {step} was saved again while it was hidden. Stop the process that saves here, "
            "then call rollback() again"
        )
    steps.forget(step)


def _let_go(steps: StepCatalog, name: str, step: int) -> None:
    """Unprotect a step that is hidden, unless the name was let go or moved by then."""
    if _protects(steps, name) == step:
        with suppress(CheckpointError):  # nothing is protected under this name
            steps.unprotect(name)


def _protects(steps: StepCatalog, name: str) -> int | None:
    """The step that has this protection now; None for none, or when its record is damaged."""
    key = steps.protection_key(name)
    try:
        return decode_protection(steps.pool.get(key), where=key)
    except (ObjectNotFound, IntegrityError):
        return None


def rollbacks(steps: StepCatalog) -> list[Rollback]:
    """Those whose steps are hidden, or whose copies are still there; in their order."""
    return [found.rollback for found in _records(steps)]


def _records(steps: StepCatalog, listed: Mapping[str, str] | None = None) -> list[_Found]:
    """Passes over damaged ones, which are logged once: their copies stay."""
    found = []
    listed = steps.hidden.look() if listed is None else listed
    for key, version in steps.hidden.records(listed).items():
        try:
            record = Rollback.decode(steps.pool.get(key), where=key)
        except ObjectNotFound:
            continue
        except IntegrityError as error:
            if key not in steps.hidden.damaged:
                steps.hidden.damaged.add(key)
                _log.warning("a rollback is passed over, what it has hidden is kept: %s", error)
            continue
        if key == record_key(steps.prefix, record.name):
            found.append(_Found(rollback=record, version=version))
    return found


def may_take_back(steps: StepCatalog, name: str | None) -> Rollback:
    """What take_back() would take back, by default the last one. Changes nothing but what repairs
    change. Raises CheckpointError."""
    record = _chosen(_records(steps), name, steps.prefix).rollback
    _require_none_since(steps, record, _whole_copies(steps, record))
    return record


def take_back(steps: StepCatalog, name: str, *, session: str) -> Rollback:
    """Commit again what a rollback has hidden. The caller has the fence as `session`.

    In force on return; after a crash in the middle, or an error that says that it is done in part,
    call it again. Raises CheckpointError: nothing was changed.
    """
    found = _chosen(_records(steps), name, steps.prefix)
    record = found.rollback
    _end_saves(steps, session)
    copies = _whole_copies(steps, record)
    _require_none_since(steps, record, copies)
    found = _moved(steps, found, RollbackState.RETURNING)  # from now on nothing of it expires
    said = f"the steps {list(record.hidden[-8:])} are taken back in part"
    with _saying_what_stands(said, record.name):
        _put_back(steps, found, copies)
        done = _moved(steps, found, RollbackState.RETURNED)
    return replace(done.rollback, hidden=tuple(sorted(copies)))


def _put_back(steps: StepCatalog, found: _Found, copies: Mapping[int, bytes]) -> None:
    """Commit what the copies are of, with the protections that it had."""
    record = found.rollback
    for step, data in sorted(copies.items()):
        try:
            look = partial(_require_returning, steps, found)
            put_manifest(steps, step, data, before=None, look=look)
        except VersionConflict:
            if not _same(steps, step, data):
                raise
    for protection, step in record.protections.items():
        if step in copies and not is_hold(protection):  # its evaluator may be gone
            _protect_again(steps, record.name, step, protection)
    lost = [step for step in record.hidden if step not in copies]
    if lost:
        _log.warning("steps %s under %r could not be taken back", lost[:8], steps.prefix)


def _require_returning(steps: StepCatalog, found: _Found) -> FenceRecord | None:
    """Under the claim of a manifest's put, before it writes: raise if another process has taken
    this undo for dead, as the run went on, or has begun one of its own."""
    key = record_key(steps.prefix, found.rollback.name)
    if existing_version(steps.pool, key) != found.version:
        raise CheckpointError(
            "another process takes this rollback back, or has ended this undo since the run has "
            "gone on: this one goes on no more. Look at steps() and steps.rollbacks()"
        )
    return read_fence(steps.pool, steps.prefix)


def _protect_again(steps: StepCatalog, rollback: str, step: int, name: str) -> None:
    """Protect a step that is back, and no other one less: a name that is given away stays there."""
    short = name if name.isascii() and len(name) <= 40 else "protected"
    for free in (name, f"{short}-{rollback}", f"{short}-{rollback}-{step}"):
        try:
            steps.protect(step, free, if_absent=True)
        except VersionConflict:
            if _protects(steps, free) == step:
                return
            continue
        if free != name:
            _log.warning(
                "step %d is back, and protected as %r: %r protects another step now",
                step,
                free,
                name,
            )
        return
    raise CheckpointError(
        f"step {step} is back, but {name!r} and names like it protect other steps: unprotect one, "
        "then call undo_rollback() again"
    )


def _chosen(records: Collection[_Found], name: str | None, prefix: str) -> _Found:
    open_ = [
        f for f in records if f.rollback.state in (RollbackState.HIDDEN, RollbackState.RETURNING)
    ]
    for found in reversed(open_):
        if name in (None, found.rollback.name):
            return found
    known = [found.rollback.name for found in open_]
    what = "no rollback" if name is None else f"no rollback {name!r}"
    raise CheckpointError(
        f"{what} under {prefix!r} can be taken back; there are {known}"
        if known
        else f"{what} under {prefix!r} can be taken back: none has hidden steps that are still kept"
    )


def _whole_copies(steps: StepCatalog, record: Rollback) -> dict[int, bytes]:
    """Manifests of hidden steps whose segments survive one more loss (PROTOCOL 19), by step.

    Passes over what is lost for certain. Raises CheckpointError where that is unclear, as a step
    that is passed over now does not come back later.
    """
    copies: dict[int, bytes] = {}
    reason: Exception | None = None
    for step in record.hidden:
        key = copy_key(steps.prefix, record.name, step)
        try:
            data = steps.pool.get(key)
            for segment in Manifest.decode(data, where=key, facts_only=True).objects:
                require_safe(steps.pool, segment.key, version=segment.version or None)
        except (ObjectNotFound, IntegrityError) as error:
            _log.warning("hidden step %d cannot be taken back: %s", step, error)
            reason = error
        except HpstoreError as error:
            raise CheckpointError(
                f"hidden step {step} cannot be taken back now: {error}. Nothing was changed. Bring "
                "missing devices back, then call undo_rollback() again; if what they held is lost "
                f"for good, pool.delete({key!r}) gives this step up and the others come back"
            ) from error
        else:
            copies[step] = data
    if not copies:
        raise CheckpointError(
            f"none of the steps that were hidden can be taken back: {reason}. Nothing was changed"
        ) from reason
    return copies


def _require_none_since(steps: StepCatalog, record: Rollback, copies: dict[int, bytes]) -> None:
    """Raise CheckpointError when the run went on since: its steps would be mixed with these."""
    later = [step for step in steps.all() if step > record.step]
    since = [s for s in later if s not in copies or not _same(steps, s, copies[s])]
    if since:
        raise CheckpointError(
            f"the run has committed the steps {since[:8]} since it went back to step "
            f"{record.step}: they cannot stand beside those that were hidden. Nothing was changed. "
            f"rollback({record.step}) hides them, too; then take this one back by its name, "
            f"{record.name!r}"
        )


def _same(steps: StepCatalog, step: int, data: bytes) -> bool:
    """Whether what is committed as this step is what was hidden."""
    key = manifest_key(steps.prefix, step)
    try:
        return bytes(steps.pool.get(key)) == bytes(data)
    except ObjectNotFound:
        return False


def _moved(steps: StepCatalog, found: _Found, state: RollbackState) -> _Found:
    """The record in this state, and of a new version: others that have begun to move it, or to take
    the rollback back, do not go on. Raises VersionConflict when another process moved it."""
    record = replace(found.rollback, state=state)
    key = record_key(steps.prefix, record.name)
    info = steps.pool.put(key, record.encode(), if_version=found.version)
    return _Found(rollback=record, version=info.version)


def remove_expired(steps: StepCatalog, now_ms: int) -> list[int]:
    """Remove hidden steps whose time is over, and copies of those that were taken back.

    Best effort: failing at it is logged. Returns the steps that are gone for good. Decides by this
    machine's clock; one that is ahead takes away the chance to take a rollback back, nothing else.
    """
    gone: list[int] = []
    try:
        listed = steps.hidden.look()
        if left := steps.hidden.without_record(listed):
            _remove_copies(steps, left)
        for found in _records(steps, listed):
            gone += _expire(steps, found, now_ms)
    except (HpstoreError, OSError) as error:
        _log.warning("hidden steps under %r are left: %s", steps.prefix, error)
    if gone:
        _log.info("steps %s under %r, hidden by a rollback, are removed", gone[-8:], steps.prefix)
    return gone


def _expire(steps: StepCatalog, found: _Found, now_ms: int) -> Sequence[int]:
    """Remove what a rollback keeps, if its time is over. The steps that are gone for good."""
    record = found.rollback
    if now_ms < record.until_ms and record.state is not RollbackState.EXPIRED:
        return ()
    back: Collection[int] = record.hidden if record.state is RollbackState.RETURNED else ()
    if record.state is RollbackState.RETURNING:
        back = steps.all()
        if not record.hidden or not back or back[-1] <= max(record.hidden):
            return ()  # it may be taken back yet
        found = _end_undo(steps, found)
    if record.state not in (RollbackState.RETURNED, RollbackState.EXPIRED):
        _moved(steps, found, RollbackState.EXPIRED)
    _remove(steps, record)
    return [step for step in record.hidden if step not in back]


def _end_undo(steps: StepCatalog, found: _Found) -> _Found:
    """End an undo that was killed in the middle before the run went on; on return it puts no
    manifest any more, if it was only stopped. Raises what the pool raises: it is not decided.

    As with saves (PROTOCOL 18): the undo looks for its version of the record under the claim of
    each put; here that version is replaced before those claims are taken.
    """
    found = _moved(steps, found, RollbackState.RETURNING)
    for step in found.rollback.hidden:
        key = manifest_key(steps.prefix, step)
        if not steps.pool.admin.bar(key):
            require_safe(steps.pool, key)
    return found


def _remove(steps: StepCatalog, record: Rollback) -> None:
    """The copies, then the segments that nothing else names, then the record: after a crash in the
    middle the rest is found again."""
    _remove_copies(steps, [copy_key(steps.prefix, record.name, step) for step in record.hidden])
    steps.pool.delete_many([record_key(steps.prefix, record.name)], missing_ok=True)


def _remove_copies(steps: StepCatalog, copies: Sequence[str]) -> None:
    """Remove copies, then the segments that nothing else names."""
    segments: set[str] = set()
    for key in copies:
        try:
            data = steps.pool.get(key)
            segments |= Manifest.decode(data, where=key, facts_only=True).segment_keys
        except (ObjectNotFound, IntegrityError):
            continue  # garbage collection finds what it names
    steps.pool.delete_many(copies, missing_ok=True)
    steps.remove_unnamed(segments)
