"""Scrubs of the disks of one host: where they go on, what they heal, when they count as done."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.agent.background_jobs import BackgroundJob, JobKind, Jobs
from hpstore.devices.base import Device, ReadHandle, raise_device_error
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DescriptorsExhausted
from hpstore.maintenance.rebuild import Progress
from hpstore.maintenance.scrub import CURSOR_FILE, decode_cursor
from hpstore.maintenance.scrub_columns import POSITION_FILE, ColumnScrubReport
from hpstore.pool.admin import PoolAdmin
from hpstore.testing.memory_pool import FakeClock, Harness
from hpstore.units import KIB, MIB
from tests.unit.agents_of_hosts import HostAgents

T = TypeVar("T")
KEYS = [f"k{number:02}" for number in range(36)]


class Stops:
    """A pace that ends the work before an object."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, nbytes: int) -> None:
        """At full speed."""

    def go_on(self) -> bool:
        self.left -= 1
        return self.left >= 0


class Sick(DeviceWrapper):
    """A device whose files fail to be read with an error number: those that `bad` chooses. With
    `dead` nothing of it works."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.bad: Callable[[str], bool] = lambda _: False
        self.number, self.dead = errno.EIO, False
        self.opened: list[str] = []

    def open(self, path: str) -> ReadHandle:
        self.opened.append(path)
        if self.bad(path):
            raise_device_error(OSError(self.number, "a bad sector"), self.url, "read")
        return super().open(path)

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if self.dead and operation in ("probe", "open", "read"):
            raise_device_error(OSError(errno.EIO, "dead"), self.url, operation)
        return super().around(operation, nbytes, call)


class Sickbed:
    """A pool of 2+2 on six devices, open through wrappers, with an object for each of KEYS."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        self.harness = Harness(directory, data=2, parity=2, devices=6, clock=self.clock)
        self.sick: dict[str, Sick] = {}
        self.pool = self.harness.open(self._wrap)
        for key in KEYS:
            self.pool.put(key, key.encode() * 40_000)
        self.ids = {url: device for device, url in self.pool.admin.devices.places.items()}
        self.began_ms = self.clock.wall_ms()

    def _wrap(self, url: str, device: Device) -> Device:
        return self.sick.setdefault(url, Sick(device))

    def scrub(
        self, *urls: str, since_ms: int | None = None, after: int = 1000
    ) -> ColumnScrubReport:
        """A scrub of these devices that is stopped after so many objects."""
        self.clock.advance(1.0)
        return self.pool.admin.scrub_columns(
            {self.ids[url] for url in urls}, since_ms=since_ms, pace=Stops(after)
        )

    def held(self, url: str) -> list[str]:
        """Keys with a column on a device, in their order."""
        return [key for key in KEYS if any(place == url for place, _ in self.harness.columns(key))]

    def position(self, url: str) -> str:
        """Where the scrub of a device is; "" at its end."""
        return decode_cursor(bytes(self.harness.devices[url].files[POSITION_FILE].bytes))[1]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Sickbed]:
    made = Sickbed(tmp_path)
    yield made
    made.pool.close()


def test_a_host_scrub_that_a_sweep_interrupts_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the keeper each sweep, rebuild and restart sent it to the first key, so that it never
    ended: each column of the host is read once, whatever comes between."""
    fleet = HostAgents(tmp_path, scrub_days=14.0)
    reports: list[ColumnScrubReport] = []
    scrub, step = PoolAdmin.scrub_columns, Jobs._step

    def noted(admin: PoolAdmin, *args: object, **kwargs: object) -> ColumnScrubReport:
        report = scrub(admin, *args, **kwargs)  # type: ignore[arg-type]
        reports.append(report)
        return report

    def interrupted(jobs: Jobs, progress: Progress) -> None:
        step(jobs, progress)
        if progress.done == 3 and len(reports) < 4:
            jobs.submit(BackgroundJob(kind=JobKind.SWEEP, reason="it is time"))

    monkeypatch.setattr(PoolAdmin, "scrub_columns", noted)
    monkeypatch.setattr(Jobs, "_step", interrupted)
    fleet.start("a")
    fleet.rounds(20.0)
    columns = sum(
        url in fleet.disks("a") for key in fleet.content for url, _ in fleet.harness.columns(key)
    )
    assert [report.stopped for report in reports].count(True) >= 2
    assert sum(report.columns for report in reports) == columns
    memory = fleet.agents["a"].memory
    assert memory.scrub_ended_ms >= memory.scrub_began_ms > 0
    fleet.stop()


def test_each_device_goes_on_from_its_own_position_in_a_pass(bed: Sickbed) -> None:
    """A later pass, and a scrub that goes on with none, begin with the first key."""
    one, two = bed.harness.urls[:2]
    first = bed.scrub(one, since_ms=bed.began_ms, after=3)
    assert first.stopped
    assert first.columns == 3
    assert bed.position(one) == bed.held(one)[2]
    both = bed.scrub(one, two, since_ms=bed.began_ms)
    assert both.columns == len(bed.held(one)) - 3 + len(bed.held(two))
    assert (bed.position(one), bed.position(two)) == ("", "")
    assert bed.scrub(one, two, since_ms=bed.began_ms).columns == 0
    assert bed.scrub(one).columns == len(bed.held(one))
    later = bed.clock.wall_ms() + 1
    bed.clock.advance(1.0)
    assert bed.scrub(one, since_ms=later).columns == len(bed.held(one))


def test_a_scrub_that_is_stopped_before_its_first_object_has_not_ended(bed: Sickbed) -> None:
    """Its position is as before."""
    one = bed.harness.urls[0]
    assert bed.scrub(one, since_ms=bed.began_ms, after=0).stopped
    assert POSITION_FILE not in bed.harness.devices[one].files
    assert bed.scrub(one, since_ms=bed.began_ms).columns == len(bed.held(one))


def test_a_bad_sector_of_a_device_that_works_is_healed_and_the_scrub_goes_on(bed: Sickbed) -> None:
    """The first one gave the whole device up until the next pass, and the object was not repaired:
    as in any other repair, one unreadable file is damage."""
    one = bed.harness.urls[0]
    held = bed.held(one)
    key = held[1]
    (path,) = (path for url, path in bed.harness.columns(key) if url == one)
    files = bed.harness.devices[one].files
    broken = files[path]
    bed.sick[one].bad = lambda opened: files.get(opened) is broken
    report = bed.scrub(one, since_ms=bed.began_ms)
    assert (report.damaged_columns, report.repaired) == (1, 1)
    assert (report.given_up, report.failed) == ((), {})
    assert report.columns == len(held) - 1
    assert files.get(path) is not broken
    assert bed.pool.stat(key).losses_tolerated == 2
    assert bed.pool.get(key) == key.encode() * 40_000


def test_a_device_that_fails_is_given_up_named_and_read_from_there_later(bed: Sickbed) -> None:
    """The others are read to their ends, and not again when the pass goes on."""
    one, two = bed.harness.urls[:2]
    bed.scrub(one, since_ms=bed.began_ms, after=4)
    bed.sick[one].dead = True
    report = bed.scrub(one, two, since_ms=bed.began_ms)
    assert report.given_up == (one,)
    assert report.columns == len(bed.held(two))
    assert bed.position(one) != ""
    bed.sick[one].dead = False
    rest = bed.scrub(one, two, since_ms=bed.began_ms)
    assert rest.given_up == ()
    assert rest.columns == len(bed.held(one)) - 4


def test_a_process_without_descriptors_blames_no_device(bed: Sickbed) -> None:
    """EMFILE gave up one device after another. The scrub ends, and goes on from there."""
    one = bed.harness.urls[0]
    third = bed.held(one)[2]
    (path,) = (path for url, path in bed.harness.columns(third) if url == one)
    bed.sick[one].bad, bed.sick[one].number = (lambda opened: opened == path), errno.EMFILE
    with pytest.raises(DescriptorsExhausted):
        bed.scrub(one, since_ms=bed.began_ms)
    bed.sick[one].bad = lambda _: False
    assert bed.scrub(one, since_ms=bed.began_ms).columns == len(bed.held(one)) - 2


def test_a_host_scrub_that_gave_a_device_up_is_not_done_for_two_weeks(tmp_path: Path) -> None:
    """It counted as the pass of `scrub_days`; now it goes on when the device works again."""
    fleet = HostAgents(tmp_path, scrub_days=14.0)
    fleet.start("a")
    url = fleet.disks("a")[0]
    device = fleet.harness.devices[url]
    listed = device.entries
    device.entries = lambda path: raise_device_error(  # type: ignore[method-assign]
        OSError(errno.EIO, "a bad directory"), url, "list"
    )
    fleet.rounds(20.0)
    memory = fleet.agents["a"].memory
    assert memory.scrub_ended_ms < memory.scrub_began_ms
    device.entries = listed  # type: ignore[method-assign]
    fleet.rounds(600.0, step=20.0)
    again = fleet.agents["a"].memory
    assert again.scrub_began_ms == memory.scrub_began_ms
    assert again.scrub_ended_ms > again.scrub_began_ms
    fleet.stop()


def test_the_end_of_a_scrub_is_noted_where_no_device_has_room(tmp_path: Path) -> None:
    """It was not, so that each later scrub began at a position of weeks ago."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=3, clock=clock, unit_bytes=64 * KIB)
    with harness.open() as pool:
        for key in KEYS:
            pool.put(key, bytes(200 * KIB))
        assert pool.admin.scrub(pace=Stops(4)).stopped
        for device in harness.devices.values():
            device.capacity_bytes = device._used() + 4 * KIB
        clock.advance(5.0)
        assert not pool.admin.scrub().stopped
        assert pool.admin.last_scrub_ms() == clock.wall_ms()
        clock.advance(5.0)
        assert pool.admin.scrub().objects == len(KEYS)
        for device in harness.devices.values():
            device.capacity_bytes = 1 << 40
            body = bytes(device.files[CURSOR_FILE].bytes)
            assert decode_cursor(body) == (clock.wall_ms(), "")
            assert device.usage().free > MIB
