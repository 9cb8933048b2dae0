"""What to say where the bytes of a step are gone: mostly the step was removed while it was read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import Manifest
from hpstore.errors import (
    CheckpointError,
    HpstoreError,
    IntegrityError,
    ObjectNotFound,
    RedundancyError,
)


@contextmanager
def reading_step(catalog: StepCatalog, manifest: Manifest) -> Iterator[None]:
    """Read a step by this manifest. If retention in another process removes the step meanwhile
    (PROTOCOL 19), raise a CheckpointError that says so."""
    try:
        yield
    except (ObjectNotFound, IntegrityError, RedundancyError) as error:
        known = _steps_without(catalog, manifest)
        if known is None:
            raise
        raise CheckpointError(
            f"step {manifest.step} under {catalog.prefix!r} was removed or saved again while it "
            f"was read. Other steps are untouched; the newest are {known[-8:]}"
        ) from error


def _steps_without(catalog: StepCatalog, manifest: Manifest) -> list[int] | None:
    """The steps that are there now; None where the one that was read is among them, or where that
    is unclear."""
    try:
        known = catalog.all()
        if manifest.step not in known:
            return known
        same = catalog.facts(manifest.step).segment_keys == manifest.segment_keys
    except (HpstoreError, OSError):
        return None
    return None if same else known
