"""The agent's parts by themselves: outlook, jobs, page, metrics, orders."""

from __future__ import annotations

import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from hpstore.agent import operator_requests
from hpstore.agent.background_call import CallSlot
from hpstore.agent.background_jobs import BackgroundJob, Effort, JobKind, Jobs
from hpstore.agent.http_server import StatusServer, parse_listen
from hpstore.agent.operator_requests import ORDERS_FILE, give_order, read_orders
from hpstore.agent.policy_facts import answers
from hpstore.agent.prometheus import exposition
from hpstore.agent.smart_watch import DiskWatch, outlook_of
from hpstore.agent.status_page import render, sparkline
from hpstore.cli.status_watch import agent_view, bars, pool_view
from hpstore.devices.wrappers import FaultyDevice
from hpstore.errors import ConfigError, IntegrityError
from hpstore.health import HealthState
from hpstore.health.forecast.forecaster import FailureForecaster, Forecast, Risk
from hpstore.health.policy.operator_commands import Command
from hpstore.health.policy.states import ForecastOutlook
from hpstore.health.smart.counters import INDEX
from hpstore.health.smart.readout import Readout, SmartReading
from hpstore.maintenance.rebuild import RebuildReport
from hpstore.membership.agent_observations import STATUS_FILE, read_status
from hpstore.testing.memory_pool import FakeClock
from tests.unit.tended import Tended

T = TypeVar("T")


def forecast(day: str, risk: Risk) -> Forecast:
    return Forecast(
        serial="s",
        family="f",
        day=day,
        risk=risk,
        reasons=(),
        judged_by="sum",
        alarm=False,
        probability=None,
        error_sum=None,
        rule_score=None,
        model_score=None,
        model_threshold=None,
        model_alarm=False,
        healthy_share=None,
        refusal="",
    )


def test_an_alarm_counts_on_two_of_three_days_and_a_flag_at_once() -> None:
    """Two looks on one day are one day; an alarm that is over is none."""
    warned = [forecast("2026-01-01", Risk.WARN)]
    assert outlook_of(forecast("2026-01-01", Risk.WARN), warned) is ForecastOutlook.NONE
    assert outlook_of(forecast("2026-01-03", Risk.WARN), warned) is ForecastOutlook.ALARM
    assert outlook_of(forecast("2026-01-03", Risk.WATCH), warned) is ForecastOutlook.NONE
    assert outlook_of(forecast("2026-01-03", Risk.FAILING), []) is ForecastOutlook.FATAL
    assert outlook_of(None, warned) is ForecastOutlook.NONE


def test_disks_are_judged_by_what_was_recorded_of_them_before(tmp_path: Path) -> None:
    """A disk whose errors rise is an alarm on its second day; one that sleeps says nothing."""

    def reading(disk: str) -> SmartReading:
        if disk == "/dev/sdb":
            return SmartReading(device=disk, readout=Readout.ASLEEP, problem="it sleeps")
        values = [math.nan] * len(INDEX)
        for name, value in (("smart_5", errors[0]), ("smart_187", 0.0), ("smart_197", errors[0])):
            values[INDEX[name]] = value
        return SmartReading(
            device=disk, readout=Readout.OK, serial="S1", model="ST4000DM000", values=tuple(values)
        )

    errors = [0.0]
    watch = DiskWatch(
        tmp_path,
        FailureForecaster(),
        timeout_seconds=1.0,
        read=reading,
        disks_of=lambda path: {"/a": ["/dev/sda"], "/b": ["/dev/sdb"]}.get(path, []),
    )
    places = {"A": "/a", "B": "/b", "C": "s3://bucket"}
    first = watch.look(places, 740_000)
    assert (first["A"][0].outlook, first["B"][0].readout) == (ForecastOutlook.NONE, "asleep")
    assert "C" not in first
    errors[0] = 400.0
    assert watch.look(places, 740_001)["A"][0].outlook is ForecastOutlook.NONE
    assert watch.look(places, 740_001)["A"][0].outlook is ForecastOutlook.NONE
    second = watch.look(places, 740_002)["A"][0]
    assert (second.outlook, second.risk) == (ForecastOutlook.ALARM, Risk.WARN)
    assert any("rose" in reason for reason in second.reasons)


class Recorded(HTMLParser):
    """Tags and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture
def tended(tmp_path: Path) -> Iterator[Tended]:
    made = Tended(tmp_path, devices=5)  # every stripe is on all of them
    made.pool.put("<script>alert(1)</script>", b"x" * 300_000)
    made.rounds(30, work=False)
    made.harness.lose(["memory://d0"])
    made.rounds(30, work=False)
    yield made
    made.stop()


def test_the_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows(tended: Tended) -> None:
    """No script, no link, no image by address; a key that is markup is shown as text."""
    assert tended.status is not None
    text = render(tended.status)
    found = Recorded(text)
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not any({"src", "href", "onload"} & attributes.keys() for _, attributes in found.tags)
    assert "url(" not in text
    assert "&lt;script&gt;" in text
    assert {"svg", "polyline", "table"} <= names
    assert "removed" in text
    assert text.count("memory://d") >= 5


def test_a_sparkline_has_a_point_for_each_value() -> None:
    """None for one value; zeros are a flat line."""
    assert sparkline([1.0]) == ""
    found = re.search(r"points='([^']*)'", sparkline([0.0, 1.0, 2.0]))
    assert found is not None
    heights = [float(point.split(",")[1]) for point in found[1].split()]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == 3
    assert "points" in sparkline([0.0, 0.0])


def test_metrics_are_prometheus_text(tended: Tended) -> None:
    """Read back by its own parser: states of all devices, objects, the pool's counters."""
    text = exposition(lambda: tended.status)().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    rows = families["hpstore_device_state"].samples
    on = {row.labels["url"]: row.labels["state"] for row in rows if row.value == 1}
    assert on["memory://d0"] == "removed"
    assert on["memory://d1"] == "online"
    assert families["hpstore_pool_objects"].samples[0].value == 4
    assert families["hpstore_device_present"].samples
    assert families["hpstore_agent_rounds"].samples[0].value == 12
    assert exposition(lambda: None)() == b""


def jobs_of(tended: Tended) -> tuple[Jobs, list[str]]:
    """Jobs of a pool without an agent's, and what they were told."""
    ran: list[str] = []
    effort = Effort(
        share=lambda: 1.0,
        heal_bytes_per_second=lambda: None,
        scrub_bytes_per_second=lambda: 1e12,
        answers=lambda device: True,
        returned=lambda device: False,
        spread=0.1,
    )
    made = Jobs(
        tended.pool,
        effort,
        started=lambda job: ran.append(f"start {job.kind}"),
        finished=lambda job, report: ran.append(f"end {job.kind}"),
    )
    return made, ran


def test_the_most_urgent_job_comes_first_and_waits_for_no_scrub(tended: Tended) -> None:
    """A scrub stops between two objects for a rebuild, and is taken up after it."""
    jobs, ran = jobs_of(tended)
    jobs.submit(BackgroundJob(kind=JobKind.SCRUB))
    scrub, calls = tended.pool.admin.scrub, [0]

    def scrubbed(**words: object) -> RebuildReport:
        if not calls[0]:
            calls[0] = 1
            jobs.submit(BackgroundJob(kind=JobKind.REBUILD))
        return scrub(**words)  # type: ignore[arg-type]

    tended.pool.admin.scrub = scrubbed  # type: ignore[method-assign]
    jobs.run_all()
    assert ran == ["start scrub", "start rebuild", "end rebuild", "start scrub", "end scrub"]


class Few:
    """A pace that stops after so many objects."""

    def __init__(self, objects: int) -> None:
        self.left = objects

    def __call__(self, nbytes: int) -> None:
        pass

    def go_on(self) -> bool:
        self.left -= 1
        return self.left >= 0


def test_work_that_is_stopped_goes_on_where_it_was(tended: Tended) -> None:
    """A scrub keeps its position; a rebuild passes over what is whole, and is not taken for one."""
    tended.harness.bring_back()
    keys: list[str] = []
    first = tended.pool.admin.scrub(pace=Few(2), progress=lambda step: keys.append(step.key))
    assert (first.stopped, first.whole, len(keys)) == (True, False, 2)
    rest = tended.pool.scrub(progress=lambda step: keys.append(step.key))
    assert not rest.stopped
    assert keys == sorted(keys)
    assert len(keys) == 4
    tended.pool.evict("memory://d1", force=True)
    assert tended.pool.admin.rebuild(pace=Few(0)).stopped
    assert tended.pool.admin.record.unhealed()
    assert tended.pool.rebuild().whole
    assert not tended.pool.admin.record.unhealed()


def test_the_terminal_shows_what_the_agent_left(tended: Tended) -> None:
    """`status --watch`: states, work, decisions; without an agent what the pool says."""
    assert tended.status is not None
    job = {"kind": "rebuild", "reason": "x", "done": 3, "total": 9, "bytes_per_second": 1e6}
    status = {
        **json.loads(json.dumps(tended.status.as_dict(), default=str)),
        "job": job,
        "warnings": ["too many"],
    }
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(agent_view(status))
    console.print(pool_view(tended.pool.status(), "main"))
    text = console.export_text()
    for words in (
        "memory://d0",
        "removed",
        "3 of 9 objects",
        "online -> removed",
        "! too many",
        "more devices may be lost",
        "no agent runs",
        "DEGRADED",
    ):
        assert words in text
    (bar,) = [line for line in text.splitlines() if line.startswith("━")]
    assert set(bar) <= set("━╸╺ ")  # a line of its own
    assert bars([0.0, 1.0, 2.0]) == "▁▅█"
    assert bars([]) == ""


def test_a_job_like_one_that_waits_is_not_queued_twice(tended: Tended) -> None:
    """But a rebuild that waits for nobody takes the place of one that would."""
    jobs, _ = jobs_of(tended)
    assert jobs.submit(BackgroundJob(kind=JobKind.REBUILD))
    assert not jobs.submit(BackgroundJob(kind=JobKind.REBUILD))
    assert jobs.submit(BackgroundJob(kind=JobKind.REBUILD, include_missing=True))
    assert [job.include_missing for job in jobs.waiting()] == [True]
    assert not jobs.submit(BackgroundJob(kind=JobKind.REBUILD))


def test_a_job_that_fails_is_told_and_does_not_end_the_others(tended: Tended) -> None:
    """An eviction of a device that nobody knows; then a rebuild."""
    jobs, ran = jobs_of(tended)
    jobs.submit(BackgroundJob(kind=JobKind.READMIT, device="nobody"))
    jobs.submit(BackgroundJob(kind=JobKind.REBUILD))
    jobs.run_all()
    assert ran[-1] == "end rebuild"
    assert "was not done" in next(event.text for event in jobs.events() if not event.ok)


def test_a_call_that_hangs_keeps_neither_the_slot_nor_the_process() -> None:
    """It is under way, nothing else is started, and its thread dies with the process."""
    released = threading.Event()
    slot: CallSlot[bool] = CallSlot("test", threads=True)
    slot.start(released.wait)
    assert not slot.free
    assert slot.take() is None
    (thread,) = [t for t in threading.enumerate() if t.name == "hpstore-agent-test"]
    assert thread.daemon
    released.set()
    thread.join(60)
    assert slot.take() is True
    assert slot.free


def test_orders_are_numbered_bounded_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last few are kept; a damaged file is refused."""
    clock = FakeClock()
    monkeypatch.setattr(operator_requests, "_KEPT", 5)
    for number in range(8):
        assert give_order(tmp_path, Command.IGNORE, "d", clock).number == number + 1
    kept = read_orders(tmp_path)
    assert (len(kept), kept[-1].number) == (5, 8)
    (tmp_path / ORDERS_FILE).write_text("{}")
    with pytest.raises(IntegrityError):
        read_orders(tmp_path)


@pytest.mark.parametrize("text", ["9640", "localhost:", ":9640", "localhost:99999", "host:port"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    """Anything else is an error that shows one."""
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_listen(text)


@pytest.mark.parametrize("host", ["x" * 70, "nowhere.invalid", "256.1.1.1"])
def test_an_address_that_cannot_be_listened_on_is_one_line(host: str) -> None:
    """Also one that is no name of a host at all."""
    with pytest.raises(ConfigError, match="cannot listen"):
        StatusServer(f"{host}:0")


def test_a_status_from_another_time_is_none(tmp_path: Path) -> None:
    """Too old, or of a clock that was set back since."""
    (tmp_path / STATUS_FILE).write_text(json.dumps({"at_ms": 1_000_000}))
    assert read_status(tmp_path, 1_030_000) is not None
    assert read_status(tmp_path, 1_070_000) is None
    assert read_status(tmp_path, 900_000) is None


def test_a_device_that_was_asked_and_has_not_answered_yet_is_there(tended: Tended) -> None:
    """What is not known is not gone; a member that is not open is."""
    from hpstore.agent.policy_facts import Sighting

    record = tended.pool.admin.record
    sighting = Sighting(
        denied=(),
        record=record,
        open={record.members[1].device_id},
        seen={},
        back=(),
        reconciled=(),
        condition=None,
        outlooks={},
        watched={},
        reports={},
        busy="",
    )
    assert answers(sighting, record.members[1])
    assert not answers(sighting, record.members[2])


def test_a_full_or_read_only_device_is_not_gone(tmp_path: Path) -> None:
    """What it holds can be read: a full one is as before, a read-only one is called that."""
    tended = Tended(tmp_path)
    wrapped: dict[str, OnlyProbes] = {}
    tended.stop()
    tended.start(lambda url, device: wrapped.setdefault(url, OnlyProbes(device)))
    tended.rounds(5, work=False)
    wrapped["memory://d1"].plan, wrapped["memory://d2"].plan = "N*", "O*"
    tended.rounds(60, work=False)
    seen = tended.agent.eyes.seen()
    full, fixed = seen[tended.device(1)], seen[tended.device(2)]
    assert (full.answers, full.read_only, "No space" in full.problem) == (True, False, True)
    assert (fixed.answers, fixed.read_only) == (True, True)
    assert full.total_bytes > 0
    assert tended.states() == {2: HealthState.READ_ONLY}
    assert len(tended.members()) == 7
    tended.stop()
    tended.start(lambda url, device: OnlyProbes(device, "N*" if url == "memory://d1" else ""))
    tended.rounds(60)
    assert tended.device(1) in tended.pool.admin.devices.places
    assert tended.states().get(1) is None
    tended.stop()


class OnlyProbes(FaultyDevice):
    """Fails by its plan, but only when it is probed."""

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "probe":
            return super().around(operation, nbytes, call)
        return call()
