"""Which steps the words of a checkpoint command mean. torch is imported when one is looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hpstore
from hpstore.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog


def steps_of(pool: hpstore.Pool, prefix: str) -> StepCatalog:
    """The steps under a prefix as it is typed, a slash at its end too; where there are none, those
    that a trainer has saved there by name. Raises ConfigError."""
    from hpstore.checkpoint.catalog.not_found_hint import SAVES, nothing_under
    from hpstore.checkpoint.catalog.step_catalog import StepCatalog

    wanted = prefix.strip("/")
    if not wanted:
        raise ConfigError(nothing_under(pool, prefix))
    found = StepCatalog(pool, wanted)
    saves = StepCatalog(pool, f"{wanted}/{SAVES}")
    return saves if not found.all() and saves.all() else found


def resolved(steps: StepCatalog, step: str) -> int:
    """A step by its number, or "latest": the newest valid. Raises ConfigError, CheckpointError."""
    if step != "latest":
        if not step.isdecimal():
            raise ConfigError(f"{step!r} is not a step: give a whole number, or latest")
        return int(step)
    from hpstore.checkpoint.catalog.not_found_hint import nothing_under

    found = steps.latest_valid()
    if found is None:
        there = len(steps.all())
        raise CheckpointError(
            f"none of the {there} checkpoints under {steps.prefix!r} can be read now; "
            "`hpstore checkpoint verify --all` says why"
            if there
            else nothing_under(steps.pool, steps.prefix)
        )
    return found
