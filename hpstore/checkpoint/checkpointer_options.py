"""What a Checkpointer is told, checked before anything is made; what verify() answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.errors import ConfigError
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


def checked_options(pool: object, save: SaveOptions | None) -> SaveOptions:
    """`save`, by default the defaults. Raises ConfigError unless both are what they must be."""
    if not isinstance(pool, Pool):
        raise ConfigError(
            f"a Checkpointer takes an open pool, not a {type(pool).__name__}: hpstore.open(...)"
        )
    if save is not None and not isinstance(save, SaveOptions):
        raise ConfigError(f"save= takes SaveOptions(...), not a {type(save).__name__}")
    return save or SaveOptions()


__all__ = ["VerifyReport", "checked_options"]
