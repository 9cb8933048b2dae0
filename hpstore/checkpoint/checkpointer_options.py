"""What a Checkpointer is told, checked before anything is made; what verify() answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpstore.errors import CheckpointError
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


def require_options(pool: object, *, commit_seconds: float, drain_seconds: float) -> None:
    """Raise CheckpointError for what is no pool, or no time."""
    if not isinstance(pool, Pool):
        raise CheckpointError(
            f"a Checkpointer takes an open pool, not a {type(pool).__name__}: hpstore.open(...)"
        )
    for name, value in (("commit_seconds", commit_seconds), ("drain_seconds", drain_seconds)):
        if not value >= 0:
            raise CheckpointError(f"{name} must be a number of seconds, not {value!r}")


__all__ = ["VerifyReport", "require_options"]
