"""All fuzz targets by name."""

from __future__ import annotations

from tests.fuzz.checkpoint_targets import CHECKPOINT_TARGETS
from tests.fuzz.data_targets import DATA_TARGETS
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import POOL_TARGETS

TARGETS: dict[str, Target] = {
    target.name: target for target in (*POOL_TARGETS, *CHECKPOINT_TARGETS, *DATA_TARGETS)
}

__all__ = ["TARGETS"]
