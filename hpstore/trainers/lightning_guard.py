"""What Lightning asks for callbacks of other packages; it imports nothing that is not there."""

from __future__ import annotations

import sys


def callbacks() -> list[object]:
    """For a Trainer that is being made: a RequireUsedIO where PoolCheckpointIO is in use here."""
    plugin = sys.modules.get("hpstore.trainers.lightning")
    return [] if plugin is None else [plugin.RequireUsedIO()]
