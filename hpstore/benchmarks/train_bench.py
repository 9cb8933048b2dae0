"""Ways of training beside each other on hpstore: drives examples/compare, which a checkout has.

`hpstore bench train --plots DIR` runs the matrix (run_all.py says what it is) into DIR: a JSON file
a row, written when the row is done, performance_report.txt and six plots. What is returned is read
from there, so that a run that is cut returns its finished rows. Where pipelines are among the
methods, what storage costs their steps follows (hpstore/benchmarks/pipeline/pipeline_bench.py).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpstore.benchmarks.harness.measure import Options
from hpstore.errors import ConfigError, HpstoreError

_log = logging.getLogger(__name__)
SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "compare"
FOLDER = Path("train-results")
LAST_LINES = 12  # of what it said, in an error
STOP_SECONDS = 60.0  # until the jobs of a run that is cut have ended
WAIT_BAR = 0.02  # of a step, for data
CHECKPOINT_BAR = 1.03  # time with a checkpoint every few steps, to time with none
PIPELINE, PIPELINES = "gpipe", ("gpipe", "f1b")
# Any below: JSON
Found = dict[str, Any]


class ComparisonFailed(HpstoreError):
    """Rows disagree, a row failed, or nothing was run; what was said last is in the message."""


def bench_train(options: Options) -> dict[str, object]:
    """All methods, storages and checkpointers, and the kill-and-resume pass.

    `options.cases`: names of methods, all unless given; `plots`: the folder (default:
    train-results here), which must hold no results; `quick`: small data, one repeat. Raises
    ConfigError where there is no checkout, ComparisonFailed.
    """
    script = SCRIPTS / "run_all.py"
    if not script.exists():
        raise ConfigError(
            f"{script} is not there: the comparison is run from a checkout of hpstore, not from an "
            "installed package. Nothing was run."
        )
    folder = options.plots or FOLDER
    if list(folder.glob("results_*.json")):
        raise ConfigError(f"{folder} holds results already: give another folder with --plots")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        subprocess.Popen(
            command(script, folder, options), stdout=subprocess.PIPE, text=True
        ) as job,
        ExitStack() as cut,
    ):
        cut.callback(_cut_short, job, folder, options)
        assert job.stdout is not None
        said = []
        for line in job.stdout:
            said.append(line)
            sys.stderr.write(line)
            options.keep(rows_in(folder))
        cut.pop_all()
    if job.returncode:  # its last lines say MISMATCH, FAILED, or what went wrong
        last = "".join(said[-LAST_LINES:]).strip()
        raise ComparisonFailed(
            f"the comparison ended with code {job.returncode}; rows that are done: {folder}\n{last}"
        )
    found = rows_in(folder)
    if not options.cases or set(PIPELINES) & set(options.cases.split(",")):
        options.keep(found)
        found["pipeline"] = measured_pipelines(folder, options)
    return found


def measured_pipelines(folder: Path, options: Options) -> Found:
    """Idle ranks, checkpoints, data and hooks of larger steps, with their bars; also a file and a
    picture in the folder."""
    from hpstore.benchmarks.pipeline.pipeline_bars import told
    from hpstore.benchmarks.pipeline.pipeline_bench import bench_pipeline

    found: Found = bench_pipeline(replace(options, plots=folder))
    (folder / "pipeline.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "pipeline.txt").write_text("\n".join(told(found["bars"])) + "\n")
    return found


def command(script: Path, folder: Path, options: Options) -> list[str]:
    """What to run."""
    words = [sys.executable, str(script), "--out", str(folder), "--repeats", str(options.repeats)]
    words += ["--quick"] if options.quick else []
    words += ["--methods", options.cases] if options.cases else []
    words += ["--directory", str(options.directory)] if options.directory else []
    return [*words, "--device", options.device.partition(":")[0]]


def _cut_short(job: subprocess.Popen[str], folder: Path, options: Options) -> None:
    """End the jobs, and report and keep the rows that are finished."""
    _stop(job)
    subprocess.run(
        [sys.executable, str(SCRIPTS / "analyze.py"), str(folder)],
        stdout=subprocess.DEVNULL,
        check=False,
    )
    options.keep(rows_in(folder))


def _stop(job: subprocess.Popen[str]) -> None:
    """Its jobs with it; killed when that takes too long."""
    job.terminate()
    try:
        job.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _log.warning("the comparison does not end: killed; its jobs may still run")
        job.kill()


def rows_in(folder: Path) -> dict[str, object]:
    """Finished rows, and the verdict where there is one."""
    rows: Found = {}
    for path in sorted(folder.glob("results_*.json")):
        result = json.loads(path.read_text())
        rows[result["row"]] = {
            "processes": result["world_size"],
            **{
                name: result[name]
                for name in ("summary", "storage", "repeats", "resume")
                if name in result
            },
            "digest": result["params_digest"][:12],
        }
    found: Found = {"folder": str(folder), "rows": rows, "ratios": ratios(rows)}
    verdict = folder / "verdict.json"
    return found | (json.loads(verdict.read_text()) if verdict.exists() else {})


def ratios(rows: Mapping[str, Any]) -> Found:
    """Figures with a bar: what storage costs a step of the pipeline."""
    found: Found = {}
    none, ours = rows.get(PIPELINE), rows.get(f"{PIPELINE}.hpstore")
    if none is not None:
        share = _median(none, "data_wait_share")
        found["data_wait_share"] = {
            "median": round(share, 4),
            "bar": WAIT_BAR,
            "met": share <= WAIT_BAR,
        }
    if ours is not None and none is not None:
        for name, row in (("hpstore", ours), ("torch_save", rows.get(f"{PIPELINE}.torch_save"))):
            if row is None:
                continue
            ratio = _median(none, "avg_throughput") / _median(row, "avg_throughput")
            found[f"checkpoints_to_none_{name}"] = {"median": round(ratio, 3)} | (
                {"bar": CHECKPOINT_BAR, "met": ratio <= CHECKPOINT_BAR} if row is ours else {}
            )
    return found


def _median(row: Mapping[str, Any], name: str) -> float:
    """Of the repeats, where there are some."""
    return float(row.get("repeats", {}).get(name, {}).get("median", row["summary"][name]))
