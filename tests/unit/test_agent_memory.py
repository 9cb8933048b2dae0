"""What an agent remembers: without its file, and where that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.agent.operator_requests import give_order, read_orders, settle_orders
from hpstore.agent.saved_state import MEMORY_FILE, AgentState, save_memory
from hpstore.health import HealthState
from hpstore.health.policy.operator_commands import Command
from hpstore.testing.memory_pool import FakeClock
from tests.unit.tended import Tended

S = HealthState


class FullDisk:
    """A state directory in which no memory can be written, while it is `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False

        def save(directory: Path, memory: AgentState) -> None:
            if self.full:
                raise OSError(28, "No space left on device", str(directory))
            save_memory(directory, memory)

        monkeypatch.setattr("hpstore.agent.loop.save_memory", save)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def events(tended: Tended) -> str:
    return "\n".join(event.text for event in tended.agent.jobs.events())


def test_orders_that_were_obeyed_are_not_obeyed_again_without_the_memory(tended: Tended) -> None:
    """Its own error says to move a damaged agent.json away: up to 256 old orders, such as a readmit
    of a disk that was since evicted, were obeyed again."""
    tended.rounds(10)
    directory = tended.pool.admin.state_directory
    give_order(directory, Command.SIT_OUT, tended.device(0), tended.clock)
    tended.rounds(10)
    give_order(directory, Command.READMIT, tended.device(0), tended.clock)
    give_order(directory, Command.SIT_OUT, tended.device(1), tended.clock)
    tended.rounds(10)
    assert tended.states() == {1: S.SITOUT}
    tended.stop()
    (directory / MEMORY_FILE).unlink()
    tended.start()
    tended.rounds(10)
    assert tended.states() == {}
    given = give_order(directory, Command.SIT_OUT, tended.device(2), tended.clock)
    assert given.number == 4
    tended.rounds(10)
    assert tended.states() == {2: S.SITOUT}


def test_an_order_from_before_the_first_agent_is_obeyed(tended: Tended) -> None:
    """ "No agent runs here now, the next one obeys": also the first one."""
    directory = tended.pool.admin.state_directory
    assert not (directory / MEMORY_FILE).exists()
    give_order(directory, Command.SIT_OUT, tended.device(4), tended.clock)
    tended.rounds(10)
    assert tended.states() == {4: S.SITOUT}
    assert read_orders(directory) == []


def test_numbers_go_on_where_all_orders_have_left_the_file(tmp_path: Path) -> None:
    """A number that was given once is never given again."""
    clock = FakeClock()
    for _ in range(3):
        give_order(tmp_path, Command.IGNORE, "d", clock)
    settle_orders(tmp_path, 2, clock)
    assert [order.number for order in read_orders(tmp_path)] == [3]
    settle_orders(tmp_path, 3, clock)
    assert read_orders(tmp_path) == []
    assert give_order(tmp_path, Command.IGNORE, "d", clock).number == 4


def test_healing_goes_on_where_the_memory_cannot_be_written_rule_17(
    tended: Tended, disk: FullDisk
) -> None:
    """Every round ended with the first error of the file, and no disk that died was made up for.
    It is told once, and in the status while it lasts."""
    tended.rounds(10)
    disk.full = True
    tended.harness.lose(["memory://d3"])
    tended.rounds(1000, step=20)
    assert 3 not in tended.members()
    assert tended.whole()
    assert events(tended).count("cannot write its memory") == 1
    assert tended.status is not None
    assert any("cannot write its memory" in text for text in tended.status.warnings)
    disk.full = False
    tended.rounds(10)
    assert not any("cannot write its memory" in text for text in tended.status.warnings)


def test_nothing_is_removed_by_choice_that_could_not_be_remembered(
    tended: Tended, disk: FullDisk
) -> None:
    """The guards count removals over restarts. An order waits, and is obeyed once there is room."""
    tended.rounds(10)
    disk.full = True
    directory = tended.pool.admin.state_directory
    give_order(directory, Command.DRAIN, tended.device(5), tended.clock)
    tended.rounds(60)
    assert tended.states() == {}
    assert tended.agent.memory.orders_done == 0
    assert [order.number for order in read_orders(directory)] == [1]
    disk.full = False
    tended.rounds(60)
    assert tended.agent.memory.orders_done == 1
    assert 5 not in tended.members()
    assert tended.whole()
