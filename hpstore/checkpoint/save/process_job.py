"""A save that a writer process makes, of one rank or of several (docs/decisions/0120, 0123)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.items import Item
from hpstore.checkpoint.format.pack import Key, Known, Segment
from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks, require_alike
from hpstore.checkpoint.save.arena import Arena
from hpstore.checkpoint.save.job_options import Earlier, JobOptions
from hpstore.checkpoint.save.save_handle import SaveReport
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.checkpoint.save.writer_client import KnownByWriter, WriterClient, WriterGone
from hpstore.checkpoint.save.writer_group import WriterGroup
from hpstore.checkpoint.save.writer_process import (
    BeginSave,
    GiveUp,
    PartWritten,
    SaveBegun,
    SaveCommitted,
)
from hpstore.codec.galois import Bytes
from hpstore.errors import CheckpointError, HpstoreError


class ProcessJob:
    """A SaveJob that a writer process makes: begin(), write() for each slice, commit().

    With a `group` begin() and commit() are calls of all ranks, and end alike on all of them.
    """

    def __init__(
        self,
        writer: WriterClient,
        steps: StepCatalog,
        options: JobOptions,
        earlier: Earlier,
        *,
        reuse: bool,
        group: WriterGroup | None = None,
    ) -> None:
        self._group = group
        self._writer, self._steps, self._options = writer, steps, options
        self._earlier, self._reuse = earlier, reuse
        self._error: BaseException | None = None
        self._nonce = ""
        self.begun = False
        self.next_known: Mapping[Key, Known] = KnownByWriter()
        self.replaced: set[str] = set()
        self.differing: Sequence[str] = ()

    @property
    def noted(self) -> bool:
        """Whether begin() has succeeded."""
        return bool(self._nonce)

    def begin(self, *, fence: bool) -> None:
        """As SaveJob.begin()."""
        self.begun, self._writer.handed_over = True, False
        try:
            try:
                self._nonce = self._begin(fence=fence)
            except WriterGone:  # as it was idle, mostly: nothing of this save was written yet
                self._nonce = self._begin(fence=fence)
        except WriterGone as error:
            raise self._placed(error) from error

    def _begin(self, *, fence: bool) -> str:
        """Once. Raises WriterGone where a writer of any rank has ended."""
        if self._group is None:
            with self._writer.in_step():
                self._writer.ready()
                return self._ask_to_begin(fence=fence)
        self._group.gather()
        nonce = ""
        problem: BaseException | None = None
        try:
            with self._writer.in_step():
                nonce = self._ask_to_begin(fence=fence)
        except BaseException as error:  # noqa: BLE001 (raised by agree, on all ranks)
            problem = error
        self._group.agree(problem)
        return nonce

    def _ask_to_begin(self, *, fence: bool) -> str:
        remembered = isinstance(self._earlier.known, KnownByWriter)
        self._writer.tell(
            BeginSave(
                options=replace(self._options, progress=None),
                progress=self._options.progress is not None,
                fence=fence,
                reuse=self._reuse,
                earlier=None if remembered else self._earlier,
                earlier_step=self._earlier.step,
            )
        )
        return self._writer.hear(SaveBegun).nonce

    def write(self, memory: Bytes, items: Sequence[Item], *, part: int) -> Segment | None:
        """As SaveJob.write(), of what begins the arena."""
        if self._error is not None:
            return None
        last = part == self._options.slices - 1
        try:
            with self._writer.in_step():
                if len(memory):
                    self._writer.share_memory()
                self._writer.tell_part(part, len(memory), items, last=last)
                if not items:
                    return None
                return self._writer.hear(PartWritten, self._options.progress).segment
        except HpstoreError as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Vote against the commit because of `error`."""
        self._error = self._error or error

    def commit(self) -> SaveReport:
        """As SaveJob.commit()."""
        if self._group is None:
            return self._commit()
        report: SaveReport | None = None
        problem: BaseException | None = None
        try:
            report = self._commit()
        except BaseException as error:  # noqa: BLE001 (raised by outcome, on all ranks)
            problem = error
        return self._group.outcome(report, problem)

    def _commit(self) -> SaveReport:
        if isinstance(self._error, WriterGone):
            raise self._unknown(self._error)
        if self._error is not None:
            self._give_up(self._error)
            if isinstance(self._error, HpstoreError):
                raise self._placed(self._error) from self._error
            raise self._error
        try:
            with self._writer.in_step():
                if not self._writer.handed_over:  # a state without tensors
                    self._writer.tell_part(0, 0, (), last=True)
                done = self._writer.hear(SaveCommitted, self._options.progress)
        except WriterGone as error:
            raise self._unknown(error) from error
        self.replaced, self.differing = done.replaced, done.differing
        return done.report

    def _give_up(self, why: BaseException) -> None:
        """Let the writer remove what it has written."""
        try:
            with self._writer.in_step():
                self._writer.tell(GiveUp(why=f"{type(why).__name__}: {why}"))
                self._writer.hear(SaveCommitted)
        except WriterGone:
            self._steps.unclear.add(self._nonce)
        except HpstoreError:  # what it says of giving up
            return

    def _unknown(self, error: WriterGone) -> HpstoreError:
        """The writer has ended: what it wrote is judged by what is there."""
        self._steps.unclear.add(self._nonce)
        return self._placed(error, maybe_visible=self._writer.handed_over)

    def _placed(self, error: HpstoreError, *, maybe_visible: bool = False) -> HpstoreError:
        return self._steps.unsaved(error, self._options.step, maybe_visible=maybe_visible)

    def cause_of(self, error: BaseException) -> BaseException:
        """As SaveJob.cause_of()."""
        return error

    @property
    def why_not_repeatable(self) -> str:
        """As that of SaveJob."""
        return "a writer process makes one attempt"

    def close(self) -> None:
        """After commit(): the writer has ended the attempt."""
        self._writer.handed_over = False


AnyJob = SaveJob | ProcessJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How the saves of a checkpointer are made: by this process, or by its `writer`."""

    catalog: StepCatalog
    ranks: Ranks
    writer: WriterClient | None = None
    group: WriterGroup | None = None  # the writers of several ranks

    @classmethod
    def of(cls, catalog: StepCatalog, ranks: Ranks, arena: Arena, background: str) -> Writing:
        """Of these ranks: a call of all of them, which raises on all."""
        require_alike(ranks, "background", background, "their saves would wait for each other")
        if background == "thread" or catalog.pool.read_only:
            return cls(catalog=catalog, ranks=ranks)
        writer: WriterClient | None = None
        problem = ""
        try:
            writer = WriterClient(catalog, arena)
        except HpstoreError as error:
            if ranks.world == 1:
                raise
            problem = str(error)
        heard = ranks.all_gather(problem.encode(), RankChannel.TRAINER)
        failed = [f"rank {n}: {text.decode()}" for n, text in enumerate(heard) if text]
        if writer is None or failed:
            if writer is not None:
                writer.close()
            raise CheckpointError("; ".join(failed))
        group = WriterGroup(writer, ranks) if ranks.world > 1 else None
        return cls(catalog=catalog, ranks=ranks, writer=writer, group=group)

    def job(self, options: JobOptions, earlier: Earlier, *, reuse: bool) -> AnyJob:
        """A save."""
        if self.writer is None:
            return SaveJob(self.catalog, self.ranks, options, earlier)
        return ProcessJob(
            self.writer, self.catalog, options, earlier, reuse=reuse, group=self.group
        )

    def close(self) -> None:
        """Let the writer end. No save is under way. Idempotent."""
        if self.writer is not None:
            self.writer.close()
