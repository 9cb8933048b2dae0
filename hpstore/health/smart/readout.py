"""What disks say of themselves: smartctl and nvme-cli in child processes, /proc/diskstats.

No answer is not a verdict. smartctl's exit status is a mask of bits, most of which tell of the disk
and not of the call. Sleeping disks are not woken. A call that takes too long is killed and reported
as such: the disk may be well.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from hpstore.health.smart.counters import COUNTERS, INDEX, SPEC_FLAG, decode
from hpstore.runtime.subprocesses import output_of

TIMEOUT_SECONDS = 20.0  # a sleeping SATA disk was seen to take 1.6 s
_MAX_OUTPUT_BYTES = 4 << 20
_MOST_CHARACTERS = 128  # ATA and NVMe give 20 of a serial number and 40 of a model
_MOST_SAID = 200  # of an error
_MOST_BYTES = 1 << 62  # of a disk
_ASLEEP_STATUS = 3  # asked for with -n: no other outcome has it
# bits of smartctl's exit status
_BAD_COMMAND, _NOT_OPENED, _COMMAND_FAILED = 1, 2, 4
_FAILING, _PREFAIL, _PREFAIL_PAST, _ERROR_LOG, _SELF_TEST = 8, 16, 32, 64, 128
_NOTES = {
    _PREFAIL_PAST: "an attribute was at its threshold in the past",
    _ERROR_LOG: "its error log has entries",
    _SELF_TEST: "a self-test has failed",
}
_NVME_WARNINGS = {
    1: "spare blocks are below their threshold",
    2: "it is outside its temperature range",
    4: "the drive says that it is no longer reliable",
    8: "it has become read-only",
    16: "its backup of volatile memory has failed",
}
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the disk has

_log = logging.getLogger(__name__)

# Any below: what other programs print; every part is checked by its type
Json = Any


class Readout(StrEnum):
    """How reading went. Only `OK` says something of the disk."""

    OK = "ok"
    ASLEEP = "asleep"  # left so
    NO_ANSWER = "no answer"  # the call took too long and was killed
    FORBIDDEN = "forbidden"  # needs root, or CAP_SYS_RAWIO (ATA) or CAP_SYS_ADMIN (NVMe)
    NO_TOOL = "no tool"
    FAILED = "failed"  # no such device, no SMART, or an answer that cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class SmartReading:
    """One disk, once. `values` in the order of COUNTERS, NaN where absent."""

    device: str
    readout: Readout
    problem: str = ""
    serial: str = ""
    model: str = ""
    capacity_bytes: int = 0
    values: tuple[float, ...] = (math.nan,) * len(COUNTERS)
    flags: tuple[str, ...] = ()  # it fails by its own specification, in words
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """For JSON; counters by name."""
        known = {c.name: v for c, v in zip(COUNTERS, self.values, strict=True) if not math.isnan(v)}
        return {**asdict(self), "values": known}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskActivity:
    """A line of /proc/diskstats: all that anybody did with a disk since it appeared."""

    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    in_flight: int
    busy_ms: int


@dataclass(slots=True)
class _Found:
    """What is gathered from one answer."""

    values: list[float] = field(default_factory=lambda: [math.nan] * len(COUNTERS))
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str, value: Json) -> None:
        if name in INDEX and type(value) in (int, float):
            try:
                self.values[INDEX[name]] = decode(name, float(value))
            except (ValueError, OverflowError):
                self.notes.append(f"{name} is {str(value)[:40]}, no count")


def disks(root: str = "/sys/block") -> list[str]:
    """Paths of this machine's disks, without loop devices, arrays and the like."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    return [f"/dev/{name}" for name in names if not name.startswith(_NOT_DISKS)]


def read_disk(device: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> SmartReading:
    """Ask one disk: smartctl, or nvme-cli where there is no smartctl. A bad disk raises nothing.

    Blocks for at most `timeout_seconds` and a little, for each of two calls; not on a path of I/O.
    """
    if shutil.which("smartctl"):
        return _read_smartctl(device, timeout_seconds)
    if shutil.which("nvme") and "nvme" in os.path.basename(device):
        return _read_nvme(device, timeout_seconds)
    wanted = "smartctl or nvme" if "nvme" in os.path.basename(device) else "smartctl"
    return SmartReading(
        device=device, readout=Readout.NO_TOOL, problem=f"{wanted} is not installed"
    )


def _read_smartctl(device: str, timeout_seconds: float) -> SmartReading:
    command = [
        "smartctl",
        "--json=c",
        "--info",
        "--health",
        "--attributes",
        f"--nocheck=standby,{_ASLEEP_STATUS}",
        device,
    ]
    code, text = _call(command, timeout_seconds)
    if code is None:
        return _no_answer(device, "smartctl", timeout_seconds)
    return parse_smartctl(device, code, text)


def _read_nvme(device: str, timeout_seconds: float) -> SmartReading:
    answers = []
    for what in ("smart-log", "id-ctrl"):
        code, text = _call(["nvme", what, device, "--output-format=json"], timeout_seconds)
        if code is None:
            return _no_answer(device, "nvme", timeout_seconds)
        answers.append((code, text))
    return parse_nvme(device, *answers[0], identity=answers[1][1])


def _no_answer(device: str, tool: str, timeout_seconds: float) -> SmartReading:
    _log.warning("%s gave no answer for %s in %.1f s", tool, device, timeout_seconds)
    return SmartReading(
        device=device,
        readout=Readout.NO_ANSWER,
        problem=f"{tool} gave no answer in {timeout_seconds:g} s; that alone does not say that the "
        "disk is dead",
    )


def _call(command: Sequence[str], timeout_seconds: float) -> tuple[int | None, str]:
    """As children.output_of, in English."""
    return output_of(
        command,
        timeout_seconds,
        max_bytes=_MAX_OUTPUT_BYTES,
        environment={**os.environ, "LC_ALL": "C"},
    )


def parse_smartctl(device: str, status: int, text: str) -> SmartReading:
    """A reading from smartctl's exit status and JSON. Pure."""
    body = _json(text)
    said = " ".join(_messages(body)) or _text(" ".join(text.split()), _MOST_SAID)
    if status == _ASLEEP_STATUS or (status & _NOT_OPENED and _sleeps(said)):
        return SmartReading(device=device, readout=Readout.ASLEEP, problem="it sleeps; not woken")
    if status & (_BAD_COMMAND | _NOT_OPENED) or not body:
        forbidden = "ermission denied" in said or "not permitted" in said
        readout = Readout.FORBIDDEN if forbidden else Readout.FAILED
        return SmartReading(
            device=device, readout=readout, problem=said or f"smartctl ended with {status}"
        )
    found = _Found()
    _take_ata(body, found)
    log = _table(body, "nvme_smart_health_information_log")
    _take_nvme(log, found)
    failing = status & _FAILING or _table(body, "smart_status").get("passed") is False
    if failing and not _says_why(log):  # smartctl calls any warning of NVMe a failure, wear too
        found.flags.insert(0, "SMART says that the disk is failing")
    if status & _PREFAIL and not found.flags:
        found.flags.append("an attribute that foretells failure is at its threshold")
    if status & _COMMAND_FAILED:
        found.notes.append("a SMART command failed")
    found.notes += [words for bit, words in _NOTES.items() if status & bit]
    return _reading(
        device,
        found,
        serial=body.get("serial_number"),
        model=body.get("model_name"),
        capacity=_table(body, "user_capacity").get("bytes"),
    )


def _take_ata(body: Mapping[str, Json], found: _Found) -> None:
    rows = _table(body, "ata_smart_attributes").get("table")
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, Mapping):
            continue
        found.put(f"smart_{row.get('id')}", _table(row, "raw").get("value"))
        if row.get("when_failed") == "now" and _table(row, "flags").get("prefailure") is True:
            found.flags.append(
                f"attribute {_text(row.get('id'))} ({_text(row.get('name'))}) is at its threshold"
            )
    # the raw temperature packs highest and lowest values; the decoded one is what is meant
    found.put("smart_194", _table(body, "temperature").get("current"))
    if not math.isnan(found.values[INDEX["smart_9"]]):
        found.put("smart_9", _table(body, "power_on_time").get("hours"))


def parse_nvme(device: str, status: int, text: str, *, identity: str = "") -> SmartReading:
    """A reading from `nvme smart-log` and `nvme id-ctrl`. Pure."""
    log = _json(text)
    if status or not log:
        said = _text(" ".join(text.split()), _MOST_SAID)
        forbidden = "ermission denied" in said or "not permitted" in said
        return SmartReading(
            device=device,
            readout=Readout.FORBIDDEN if forbidden else Readout.FAILED,
            problem=said or f"nvme ended with {status}",
        )
    names = {
        "avail_spare": "available_spare",
        "spare_thresh": "available_spare_threshold",
        "percent_used": "percentage_used",
    }
    found = _Found()
    _take_nvme({names.get(name, name): value for name, value in log.items()}, found)
    facts = _json(identity)
    return _reading(
        device, found, serial=facts.get("sn"), model=facts.get("mn"), capacity=facts.get("tnvmcap")
    )


def _take_nvme(log: Mapping[str, Json], found: _Found) -> None:
    if not log:
        return
    for name in ("media_errors", "available_spare", "percentage_used"):
        found.put(f"nvme_{name}", log.get(name))
    errors, warning = found.values[INDEX["nvme_media_errors"]], _critical_warning(log)
    for bit, words in _NVME_WARNINGS.items():
        if warning & bit:
            # worn out by its own count, without an error: a plan, not an emergency
            (found.notes if bit == 4 and not errors > 0 else found.flags).append(words)
    spare, least = log.get("available_spare"), log.get("available_spare_threshold")
    if type(spare) is int and type(least) is int and spare < least:
        found.flags.append(f"spare blocks are at {spare} %, below {least} %")
    if found.values[INDEX["nvme_percentage_used"]] >= 100:
        found.notes.append("its rated endurance is used up: plan its replacement")


def _critical_warning(log: Mapping[str, Json]) -> int:
    """The bits of NVMe's critical warning; 0 where there is none."""
    warning = log.get("critical_warning")
    if isinstance(warning, Mapping):  # newer nvme-cli: {"value": 4, ...}
        warning = warning.get("value")
    return warning if type(warning) is int else 0


def _says_why(log: Mapping[str, Json]) -> bool:
    """Whether NVMe's critical warning has reasons alone that _NVME_WARNINGS knows."""
    warning = _critical_warning(log)
    return warning > 0 and not warning & ~sum(_NVME_WARNINGS)


def _reading(
    device: str, found: _Found, *, serial: Json, model: Json, capacity: Json
) -> SmartReading:
    found.put(SPEC_FLAG, int(bool(found.flags)))
    return SmartReading(
        device=device,
        readout=Readout.OK,
        serial=_text(serial),
        model=_text(model),
        capacity_bytes=capacity if type(capacity) is int and 0 <= capacity < _MOST_BYTES else 0,
        values=tuple(found.values),
        flags=tuple(dict.fromkeys(found.flags)),
        notes=tuple(found.notes),
    )


def _text(value: Json, most: int = _MOST_CHARACTERS) -> str:
    """What a drive says of itself, fit for every file and terminal: firmware writes odd bytes.

    Short, as a record with a line of a megabyte could not be read any more; and of one line, as a
    row of it is found by that.
    """
    text = str(value or "").strip()[:most]
    return "".join(c if c.isprintable() else "?" for c in text)


def _json(text: str) -> dict[str, Json]:
    start = text.find("{")  # warnings may stand before it
    try:
        body, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else ({}, 0)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _table(body: Mapping[str, Json], name: str) -> Mapping[str, Json]:
    found = body.get(name)
    return found if isinstance(found, Mapping) else {}


def _messages(body: Mapping[str, Json]) -> list[str]:
    rows = _table(body, "smartctl").get("messages")
    return [
        _text(row.get("string"), _MOST_SAID)
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, Mapping)
    ]


def _sleeps(said: str) -> bool:
    return any(f"{mode} mode" in said for mode in ("STANDBY", "SLEEP")) or "STANDBY (OS)" in said


def parse_diskstats(text: str) -> dict[str, DiskActivity]:
    """Activity by name of disk ("sda", "nvme0n1"). Lines that are none are passed over. Pure."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 14 and all(word.isdecimal() for word in words[3:14]):
            numbers = [int(word) for word in words[3:14]]
            found[words[2]] = DiskActivity(
                reads=numbers[0],
                read_bytes=numbers[2] * _SECTOR_BYTES,
                writes=numbers[4],
                written_bytes=numbers[6] * _SECTOR_BYTES,
                in_flight=numbers[8],
                busy_ms=numbers[9],
            )
    return found


def read_diskstats(path: str = "/proc/diskstats") -> dict[str, DiskActivity]:
    """`parse_diskstats` of this machine; empty where there is no such file."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return parse_diskstats(file.read())
    except OSError:
        return {}
