"""One save of one rank: its note, its segments from the staged arena, its commit (PROTOCOL 18)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpstore import errors
from hpstore.checkpoint.catalog.run_index import take_over
from hpstore.checkpoint.catalog.segment_safety import is_there
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import compact, segment_key
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Key, Known, Packed, Segment, digests_of, pack
from hpstore.checkpoint.format.segment_plan import SMALL_ITEM_BYTES
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.save.commit import StepCommit
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.save.save_traces import SaveTraces
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, HpstoreError
from hpstore.runtime.threads import WorkerThreads


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
        self._traces = SaveTraces(steps, options)
        self._commit = StepCommit(steps, ranks, options, self._traces)
        self._written = self._commit.written
        self.begun = False  # begin() was called
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
            self._traces.nonce = secrets.token_hex(8)
            return
        mine = sorted({k.segment.key for k in self._known.values()})
        heard = self._ranks.all_gather(json.dumps(mine).encode(), RankChannel.SAVER)
        message = b""
        if self._ranks.leads:
            try:
                references = sorted({str(key) for keys in heard for key in json.loads(keys)})
                message = json.dumps(self._note_attempt(references, fence=fence)).encode()
            except BaseException as error:
                self._commit.cause = error
                self._traces.end_note()  # first: a peer that is dead makes the broadcast raise
                told = {"error": str(error), "kind": type(error).__name__}
                self._ranks.broadcast(json.dumps(told).encode(), RankChannel.SAVER)
                if isinstance(error, HpstoreError):
                    raise self._commit.placed(error) from error
                raise
        told = json.loads(self._ranks.broadcast(message, RankChannel.SAVER))
        if "error" in told:  # of the same class: ranks decide alike what a failure means
            kind = getattr(errors, told["kind"], CheckpointError)
            raise self._commit.placed(kind(f"rank 0 could not begin the save: {told['error']}"))
        self._traces.nonce = str(told["nonce"])
        gone = set(told["gone"])
        self._known = {n: k for n, k in self._known.items() if k.segment.key not in gone}

    def _note_attempt(self, references: Sequence[str], *, fence: bool) -> dict[str, Any]:
        """Put the fence and the note. From then on nobody removes `references`; those that cannot
        be read any more are returned with the nonce. A save within its manifest needs no note."""
        if fence:
            take_over(self._steps, self._options.session)
        if self._options.within:
            return {"nonce": secrets.token_hex(8), "gone": []}
        nonce = self._traces.note(references)
        there = self._referable(references)
        gone = [key for key in references if key not in there]
        return {"nonce": nonce, "gone": gone}

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
        if self._traces.maybe_visible:
            return "its manifest may be there all the same"
        if self._options.slices > 1 or (self._began_to_pack and self._packed is None):
            return "the staging memory does not hold all of it any more"
        return ""

    def cause_of(self, error: BaseException) -> BaseException | None:
        """What this rank met itself of what commit() or begin() has raised; None where other ranks
        alone failed."""
        return error if self._ranks.world == 1 else self._commit.error or self._commit.cause

    def again(self) -> SaveJob:
        """The same save once more, of the same staged bytes, under a nonce of its own."""
        other = SaveJob(self._steps, self._ranks, self._options, self._refers_to)
        other._packed = self._packed
        return other

    @property
    def nonce(self) -> str:
        """Of the attempt; "" before begin() has succeeded."""
        return self._traces.nonce

    @property
    def noted(self) -> bool:
        """Whether begin() has succeeded."""
        return bool(self.nonce)

    def write(self, memory: Bytes, items: Sequence[Item], *, part: int) -> Segment | None:
        """Put what is staged in `memory` as one segment; None when nothing had to be written.

        What goes wrong is kept for the vote: commit() raises it.
        """
        if self._commit.error is not None:
            return None
        try:
            return self._write(memory, items, part)
        except BaseException as error:  # noqa: BLE001 (raised by commit, on all ranks)
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Vote against the commit because of `error`."""
        self._commit.fail(error)

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
            self._traces.segments.append(key)
            with WorkerThreads(1, "hpstore-hash") as hashing:
                hashes = hashing.submit(digests_of, memory, packed.items)
                if self._commit.tree_text is None and self._ranks.world == 1:
                    # beside the writes: 10,000 tensors are 10 ms of JSON
                    self._commit.tree_text = hashing.submit(compact, self._options.tree)
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
            self._commit.last_put = segment, info
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
        report = self._commit.make()
        self.replaced, self.differing = self._commit.replaced, self._commit.differing
        return report

    def close(self) -> None:
        """After commit(), whatever became of it: the attempt is over."""
        self._traces.end_note()
