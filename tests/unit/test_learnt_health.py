"""What processes leave for later ones: learnt times and pardons; hostile bytes are refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hpstore.errors import IntegrityError
from hpstore.format.records import FORMAT, seal
from hpstore.health.detect.device_standing import slowest_of_class
from hpstore.health.detect.evidence import Media
from hpstore.health.detect.io_recorder import Operation
from hpstore.health.detect.learnt_times import LEARNT_FILE, LearntTimes, load_learnt, save_learnt
from hpstore.health.detect.telemetry import CELLS, Telemetry
from hpstore.health.pardons import PARDONS_FILE, Pardons
from hpstore.health.probe_scores import ProbeScores
from hpstore.health.process_memory import ProcessMemory
from hpstore.runtime.metrics import Metrics
from hpstore.testing import ManualClock
from hpstore.units import KIB, MIB


def used(seconds: float, *, nbytes: int = 64 * KIB, count: int = 64) -> Telemetry:
    """A telemetry of one device that has made some reads."""
    telemetry = Telemetry()
    recorder = telemetry.recorder("d0")
    telemetry.tick(0.0)
    for _ in range(count):
        recorder.record(Operation.READ, nbytes, 1, seconds)
    return telemetry


def test_a_device_that_is_slower_than_in_earlier_processes_is_known(tmp_path: Path) -> None:
    """From its first tick, and without a peer."""
    before = used(2e-3)
    before.tick(1.0)
    save_learnt(tmp_path, before.learnt(LearntTimes(), ["d0"]))
    now = used(1e-2)
    now.remember(load_learnt(tmp_path, cells=CELLS))
    assert now.tick(1.0).signs["d0"].past_ratio == pytest.approx(5.0)
    unknown = used(1e-2, nbytes=4 * MIB)
    unknown.remember(load_learnt(tmp_path, cells=CELLS))
    assert unknown.tick(1.0).signs["d0"].past_ratio == 0


def test_one_process_moves_what_many_have_learnt_by_a_fifth() -> None:
    """One that was slow all the time is not what is normal from then on."""
    learnt = LearntTimes(cells={"d0": {3: 1e-3}})
    ios, seconds = np.zeros(CELLS), np.zeros(CELLS)
    ios[3], seconds[3] = 100.0, 1.0
    assert learnt.learn("d0", ios, seconds).cells["d0"][3] == pytest.approx(2.8e-3)
    ios[3] = 10.0
    assert learnt.learn("d0", ios, seconds).cells["d0"] == {3: 1e-3}


def test_learnt_times_are_bounded() -> None:
    """1024 devices, 24 cells of each, whatever is added."""
    learnt, ios = LearntTimes(), np.full(CELLS, 100.0)
    for number in range(1100):
        learnt = learnt.learn(f"d{number}", ios, ios * 1e-3)
    assert len(learnt.cells) == 1024
    assert max(map(len, learnt.cells.values())) == 24
    assert LearntTimes.decode(learnt.encode(), cells=CELLS, where="x").cells == learnt.cells


@pytest.mark.parametrize(
    "devices",
    [
        [],
        {"d0": {"3": 1.0}},
        {"d0": [[3]]},
        {"d0": [[-1, 1e-3]]},
        {"d0": [[CELLS, 1e-3]]},
        {"d0": [[True, 1e-3]]},
        {"d0": [[3, 0.0]]},
        {"d0": [[3, 1e9]]},
        {"d0": [[3, "x"]]},
        {"d0": [[n % CELLS, 1e-3] for n in range(25)]},
        {f"d{n}": [] for n in range(1025)},
    ],
)
def test_learnt_times_that_no_process_wrote_are_refused(devices: object) -> None:
    """Also where the digest is right."""
    with pytest.raises(IntegrityError):
        LearntTimes.decode(
            seal({"format": FORMAT, "devices": devices}),
            cells=CELLS,
            where="x",
        )


@pytest.mark.parametrize("name", [LEARNT_FILE, PARDONS_FILE])
@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b" " * (5 << 20)])
def test_damaged_files_are_counted_and_left_as_they_are(
    tmp_path: Path, name: str, data: bytes
) -> None:
    """Health goes on without them."""
    (tmp_path / name).write_bytes(data)
    metrics, telemetry = Metrics(), used(1e-3)
    memory = ProcessMemory(tmp_path, metrics)
    memory.begin(telemetry, 0.0)
    telemetry.tick(1.0)
    memory.save(telemetry, ["d0"], 1.0, last=True)
    assert metrics.value("health_memory_error_total") == 1
    assert (tmp_path / name).read_bytes() == data


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LEARNT_FILE)
    with pytest.raises(OSError, match="is not a file"):
        load_learnt(tmp_path, cells=CELLS)


def test_times_are_written_once_a_minute(tmp_path: Path) -> None:
    """And at the end; those of devices that are not well never."""
    memory, telemetry = ProcessMemory(tmp_path, Metrics()), used(1e-3)
    memory.begin(telemetry, 0.0)
    telemetry.tick(1.0)
    memory.save(telemetry, ["d0"], 59.0)
    memory.save(telemetry, [], 60.0)
    assert not (tmp_path / LEARNT_FILE).exists()
    memory.save(telemetry, ["d0"], 120.0)
    assert load_learnt(tmp_path, cells=CELLS).cells.keys() == {"d0"}


def test_a_pardon_reaches_processes_that_run_and_none_that_begins(tmp_path: Path) -> None:
    """Each once, in order."""
    clock, running, other = ManualClock(), Pardons(tmp_path), Pardons(tmp_path)
    assert running.new() == []
    other.give("d0", clock)
    other.give("d1", clock)
    assert running.new() == ["d0", "d1"]
    assert running.new() == []
    late = Pardons(tmp_path)
    assert late.new() == []
    other.give("d2", clock)
    assert (running.new(), late.new()) == (["d2"], ["d2"])


def test_a_pardon_counts_after_the_file_was_tidied_away(tmp_path: Path) -> None:
    """Below /tmp it goes after some days, and its numbers begin again at 1: processes that had
    followed three words passed the next ones over. Also where they did not look in between."""
    clock, running, asleep, other = ManualClock(), *(Pardons(tmp_path) for _ in range(3))
    assert (running.new(), asleep.new()) == ([], [])
    for device in ("d0", "d1", "d2"):
        other.give(device, clock)
    assert (running.new(), asleep.new()) == (["d0", "d1", "d2"], ["d0", "d1", "d2"])
    (tmp_path / PARDONS_FILE).unlink()
    assert running.new() == []
    other.give("d3", clock)
    assert (running.new(), asleep.new()) == (["d3"], ["d3"])
    assert (running.new(), asleep.new()) == ([], [])


def test_pardons_are_bounded(tmp_path: Path) -> None:
    """Words of long ago are let go; numbers go on."""
    clock, pardons = ManualClock(), Pardons(tmp_path)
    for number in range(70):
        pardons.give(f"d{number}", clock)
    running = Pardons(tmp_path)
    running.new()
    pardons.give("new", clock)
    assert running.new() == ["new"]
    assert (tmp_path / PARDONS_FILE).stat().st_size < 64 << 10


@pytest.mark.parametrize(
    ("media", "seconds", "beyond"),
    [
        (Media.NVME, 1e-3, False),
        (Media.NVME, 2e-2, True),
        (Media.HDD, 5e-2, False),
        (Media.HDD, 0.4, True),
        (Media.UNKNOWN, 5e-2, False),
        (Media.UNKNOWN, 0.4, True),
    ],
)
def test_a_mebibyte_beyond_what_a_class_takes_is_known(
    media: Media, seconds: float, beyond: bool
) -> None:
    """2.5 MB/s are no class's: 0.4 s. Calls in flight wait for each other."""
    telemetry = used(seconds, nbytes=MIB)
    telemetry.classify("d0", media)
    assert (telemetry.tick(1.0).signs["d0"].class_ratio > 1) == beyond
    one = slowest_of_class(media, np.array([1e6]), np.array([1.0]))
    assert slowest_of_class(media, np.array([1e6]), np.array([4.0])) == pytest.approx(4 * one)


def test_busy_is_the_share_of_time_with_a_call_in_flight() -> None:
    """Calls that wait for each other count once; one that has not ended counts, too."""
    telemetry = Telemetry()
    recorder = telemetry.recorder("d0")
    telemetry.tick(0.0)
    for _ in range(4):
        recorder.record(Operation.READ, 4096, 4, 0.2)
    assert telemetry.tick(1.0).signs["d0"].busy_share == pytest.approx(0.2)
    recorder.begin(1.5)
    assert telemetry.tick(2.0).signs["d0"].busy_share == pytest.approx(0.5)
    assert telemetry.tick(3.0).signs["d0"].busy_share == 1.0


def test_the_last_probes_count_most() -> None:
    """A device that was slow when its sit-out began does not stay for that."""
    scores = ProbeScores()
    scores.note("d0", 10.0, 4, 0.0)
    assert scores.ratio("d0", 1.0) == 10.0
    for second in range(12):
        scores.note("d0", 1.0, 4, float(second))
    assert scores.ratio("d0", 12.0) < 1.3
    assert scores.ratio("d0", 100.0) == 1.0
    scores.keep_only([])
    assert scores.ratio("d0", 12.0) == 1.0
