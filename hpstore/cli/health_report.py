"""What `health report` shows: of files, or of this machine's disks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import hpstore
from hpstore.cli.output import emit_json, table, write_err, write_out
from hpstore.errors import ForecastError
from hpstore.health.forecast import disk_record as records
from hpstore.health.forecast.drive_histories import DriveHistory, Gathered
from hpstore.health.forecast.drive_stats import BadRows
from hpstore.health.forecast.forecaster import FailureForecaster, Forecast, Risk
from hpstore.health.forecast.this_machine import judge_reading, recorded
from hpstore.health.smart.readout import Readout, disks, read_disk, read_diskstats

_ORDER = list(Risk)


def agents_record(pool: str) -> Path:
    """Where the agent of a pool keeps what it has seen of this machine's disks.

    Raises HpstoreError where the pool does not open, ForecastError where there is no such place.
    """
    from hpstore.agent.smart_watch import RECORD_FILE

    with hpstore.open(pool, read_only=True) as opened:
        directory = opened.admin.state_directory
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ForecastError(f"cannot make {directory}: {error.strerror or error}") from error
    return directory / RECORD_FILE


def report_files(
    forecaster: FailureForecaster,
    gathered: Gathered,
    bad: BadRows,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    """Drives of files on their last day; those that have failed are only counted."""
    living = [h for h in gathered.histories if h.failed_day is None]
    found = [forecaster.judge(h) for h in living]
    found.sort(key=lambda f: (-_ORDER.index(f.risk), -(f.rule_score or 0.0), f.serial))
    failed = len(gathered.histories) - len(living)
    if as_json:
        emit_json(
            {"drives": [f.as_dict() for f in found], "failed": failed, "bad_rows": bad.as_dict()}
        )
        return
    shown = [f for f in found if everything or f.risk is not Risk.NONE]
    if shown:
        _show([(f.serial, f) for f in shown])
    counts = Counter(f.risk for f in found)
    said = ", ".join(f"{counts[risk]} {risk}" for risk in reversed(_ORDER) if counts[risk])
    write_out(f"{len(found)} drives: {said or 'none'}; {failed} have failed before\n")
    _show_refusals(found)


def report_machine(
    forecaster: FailureForecaster, record: Path | None, timeout_seconds: float, *, as_json: bool
) -> None:
    """The disks of this machine, now."""
    today = datetime.now(UTC).date().toordinal()
    readings = [read_disk(device, timeout_seconds=timeout_seconds) for device in disks()]
    answered = [r for r in readings if r.readout is Readout.OK and r.serial]
    before: dict[str, DriveHistory] = {}
    if record is not None:
        bad = BadRows()
        before = recorded(record, bad)
        for line in bad.named:
            write_err(f"LEFT OUT {line}\n")
        records.append(str(record), today, answered)
    activity = read_diskstats()
    judged = [(r, judge_reading(forecaster, r, before.get(r.serial), today)) for r in readings]
    if as_json:
        emit_json(
            [
                {
                    **r.as_dict(),
                    "forecast": None if f is None else f.as_dict(),
                    "activity": asdict(activity[name])
                    if (name := os.path.basename(r.device)) in activity
                    else None,
                }
                for r, f in judged
            ]
        )
        return
    if not readings:
        write_out("no disk in /sys/block\n")
        return
    if answered:
        _show([(r.device, f) for r, f in judged])
    for reading, _ in judged:
        if reading.readout is not Readout.OK:
            write_out(f"{reading.device}: {reading.readout}: {reading.problem}\n")
        for note in reading.notes:
            write_out(f"{reading.device}: note: {note}\n")
    _show_refusals([f for _, f in judged if f is not None])


def _show(rows: Sequence[tuple[str, Forecast | None]]) -> None:
    table(
        "",
        ("drive", "family", "day", "risk", "judged by", "score", "probability", "because"),
        [
            (
                name,
                f.family,
                f.day,
                f.risk,
                f.judged_by,
                _score(f),
                "" if f.probability is None else f"{f.probability:.2g}",
                "; ".join(f.reasons),
            )
            for name, f in rows
            if f is not None
        ],
    )


def _score(found: Forecast) -> str:
    scores = {"sum": found.error_sum, "rule": found.rule_score, "model": found.model_score}
    score = scores[found.judged_by]
    return "unknown" if score is None else f"{score:.1f}{' (alarm)' if found.alarm else ''}"


def _show_refusals(found: Sequence[Forecast]) -> None:
    for reason, count in Counter(f.refusal for f in found if f.refusal).most_common(8):
        write_out(f"no forecast for {count} drives: {reason}\n")
