"""The committed steps under a prefix: find them, delete them, keep what is to be kept."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from hpstore.checkpoint.catalog.dead_saves import end_save
from hpstore.checkpoint.catalog.fence_record import fence_key, fence_session, index_of
from hpstore.checkpoint.catalog.hidden_steps import HiddenSteps
from hpstore.checkpoint.catalog.left_writers import LeftWriters
from hpstore.checkpoint.catalog.not_found_hint import nothing_under
from hpstore.checkpoint.catalog.retention import orphans
from hpstore.checkpoint.catalog.writer_fence import (
    ATTEMPT_SECONDS,
    NoteWatch,
    SaveAttempt,
    attempt_lives,
)
from hpstore.checkpoint.format.checkpoint_manifest import (
    HEAD_BYTES,
    Listing,
    Manifest,
    checked_step,
    manifest_key,
    needs_more,
    sort_out,
)
from hpstore.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
    SomeFailed,
    VersionConflict,
)
from hpstore.format.keys import check_key
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.maintenance.deferred_repair import note_key
from hpstore.pool.pool import Pool

_log = logging.getLogger(__name__)


class StepCatalog:
    """Steps of one run. Needs no torch state; safe to use beside a save."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self.pool, self.prefix = pool, check_key(prefix)
        self._read: dict[int, tuple[str, Manifest]] = {}  # by step, with the version it is of
        self._watch = NoteWatch()
        self.hidden = HiddenSteps(pool, self.prefix)
        self.left = LeftWriters(pool, self.prefix)
        self._seen: frozenset[int] = frozenset()  # steps that the last listing had: a hint
        self.manifests: dict[int, str] = {}  # their versions
        self._overtaken: dict[int, str] = {}  # versions of manifests that it had, of no steps
        self.lasting: set[int] = set()  # steps that were seen to survive a loss: they stay
        self.unclear: set[str] = set()  # nonces of this process' saves that may yet be read

    def listing(self) -> Listing:
        """All objects of the run, sorted out.

        Raises TooFewDevices when some may be there unseen: what is not listed would be taken for
        absent, and what an unseen manifest names for garbage. Which manifests are steps is read
        after them (PROTOCOL 18): of an older record, one that was put since might count.
        """
        listed = self.pool.admin.versions_under(f"{self.prefix}/")
        found = sort_out(self.prefix, sorted(listed))
        fenced = fence_key(self.prefix) in listed
        index = index_of(self.pool, self.prefix) if fenced else None
        there = {step: listed[manifest_key(self.prefix, step)] for step in found.steps}
        steps = there if index is None else index.committed(there)  # other threads list, too
        self.manifests, self._seen = steps, frozenset(steps)
        self._overtaken = {s: v for s, v in there.items() if s not in steps}
        return replace(found, steps=tuple(steps))

    def counts(self, step: int, version: str) -> bool:
        """Whether a manifest of this version is a step, as the run is now."""
        index = index_of(self.pool, self.prefix)
        return index is None or index.counts(step, version)

    def all(self) -> list[int]:
        """Committed steps, ascending."""
        return list(self.listing().steps)

    def standing(self) -> str:
        """Which step is good now, for the message of a save that failed."""
        try:
            steps = self.all()
        except (HpstoreError, OSError):
            return "what was committed before is untouched"
        return f"step {steps[-1]} is still current" if steps else "no step was committed before"

    def unsaved(self, error: HpstoreError, step: int, *, maybe_visible: bool) -> HpstoreError:
        """What went wrong in a save, saying what became of the step, which one is good, and how the
        pool is."""
        fate = "may be committed or not" if maybe_visible else "is not committed"
        try:
            state = f" ({self.pool.admin.state_in_brief()})"
        except (HpstoreError, OSError):
            state = ""  # the error says enough
        return type(error)(
            f"step {step} {fate}, {self.standing()}: {error}{state}",
            device=error.device,
            key=error.key,
        )

    def committed(self, step: int) -> None:
        """A step was committed; the next listing will have it."""
        self._seen |= {step}

    def require_new(self, step: int) -> None:
        """Raise VersionConflict for a step that is known to be committed, before it is staged.

        What others have committed since the last listing shows at the commit. Looks into the pool
        only for a step that was there then.
        """
        if checked_step(step) not in self._seen:
            return
        key = manifest_key(self.prefix, step)
        try:
            there = self.pool.exists(key)
        except (HpstoreError, OSError):
            return  # unclear: the commit will tell
        if there:
            raise already_committed(self.prefix, step, key)

    def manifest(self, step: int) -> Manifest:
        """A step's manifest. Raises CheckpointError when there is none, IntegrityError."""
        key = manifest_key(self.prefix, step)
        try:
            version = self.pool.stat(key).version
            if not self.counts(step, version):
                raise ObjectNotFound(f"{key} was put by a session that had lost the fence", key=key)
            return Manifest.decode(self.pool.get(key), where=key)
        except ObjectNotFound as error:
            known = self.all()[-8:]
            raise CheckpointError(
                f"no checkpoint of step {step} under {self.prefix!r}; the newest are {known}"
                if known
                else nothing_under(self.pool, self.prefix)
            ) from error

    def settle(self, step: int) -> None:
        """PROTOCOL 8: bring a manifest that is to be acted on to all its copies, where it can be.

        One that a crash left with fewer would be gone with the devices that hold it, after it was
        restored. With devices missing it may have to stay as it is.
        """
        key = manifest_key(self.prefix, step)
        try:
            if not self.pool.read_only and self.pool.stat(key).spare_columns < self.pool.parity:
                self.pool.admin.settle(key)
        except ObjectNotFound:
            return  # its reader says so
        except (HpstoreError, OSError) as error:
            _log.warning("the manifest of step %d has fewer copies than it should: %s", step, error)

    def facts(self, step: int, version: str | None = None) -> Manifest:
        """A step's manifest without items and tree, from memory when it was read before."""
        key = manifest_key(self.prefix, step)
        version = version or self.pool.stat(key).version
        before = self._read.get(step)
        if before is None or before[0] != version:
            data = self.pool.get(key, 0, HEAD_BYTES)
            if len(data) == HEAD_BYTES and needs_more(data):
                data = self.pool.get(key)
            found = Manifest.decode(data, where=key, facts_only=True)
            before = self._read[step] = (version, found)
        return before[1]

    def note_facts(self, manifest: Manifest, version: str) -> None:
        """What was put as this version of a step's manifest: its facts need not be read."""
        segments = tuple(replace(segment, data=None) for segment in manifest.segments)
        facts = replace(manifest, segments=segments, items=(), tree=None)
        self._read[manifest.step] = (version, facts)

    def latest_valid(
        self, *, besides: int | None = None, hidden: Collection[int] = ()
    ) -> int | None:
        """The newest step whose manifest and segments can be read; None when there is none.

        Walks back past damaged ones, and logs why each was passed over.
        """
        tried = {*hidden} if besides is None else {*hidden, besides}
        while (step := newest_untried(self.all(), tried)) is not None:
            tried.add(step)
            try:
                for segment in self.facts(step).objects:
                    self.pool.stat(segment.key)
            except (IntegrityError, RedundancyError, CheckpointError, ObjectNotFound) as error:
                _log.warning("checkpoint step %d is passed over: %s", step, error)
            else:
                return step
        return None

    def is_whole(self, step: int) -> bool:
        """PROTOCOL 19, once more after the manifest is there: whether every object of a step has
        its full stripe. False when that is unclear."""
        try:
            keys = [manifest_key(self.prefix, step), *(s.key for s in self.facts(step).objects)]
            return all(self.pool.stat(key).spare_columns >= self.pool.parity for key in keys)
        except (HpstoreError, OSError) as error:
            _log.warning(
                "step %d under %r is committed, but not known to be whole; older steps "
                "are kept: %s",
                step,
                self.prefix,
                error,
            )
            return False

    def placed(self, error: Exception, step: int, note: str = "") -> Exception:
        """What went wrong with a step, saying which other one is good; `note` comes last."""
        if not isinstance(error, HpstoreError) or isinstance(error, CheckpointMismatch):
            return error
        try:
            good = self.latest_valid(besides=step)
            told = "no other step can be read" if good is None else f"step {good} can be read"
        except (HpstoreError, OSError):
            told = "other steps cannot be listed"
        return type(error)(
            f"step {step} cannot be read now, {told}: {error}{note}",
            device=error.device,
            key=error.key,
        )

    # --- protecting -------------------------------------------------------------------------

    def protect(self, step: int, name: str, *, if_absent: bool = False) -> None:
        """Keep a step, whatever retention says, until unprotect(name). Durable on return.

        `if_absent`: raise VersionConflict where the name is given away.
        """
        self.manifest(step)
        key = self.protection_key(name)
        data = seal({"format": FORMAT, "step": checked_step(step)})
        self.pool.put(key, data, if_absent=if_absent)
        self._delete_those_there([note_key(self.prefix)])  # this step goes no more

    def unprotect(self, name: str) -> None:
        """Let retention have it again. Raises CheckpointError when nothing has this name."""
        try:
            self.pool.delete(self.protection_key(name))
        except ObjectNotFound as error:
            raise CheckpointError(
                f"nothing under {self.prefix!r} is protected as {name!r}"
            ) from error

    def protected(self) -> dict[str, int]:
        """Protected steps by name."""
        found = {}
        start = f"{self.prefix}/protected/"
        for key in self.pool.list(start, certain=True):
            found[key.removeprefix(start)] = decode_protection(self.pool.get(key), where=key)
        return found

    def protection_key(self, name: str) -> str:
        """Where a protection of this name is. Raises ConfigError."""
        if not name or "/" in name:
            raise ConfigError(f"{name!r} is not a name: it must not be empty or hold a slash")
        return check_key(f"{self.prefix}/protected/{name}")

    # --- removing ---------------------------------------------------------------------------

    def delete(self, step: int, *, force: bool = False) -> None:
        """Delete a step: its manifest first, then the segments that it alone names, as far as that
        goes now: garbage collection finds the others.

        Raises CheckpointError for a step that is protected, unless forced.
        """
        if not force:
            self.require_unprotected(step)
        key = manifest_key(self.prefix, step)
        if not self._seems_there(key):
            self.manifest(step)  # says which steps there are
        segments = self.named_by(step)
        self.pool.delete(key)
        self.forget(step)
        self.remove_unnamed(segments)

    def require_unprotected(self, step: int) -> None:
        """Raise CheckpointError for a step that is protected."""
        names = [name for name, kept in self.protected().items() if kept == step]
        if names:
            raise CheckpointError(
                f"step {step} is protected as {names[0]!r} in {self.pool.config.name}: unprotect "
                "it first. Nothing was deleted"
            )

    def named_by(self, step: int, version: str | None = None) -> set[str]:
        """The segments that a step names, as far as that can be read. `version`: of its manifest,
        where that is known. Raises ObjectNotFound."""
        try:
            return self.facts(step, version).segment_keys
        except (IntegrityError, RedundancyError):
            return set()  # garbage collection finds them

    def forget(self, step: int) -> None:
        """Its manifest is gone."""
        self._read.pop(step, None)
        self.lasting.discard(step)

    def remove_unnamed(self, segments: set[str]) -> None:
        """Delete what no step names and no save under way refers to; best effort."""
        self._delete_those_there(segments - self.still_named(segments))

    def _seems_there(self, key: str) -> bool:
        """False only when it is certain: what is damaged beyond reading can still be deleted."""
        try:
            return self.pool.exists(key)
        except RedundancyError:
            return True

    def warn_of_later(self, step: int) -> None:
        """Say that a restart would go on from steps of a run that was rolled back.

        Not being able to look fails nothing: the save is committed.
        """
        try:
            later = [number for number in self.all() if number > step]
        except (HpstoreError, OSError) as error:
            _log.info("later steps under %r were not looked for: %s", self.prefix, error)
            return
        if later:
            _log.warning(
                "step %d is committed, but %r holds the later steps %s of a run that was rolled "
                "back: restore() would take the newest of them. rollback(step) hides them; or save "
                "under another prefix.",
                step,
                self.prefix,
                later[-8:],
            )

    def still_named(self, segments: set[str], going: Collection[int] = ()) -> set[str]:
        """Those that a step which is not `going` names or a save under way refers to; all when that
        is unclear."""
        if not segments:
            return set()
        try:
            listing = self.listing()
            staying = [step for step in listing.steps if step not in going]
            named = {key for step in staying for key in self.facts(step).segment_keys}
            named |= self.hidden.segments()  # PROTOCOL 24: after the steps
            # also those of dead saves: while the note is there its save may yet commit
            for attempt in self._attempts(listing, all_live=True)[0].values():
                if attempt is None:
                    return segments
                named.update(attempt.references)
        except (HpstoreError, OSError) as error:
            _log.warning("segments under %r are left to garbage collection: %s", self.prefix, error)
            return segments
        return segments & named

    def collect_garbage(self) -> int:
        """Remove segments that no manifest and no living save names; returns how many.

        Does nothing while some manifest cannot be read: it might name them. Dead saves are ended
        first, and manifests are looked at after that: one that commits all the same has its
        manifest there by then (PROTOCOL 18). Manifests that are no steps go first.
        """
        try:
            first, dead = self._orphans()
            for step, version in self._overtaken.items():
                self.pool.admin.bar(manifest_key(self.prefix, step), removes=version)
            if not first and not dead:
                return 0
            for key, attempt in dead.items():
                self.end_attempt(key, attempt)
            # looked at twice: a listing is no snapshot, and a save may commit while it is made
            second, _ = self._orphans(all_live=True)
        except (HpstoreError, OSError) as error:
            _log.warning("garbage under %r is left: %s", self.prefix, error)
            return 0
        self._delete_those_there(first & second)
        return len(first & second)

    def end_attempt(self, key: str, attempt: SaveAttempt | None) -> None:
        """End a dead save. Where that cannot be done now, its note or mark goes on protecting."""
        known = sort_out(self.prefix, [key])
        step, nonce = (known.attempts | known.condemned)[key]
        manifest = (attempt.manifest if attempt else "") or manifest_key(self.prefix, step)
        replaces = attempt.replaces if attempt else True
        try:
            counts = partial(self.counts, step)
            end_save(self.pool, key, manifest=manifest, replaces=replaces, counts=counts)
        except (HpstoreError, OSError) as error:
            _log.warning(
                "what became of a save of step %d under %r is left open: %s",
                step,
                self.prefix,
                error,
            )
        else:
            self.unclear.discard(nonce)

    def _orphans(self, *, all_live: bool = False) -> tuple[set[str], dict[str, SaveAttempt | None]]:
        """Segments that belong to nobody, and dead saves by the key of their note or mark.

        `all_live`: a note that is there, whatever its save is, protects what is its own.
        """
        listing = self.listing()
        living, dead = self._attempts(listing, all_live=all_live)
        named = {key for step in listing.steps for key in self.facts(step).segment_keys}
        named |= self.hidden.segments()  # PROTOCOL 24: after the steps
        named |= {key for attempt in living.values() if attempt for key in attempt.references}
        if any(attempt is None for attempt in living.values()):
            return set(), dead  # it may refer to anything
        return set(orphans(listing, named, set(living))), dead

    def _attempts(
        self, listing: Listing, *, all_live: bool = False
    ) -> tuple[dict[str, SaveAttempt | None], dict[str, SaveAttempt | None]]:
        """Saves that may live, by nonce (None: unreadable), and dead ones by note or mark.

        PROTOCOL 18: a save of a session that has lost the fence cannot commit, so it is dead,
        whatever any clock says; others are dead when their process is, or their note stands still,
        or another collector has begun to end them.
        """
        living: dict[str, SaveAttempt | None] = {}
        dead: dict[str, SaveAttempt | None] = {}
        self._watch.only(set(listing.attempts))
        session = fence_session(self.pool, self.prefix) if listing.attempts else None
        for key, (_, nonce) in (listing.attempts | listing.condemned).items():
            attempt: SaveAttempt | None = None
            try:
                attempt = SaveAttempt.decode(self.pool.get(key), where=key)
            except ObjectNotFound:
                continue  # over since the listing was made: the manifest, if any, was put before
            except (HpstoreError, OSError, KeyError, ValueError):
                attempt = None  # what cannot be read is taken for alive until it stands still
            over = nonce in self.unclear or key in listing.condemned
            if all_live or not (over or self._is_dead(key, attempt, session)):
                living[nonce] = attempt
            else:
                dead[key] = attempt
        return living, dead

    def _is_dead(self, key: str, attempt: SaveAttempt | None, session: str | None) -> bool:
        unchanged = self._unchanged_seconds(key)
        if attempt is None:
            return unchanged >= ATTEMPT_SECONDS
        fenced = bool(attempt.session) and session not in (None, attempt.session)
        return fenced or not attempt_lives(attempt, unchanged)

    def _unchanged_seconds(self, key: str) -> float:
        try:
            return self._watch.unchanged_seconds(key, self.pool.stat(key).version)
        except (HpstoreError, OSError):
            return 0.0

    def _delete_those_there(self, keys: Collection[str]) -> None:
        """Best effort: what fails is logged, and left for garbage collection."""
        try:
            self.pool.delete_many(sorted(keys), missing_ok=True)
        except SomeFailed as error:
            for key, reason in error.failed.items():
                _log.warning("%s could not be removed: %s", key, reason)
        except (HpstoreError, OSError) as error:
            _log.warning("%d objects could not be removed: %s", len(keys), error)


def newest_untried(steps: Sequence[int], tried: Collection[int]) -> int | None:
    """The newest step that was not tried. Asked with a fresh list each time: retention of a process
    that saves on may have removed the step that was wanted, for a newer one (PROTOCOL 8). Pure."""
    return max((step for step in steps if step not in tried), default=None)


def already_committed(prefix: str, step: int, key: str) -> VersionConflict:
    """The error of a save of a step that is there."""
    return VersionConflict(
        f"step {step} under {prefix!r} is committed already and was not touched. If another job "
        "has saved it since this one restored, start this one again; else save(overwrite=True) "
        "replaces it",
        key=key,
    )


def decode_protection(data: bytes, *, where: str) -> int:
    """The step that a record of a protection names. Raises IntegrityError."""
    with parsing(where):
        return checked_step(int(str(unseal(data, where=where)["step"])))
