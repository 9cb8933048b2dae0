"""The GPU's kernels, interpreted on the CPU: equal to the codec and to xxhash, byte for byte.

`make test-kernels` installs Triton and runs this. tests/gpu runs the same kernels compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed (200 MB, not in [dev]): make test-kernels",
)


def run(script: str, **environment: str) -> dict[str, Any]:  # Any: what JSON holds
    """What a script of this directory prints, in a process of its own."""
    around = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / script],
        capture_output=True,
        text=True,
        timeout=250,
        env={**around, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What the interpreted kernels did, by check."""
    if tuple(map(int, metadata.version("triton").split(".")[:2])) < (3, 7):
        pytest.skip(
            "Triton's interpreter before 3.7 takes no loaded bound of a loop with numpy 2.4"
        )
    return run("kernels.py", TRITON_INTERPRET="1")


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Machine code for Hopper, for the shapes in use, without a GPU here."""
    sizes = run("compiling.py", TRITON_CACHE_DIR=str(tmp_path))
    assert len(sizes) == 5
    assert min(sizes.values()) > 0


@pytest.mark.parametrize(
    "check",
    [
        "decode-4+2-all",
        "decode-8+3-some",
        "decode-2+1-all",
        "decode-10+4-few",
        "decode-jobs",
        "digests",
        "flips",
        "epoch",
    ],
)
def test_interpreted_kernels_agree_with_the_reference(answers: dict[str, Any], check: str) -> None:
    """Lost columns of a stripe that the codec encoded; blocks that xxhash hashed; flipped bits."""
    assert answers[check] == ""
