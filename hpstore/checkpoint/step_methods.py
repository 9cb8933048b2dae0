"""What a Checkpointer does with the steps that are there: list, verify, keep, delete."""

from __future__ import annotations

from abc import abstractmethod

from hpstore.checkpoint.catalog.steps import Steps
from hpstore.checkpoint.checkpointer_options import VerifyReport
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.restore.read_items import check_items
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, counted
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing


class Keeping(Closing):
    """The committed steps of one run."""

    pool: Pool
    _steps: Steps

    @abstractmethod
    def _let_tidy(self) -> None:
        """Wait for what comes after a commit that is done, so that callers see its end."""

    def steps(self) -> list[int]:
        """Committed steps, ascending. Whether they can be read is verify()'s to say."""
        self._let_tidy()
        return self._steps.all()

    def manifest(self, step: int) -> Manifest:
        """A step's manifest. Raises CheckpointError when there is none, IntegrityError."""
        return self._steps.manifest(step)

    def latest_valid(self) -> int | None:
        """The newest step whose manifest and segments can be read; None when there is none.

        Walks back past damaged ones, and logs why each was passed over.
        """
        return self._steps.latest_valid()

    def verify(self, step: int, *, progress: ByteProgress | None = None) -> VerifyReport:
        """Read every byte of a step and compare every item with its hash.

        `progress(done, total)` is called now and then with bytes of items, by this thread.
        """
        manifest = self.manifest(step)
        seen = counted(progress, manifest.items) if progress is not None else None
        wrong = check_items(self.pool, manifest.segments, manifest.items, seen)
        return VerifyReport(
            step=step, items=len(manifest.items), bytes=manifest.total_bytes, damaged=tuple(wrong)
        )

    def delete(self, step: int, *, force: bool = False) -> None:
        """Delete a step: its manifest first, then what it alone names. Not a protected one."""
        self._let_tidy()
        self._steps.delete(step, force=force)

    def protect(self, step: int, name: str) -> None:
        """Keep a step under a name, whatever retention says. Durable on return."""
        self._steps.protect(step, name)

    def unprotect(self, name: str) -> None:
        """Let retention have a protected step again."""
        self._steps.unprotect(name)

    def protected(self) -> dict[str, int]:
        """Protected steps by name."""
        return self._steps.protected()

    def collect_garbage(self) -> int:
        """Remove segments that no manifest and no living save names; returns how many."""
        self._let_tidy()
        return self._steps.collect_garbage()


__all__ = ["Keeping"]
