"""What a save leaves in the pool before its manifest is there: its note and its segments."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from hpstore.checkpoint.catalog.dead_saves import taken_for_dead
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import Heartbeat
from hpstore.checkpoint.format.checkpoint_manifest import manifest_key
from hpstore.checkpoint.save.job_options import JobOptions
from hpstore.errors import CheckpointError, HpstoreError


class SaveTraces:
    """Of one rank; the note is rank 0's. What no manifest can name is removed at the end."""

    def __init__(self, steps: StepCatalog, options: JobOptions) -> None:
        self._steps, self._options = steps, options
        self.nonce = ""  # of the attempt, once it has begun
        self.segments: list[str] = []  # keys of those that this rank has put
        self.maybe_visible = False  # the manifest's put has begun
        self.committed = False
        self._heartbeat: Heartbeat | None = None

    def note(self, references: Sequence[str]) -> str:
        """Put the note of this save, durably; the nonce of the attempt. From then on no process
        removes `references`."""
        self._heartbeat = Heartbeat(
            self._steps.pool,
            self._steps.prefix,
            self._options.step,
            secrets.token_hex(8),
            self._options.session,
            references,
            manifest=manifest_key(self._steps.prefix, self._options.step),
            replaces=self._options.overwrite,
        )
        return self._heartbeat.nonce

    @property
    def noted(self) -> bool:
        """Whether a note of this save is renewed now."""
        return self._heartbeat is not None

    def require_noted(self) -> None:
        """PROTOCOL 18: under the claim of the manifest's put. Who takes this save for dead removes
        its note before it takes that claim. Raises CheckpointError."""
        try:
            gone = self._heartbeat is None or self._heartbeat.removed()
        except (HpstoreError, OSError) as error:
            raise CheckpointError(f"the note of this save cannot be looked at: {error}") from error
        if gone:
            raise taken_for_dead()

    def abandon(self) -> None:
        """Remove what this rank has put; best effort, garbage collection finds the rest."""
        try:
            self.remove_segments()
        finally:
            self.end_note()

    def remove_segments(self) -> None:
        """Best effort; garbage collection finds what is left."""
        own, self.segments = self.segments, []
        for key in own:
            try:
                self._steps.pool.delete(key)
            except (HpstoreError, OSError):
                continue

    def end_note(self) -> None:
        """The attempt is over, whatever became of it."""
        beating, self._heartbeat = self._heartbeat, None
        if beating is None:
            return
        if self.maybe_visible and not self.committed:  # the note protects what may yet be read
            self._steps.unclear.add(beating.nonce)
            beating.fade()
        else:
            beating.stop()
