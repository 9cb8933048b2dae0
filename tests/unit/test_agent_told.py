"""What the agent is told, by reports, orders and settings; on memory devices, round by round."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hpstore.agent import agent_config
from hpstore.agent.background_jobs import BackgroundJob, JobKind
from hpstore.agent.operator_requests import ORDERS_FILE, give_order
from hpstore.agent.status_page import render
from hpstore.cli.status_report import shared_directory
from hpstore.cli.status_watch import agent_view
from hpstore.errors import ConfigError
from hpstore.format.records import DeviceState, seal
from hpstore.health import HealthState
from hpstore.health.decision_log import history_path
from hpstore.health.history import History
from hpstore.health.policy.operator_commands import Command
from hpstore.health.policy.states import Decision, Role
from hpstore.membership.agent_observations import read_status
from hpstore.runtime.metrics import Metrics
from tests.unit.tended import Tended

S = HealthState


def report(
    tended: Tended,
    device: int,
    at: float,
    was: S = S.SITOUT,
    becomes: S = S.SITOUT,
    reason: str = "report: 3 sit-outs within a day",
) -> None:
    """What a process of this node writes; unless given, when it has given up on a device."""
    pool = tended.pool
    history = History(history_path(pool.config.settings, pool.admin.record.pool_id), Metrics())
    history.add_decisions(
        [
            Decision(
                at_seconds=at,
                device=tended.device(device),
                was=was,
                becomes=becomes,
                reason=reason,
                role=Role.PROCESS,
            )
        ]
    )
    history.close()


def test_what_a_process_reports_is_drained_and_evicted(tended: Tended) -> None:
    """By the guards' leave; a source until it is empty; it does not come back by itself."""
    tended.rounds(10)
    report(tended, 4, tended.clock.wall_ms() / 1000)
    tended.rounds(5, work=False)
    assert tended.states() == {4: S.DRAINING}
    tended.rounds(120)
    assert 4 not in tended.members()
    assert tended.whole()
    assert not any(url == "memory://d4" for url, _ in tended.harness.columns("large"))
    tended.rounds(300, step=20)
    assert 4 not in tended.members()


def test_a_report_does_not_pass_the_guards_rule_17(tmp_path: Path) -> None:
    """PROTOCOL 17: with m = 1 there is no parity to spare for what is done by choice."""
    tended = Tended(tmp_path, data=3, parity=1, devices=6)
    tended.rounds(10)
    report(tended, 4, tended.clock.wall_ms() / 1000)
    tended.rounds(60)
    assert tended.states() == {}
    assert len(tended.members()) == 6
    assert tended.status is not None
    (refused,) = [d.refused for d in tended.status.devices if d.refused]
    assert "parity 1 allows 0" in refused
    tended.stop()


def test_old_reports_and_those_from_before_a_pardon_do_not_count(tended: Tended) -> None:
    """An operator's readmit is not undone by what was said before it."""
    tended.rounds(10)
    report(tended, 4, tended.clock.wall_ms() / 1000 - 1000)
    report(tended, 5, tended.clock.wall_ms() / 1000)
    give_order(tended.pool.admin.state_directory, Command.READMIT, tended.device(5), tended.clock)
    tended.rounds(60)
    assert tended.states() == {}


def test_where_processes_have_a_device_is_shown_until_it_is_too_old_to_be_true(
    tended: Tended,
) -> None:
    """PROTOCOL 16: shown on the page and the terminal; the agent's own state is its own."""
    tended.rounds(10)
    now = tended.clock.wall_ms() / 1000
    report(tended, 4, now - 10, S.ONLINE, S.SUSPECT, "9.1 x its peers")
    report(tended, 5, now - 20, S.ONLINE, S.SUSPECT, "8.2 x its peers")
    report(tended, 5, now - 5, S.SUSPECT, S.ONLINE, "quiet again")

    def shown() -> dict[str, tuple[str, str]]:
        tended.rounds(5)
        assert tended.status is not None
        return {
            view.url: (view.process_state, view.process_reason)
            for view in tended.status.devices
            if view.process_state
        }

    assert shown() == {"memory://d4": ("suspect", "9.1 x its peers")}
    assert tended.states() == {}
    assert tended.status is not None
    page = render(tended.status)
    assert page.count("</span> in a process") == 1
    assert "9.1 x its peers" in page
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(agent_view(json.loads(json.dumps(tended.status.as_dict(), default=str))))
    assert "online, suspect in a process" in console.export_text()
    tended.rounds(3600, step=60)
    assert shown() == {}


def test_a_long_path_of_all_devices_pushes_nothing_off_the_terminal(tended: Tended) -> None:
    """It stands above the table; names and states are whole."""
    report(tended, 4, tended.clock.wall_ms() / 1000, S.ONLINE, S.SUSPECT, "9.1 x its peers")
    tended.rounds(5)
    assert tended.status is not None
    where = "/tmp/" + "very-" * 16 + "long/"
    text = json.dumps(tended.status.as_dict(), default=str).replace("memory://", where)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(agent_view(json.loads(text)))
    shown = console.export_text()
    assert re.search(r"│ d4 +│ online, suspect in a process │", shown)
    assert f"devices are in {where}" in shown


@pytest.mark.parametrize(
    ("urls", "above"),
    [
        (["/mnt/a", "/mnt/b"], ""),  # short: shown with each
        (["/data/cluster-7/node-12/a", "/data/cluster-7/node-12/b"], "/data/cluster-7/node-12/"),
        (
            ["/data/cluster-7/node-12/disk1", "/data/cluster-7/node-12/disk12"],
            "/data/cluster-7/node-12/",
        ),
        (["/data/cluster-7/node-12/a"], ""),  # one: nothing is shared
        (["/data/cluster-7/node-12/a", "s3://bucket/a"], ""),
        ([], ""),
    ],
)
def test_what_devices_have_in_common_is_a_long_directory(urls: list[str], above: str) -> None:
    assert shared_directory(urls) == above


def test_what_a_process_said_before_a_device_returned_is_not_shown(tended: Tended) -> None:
    """It was lost, evicted and is back; while it is evicted nobody reads it."""
    tended.rounds(10)
    tended.harness.lose(["memory://d4"])
    report(tended, 4, tended.clock.wall_ms() / 1000, S.ONLINE, S.FAULTED, "10 I/O errors")
    tended.rounds(1200, step=20)
    assert tended.states() == {4: S.EVICTED}
    assert tended.status is not None
    assert not any(view.process_state for view in tended.status.devices)
    tended.harness.bring_back()
    tended.rounds(1200, step=20)
    assert tended.states() == {}
    assert not any(view.process_state for view in tended.status.devices)


def test_orders_are_obeyed_once_and_refusals_told(tended: Tended) -> None:
    """Two may sit out of 3+2, the third is refused; readmit ends it; a restart repeats nothing."""
    tended.rounds(10)
    directory = tended.pool.admin.state_directory
    for number in range(3):
        give_order(directory, Command.SIT_OUT, tended.device(number), tended.clock)
    tended.rounds(5)
    assert tended.states() == {0: S.SITOUT, 1: S.SITOUT}
    assert any(e.text.startswith("order 3, sit-out: refused") for e in tended.agent.jobs.events())
    give_order(directory, Command.READMIT, tended.device(0), tended.clock)
    tended.rounds(5)
    assert tended.states() == {1: S.SITOUT}
    tended.stop()
    tended.start()
    tended.rounds(5)
    assert tended.states() == {1: S.SITOUT}
    found = read_status(tended.agent.run_directory, tended.clock.wall_ms())
    assert found is not None
    assert found["orders_done"] == 4
    said = [d.reason for d in tended.agent.history.decisions(50)]
    assert said.count("by an operator: sit-out") == 2


def test_settings_of_the_agent_name_the_nearest_key(tmp_path: Path) -> None:
    """[agent] and [agent.policy] of pool.toml; the role is not a setting."""
    tended = Tended(tmp_path)
    config = replace(
        tended.harness.config, agent={"tick_seconds": 1, "policy": {"grace_seconds": 5}}
    )
    made = agent_config(config)
    assert (made.tick_seconds, made.policy.grace_seconds, made.policy.role) == (
        1.0,
        5.0,
        Role.AGENT,
    )
    limited = agent_config(replace(config, agent={"heal_bytes_per_second": "200MB"}))
    assert limited.heal_bytes_per_second == 200_000_000  # as docs/health.md writes it
    with pytest.raises(ConfigError, match="did you mean 'tick_seconds'"):
        agent_config(replace(config, agent={"tick_second": 1}))
    with pytest.raises(ConfigError, match=r"\[agent.policy\].*unknown setting 'role'"):
        agent_config(replace(config, agent={"policy": {"role": "process"}}))
    tended.stop()


def test_a_drain_that_was_called_off_is_not_ended(tended: Tended) -> None:
    """An operator readmits the device between the rebuild and the eviction: it stays a member."""
    tended.rounds(10)
    device = tended.device(1)
    tended.pool.admin.devices.begin_drain(device)
    assert tended.pool.rebuild().whole
    tended.pool.readmit(device)
    jobs = tended.agent.jobs
    jobs.submit(BackgroundJob(kind=JobKind.EVICT, device=device, reason="it is drained"))
    tended.agent.finish_jobs()
    member = tended.pool.admin.record.member(device)
    assert member is not None
    assert member.state is DeviceState.ONLINE
    assert any("is called off" in event.text for event in jobs.events())


def test_what_cannot_be_drained_is_not_evicted_instead_rule_16(tmp_path: Path) -> None:
    """PROTOCOL 16: three devices for 1+2 and one that drains: its columns have nowhere to go with
    full parity, so it stays, whatever was asked."""
    tended = Tended(tmp_path, data=1, parity=2, devices=3)
    tended.rounds(10)
    device = tended.device(1)
    tended.pool.admin.devices.begin_drain(device)
    tended.agent.jobs.submit(
        BackgroundJob(kind=JobKind.EVICT, device=device, reason="it is drained")
    )
    tended.agent.finish_jobs()
    assert tended.pool.admin.record.member(device) is not None
    assert any("cannot leave" in event.text for event in tended.agent.jobs.events())
    tended.stop()


def test_a_warning_lasts_as_long_as_its_reason_and_over_a_restart(tmp_path: Path) -> None:
    """A pinned device, until it is readmitted; too many bad ones, until they are well."""
    tended = Tended(tmp_path, devices=6)
    tended.rounds(10)
    policy = tended.agent.memory.policy
    pinned = replace(
        policy.health(tended.device(0)), pinned=True, state=S.SITOUT, until_seconds=1e12
    )
    tended.agent.memory = replace(
        tended.agent.memory,
        policy=replace(policy, devices={**policy.devices, tended.device(0): pinned}),
    )
    tended.harness.lose(["memory://d4", "memory://d5"])
    tended.rounds(40)
    assert tended.status is not None
    assert len(tended.status.warnings) == 2
    assert "are bad" in tended.status.warnings[0]
    assert "memory://d0: it changes too often" in tended.status.warnings[1]
    tended.harness.bring_back()
    tended.stop()
    tended.start()
    give_order(tended.pool.admin.state_directory, Command.READMIT, tended.device(0), tended.clock)
    tended.rounds(5)
    assert list(tended.status.warnings)
    tended.rounds(600, step=20)
    assert not list(tended.status.warnings)
    tended.stop()


def test_orders_that_cannot_be_read_are_told_until_they_can(tended: Tended) -> None:
    """Healing goes on meanwhile; also when a newer version has written them."""
    tended.rounds(10)
    path = tended.pool.admin.state_directory / ORDERS_FILE
    for body in (b"{}", seal({"format": 99, "orders": []})):
        path.write_bytes(body)
        tended.rounds(10)
        assert tended.status is not None
        assert any("orders cannot be read" in text for text in tended.status.warnings)
        assert tended.status.ticks > 2
    path.unlink()
    tended.rounds(10)
    assert tended.status is not None
    assert not list(tended.status.warnings)


def test_an_order_after_the_file_was_moved_away_is_obeyed(tended: Tended) -> None:
    """Its number is above those that were obeyed: the agent would pass it over in silence."""
    tended.rounds(10)
    directory = tended.pool.admin.state_directory
    for number in (0, 1):
        give_order(directory, Command.IGNORE, tended.device(number), tended.clock)
    tended.rounds(5)
    (directory / ORDERS_FILE).unlink()
    given = give_order(directory, Command.SIT_OUT, tended.device(2), tended.clock)
    assert given.number == 3
    tended.rounds(5)
    assert tended.states() == {2: S.SITOUT}


def test_a_rate_may_be_written_with_its_unit(tmp_path: Path) -> None:
    """As docs/health.md shows it; what is below 0 or no number is refused."""
    tended = Tended(tmp_path)
    base = tended.harness.config
    made = agent_config(replace(base, agent={"heal_bytes_per_second": "200MB"}))
    assert made.heal_bytes_per_second == 200_000_000
    wrong: list[dict[str, object]] = [
        {"heal_bytes_per_second": -5},
        {"foreground_bytes_per_second": -1},
        {"rebalance_spread": 2.0},
        {"rebalance_spread": float("nan")},
        {"forecast_far": 0.0},
        {"policy": {"grace_seconds": float("nan")}},
        {"policy": {"reserve": 0}},
    ]
    for table in wrong:
        with pytest.raises(ConfigError):
            agent_config(replace(base, agent=table))
    tended.stop()


def test_a_report_from_the_future_does_not_count(tended: Tended) -> None:
    """A clock that was two hours ahead wrote it, and was set right: its pardon was moved with the
    agent's memory, and it stayed fresh until that time came again."""
    tended.rounds(10)
    tended.clock.now_ms += 7_200_000
    tended.rounds(10)
    report(tended, 5, tended.clock.wall_ms() / 1000)
    give_order(tended.pool.admin.state_directory, Command.READMIT, tended.device(5), tended.clock)
    tended.rounds(10)
    tended.clock.now_ms -= 7_200_000
    tended.rounds(120)
    assert tended.states() == {}
    report(tended, 4, tended.clock.wall_ms() / 1000)  # one of today is heard beside it
    tended.rounds(10)
    assert set(tended.states()) == {4}
