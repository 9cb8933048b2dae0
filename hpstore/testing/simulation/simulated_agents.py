"""What an agent has instead of a database: SQLite's connections belong to one thread, and a process
of a simulation runs on any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpstore.agent import loop
from hpstore.health.policy.states import Decision


class ListedHistory:
    """Decisions of one agent, in memory."""

    def __init__(self, path: Path, *_: object, **__: object) -> None:
        self.path, self._decisions = path, list[Decision]()

    def add_decisions(self, decisions: Sequence[Decision]) -> None:
        """Remember some."""
        self._decisions += decisions

    def decisions(self, count: int) -> list[Decision]:
        """The newest ones."""
        return self._decisions[-count:]

    def close(self) -> None:
        """Nothing is open."""


def exchanged() -> list[tuple[Any, str, object]]:
    """What is exchanged in hpstore.agent."""
    return [(loop, "History", ListedHistory)]
