"""Decisions of a process, written down: its log, its counters, the node's history."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hpstore.config import Settings, private_directory
from hpstore.errors import ConfigError
from hpstore.health.history import History
from hpstore.health.policy.states import Decision
from hpstore.objects.context import PoolContext

_log = logging.getLogger(__name__)


def history_path(settings: Settings, pool_id: str) -> Path:
    """Where this node's history of a pool is: never on a device of the pool."""
    return settings.run_path(pool_id) / "health.sqlite"


def write_down(store: PoolContext, decisions: Sequence[Decision]) -> None:
    """Log, count, and write into the node's history. What fails there is counted and logged."""
    for decision in decisions:
        device = store.view.devices.get(decision.device)
        where = decision.device[:8] if device is None else device.url
        store.metrics.count("health_decision_total")
        if decision.was is decision.becomes:
            _log.warning("device %s stays %s: %s", where, decision.was, decision.reason)
        else:
            _log.warning(
                "device %s: %s -> %s: %s",
                where,
                decision.was,
                decision.becomes,
                decision.reason,
            )
    path = history_path(store.settings, store.view.record.pool_id)
    try:
        private_directory(path.parent)
    except ConfigError as error:
        store.metrics.count("health_history_error_total")
        _log.warning("health history %s cannot be made: %s", path, error)
        return
    history = History(path, store.metrics)  # opened for this alone: no fork finds it open
    history.add_decisions(decisions)
    history.close()
