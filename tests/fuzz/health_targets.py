"""Parsers of what disks and their makers report, and of forecast models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hpstore.health.detect.learnt_times import LearntTimes
from hpstore.health.detect.telemetry import CELLS
from hpstore.health.forecast.drive_stats import BadRows, read_rows
from hpstore.health.forecast.forecast_model import _digest, model_from_json
from hpstore.health.smart.readout import parse_diskstats, parse_nvme, parse_smartctl
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import record, scratch, unsealed


def take_learnt(data: bytes) -> None:
    LearntTimes.decode(data, cells=CELLS, where="fuzz")


def learnt_seeds() -> list[bytes]:
    return [
        LearntTimes().encode(),
        LearntTimes(cells={"a" * 32: {0: 1e-3, 17: 0.5}, "b" * 32: {CELLS - 1: 2.0}}).encode(),
    ]


def take_smart(data: bytes) -> None:
    text = data.decode(errors="replace")
    for status in (0, 2, 255):
        parse_smartctl("/dev/sda", status, text)
        parse_nvme("/dev/nvme0", status, text, identity=text)
    parse_diskstats(text)


SMART = json.dumps(
    {
        "serial_number": "S",
        "model_name": "M",
        "user_capacity": {"bytes": 4000},
        "smart_status": {"passed": True},
        "temperature": {"current": 30},
        "power_on_time": {"hours": 5},
        "smartctl": {"messages": [{"string": "hm"}]},
        "ata_smart_attributes": {
            "table": [
                {
                    "id": 5,
                    "name": "x",
                    "when_failed": "now",
                    "flags": {"prefailure": True},
                    "raw": {"value": 3},
                }
            ]
        },
        "nvme_smart_health_information_log": {
            "media_errors": 0,
            "available_spare": 99,
            "critical_warning": 4,
            "percentage_used": 120,
        },
    }
).encode()


DISKSTATS = b"   8       0 sda 1 2 3 4 5 6 7 8 9 10 11 0 0\n"


def take_drive_stats(data: bytes) -> None:
    kind, body = data[:1], data[1:]
    ending = {b"z": "zip", b"g": "csv.gz", b"x": "csv.xz"}.get(kind, "csv")
    for _, _row in zip(
        range(1000), read_rows(str(scratch(f"d.{ending}", body)), bad=BadRows()), strict=False
    ):
        pass


def drive_stats_seeds() -> list[bytes]:
    import gzip
    import io
    import lzma
    import zipfile

    text = (
        b"date,serial_number,model,capacity_bytes,failure,smart_5_raw,smart_187_raw,"
        b"smart_197_raw,smart_198_raw,smart_9_raw\n2024-01-01,S1,ST4000,400,0,0,1,2,3,400\n"
        b"2024-01-02,S1,ST4000,400,1,0,1,2,3,424\n"
    )
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("a.csv", text)
    return [
        b"c" + text,
        b"g" + gzip.compress(text, mtime=0),
        b"x" + lzma.compress(text),
        b"z" + raw.getvalue(),
    ]


MODEL = Path(__file__).parent / "model.json"


def model_seeds() -> list[bytes]:
    return [MODEL.read_bytes()]


def model_sealed(parts: Sequence[bytes]) -> bytes:
    body = json.loads(parts[0])
    return json.dumps({**body, "digest": _digest(body)}).encode()


HEALTH_TARGETS = [
    Target(name="smart", run=take_smart, seeds=lambda: [SMART, DISKSTATS]),
    Target(name="drive-stats", run=take_drive_stats, seeds=drive_stats_seeds),
    record("learnt-times", learnt_seeds, take_learnt),
    Target(
        name="forecast-model",
        run=model_from_json,
        seeds=model_seeds,
        take_apart=unsealed,
        put_together=model_sealed,
    ),
]
