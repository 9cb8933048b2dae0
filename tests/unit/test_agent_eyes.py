"""What an agent sees of the objects while a walk over them takes long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpstore.agent.background_call import CallSlot
from hpstore.maintenance.survey_condition import Condition
from tests.unit.tended import Tended


class Slow(CallSlot[Condition]):
    """Its calls end at the tenth look."""

    def __init__(self) -> None:
        super().__init__("walk", threads=False)
        self.looks = 0

    def start(self, call: Callable[[], Condition]) -> None:
        self.looks = 0
        super().start(call)

    def take(self) -> object:  # type: ignore[override]  # of any slot
        self.looks += 1
        return super().take() if self.looks > 10 else None


def test_a_walk_that_takes_longer_than_the_pause_is_seen_all_the_same(tmp_path: Path) -> None:
    """Kill loop: a young object that is short is looked at for seconds, more than there are between
    two walks there; a pool of many objects is walked over for minutes. The next walk began as the
    last one ended, so the agent never knew of what there was to mend."""
    tended = Tended(tmp_path)
    tended.rounds(2)
    eyes, seconds = tended.agent.eyes, tended.agent.config.survey_seconds
    eyes._inline, eyes._walk = False, Slow()
    now, known = tended.pool.admin.clock.monotonic() + 2 * seconds, []
    for _ in range(60):
        now += seconds / 4
        eyes._look_at_objects(now)
        known.append(eyes.condition() is not None)
    assert 12 <= sum(known) <= 24  # four rounds of a quarter each, after ten
    tended.stop()
