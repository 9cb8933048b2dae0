"""What disks say: recorded answers, and real child processes that play smartctl and nvme."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest

from hpstore.health.forecast.disk_record import append
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.this_machine import recorded
from hpstore.health.smart.counters import INDEX, SPEC_FLAG
from hpstore.health.smart.readout import (
    Readout,
    SmartReading,
    disks,
    parse_diskstats,
    parse_nvme,
    parse_smartctl,
    read_disk,
)
from tests.fault.common import poll

ATA = {
    "smartctl": {"version": [7, 4], "exit_status": 0},
    "device": {"name": "/dev/sda", "type": "sat", "protocol": "ATA"},
    "model_name": "ST4000DM000-1F2168",
    "serial_number": "Z30A",
    "user_capacity": {"blocks": 7814037168, "bytes": 4000787030016},
    "smart_status": {"passed": True},
    "power_on_time": {"hours": 30000},
    "temperature": {"current": 31},
    "ata_smart_attributes": {
        "revision": 10,
        "table": [
            {
                "id": 5,
                "name": "Reallocated_Sector_Ct",
                "value": 99,
                "worst": 99,
                "thresh": 10,
                "when_failed": "",
                "flags": {"prefailure": True},
                "raw": {"value": 48, "string": "48"},
            },
            {
                "id": 9,
                "name": "Power_On_Hours",
                "when_failed": "",
                "flags": {"prefailure": False},
                "raw": {"value": 1099511657776, "string": "30000 (...)"},
            },
            {
                "id": 188,
                "name": "Command_Timeout",
                "when_failed": "",
                "flags": {},
                "raw": {"value": 4295032833, "string": "1 1 1"},
            },
            {
                "id": 190,
                "name": "Airflow_Temperature_Cel",
                "when_failed": "past",
                "flags": {"prefailure": False},
                "raw": {"value": 522780703, "string": "31"},
            },
            {
                "id": 194,
                "name": "Temperature_Celsius",
                "when_failed": "",
                "flags": {},
                "raw": {"value": 77309411359, "string": "31 (0 18 0 0 0)"},
            },
            {
                "id": 197,
                "name": "Current_Pending_Sector",
                "when_failed": "",
                "flags": {},
                "raw": {"value": 8, "string": "8"},
            },
        ],
    },
}
NVME = {
    "critical_warning": 0,
    "temperature": 305,
    "avail_spare": 100,
    "spare_thresh": 10,
    "percent_used": 3,
    "media_errors": 2,
    "num_err_log_entries": 900,
}
STANDBY = {
    "smartctl": {
        "exit_status": 2,
        "messages": [{"string": "Device is in STANDBY mode, exit(2)", "severity": "information"}],
    }
}


def smartctl(status: int, body: object = ATA) -> SmartReading:
    return parse_smartctl("/dev/sda", status, json.dumps(body))


def counter(reading: SmartReading, name: str) -> float:
    return reading.values[INDEX[name]]


def test_an_ata_answer_gives_decoded_counters() -> None:
    """Packed time-outs, hours and temperature are what people mean by them."""
    found = smartctl(0)
    assert (found.readout, found.serial, found.model) == (Readout.OK, "Z30A", "ST4000DM000-1F2168")
    named = {
        n: counter(found, n) for n in ("smart_5", "smart_9", "smart_188", "smart_194", "smart_197")
    }
    assert named == {
        "smart_5": 48,
        "smart_9": 30000,
        "smart_188": 1,
        "smart_194": 31,
        "smart_197": 8,
    }
    assert (found.flags, found.notes, found.capacity_bytes) == ((), (), 4000787030016)


@pytest.mark.parametrize(
    ("status", "readout", "flags", "notes"),
    [
        (0, Readout.OK, 0, 0),
        (1, Readout.FAILED, 0, 0),  # bad command line
        (2, Readout.FAILED, 0, 0),  # could not be opened
        (3, Readout.ASLEEP, 0, 0),  # the status that we ask for
        (4, Readout.OK, 0, 1),  # a command failed, the rest of the answer counts
        (8, Readout.OK, 1, 0),  # failing
        (16, Readout.OK, 1, 0),  # an attribute at its threshold
        (24, Readout.OK, 1, 0),
        (32, Readout.OK, 0, 1),  # in the past
        (64, Readout.OK, 0, 1),  # error log
        (128, Readout.OK, 0, 1),  # self-test log
        (4 | 32 | 64 | 128, Readout.OK, 0, 4),
        (2 | 8, Readout.FAILED, 0, 0),
    ],
)
def test_smartctls_exit_status_is_a_mask(
    status: int, readout: Readout, flags: int, notes: int
) -> None:
    """Bits that tell of the call end it; bits that tell of the disk are flags or notes."""
    found = smartctl(status)
    assert (found.readout, len(found.flags), len(found.notes)) == (readout, flags, notes)
    if readout is Readout.OK:
        assert counter(found, "smart_5") == 48
        assert counter(found, SPEC_FLAG) == bool(flags)


def test_flags_name_what_failed() -> None:
    """SMART's own verdict, and the pre-fail attribute that is at its threshold now."""
    body = json.loads(json.dumps(ATA))
    body["smart_status"]["passed"] = False
    body["ata_smart_attributes"]["table"][0]["when_failed"] = "now"
    assert smartctl(24, body).flags == (
        "SMART says that the disk is failing",
        "attribute 5 (Reallocated_Sector_Ct) is at its threshold",
    )


def test_a_sleeping_disk_is_told_from_one_that_cannot_be_opened() -> None:
    """By the status that we ask for, or by the message where the status is smartctl's default."""
    assert smartctl(2, STANDBY).readout is Readout.ASLEEP
    assert (
        parse_smartctl("/dev/sda", 2, "Device is in STANDBY mode, exit(2)").readout
        is Readout.ASLEEP
    )
    gone = {
        "smartctl": {
            "messages": [{"string": "Smartctl open device: /dev/sda failed: No such device"}]
        }
    }
    found = smartctl(2, gone)
    assert (found.readout, "No such device" in found.problem) == (Readout.FAILED, True)
    denied = {
        "smartctl": {
            "messages": [{"string": "Smartctl open device: /dev/sda failed: Permission denied"}]
        }
    }
    assert smartctl(2, denied).readout is Readout.FORBIDDEN


def test_what_a_drive_says_of_itself_can_be_written_down() -> None:
    """Firmware writes odd bytes into serial numbers; status files and logs are UTF-8."""
    odd = {**ATA, "serial_number": "WD\udcff1 ", "model_name": "\ud800"}
    found = smartctl(0, odd)
    assert (found.serial, found.model) == ("WD?1", "?")
    asleep = smartctl(2, {"smartctl": {"messages": [{"string": "odd \udcff"}]}})
    assert asleep.problem.encode()


def test_a_hostile_name_does_not_spoil_the_record_or_the_screen(tmp_path: Path) -> None:
    """Lines, escapes and megabytes in a serial number: the row of a day is found again, so that it
    is written once, and all of the record is read."""
    record = str(tmp_path / "record.csv")
    names = ("S\n2018-01-01,T,M,1,0", "\x1b[2J\x07S", "a\0b", 'S"x,"y', "S" * 3_000_000, "\udcff")
    readings = [smartctl(0, {**ATA, "serial_number": name, "model_name": name}) for name in names]
    for _ in range(2):
        append(record, 736_695, readings)
    bad = BadRows()
    found = recorded(record, bad)
    assert not bad.count
    assert sorted(found) == sorted({reading.serial for reading in readings})
    assert all(len(disk.days) == 1 and disk.serial.isprintable() for disk in found.values())
    rows = Path(record).read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + len(names)


def test_answers_of_any_shape_are_survived() -> None:
    """Text, depth, tables that are lists, counts that are none."""
    for text in (
        "",
        "no json",
        "[" * 100_000,
        "{" * 100_000,
        '{"ata_smart_attributes": []}',
        '{"ata_smart_attributes": {"table": [1, {"id": 5}, {"id": 5, "raw": 7}]}}',
        '{"smartctl": {"messages": [1]}, "smart_status": 1}',
    ):
        parse_smartctl("/dev/sda", 0, text)
        parse_nvme("/dev/nvme0n1", 0, text, identity=text)
    body = json.loads(json.dumps(ATA))
    body["ata_smart_attributes"]["table"][0]["raw"]["value"] = -5
    assert smartctl(0, body).notes == ("smart_5 is -5, no count",)


def test_nvme_wear_is_a_plan_and_media_errors_are_not() -> None:
    """Bit 0x04 with no media error is a note; with errors a flag; spare below threshold a flag."""

    def flags(**change: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = parse_nvme("/dev/nvme0n1", 0, json.dumps({**NVME, **change}))
        assert counter(found, SPEC_FLAG) == bool(found.flags)
        return found.flags, found.notes

    assert flags() == ((), ())
    worn, plan = flags(critical_warning=4, media_errors=0, percent_used=104)
    assert (worn, len(plan)) == ((), 2)
    assert len(flags(critical_warning=4)[0]) == 1
    assert flags(critical_warning=8)[0] == ("it has become read-only",)
    assert flags(avail_spare=9)[0] == ("spare blocks are at 9 %, below 10 %",)
    log = {
        "nvme_smart_health_information_log": {
            "critical_warning": 0,
            "available_spare": 9,
            "available_spare_threshold": 10,
            "percentage_used": 3,
            "media_errors": 7,
        },
        "serial_number": "N1",
    }
    found = smartctl(0, log)
    assert (counter(found, "nvme_media_errors"), len(found.flags)) == (7, 1)


@pytest.mark.parametrize(
    ("warning", "errors", "flags", "notes"),
    [
        (4, 0, 0, 1),  # worn out: a plan
        (4, 7, 1, 0),
        (12, 0, 1, 1),  # worn out and read-only
        (0, 0, 1, 0),  # the verdict alone is given
        (64, 0, 1, 0),  # a reason that hpstore does not know
        (68, 0, 1, 1),
    ],
)
def test_smartctl_and_nvme_cli_agree_on_what_a_critical_warning_means(
    warning: int, errors: int, flags: int, notes: int
) -> None:
    """smartctl says that SMART has failed (status bit 8, `passed` false) for any of its bits: one
    disk was failing by smartctl, and had a note by nvme-cli."""
    log = {"critical_warning": warning, "media_errors": errors, "percentage_used": 60}
    body = {"smart_status": {"passed": False}, "nvme_smart_health_information_log": log}
    found = smartctl(8, body)
    assert (len(found.flags), len(found.notes)) == (flags, notes)
    assert counter(found, SPEC_FLAG) == bool(flags)
    if warning in (4, 12):
        own = parse_nvme("/dev/nvme0n1", 0, json.dumps(log))
        assert (own.flags, own.notes) == (found.flags, found.notes)


class Tools:
    """A directory of executables that alone is in PATH."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        patch.setenv("PATH", str(path))

    def make(self, name: str, body: str) -> None:
        (self.path / name).write_text(f"#!/bin/sh\n{textwrap.dedent(body)}\n")
        (self.path / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


def test_a_real_child_is_asked_for_json_and_not_to_wake_the_disk(
    tools: Tools, tmp_path: Path
) -> None:
    """The arguments that reach smartctl, and its answer with status 64."""
    (tmp_path / "answer").write_text(json.dumps(ATA))
    tools.make(
        "smartctl",
        f'echo "$@" > {tmp_path}/asked; read -r line < {tmp_path}/answer; echo "$line"; exit 64',
    )
    found = read_disk("/dev/sda")
    asked = (tmp_path / "asked").read_text().split()
    assert "--nocheck=standby,3" in asked
    assert asked[-1] == "/dev/sda"
    assert (found.readout, found.serial) == (Readout.OK, "Z30A")
    assert found.notes == ("its error log has entries",)


def test_a_call_that_takes_too_long_is_killed_and_is_not_a_dead_disk(
    tools: Tools, tmp_path: Path
) -> None:
    """smartctl and its own child hang; both are gone afterwards, and no flag is raised."""
    tools.make(
        "smartctl",
        f"""\
        /bin/sleep 600 &
        echo $! $$ > {tmp_path}/pids
        wait""",
    )
    found = read_disk("/dev/sda", timeout_seconds=0.5)
    assert found.readout is Readout.NO_ANSWER
    assert found.flags == ()
    assert "does not say that the disk is dead" in found.problem

    def gone(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    poll(60, lambda: all(map(gone, pids)))  # where processors are busy SIGKILL takes a while


def test_nvme_cli_serves_where_there_is_no_smartctl(tools: Tools) -> None:
    """smart-log and id-ctrl; a SATA disk is then not judged, nor is anything without tools."""
    assert read_disk("/dev/nvme0n1").readout is Readout.NO_TOOL
    tools.make(
        "nvme",
        f"""\
        case "$1" in
        smart-log) echo '{json.dumps(NVME)}';;
        id-ctrl) echo '{{"sn": "N1  ", "mn": "Fast SSD", "tnvmcap": 1000}}';;
        esac""",
    )
    found = read_disk("/dev/nvme0n1")
    assert (found.readout, found.serial, found.model) == (Readout.OK, "N1", "Fast SSD")
    assert counter(found, "nvme_media_errors") == 2
    assert read_disk("/dev/sda").readout is Readout.NO_TOOL
    tools.make("nvme", "echo 'open: Permission denied'; exit 1")
    assert read_disk("/dev/nvme0n1").readout is Readout.FORBIDDEN


def test_diskstats_are_read_by_disk() -> None:
    """Kernels with 14 and with 20 columns; lines that are none."""
    text = (
        "   8       0 sda 100 5 2000 40 10 2 80 7 3 55 66\n"
        " 259 0 nvme0n1 1 0 8 0 2 0 16 0 0 9 9 0 0 0 0 0 0\nbroken\n8 1 sda1 x\n"
    )
    found = parse_diskstats(text)
    assert list(found) == ["sda", "nvme0n1"]
    sda = found["sda"]
    assert (sda.reads, sda.read_bytes, sda.writes, sda.written_bytes) == (
        100,
        2000 * 512,
        10,
        80 * 512,
    )
    assert (sda.in_flight, sda.busy_ms) == (3, 55)


def test_disks_are_listed_without_what_is_none(tmp_path: Path) -> None:
    """Loop devices, arrays, memory and CDs have no SMART."""
    for name in ("sda", "nvme0n1", "loop0", "dm-0", "md127", "zram0", "sr0", "nbd3"):
        os.mkdir(tmp_path / name)
    assert disks(str(tmp_path)) == ["/dev/nvme0n1", "/dev/sda"]
    assert disks(str(tmp_path / "none")) == []
