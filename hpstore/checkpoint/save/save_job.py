"""One save from the staged arena to the committed manifest (PROTOCOL 18-20)."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from hpstore import errors
from hpstore.checkpoint.catalog.dead_saves import taken_for_dead
from hpstore.checkpoint.catalog.fence_record import FenceRecord, fence_key
from hpstore.checkpoint.catalog.run_index import put_manifest, take_over
from hpstore.checkpoint.catalog.segment_safety import existing_version, is_there, require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog, already_committed
from hpstore.checkpoint.catalog.writer_fence import Heartbeat, require_fence
from hpstore.checkpoint.format.checkpoint_manifest import (
    Manifest,
    compact,
    manifest_key,
    segment_key,
)
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Key, Known, Packed, Segment, digests_of, pack
from hpstore.checkpoint.format.segment_plan import SMALL_ITEM_BYTES
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.rank_vote import RankVote, merged
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.state.merge_trees import Merge
from hpstore.checkpoint.state.state_tree import tensor_names
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, HpstoreError, TooFewDevices, VersionConflict
from hpstore.objects.object_info import ObjectInfo
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import WorkerThreads

_log = logging.getLogger(__name__)
T = TypeVar("T")


class SaveJob:
    """One save of one rank: begin(), write() for each slice, commit(). Once each, in this order.

    A crash before the manifest's put leaves the previous step current, a crash after it this one,
    never a mixture. After an error nothing of the save is visible and its segments are removed,
    unless the manifest may have become visible: then they are left to garbage collection.
    """

    def __init__(
        self, steps: StepCatalog, ranks: Ranks, options: JobOptions, earlier: Earlier
    ) -> None:
        self._steps, self._ranks, self._options = steps, ranks, options
        self._pool, self._prefix = steps.pool, steps.prefix
        self._refers_to = earlier
        self._earlier, self._known = earlier.step, {} if options.within else earlier.known
        self._packed: Packed | None = None  # the last slice as it lies in the arena, once packed
        self._began_to_pack = False  # which changes the arena
        self.nonce = ""  # of the attempt, once begin() has succeeded
        self._heartbeat: Heartbeat | None = None
        self._written = RankVote(tree=options.tree, tolerated=self._pool.parity)
        self._own: list[str] = []  # keys of segments that this rank has put
        self._put: tuple[Segment, ObjectInfo] | None = None  # the last one, and what its put said
        self._error: BaseException | None = None
        self._cause: BaseException | None = None  # what rank 0 met when it noted or published
        self._maybe_visible = False  # the manifest's put has begun
        self._committed = False
        self.begun = False  # begin() was called
        self._tree_text: Future[str] | None = None  # of options.tree, made beside the writes
        self.next_known: dict[Key, Known] = {}
        self.replaced: set[str] = set()  # segments of the step that this one has overwritten
        self.differing: list[str] = []  # values in which ranks differ; rank 0's is recorded

    def begin(self, *, fence: bool) -> None:
        """Rank 0 notes the attempt, durably, before anybody writes; all learn its nonce.

        `fence`: first become the session that saves here. The note names the segments that any
        rank may refer to; what is gone already is not referred to.
        """
        self.begun = True
        if self._options.within and not fence:  # nothing is put before the vote
            self.nonce = secrets.token_hex(8)
            return
        mine = sorted({k.segment.key for k in self._known.values()})
        heard = self._ranks.all_gather(json.dumps(mine).encode(), RankChannel.SAVER)
        message = b""
        if self._ranks.leads:
            try:
                references = sorted({str(key) for keys in heard for key in json.loads(keys)})
                message = json.dumps(self._note_attempt(references, fence=fence)).encode()
            except BaseException as error:
                self._cause = error
                self._stop_heartbeat()  # first: a peer that is dead makes the broadcast raise
                told = {"error": str(error), "kind": type(error).__name__}
                self._ranks.broadcast(json.dumps(told).encode(), RankChannel.SAVER)
                if isinstance(error, HpstoreError):
                    raise self._placed(error) from error
                raise
        told = json.loads(self._ranks.broadcast(message, RankChannel.SAVER))
        if "error" in told:  # of the same class: ranks decide alike what a failure means
            kind = getattr(errors, told["kind"], CheckpointError)
            raise self._placed(kind(f"rank 0 could not begin the save: {told['error']}"))
        self.nonce = str(told["nonce"])
        gone = set(told["gone"])
        self._known = {n: k for n, k in self._known.items() if k.segment.key not in gone}

    def _note_attempt(self, references: Sequence[str], *, fence: bool) -> dict[str, Any]:
        """Put the fence and the note. From then on nobody removes `references`; those that cannot
        be read any more are returned with the nonce. A save within its manifest needs no note."""
        if fence:
            take_over(self._steps, self._options.session)
        if self._options.within:
            return {"nonce": secrets.token_hex(8), "gone": []}
        beating = self._note(references)
        there = self._referable(references)
        gone = [key for key in references if key not in there]
        return {"nonce": beating.nonce, "gone": gone}

    def _note(self, references: Sequence[str]) -> Heartbeat:
        """Put the note of this save, durably."""
        self._heartbeat = Heartbeat(
            self._pool,
            self._prefix,
            self._options.step,
            secrets.token_hex(8),
            self._options.session,
            references,
            manifest=manifest_key(self._prefix, self._options.step),
            replaces=self._options.overwrite,
        )
        return self._heartbeat

    def _referable(self, references: Sequence[str]) -> set[str]:
        """Those that a manifest names now, after the note was put. PROTOCOL 18.

        Who deletes a step removes its manifest before it looks at notes: either it sees the note,
        or the manifest is gone here. A segment that merely lies there may be about to go.
        """
        if not references:
            return set()
        try:
            named = self._steps.facts(self._earlier).segment_keys
        except (HpstoreError, OSError):
            return set()  # all is written anew
        return {key for key in references if key in named and is_there(self._pool, key)}

    @property
    def why_not_repeatable(self) -> str:
        """Why again() cannot save what is staged after a failure; "" when it can."""
        if self._maybe_visible:
            return "its manifest may be there all the same"
        if self._options.slices > 1 or (self._began_to_pack and self._packed is None):
            return "the staging memory does not hold all of it any more"
        return ""

    def cause_of(self, error: BaseException) -> BaseException | None:
        """What this rank met itself of what commit() or begin() has raised; None where other ranks
        alone failed."""
        return error if self._ranks.world == 1 else self._error or self._cause

    def again(self) -> SaveJob:
        """The same save once more, of the same staged bytes, under a nonce of its own."""
        other = SaveJob(self._steps, self._ranks, self._options, self._refers_to)
        other._packed = self._packed
        return other

    @property
    def noted(self) -> bool:
        """Whether begin() has succeeded."""
        return bool(self.nonce)

    def write(self, memory: Bytes, items: Sequence[Item], *, part: int) -> Segment | None:
        """Put what is staged in `memory` as one segment; None when nothing had to be written.

        What goes wrong is kept for the vote: commit() raises it.
        """
        if self._error is not None:
            return None
        try:
            return self._write(memory, items, part)
        except BaseException as error:  # noqa: BLE001 (raised by commit, on all ranks)
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Vote against the commit because of `error`."""
        self._error = self._error or error

    def _write(self, memory: Bytes, items: Sequence[Item], part: int) -> Segment | None:
        packed = self._packed_again() or self._pack(memory, items)
        segment = None
        if packed.items and self._options.within:
            data = memory[: packed.size].copy()
            whole = Segment(key="", size=packed.size, version="", data=data)
            index = self._written.index_of(whole)
            self._written.columns.add(
                packed.items, segment=index, digests=digests_of(data, packed.items)
            )
            if self._options.progress is not None:
                self._options.progress(packed.size)
        elif packed.items:
            key = segment_key(self._prefix, self._options.step, self.nonce, self._ranks.rank, part)
            data = memory[: packed.size]
            self._own.append(key)
            with WorkerThreads(1, "hpstore-hash") as hashing:
                hashes = hashing.submit(digests_of, memory, packed.items)
                if self._tree_text is None and self._ranks.world == 1:
                    # beside the writes: 10,000 tensors are 10 ms of JSON
                    self._tree_text = hashing.submit(compact, self._options.tree)
                info = self._pool.put(
                    key,
                    data.data,
                    rate_bytes_per_second=self._options.rate_bytes_per_second,
                    progress=self._options.progress,
                    min_losses_tolerated=self._options.min_losses_tolerated,
                )
                digests = hashes.result()
            if info.size != packed.size:
                raise CheckpointError(f"segment {key} has {info.size} bytes, not {packed.size}")
            segment = Segment(key=key, size=info.size, version=info.version)
            self._put = segment, info
            index = self._written.index_of(segment)
            self._written.columns.add(packed.items, segment=index, digests=digests)
            for item, digest in zip(packed.items, digests, strict=True):
                if item.length >= SMALL_ITEM_BYTES or item.codec:  # those have a probe
                    self._remember(replace(item, digest=digest), segment, packed.probes[item.key])
        for before in packed.referenced:
            index = self._written.index_of(before.segment)
            self._written.referenced_bytes += before.item.length
            self._written.columns.add([before.item], segment=index)
            self._remember(before.item, before.segment, before.probe)
        return segment

    def _pack(self, memory: Bytes, items: Sequence[Item]) -> Packed:
        self._began_to_pack, self._packed = True, None
        self._packed = pack(memory, items, self._known, self._options.codec)
        return self._packed

    def _packed_again(self) -> Packed | None:
        """What an attempt before has packed. Raises CheckpointError when what it refers to has gone
        since: those bytes are not staged any more."""
        packed = None if self._options.slices > 1 else self._packed
        if packed is not None:
            there = {known.segment.key for known in self._known.values()}
            gone = [k.segment.key for k in packed.referenced if k.segment.key not in there]
            if gone:
                raise CheckpointError(f"{gone[0]}, which the save refers to, is gone")
        return packed

    def _remember(self, item: Item, segment: Segment, probe: int | None) -> None:
        """For the next save, which may refer to it."""
        self.next_known[item.key] = Known(item=item, segment=segment, probe=probe)

    def commit(self) -> SaveReport:
        """Vote; rank 0 publishes the manifest when everything that was planned is there.

        Raises what went wrong, on all ranks when any of them failed or died (PROTOCOL 20), with
        the step that is still good.
        """
        try:
            return self._commit()
        except VersionConflict:
            raise  # nothing is wrong with the step that is there
        except HpstoreError as error:
            raise self._placed(error) from error

    def _placed(self, error: HpstoreError) -> HpstoreError:
        """The same error, saying what became of the step and which one is good."""
        return self._steps.unsaved(error, self._options.step, maybe_visible=self._maybe_visible)

    def _commit(self) -> SaveReport:
        if self._error is None:
            try:
                self._require_safe()
            except BaseException as error:  # noqa: BLE001 (raised below, on all ranks)
                self.fail(error)
        if self._ranks.world > 1:
            return self._vote()
        if self._error is not None:
            self.abandon()
            raise self._error
        return self._publish([self._written])

    def _vote(self) -> SaveReport:
        """What was put is removed only when it is certain that no manifest names it."""
        if self._error is not None:
            self._written.error = f"{type(self._error).__name__}: {self._error}"
        try:
            mine = self._written.encode(with_bytes=not self._ranks.leads)
            votes = self._ranks.all_gather(mine, RankChannel.SAVER)
        except CheckpointError:
            if self._ranks.leads:
                self.abandon()
            self._maybe_visible = not self._ranks.leads  # rank 0 alone publishes
            raise
        outcome = self._decide(votes) if self._ranks.leads else {}
        self._maybe_visible = True
        told = json.loads(self._ranks.broadcast(json.dumps(outcome).encode(), RankChannel.SAVER))
        if "error" in told:
            self._maybe_visible = told["visible"]
            if not told["visible"]:
                self._remove_own()
            kind = getattr(errors, told["kind"], CheckpointError)
            raise kind(told["error"]) from self._error
        return SaveReport(
            **{**told["report"], "durable_seconds": time.perf_counter() - self._options.began}
        )

    def _decide(self, votes: Sequence[bytes]) -> dict[str, Any]:
        """Rank 0: publish, or say why not."""
        try:
            written = [
                RankVote.decode(vote, within=self._written.within if rank == 0 else None)
                for rank, vote in enumerate(votes)
            ]
            failed = [f"rank {n}: {w.error}" for n, w in enumerate(written) if w.error]
            if failed:
                self._stop_heartbeat()
                kind = CheckpointError.__name__
                return {"error": "; ".join(failed), "kind": kind, "visible": False}
            return {"report": self._publish(written).as_dict()}
        except BaseException as error:  # noqa: BLE001 (told to all ranks, which raise it)
            self._cause = error
            self._stop_heartbeat()
            kind = type(error).__name__
            return {"error": str(error), "kind": kind, "visible": self._maybe_visible}

    def _require_safe(self) -> None:
        """PROTOCOL 19: every segment, the referenced ones too, must survive one more loss."""
        last, put = self._put if self._put is not None else (None, None)
        for segment in self._written.segments:  # of those put before devices may have gone since
            if not segment.key:
                continue
            info = put if segment == last else None
            tolerated = require_safe(self._pool, segment.key, version=segment.version, info=info)
            self._written.tolerated = min(self._written.tolerated, tolerated)

    def _publish(self, written: Sequence[RankVote]) -> SaveReport:
        """Publish the manifest: that put is the commit."""
        key = manifest_key(self._prefix, self._options.step)
        with ExitStack() as undo:  # nothing names yet what was put
            undo.callback(self.abandon)
            if not self._options.within:
                require_fence(self._pool, self._prefix, self._options.session)
            manifest, data = self._manifest(written)
            before, replaced = self._standing(key) if self._options.overwrite else (None, set())
            if before is not None and self._heartbeat is None:
                self._note([])  # who takes the fence must know that a step may be replaced
            undo.pop_all()
        # from here on the manifest may become visible even if its put fails
        self._maybe_visible = True
        try:
            info = put_manifest(
                self._steps,
                self._options.step,
                data,
                before=before,
                look=self._require_mine,
                min_losses_tolerated=self._options.min_losses_tolerated,
            )
        except VersionConflict as error:
            self._maybe_visible = error.maybe_visible  # else superseded, if ever it was seen
            if error.key == fence_key(self._prefix):
                if not error.maybe_visible:
                    self.abandon()
                raise
            self._require_mine()  # else that is why
            raise already_committed(self._prefix, self._options.step, key) from error
        except (TooFewDevices, CheckpointError) as error:
            if not error.maybe_visible:  # a full pool: nothing of the manifest is there
                self._maybe_visible = False
                self.abandon()
            raise
        self._committed = True
        self._steps.note_facts(manifest, info.version)
        self.replaced = replaced
        spare = min(info.spare_columns, *(w.tolerated for w in written))
        return SaveReport(
            step=self._options.step,
            key=key,
            bytes=sum(
                s.size for w in written for s in w.segments if not s.key or self.nonce in s.key
            ),
            referenced_bytes=sum(w.referenced_bytes for w in written),
            staged_seconds=0.0,
            durable_seconds=time.perf_counter() - self._options.began,
            losses_tolerated=min(info.losses_tolerated, spare),
            spare_columns=spare,
        )

    def _require_mine(self) -> FenceRecord | None:
        """Under the claim of the run, before its manifest is written: raise if this save is over.
        The record of the fence."""
        found = require_fence(self._pool, self._prefix, self._options.session)
        if self._heartbeat is not None or not self._options.within:
            self._require_noted()
        return found

    def _require_noted(self) -> None:
        """PROTOCOL 18: under the claim of the manifest's put. Who takes this save for dead removes
        its note before it takes that claim. Raises CheckpointError."""
        try:
            gone = self._heartbeat is None or self._heartbeat.removed()
        except (HpstoreError, OSError) as error:
            raise CheckpointError(f"the note of this save cannot be looked at: {error}") from error
        if gone:
            raise taken_for_dead()

    def _standing(self, key: str) -> tuple[str | None, set[str]]:
        """The version of the manifest that is to be replaced, and the segments that it names."""
        before = existing_version(self._pool, key)
        if before is None:
            return None, set()
        try:
            return before, self._steps.facts(self._options.step).segment_keys
        except (HpstoreError, OSError):
            return before, set()  # garbage collection finds them

    def _manifest(self, written: Sequence[RankVote]) -> tuple[Manifest, bytes]:
        """The manifest of what all ranks wrote, and its bytes. Raises CheckpointError unless that
        is all."""
        together, merge = merged(written), Merge()
        tree = written[0].tree
        for part in written[1:]:
            tree = merge.trees(tree, part.tree)
        self.differing = merge.differing
        alone = len(written) == 1  # then it is known what was planned, without a walk
        named = set(self._options.names if alone else tensor_names(tree))
        together.columns.require_cover(named)
        lost = sorted(set(together.columns.names) - named)
        if lost:
            raise CheckpointError(
                f"the states of the ranks do not fit together: {lost[0]!r} is a tensor on one rank "
                "and something else, or in a list of another length, on an earlier one, so it "
                "would be lost. Wrap what every rank has for itself in per_rank()."
            )
        manifest = Manifest(
            step=self._options.step,
            created_ms=max(0, time.time_ns() // 1_000_000),
            segments=tuple(together.segments),
            items=(),
            tree=tree,
            world=self._ranks.world,
            session=self._options.session,
            extra=self._options.extra,
        )
        text = self._tree_text.result() if self._tree_text is not None else None
        return manifest, manifest.encode(together.columns, text)

    def close(self) -> None:
        """After commit(), whatever became of it: the attempt is over."""
        self._stop_heartbeat()

    def abandon(self) -> None:
        """Remove what this rank has put; best effort, garbage collection finds the rest."""
        try:
            self._remove_own()
        finally:
            self._stop_heartbeat()

    def _remove_own(self) -> None:
        own, self._own = self._own, []
        for key in own:
            _remove_quietly(self._pool, key)

    def _stop_heartbeat(self) -> None:
        beating, self._heartbeat = self._heartbeat, None
        if beating is None:
            return
        if self._maybe_visible and not self._committed:  # the note protects what may yet be read
            self._steps.unclear.add(beating.nonce)
            beating.fade()
        else:
            beating.stop()


def _remove_quietly(pool: Pool, key: str) -> None:
    """Best effort; garbage collection finds what is left."""
    try:
        pool.delete(key)
    except (HpstoreError, OSError):
        return
