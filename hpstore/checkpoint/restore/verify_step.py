"""Read every byte of a step and compare every item with its hash."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.checkpoint.restore.read_items import check_items
from hpstore.checkpoint.restore.tensor_stream import ByteProgress, counted
from hpstore.pool.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of verifying one step."""

    step: int
    items: int
    bytes: int
    damaged: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every item has the bytes that were saved."""
        return not self.damaged

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok}


def verify_step(pool: Pool, manifest: Manifest, progress: ByteProgress | None) -> VerifyReport:
    """Verify the step of `manifest`. `progress` gets bytes of items done and in all."""
    seen = counted(progress, manifest.items) if progress is not None else None
    wrong = check_items(pool, manifest.segments, manifest.items, seen)
    return VerifyReport(
        step=manifest.step,
        items=len(manifest.items),
        bytes=manifest.total_bytes,
        damaged=tuple(wrong),
    )
