"""The committed steps of a Checkpointer: list, verify, protect and delete them."""

from __future__ import annotations

from collections.abc import Callable

from hpstore.checkpoint.catalog.retain_steps import decisions_now
from hpstore.checkpoint.catalog.retention import Retention, StepDecision
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.restore.tensor_stream import ByteProgress
from hpstore.checkpoint.restore.verify_step import VerifyReport, verify_step
from hpstore.runtime.clock import SystemClock


class Steps:
    """The committed steps of one run: `ckpt.steps`. `ckpt.steps()` is `ckpt.steps.list()`.

    Nothing here is collective. Beside a save of this process every call shows what it has
    committed, and what retention has deleted after that.
    """

    def __init__(
        self, catalog: StepCatalog, settled: Callable[[], None], retention: Retention
    ) -> None:
        self._catalog, self._settled, self._retention = catalog, settled, retention

    def __call__(self) -> list[int]:
        """Return the committed steps, ascending; the same as list()."""
        self._settled()
        return self._catalog.all()

    def latest(self) -> int | None:
        """Return the newest step whose manifest and segments can be read; None without one.

        Damaged steps are passed over; the log says why.
        """
        return self._catalog.latest_valid()

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of a step.

        Parameters
        ----------
        step
            A committed step.

        Returns
        -------
        Manifest
            What the step holds, where.

        Raises
        ------
        CheckpointError
            There is no such step.
        IntegrityError
            The manifest is damaged.
        """
        return self._catalog.manifest(step)

    def verify(self, step: int, *, progress: ByteProgress | None = None) -> VerifyReport:
        """Read every byte of a step and compare every item with its hash.

        Parameters
        ----------
        step
            A committed step.
        progress
            Called now and then with the bytes of items done and in all, by this thread.

        Returns
        -------
        VerifyReport
            `ok`, or the names of what is damaged.

        Raises
        ------
        CheckpointError
            There is no such step.
        IntegrityError
            The manifest is damaged.
        """
        return verify_step(self._catalog.pool, self.manifest(step), progress)

    def delete(self, step: int, *, force: bool = False) -> None:
        """Delete a step: its manifest first, then the segments that it alone names.

        Parameters
        ----------
        step
            A committed step.
        force
            Delete a protected step, too.

        Raises
        ------
        CheckpointError
            The step is protected, or there is none.
        """
        self._settled()
        self._catalog.delete(step, force=force)

    def retain(self, *, dry_run: bool = False) -> list[StepDecision]:
        """Apply the Checkpointer's keep_last, keep_every, keep_best and keep_for now.

        As after each save, without waiting for the next one: what has become too old since the
        last goes. While the newest step is not whole, all stay.

        Parameters
        ----------
        dry_run
            Only report: nothing is deleted.

        Returns
        -------
        list of StepDecision
            Of each committed step, ascending, whether it stays and why.

        Raises
        ------
        HpstoreError
            Steps cannot be listed now, or some could not be deleted: the rest of those that go are
            deleted, and a later call goes on.
        """
        self._settled()
        now_ms = SystemClock().wall_ms()
        decisions = decisions_now(self._catalog, self._retention, now_ms=now_ms)
        if not dry_run:
            self._catalog.delete_all([found.step for found in decisions if not found.stays])
        return decisions

    def protect(self, step: int, name: str) -> None:
        """Keep a step under a name, whatever retention decides. Durable on return.

        Parameters
        ----------
        step
            A committed step.
        name
            Not empty, without a slash. A name keeps one step: the one it kept before is as any
            other then.

        Raises
        ------
        CheckpointError
            There is no such step.
        ConfigError
            `name` cannot be used.
        """
        self._catalog.protect(step, name)

    def unprotect(self, name: str) -> None:
        """Let retention have a protected step again.

        Parameters
        ----------
        name
            As given to protect().

        Raises
        ------
        CheckpointError
            Nothing is protected by this name.
        """
        self._catalog.unprotect(name)

    def protected(self) -> dict[str, int]:
        """Return the protected steps by name."""
        return self._catalog.protected()

    def collect_garbage(self) -> int:
        """Remove segments that no manifest and no save under way names; return how many.

        A Checkpointer does so when it is made.
        """
        self._settled()
        return self._catalog.collect_garbage()

    def list(self) -> list[int]:
        """Return the committed steps, ascending. Whether they can be read is verify()'s to find."""
        return self()
