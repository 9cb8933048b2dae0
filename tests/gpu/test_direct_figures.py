"""The stages that `hpstore bench loader --device cuda` runs, by themselves.

`pytest tests/gpu/test_direct_figures.py -s` prints one JSON line a figure and the verdict of each
stage (docs/gpu.md). --basetemp=DIR chooses the drive.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpstore.benchmarks.gpu.gpu_stages import PLAN, GpuStage, Status, run_stage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SLACK_SECONDS = 60  # for the child to be killed, and its files to be removed


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(
            stage,
            marks=pytest.mark.timeout(stage.limit_seconds + SLACK_SECONDS),
            id=f"{stage.number}-{stage.what}".replace(" ", "-"),
        )
        for stage in PLAN
        if stage.run is not None
    ],
)
def test_stage(stage: GpuStage, tmp_path: Path) -> None:
    """It passes, or says why it cannot run here."""
    ended = run_stage(stage, tmp_path)
    for line in (*ended.figures, ended.verdict()):
        print("\n" + json.dumps(line), end="")
    if ended.status is Status.SKIP:
        pytest.skip(ended.reason)
    assert ended.status is Status.PASS, ended.reason
