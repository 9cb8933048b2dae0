"""How fast background work goes: shares of time, rates, and what disks do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.agent.background_rate import SharedPace, pause_seconds, scrub_rate
from hpstore.agent.disk_load import Foreground, disks_below
from hpstore.health.smart.readout import DiskActivity
from hpstore.maintenance.rebuild import WorkPace
from hpstore.runtime.rate_limit import RateLimit
from hpstore.testing.memory_pool import FakeClock


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30),
    st.floats(0.05, 1.0),
)
def test_work_takes_its_share_of_the_time(steps: list[float], share: float) -> None:
    """Whatever the steps take: the wait after each makes it `share` of the whole."""
    clock = FakeClock()
    pace = SharedPace(clock, lambda: share, stop=lambda: False)
    for seconds in steps:
        clock.advance(seconds)
        pace(1000)
    assert sum(steps) / clock.monotonic() == pytest.approx(share, rel=1e-6)
    whole, alone = pace.rates()
    assert whole == pytest.approx(share * alone, rel=1e-6)


class Meanwhile(FakeClock):
    """While somebody waits for the first time, something else happens."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then: Callable[[], None] | None = then

    def wait(self, seconds: float) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()
        super().wait(seconds)


def test_two_threads_share_one_pause() -> None:
    """A laying out anew reads on two threads: one may not work on while the other pauses."""
    ended: list[float] = []

    def other() -> None:
        pace(1000)
        ended.append(clock.monotonic())

    clock = Meanwhile(other)
    pace = SharedPace(clock, lambda: 0.25, stop=lambda: False)
    clock.advance(1.0)
    pace(1000)
    assert ended == [pytest.approx(4.0)]
    assert clock.monotonic() == pytest.approx(4.0, abs=0.3)  # its wait was of 0.2 s


def test_a_stall_does_not_stop_work_for_minutes() -> None:
    """A step of a minute is waited for as one of two seconds."""
    assert pause_seconds(60.0, 0.5) == 2.0
    assert pause_seconds(1.0, 0.1) == pytest.approx(9.0)
    assert pause_seconds(1.0, 1.0) == 0.0


def test_a_further_limit_holds_too_and_a_stop_ends_the_wait() -> None:
    """1,000 bytes a second: 5,000 take five seconds; told to stop it waits no more."""
    clock, stopped = FakeClock(), [False]
    pace = SharedPace(clock, lambda: 1.0, stop=lambda: stopped[0], bytes_per_second=1000.0)
    for _ in range(5):
        pace(1000)
    assert clock.monotonic() == pytest.approx(5.0)
    stopped[0] = True
    pace(10**9)
    assert clock.monotonic() == pytest.approx(5.0)
    assert not pace.go_on()


@pytest.mark.parametrize(
    "made",
    [
        lambda clock: RateLimit(1000.0, clock),
        lambda clock: SharedPace(clock, lambda: 1.0, stop=lambda: False, bytes_per_second=1000.0),
    ],
)
def test_a_rate_is_reached_by_work_that_takes_most_of_the_time(
    made: Callable[[FakeClock], WorkPace],
) -> None:
    """Steps of 1,000 bytes take 0.8 s each; with 1,000 bytes a second allowed there is one a
    second, not one in 1.8. After a stall of a minute two seconds are made up for, not sixty.
    """
    clock = FakeClock()
    pace = made(clock)
    for _ in range(10):
        pace(1000)
        clock.advance(0.8)
    assert clock.monotonic() == pytest.approx(10.8)
    clock.advance(60.0)
    before = clock.monotonic()
    for _ in range(6):
        pace(1000)
    assert clock.monotonic() - before == pytest.approx(4.0)


def test_a_scrub_reads_all_within_nine_tenths_of_its_days() -> None:
    """And not slower than 1 MiB a second: a small pool is soon done."""
    assert scrub_rate(10**13, 14.0) * 0.9 * 14 * 86400 == pytest.approx(1e13)
    assert scrub_rate(0, 14.0) == 1 << 20


def activity(nbytes: int) -> DiskActivity:
    return DiskActivity(
        reads=0, read_bytes=nbytes, writes=0, written_bytes=0, in_flight=0, busy_ms=0
    )


def test_the_foreground_is_what_disks_do_less_what_this_process_does() -> None:
    """By the second; unknown at the first look, and where a disk is not listed."""
    rows, own = {"sda1": activity(0), "sdb": activity(0)}, [0]
    found = Foreground(activity=lambda: rows, own=lambda: own[0])
    found.look({"sda1", "sdb"}, 10.0)
    assert not found.known
    rows.update(sda1=activity(8_000_000), sdb=activity(2_000_000))
    own[0] = 4_000_000
    found.look({"sda1", "sdb"}, 12.0)
    assert (found.known, found.bytes_per_second) == (True, 3_000_000.0)
    found.look({"sda1", None}, 13.0)
    assert not found.known
    found.look(set(), 14.0)
    assert not found.known


def test_disks_are_found_below_partitions_and_mappings(tmp_path: Path) -> None:
    """dm-0 over sda1 and md0, md0 over sdb2 and sdc; a loop device has no disk."""
    blocks = tmp_path / "class" / "block"
    real = tmp_path / "devices"
    for name in ("sda", "sda/sda1", "sdb", "sdb/sdb2", "sdc", "dm-0", "md0", "loop0"):
        (real / name).mkdir(parents=True)
    for name in ("sda/sda1", "sdb/sdb2"):
        (real / name / "partition").write_text("1")
    for over, below in (("dm-0", ("sda1", "md0")), ("md0", ("sdb2", "sdc"))):
        for name in below:
            (real / over / "slaves" / name).mkdir(parents=True)
    blocks.mkdir(parents=True)
    for path in ("sda", "sda/sda1", "sdb", "sdb/sdb2", "sdc", "dm-0", "md0", "loop0"):
        (blocks / path.rpartition("/")[2]).symlink_to(real / path)
    assert disks_below("dm-0", str(tmp_path)) == ["/dev/sda", "/dev/sdb", "/dev/sdc"]
    assert disks_below("sda1", str(tmp_path)) == ["/dev/sda"]
    assert disks_below("loop0", str(tmp_path)) == []
