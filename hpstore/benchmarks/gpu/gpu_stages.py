"""The staged plan of a GPU (docs/gpu.md), each stage in a process of its own.

`hpstore bench loader --device cuda` and tests/gpu run it: opening cuFile is known to hang and to
crash, and what one stage does to a process is nothing to the next. A stage that takes four times as
long as it may, or dies, has failed with that reason, and the rest goes on; the figures that it said
before are kept. By hand: `python -m hpstore.benchmarks.gpu.gpu_stages --stage 4 --directory DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch

from hpstore.benchmarks.gpu import gpu_figures
from hpstore.benchmarks.harness.sessions import Found
from hpstore.runtime.subprocesses import output_of

PATIENCE = 4  # a machine that is so many times slower than planned is no failure
_MAX_OUTPUT_BYTES = 1 << 20
_NOISE_LETTERS = 300  # of the end of what a child says beside its figures
_SIGNALS = {one.value: one.name for one in signal.Signals}
NO_CUDA = "no CUDA"


class Status(StrEnum):
    """How a stage ended."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"  # it cannot run here
    ELSEWHERE = "elsewhere"  # something else runs it; the reason says what


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStage:
    """A row of the plan. `run` is None of one that something else runs, `elsewhere`."""

    number: int
    what: str
    plan_seconds: float = 0.0
    run: Callable[[Path], str] | None = None  # given an empty directory; says what it found
    elsewhere: str = ""

    @property
    def limit_seconds(self) -> float:
        """When its process is killed."""
        return PATIENCE * self.plan_seconds


PLAN = (
    GpuStage(number=0, what="machine", plan_seconds=10, run=gpu_figures.machine),
    GpuStage(number=1, what="contract of direct reads", elsewhere="tests/gpu/test_direct.py"),
    GpuStage(number=2, what="raw copies", plan_seconds=60, run=gpu_figures.raw_copies),
    GpuStage(
        number=3,
        what="from files to the GPU",
        elsewhere="the cases of this report; beside a training loop: tests/gpu/test_training.py",
    ),
    GpuStage(number=4, what="decoding", plan_seconds=60, run=gpu_figures.decoding),
    GpuStage(number=5, what="checksums", plan_seconds=30, run=gpu_figures.checksums),
    GpuStage(
        number=6,
        what="cuFile beside pinned memory",
        plan_seconds=90,
        run=gpu_figures.cufile_beside_pinned,
    ),
    GpuStage(number=7, what="torch.cuda.gds", plan_seconds=30, run=gpu_figures.torch_gds),
    GpuStage(number=8, what="staging of checkpoints", elsewhere="tests/gpu/test_checkpoint_gpu.py"),
    GpuStage(
        number=9, what="loader and saves, devices lost", elsewhere="tests/gpu/test_training.py"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutcome:
    """How a stage ended, and the figures that it said until then."""

    stage: GpuStage
    status: Status
    reason: str = ""
    seconds: float = 0.0
    figures: tuple[Found, ...] = ()

    def verdict(self) -> Found:
        """The last line of a stage."""
        return {
            "stage": self.stage.number,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 2),
        }

    def as_dict(self) -> Found:
        """For a report: `met` says whether it did what it must, as of any figure with a bar."""
        bar = {Status.PASS: {"met": True}, Status.FAIL: {"met": False}}.get(self.status, {})
        return {"what": self.stage.what, **self.verdict(), **bar, "figures": list(self.figures)}


# Who knows what runs a stage in a directory: tests have children that hang and die
Command = Callable[[GpuStage, Path], Sequence[str]]


def stage_command(stage: GpuStage, directory: Path) -> list[str]:
    """Return the child's command: this Python, without imports from its working directory."""
    return [
        sys.executable,
        "-P",
        "-m",
        "hpstore.benchmarks.gpu.gpu_stages",
        "--stage",
        str(stage.number),
        "--directory",
        str(directory),
    ]


def run_stage(
    stage: GpuStage, directory: Path, gpu: int = 0, command: Command = stage_command
) -> StageOutcome:
    """One stage on the drive of `directory`, in a child process, which is killed when it takes too
    long; or who runs it. Nothing is left there.
    """
    if stage.run is None:
        return StageOutcome(stage=stage, status=Status.ELSEWHERE, reason=stage.elsewhere)
    began = time.perf_counter()
    # a child that does not die may go on writing there
    with tempfile.TemporaryDirectory(
        prefix="stage-", dir=directory, ignore_cleanup_errors=True
    ) as own:
        code, text = output_of(
            command(stage, Path(own)),
            stage.limit_seconds,
            max_bytes=_MAX_OUTPUT_BYTES,
            environment=environment_for(gpu, os.environ),
            directory=own,
        )
    return replace(outcome(stage, code, text), seconds=time.perf_counter() - began)


def environment_for(gpu: int, around: Mapping[str, str]) -> dict[str, str]:
    """Of a child that uses the `gpu`-th GPU of this process, as its first one."""
    found = {**around, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if gpu:  # the first one is everybody's default
        visible = around.get("CUDA_VISIBLE_DEVICES", "").split(",")
        found["CUDA_VISIBLE_DEVICES"] = visible[gpu] if gpu < len(visible) else str(gpu)
    return found


def outcome(stage: GpuStage, code: int | None, text: str) -> StageOutcome:
    """What the end of a child means: its exit status (None: it was killed) and its output. Pure."""
    said, verdict, noise = parsed(stage, text)

    def failed(reason: str) -> StageOutcome:
        last = said[-1]["what"] if said else "nothing"
        return StageOutcome(
            stage=stage,
            status=Status.FAIL,
            figures=said,
            reason=f"{reason}; the last figure was {last}" + (f": {noise}" if noise else ""),
        )

    if code is None:
        return failed(f"not done within {stage.limit_seconds:g} s: killed")
    if code < 0:
        return failed(f"died by {_SIGNALS.get(-code, f'signal {-code}')}")
    if verdict is None:
        return failed(f"ended with code {code} and said no verdict")
    if code and verdict["status"] != Status.FAIL:
        return failed(f"ended with code {code} after the verdict {verdict['status']}")
    return StageOutcome(
        stage=stage, status=Status(verdict["status"]), reason=str(verdict["reason"]), figures=said
    )


def parsed(stage: GpuStage, text: str) -> tuple[tuple[Found, ...], Found | None, str]:
    """A child's figures, its verdict, and the end of what else it wrote. Pure."""
    said: list[Found] = []
    verdict: Found | None = None
    rest: list[str] = []
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("stage") != stage.number:
            rest.append(line)
        elif "what" in found:
            said.append(found)
        elif found.get("status") in tuple(Status) and "reason" in found:
            verdict = found
        else:
            rest.append(line)
    return tuple(said), verdict, " ".join(" ".join(rest).split())[-_NOISE_LETTERS:]


def perform(stage: GpuStage, directory: Path) -> StageOutcome:
    """Runs a stage in this process. It writes into `directory`, and may leave files there."""
    began = time.perf_counter()
    status, reason = Status.SKIP, NO_CUDA
    if torch.cuda.is_available() and stage.run is not None:
        try:
            status, reason = Status.PASS, stage.run(directory)
        except gpu_figures.NotHere as error:
            status, reason = Status.SKIP, str(error)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the stage's verdict)
            status, reason = Status.FAIL, f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return StageOutcome(
        stage=stage, status=status, reason=reason, seconds=time.perf_counter() - began
    )


def main(words: Sequence[str] | None = None) -> int:
    """The child: one stage, its figures and its verdict as lines of JSON. 1 when it failed."""
    here = {stage.number: stage for stage in PLAN if stage.run is not None}
    parser = argparse.ArgumentParser(description="One stage of the plan of docs/gpu.md.")
    parser.add_argument("--stage", type=int, choices=here, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="on the drive to measure")
    told = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="stage-", dir=told.directory) as own:
        found = perform(here[told.stage], Path(own))
    gpu_figures.write_line(found.verdict())
    return int(found.status is Status.FAIL)


if __name__ == "__main__":
    sys.exit(main())
