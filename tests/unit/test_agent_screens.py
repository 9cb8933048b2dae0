"""What an agent's status, the pool's and reports count and show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpstore.agent import AgentConfig
from hpstore.agent.background_jobs import BackgroundJob, JobKind
from hpstore.agreement.registers import WAITING
from hpstore.format.records import DeviceState, shown_members
from tests.unit.tended import Tended


def test_a_scrub_by_another_process_is_the_last_scrub(tmp_path: Path) -> None:
    """The page showed the agent's own alone, and it scrubbed again the next day."""
    tended = Tended(tmp_path, config=AgentConfig(scrub_days=7.0, smart_hours=0.0))
    tended.rounds(10)
    own = tended.agent.memory.scrub_ended_ms
    assert own
    tended.rounds(6 * 86_400, step=86_400)
    with tended.harness.open() as operator:
        operator.scrub()
        ended = operator.admin.clock.wall_ms()
    tended.rounds(120, step=60)
    assert tended.status is not None
    assert own < tended.status.scrub_ended_ms <= ended
    tended.rounds(3 * 86_400, step=86_400)  # nine days after its own
    assert tended.agent.memory.scrub_ended_ms <= ended
    tended.rounds(5 * 86_400, step=86_400)
    assert tended.agent.memory.scrub_ended_ms > ended
    tended.stop()


def test_a_rebuild_of_the_agent_gives_way_to_an_operator(tended: Tended) -> None:
    """It held the pool to its end, for hours; scrubs and rebalances gave way already."""
    tended.rounds(10)
    tended.agent.jobs.submit(BackgroundJob(kind=JobKind.REBUILD, reason="of the agent"))
    with tended.pool.admin.registers.hold(WAITING, "an operator's scrub"):
        tended.agent.jobs.run_all(limit=1)
    texts = [event.text for event in tended.agent.jobs.events()]
    assert any("rebuild" in text and "goes first" in text for text in texts), texts


def test_devices_that_left_long_ago_are_shown_no_more(tended: Tended) -> None:
    """They stayed on page and status for ever. One that no rebuild has made up for stays."""
    tended.rounds(10)
    tended.pool.evict(tended.device(0))
    tended.rounds(6 * 86_400, step=3_600 * 24)
    assert tended.status is not None
    assert len(tended.status.devices) == 7
    assert len(tended.pool.status().devices) == 7
    tended.rounds(2 * 86_400, step=3_600 * 24)
    assert len(tended.status.devices) == 6
    found = tended.pool.status()
    assert (len(found.devices), found.past) == (6, 1)
    assert len(tended.pool.status(past=True).devices) == 7
    record = tended.pool.admin.record
    (left,) = record.evicted
    lost = replace(record, evicted=(replace(left, state=DeviceState.EVICTED),))
    assert len(shown_members(lost, tended.clock.wall_ms())) == 7


def test_a_rebuild_counts_objects_as_a_status_does(tended: Tended) -> None:
    """It said 22 where there were 10: records of deletes are named apart."""
    for number in range(20):
        tended.pool.put(f"gone/{number}", b"x")
    tended.harness.lose(["memory://d0"])
    for number in range(20):
        tended.pool.delete(f"gone/{number}")
    tended.harness.bring_back()
    count = tended.pool.status().objects
    assert count == len(tended.pool.list()) == len(tended.content)
    rebuilt = tended.pool.rebuild()
    assert rebuilt.deletes  # of those that had a column on the device that was away
    for report in (rebuilt, tended.pool.scrub()):
        assert (report.objects, report.healthy) == (count, count)
