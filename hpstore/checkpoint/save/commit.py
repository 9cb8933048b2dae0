"""The commit of a save: the ranks vote, then rank 0 puts the manifest (PROTOCOL 18-20)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from hpstore import errors
from hpstore.checkpoint.catalog.fence_record import FenceRecord, fence_key
from hpstore.checkpoint.catalog.run_index import put_manifest
from hpstore.checkpoint.catalog.segment_safety import existing_version, require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog, already_committed
from hpstore.checkpoint.catalog.writer_fence import require_fence
from hpstore.checkpoint.format.checkpoint_manifest import Manifest, manifest_key
from hpstore.checkpoint.format.pack import Segment
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.save.job_options import JobOptions
from hpstore.checkpoint.save.rank_vote import RankVote, merged
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.save.save_traces import SaveTraces
from hpstore.checkpoint.state.merge_trees import Merge
from hpstore.checkpoint.state.state_tree import tensor_names
from hpstore.errors import CheckpointError, HpstoreError, TooFewDevices, VersionConflict
from hpstore.objects.object_info import ObjectInfo


class StepCommit:
    """Of what one rank has `written`. SaveJob says when, and fills in what it knows.

    A crash before the manifest's put leaves the previous step current, a crash after it this one,
    never a mixture.
    """

    def __init__(
        self, steps: StepCatalog, ranks: Ranks, options: JobOptions, traces: SaveTraces
    ) -> None:
        self._steps, self._ranks, self._options, self._traces = steps, ranks, options, traces
        self._pool, self._prefix = steps.pool, steps.prefix
        self.written = RankVote(tree=options.tree, tolerated=self._pool.parity)
        self.last_put: tuple[Segment, ObjectInfo] | None = None  # and what its put said
        self.tree_text: Future[str] | None = None  # of options.tree, made beside the writes
        self.error: BaseException | None = None  # why this rank votes against it
        self.cause: BaseException | None = None  # what rank 0 met when it noted or published
        self.replaced: set[str] = set()  # segments of the step that this one has overwritten
        self.differing: list[str] = []  # values in which ranks differ; rank 0's is recorded

    def fail(self, error: BaseException) -> None:
        """Vote against it because of `error`."""
        self.error = self.error or error

    def make(self) -> SaveReport:
        """Vote; rank 0 publishes the manifest when everything that was planned is there.

        Raises what went wrong, on all ranks when any of them failed or died (PROTOCOL 20), with
        the step that is still good.
        """
        try:
            return self._make()
        except VersionConflict:
            raise  # nothing is wrong with the step that is there
        except HpstoreError as error:
            raise self.placed(error) from error

    def placed(self, error: HpstoreError) -> HpstoreError:
        """The same error, saying what became of the step and which one is good."""
        maybe_visible = self._traces.maybe_visible
        return self._steps.unsaved(error, self._options.step, maybe_visible=maybe_visible)

    def _make(self) -> SaveReport:
        if self.error is None:
            try:
                self._require_safe()
            except BaseException as error:  # noqa: BLE001 (raised below, on all ranks)
                self.fail(error)
        if self._ranks.world > 1:
            return self._vote()
        if self.error is not None:
            self._traces.abandon()
            raise self.error
        return self._publish([self.written])

    def _vote(self) -> SaveReport:
        """What was put is removed only when it is certain that no manifest names it."""
        if self.error is not None:
            self.written.error = f"{type(self.error).__name__}: {self.error}"
        try:
            mine = self.written.encode(with_bytes=not self._ranks.leads)
            votes = self._ranks.all_gather(mine, RankChannel.SAVER)
        except CheckpointError:
            if self._ranks.leads:
                self._traces.abandon()
            self._traces.maybe_visible = not self._ranks.leads  # rank 0 alone publishes
            raise
        outcome = self._decide(votes) if self._ranks.leads else {}
        self._traces.maybe_visible = True
        told = json.loads(self._ranks.broadcast(json.dumps(outcome).encode(), RankChannel.SAVER))
        if "error" in told:
            self._traces.maybe_visible = told["visible"]
            if not told["visible"]:
                self._traces.remove_segments()
            kind = getattr(errors, told["kind"], CheckpointError)
            raise kind(told["error"]) from self.error
        return SaveReport(
            **{**told["report"], "durable_seconds": time.perf_counter() - self._options.began}
        )

    def _decide(self, votes: Sequence[bytes]) -> dict[str, Any]:
        """Rank 0: publish, or say why not."""
        try:
            written = [
                RankVote.decode(vote, within=self.written.within if rank == 0 else None)
                for rank, vote in enumerate(votes)
            ]
            failed = [f"rank {n}: {w.error}" for n, w in enumerate(written) if w.error]
            if failed:
                self._traces.end_note()
                kind = CheckpointError.__name__
                return {"error": "; ".join(failed), "kind": kind, "visible": False}
            return {"report": self._publish(written).as_dict()}
        except BaseException as error:  # noqa: BLE001 (told to all ranks, which raise it)
            self.cause = error
            self._traces.end_note()
            kind = type(error).__name__
            return {"error": str(error), "kind": kind, "visible": self._traces.maybe_visible}

    def _require_safe(self) -> None:
        """PROTOCOL 19: every segment, the referenced ones too, must survive one more loss."""
        last, put = self.last_put if self.last_put is not None else (None, None)
        for segment in self.written.segments:  # of those put before devices may have gone since
            if not segment.key:
                continue
            info = put if segment == last else None
            tolerated = require_safe(self._pool, segment.key, version=segment.version, info=info)
            self.written.tolerated = min(self.written.tolerated, tolerated)

    def _publish(self, written: Sequence[RankVote]) -> SaveReport:
        """Publish the manifest: that put is the commit."""
        key = manifest_key(self._prefix, self._options.step)
        with ExitStack() as undo:  # nothing names yet what was put
            undo.callback(self._traces.abandon)
            if not self._options.within:
                require_fence(self._pool, self._prefix, self._options.session)
            manifest, data = self._manifest(written)
            before, replaced = self._standing(key) if self._options.overwrite else (None, set())
            if before is not None and not self._traces.noted:
                self._traces.note([])  # who takes the fence must know that a step may be replaced
            undo.pop_all()
        # from here on the manifest may become visible even if its put fails
        self._traces.maybe_visible = True
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
            self._traces.maybe_visible = error.maybe_visible  # else superseded, if ever it was seen
            if error.key == fence_key(self._prefix):
                if not error.maybe_visible:
                    self._traces.abandon()
                raise
            self._require_mine()  # else that is why
            raise already_committed(self._prefix, self._options.step, key) from error
        except (TooFewDevices, CheckpointError) as error:
            if not error.maybe_visible:  # a full pool: nothing of the manifest is there
                self._traces.maybe_visible = False
                self._traces.abandon()
            raise
        self._traces.committed = True
        self._steps.note_facts(manifest, info.version)
        self.replaced = replaced
        spare = min(info.spare_columns, *(w.tolerated for w in written))
        return SaveReport(
            step=self._options.step,
            key=key,
            bytes=sum(
                s.size
                for w in written
                for s in w.segments
                if not s.key or self._traces.nonce in s.key
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
        if self._traces.noted or not self._options.within:
            self._traces.require_noted()
        return found

    def _standing(self, key: str) -> tuple[str | None, set[str]]:
        """The version of the manifest that this save replaces, and the segments that it names."""
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
        text = self.tree_text.result() if self.tree_text is not None else None
        return manifest, manifest.encode(together.columns, text)
