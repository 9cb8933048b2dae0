"""Checkpoints that go by a name, as trainers call theirs, over a Checkpointer that counts steps.

    <prefix>/saves/...          checkpoints, numbered as they were made
    <prefix>/names/<name>       which of them a name means: its put is what makes a save visible
    <prefix>/doubtful/<number>  may be left over from a crash: judged after the next save. With
                                tiers the last note stays: its number is not given again

A checkpoint is deleted only after its name was read and means another one, or none. Names are put
under the claim of the run while its fence is this session's, as manifests are (PROTOCOL 18): a
session that another one has taken over from names nothing and removes nothing of the other's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpstore.checkpoint import Checkpointer, LoadOptions, SaveHandle, SaveOptions, Tier
from hpstore.checkpoint.catalog.not_found_hint import SAVES
from hpstore.checkpoint.catalog.retain_steps import remove_steps
from hpstore.checkpoint.catalog.segment_safety import existing_version
from hpstore.checkpoint.catalog.writer_fence import require_fence
from hpstore.checkpoint.format.checkpoint_manifest import checked_step, manifest_key
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    VersionConflict,
)
from hpstore.format.keys import check_key
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.runtime.threads import WorkerThreads
from hpstore.trainers.rank_messages import agreed
from hpstore.trainers.refused_states import refuse_states
from hpstore.trainers.sharded_parts import read_tree, read_without
from hpstore.trainers.tier_names import TierNames, checked_trainer_tiers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A name and the number of the checkpoint that it means."""

    name: str
    number: int

    def encode(self) -> bytes:
        return seal({"format": FORMAT, "name": self.name, "number": self.number})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Named:
        """Inverse of encode. Raises IntegrityError, FormatTooNew."""
        with parsing(where):
            body = unseal(data, where=where)
            return cls(name=str(body["name"]), number=checked_step(int(str(body["number"]))))


class NamedCheckpoints(Closing):
    """Save, load and remove checkpoints by name. One saving process per prefix at a time.

    save() returns once the state is staged; the rest goes on in the background, in order: commit,
    name, then removals. A removal asked for during a save waits until that save is durable with
    its full parity, and is postponed when it failed: there is never less than before. What went
    wrong is raised by the next save(), load(), wait() or close(). The background thread ends when
    these have waited for it, and is started again by the next save or removal.

    keep_last: how many names stay; the oldest go after a newer one is durable. None keeps all.
    allow_pickle: as of Checkpointer. ranks: those that save together, each its shards; they all
    call save(), load_into(), wait() and close(), and rank 0 alone names and removes. Without them
    this process saves for itself.
    tiers: further pools, which get copies of the checkpoints. One that has left this pool by its
    removal or keep_last is there by its name as long as a tier holds it.
    """

    def __init__(
        self,
        pool: Pool,
        prefix: str,
        *,
        keep_last: int | None = None,
        allow_pickle: bool = False,
        ranks: Ranks | None = None,
        commit_seconds: float = SaveOptions().commit_seconds,
        tiers: Iterable[Tier] = (),
    ) -> None:
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ConfigError("keep_last must be a whole number of at least 1, or None")
        self.pool, self.prefix, self.keep_last = pool, check_key(prefix), keep_last
        self._ranks = ranks or Ranks(commit_seconds, alone=True)
        self._checkpoints = Checkpointer(
            pool,
            f"{prefix}/{SAVES}",
            rng=False,
            group=None if self._ranks.world > 1 else "alone",
            allow_pickle=allow_pickle,
            save=SaveOptions(commit_seconds=commit_seconds),
            tiers=checked_trainer_tiers(tiers),
        )
        self._tier_names = TierNames(self._checkpoints)
        self._worker: WorkerThreads | None = None  # from a save or a removal to the next wait()
        self._pending: list[Future[None]] = []  # of the one save under way and its removals
        # names to remove, and whom to tell; the worker's alone
        self._postponed: dict[str, Callable[[], None] | None] = {}
        self._until_copied = False  # something of the first pool waits for a copy; the worker's
        self._whole = True  # the last save is durable with full parity; the worker's alone
        self._number: int | None = None  # of the last save here
        # the worker's alone: a save of this session was committed, so it has taken the fence; and
        # the numbers that no name can come to mean, or cease to, but by this session
        self._fenced, self._settled = False, set[int]()
        self._closed = False

    # --- saving -----------------------------------------------------------------------------

    def save(
        self, name: str, state: Mapping[str, Any], *, durable: Callable[[], None] | None = None
    ) -> None:
        """Save plain nested values under `name`, in place of what had that name.

        Returns once staged; the tensors may change then. `durable` is called, on the background
        thread, when a restart would find it. A crash before leaves the name as it was. Raises
        CheckpointError naming an entry that cannot be saved, and what went wrong before.
        """
        mine = agreed(self._ranks, lambda: self._prepare(name, state))
        number = int(self._ranks.broadcast(str(mine).encode(), RankChannel.TRAINER))
        handle = self._checkpoints.save(number, {"name": name, "checkpoint": dict(state)})
        self._number = number
        named = Named(name=name, number=number)
        if self._ranks.leads:
            self._go_on(partial(self._publish, named, handle, durable))
        else:
            self._go_on(partial(_await, handle))

    def _prepare(self, name: str, state: Mapping[str, Any]) -> int:
        """The number of a save that may begin; rank 0's counts."""
        self.wait()
        self._pointer_key(name)  # raises before anything is staged
        refuse_states(state, "checkpoint")
        if not self._ranks.leads:
            return -1
        number = self._next_number()
        self._doubt(Named(name=name, number=number))
        return number

    def _next_number(self) -> int:
        """One that no checkpoint has had, in a tier that cannot be listed now either: a copy takes
        the place of what has its number there."""
        if self._number is None:
            known = [*self._checkpoints.steps(), *(n.number for n in self._named())]
            known += map(_number_of, self._doubtful())
            self._number = max(known, default=-1)
        return self._number + 1

    def _doubtful(self) -> list[str]:
        """Keys of the notes of doubtful checkpoints, the oldest first."""
        return sorted(self.pool.list(f"{self.prefix}/doubtful/"))

    def _publish(
        self, named: Named, handle: SaveHandle, durable: Callable[[], None] | None
    ) -> None:
        self._whole = False
        report = handle.result()
        self._fenced = True
        self._postponed.pop(named.name, None)  # it was of the one that is replaced
        info = self._point(named)
        if durable is not None:
            durable()
        spare = min(report.spare_columns, info.spare_columns)
        self._whole = spare >= self.pool.parity
        if not self._whole:
            _log.warning("%s survives %d losses: nothing older is removed", named, spare)
            return
        self._tidy()

    def _point(self, named: Named) -> ObjectInfo:
        """Let a name mean a checkpoint. Raises VersionConflict when another session saves here."""
        before, version = self._look(named.name)
        if before is not None:
            self._doubt(before)
        try:
            info = self._put_name(named, version)
        except VersionConflict:
            self._require_mine()  # says who was faster
            raise
        self._settled |= {named.number} if before is None else {named.number, before.number}
        return info

    def _put_name(self, named: Named, version: str | None) -> ObjectInfo:
        """Put a name's record in place of this version, while the fence is this session's."""
        return self.pool.put(
            self._pointer_key(named.name),
            named.encode(),
            if_absent=version is None,
            if_version=version,
            progress=lambda _: self._require_mine(),
        )

    def _require_mine(self) -> None:
        """Raise VersionConflict when another session has begun to save here since this one did."""
        require_fence(self.pool, f"{self.prefix}/{SAVES}", self._checkpoints.saver.session)

    def remove(self, name: str, *, removed: Callable[[], None] | None = None) -> None:
        """Remove a name and its checkpoint, after the save under way; not when that failed.

        A name that is not there is passed over. `removed` is called when it is gone.
        """
        if self._closed:
            raise CheckpointError("these checkpoints are closed")
        self._go_on(partial(self._remove, name, removed))

    def _go_on(self, call: Callable[[], None]) -> None:
        """In the background, after what is under way there."""
        if self._worker is None:
            self._worker = WorkerThreads(1, "hpstore-names")
        self._pending.append(self._worker.submit(call))

    def _remove(self, name: str, removed: Callable[[], None] | None) -> None:
        self._postponed[name] = removed
        if self._whole:
            self._tidy()
        else:
            _log.warning("removal of %r waits for a save that is durable in full", name)

    # --- removing: on the worker --------------------------------------------------------------

    def _tidy(self) -> None:
        """Removals that waited, retention, and what crashes left. Failing at it fails no save."""
        try:
            if self.keep_last is not None:
                # names that a listing misses are kept: it errs on the safe side
                ordered = sorted(self._named(), key=lambda named: named.number)
                for named in ordered[: -self.keep_last]:
                    self._postponed.setdefault(named.name, None)
            for name, removed in list(self._postponed.items()):
                try:
                    self._forget(name)
                except IntegrityError as error:  # others go all the same
                    _log.warning("%r under %r is not removed: %s", name, self.prefix, error)
                    continue
                del self._postponed[name]
                if removed is not None:
                    removed()
            notes = self._doubtful()
            doubted = [self._seen(key) for key in notes]
            if self._fenced:  # after the look: what others begin from now on is not in it
                self._require_mine()
            kept = notes[-1:] if self._checkpoints.saver.tiers.catalogs else []
            for key, named, version in doubted:
                if named.number in self._settled or self._fenced:
                    over = self._judge(named, version)
                    if over and key not in kept:
                        self.pool.delete(key)
        except (HpstoreError, OSError) as error:
            _log.warning("removals under %r are postponed: %s", self.prefix, error)

    def _forget(self, name: str) -> None:
        """Remove what a name means now: not what another session may yet put there."""
        if self._fenced:
            self._require_mine()
        named, version = self._look(name)
        if named is not None:
            self._doubt(named)
            self.pool.admin.bar(self._pointer_key(name), removes=version)
            if not self.pool.exists(self._doubt_key(named)):
                self._doubt(named)  # another session has judged it while it had its name
            self._settled.add(named.number)

    def _seen(self, key: str) -> tuple[str, Named, str | None]:
        """A doubtful checkpoint, and the version of its manifest; None where there is none."""
        doubted = Named.decode(self.pool.get(key), where=key)
        manifest = manifest_key(f"{self.prefix}/{SAVES}", doubted.number)
        return key, doubted, existing_version(self.pool, manifest)

    def _judge(self, doubted: Named, version: str | None) -> bool:
        """Delete a doubtful checkpoint, unless its name means it; False when that must wait."""
        current = self._decided(doubted)  # raises when that is not certain
        meant = current is not None and current.number == doubted.number
        catalog = self._checkpoints.steps.catalogs[0]
        if not meant and version is not None and catalog.counts(doubted.number, version):
            if doubted.number in self._checkpoints.saver.tiers.held().values():
                self._until_copied = True
                return False
            if doubted.number in catalog.protected().values():
                return False
            remove_steps(catalog, [doubted.number], {doubted.number: version})
        return True

    def _decided(self, doubted: Named) -> Named | None:
        """What a name means, and no put that another session had begun changes it any more."""
        while True:
            current, version = self._look(doubted.name)
            if doubted.number in self._settled or (current and current.number == doubted.number):
                return current
            if current is None and self.pool.admin.bar(self._pointer_key(doubted.name)):
                return None
            if current is not None:
                self._put_name(current, version)
                return current

    def _doubt(self, named: Named) -> None:
        self.pool.put(self._doubt_key(named), named.encode())

    def _doubt_key(self, named: Named) -> str:
        return f"{self.prefix}/doubtful/{named.number:012d}"

    # --- finding ------------------------------------------------------------------------------

    def _pointer_key(self, name: str) -> str:
        return check_key(f"{self.prefix}/names/{name}")

    def _read(self, name: str) -> Named | None:
        key = self._pointer_key(name)
        try:
            return Named.decode(self.pool.get(key), where=key)
        except ObjectNotFound:
            return None

    def _look(self, name: str) -> tuple[Named | None, str | None]:
        """What a name means, and the version of its record; None and None for no such name."""
        key = self._pointer_key(name)
        while (version := existing_version(self.pool, key)) is not None:
            with suppress(ObjectNotFound):  # it was replaced in between
                return Named.decode(self.pool.get(key, version=version), where=key), version
        return None, None

    def _named(self) -> list[Named]:
        keys = self.pool.list(f"{self.prefix}/names/")
        found = [self._read(key.removeprefix(f"{self.prefix}/names/")) for key in keys]
        return [named for named in found if named is not None]

    def _everywhere(self) -> list[Named]:
        """Those named here, and those of other names that tiers hold."""
        here = self._named()
        others = self._tier_names.besides({named.name for named in here})
        return here + [Named(name=name, number=number) for name, number in others.items()]

    def names(self) -> list[str]:
        """Names of durable checkpoints, oldest save first. Waits for nothing under way."""
        return [named.name for named in sorted(self._everywhere(), key=lambda named: named.number)]

    def latest(self) -> str | None:
        """The name saved last among those that can be read; None when there is none.

        Waits for the save and the removals under way here: a name that is about to go is no answer
        for a restart. What went wrong in them is left to the next save(), load() or wait().
        """
        self._await_pending()
        valid = self._checkpoints.latest_valid()
        found = [n for n in self._everywhere() if valid is not None and n.number <= valid]
        return max(found, key=lambda named: named.number).name if found else None

    def load(self, name: str, *, missing: Callable[[], str] = lambda: "") -> dict[str, Any]:
        """The state under `name`, verified, tensors on the CPU; the caller owns it.

        `missing`: what the error says besides where there is none of that name. Raises
        CheckpointError naming what there is, IntegrityError, RedundancyError.
        """
        self.wait()
        number = self._known(name, missing).number
        return self._of_name(name, number, read_tree(self._checkpoints, number))

    def _known(self, name: str, missing: Callable[[], str] = lambda: "") -> Named:
        named = self._read(name)
        if named is None:
            number = self._tier_names.besides(()).get(name)
            named = None if number is None else Named(name=name, number=number)
        if named is None:
            raise CheckpointError(
                f"no checkpoint {name!r} under {self.prefix!r}; the newest are "
                f"{self.names()[-8:]}{missing()}"
            )
        return named

    def _of_name(self, name: str, number: int, state: dict[str, Any]) -> dict[str, Any]:
        if state.get("name") != name:
            raise IntegrityError(f"checkpoint {number} under {self.prefix!r} is not {name!r}")
        found: dict[str, Any] = state["checkpoint"]
        return found

    def load_into(
        self,
        name: str,
        state: Mapping[str, Any],
        *,
        check: Callable[[dict[str, Any]], None] = lambda rest: None,
    ) -> dict[str, Any]:
        """Fill what `state` has in place, each rank its shards; what is left of the checkpoint is
        returned, after `check` has let it pass. What fails on one rank is raised on all.

        Raises CheckpointError naming what there is, CheckpointMismatch where it does not fit.
        """
        mine = agreed(self._ranks, lambda: self._found(name) if self._ranks.leads else -1)
        number = int(self._ranks.broadcast(str(mine).encode(), RankChannel.TRAINER))
        names = tuple(f"checkpoint/{part}" for part in state)
        rest = agreed(self._ranks, lambda: self._rest(name, number, state, names))
        agreed(self._ranks, lambda: check(rest))
        self._checkpoints.restore({"checkpoint": state}, number, load=LoadOptions(include=names))
        return rest

    def _found(self, name: str) -> int:
        """The number that a name means now."""
        self.wait()
        return self._known(name).number

    def _rest(
        self, name: str, number: int, state: Mapping[str, Any], names: tuple[str, ...]
    ) -> dict[str, Any]:
        """A checkpoint without what is filled in place."""
        self.wait()
        tree = self._checkpoints.steps.manifest(number).tree
        saved = tree.get("checkpoint") if isinstance(tree, dict) else None
        for part, things in state.items():
            count = len(saved.get(part, ())) if isinstance(saved, dict) else 0
            if count != len(things):
                raise CheckpointMismatch(
                    f"{count} {part} were saved, {len(things)} are there to load"
                )
        found = read_without(self._checkpoints, number, self._ranks.rank, *names)
        return self._of_name(name, number, found)

    # --- ending -------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the save and the removals under way; raises what went wrong in them."""
        if self._closed:
            raise CheckpointError("these checkpoints are closed")
        errors = self._await_pending()
        self._pending = []
        self._end_worker()  # no thread stays behind in a trainer that ends without close()
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"saving under {self.prefix!r} failed", errors)

    def _await_pending(self) -> list[BaseException]:
        return [error for error in (future.exception() for future in self._pending) if error]

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()

    def close(self) -> None:
        """Wait, then release threads and the arena. Idempotent; the pool stays open."""
        if self._closed:
            return
        try:
            self.wait()
            self._after_copies()
        finally:
            self._closed = True
            self._end_worker()
            self._checkpoints.close()

    def _after_copies(self) -> None:
        """What stayed here until it was copied goes now."""
        if self._until_copied and self._whole:
            self._checkpoints.tiers.wait()
            self._tidy()


def _number_of(note: str) -> int:
    """Of the checkpoint that a note is about, by its key."""
    text = note.rpartition("/")[2]
    return int(text) if text.isascii() and text.isdigit() else -1


def _await(handle: SaveHandle) -> None:
    """Raise what went wrong in a save."""
    handle.result()
