"""What an agent of this node has left lately about devices: for commands that may not write.

A file in the run directory. It is believed where no other user could have put it there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpstore.config import is_believable
from hpstore.runtime.text_files import read_text_file

STATUS_FILE = "agent-status.json"
STALE_SECONDS = 60.0  # without a new one no agent runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedDevice:
    """One device, as an agent's last probe (write, sync, read back) has found it."""

    answers: bool
    read_only: bool
    problem: str
    agent: int  # its process
    age_seconds: float

    @property
    def source(self) -> str:
        """For people: who knows it, and since when."""
        return f"agent {self.agent}, {self.age_seconds:.0f} s ago"


def read_status(directory: Path, now_ms: int) -> dict[str, object] | None:
    """What an agent of this node has left lately, as JSON; None when no agent runs."""
    try:
        if not is_believable(directory):
            return None
        found = json.loads(read_text_file(directory / STATUS_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("at_ms"), int):
        return None
    return found if abs(now_ms - found["at_ms"]) <= STALE_SECONDS * 1000 else None


def observed_devices(directory: Path, now_ms: int) -> dict[str, ObservedDevice]:
    """Devices by id, as an agent of this node sees them; none where no agent runs."""
    found = read_status(directory, now_ms) or {}
    rows, agent, at_ms = found.get("devices"), found.get("process"), found.get("at_ms")
    if not isinstance(rows, list) or not isinstance(agent, int) or not isinstance(at_ms, int):
        return {}
    age = max(0.0, (now_ms - at_ms) / 1000)
    return {
        str(row.get("device")): ObservedDevice(
            answers=row.get("present") is True,
            read_only=row.get("read_only") is True,
            problem=str(row.get("problem") or ""),
            agent=agent,
            age_seconds=age,
        )
        for row in rows
        if isinstance(row, Mapping)
    }
