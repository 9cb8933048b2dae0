"""examples/trainers: each script killed by SIGKILL in the middle of a save goes on bit by bit."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpstore.config import load_config
from tests.integration.ranks import make_pool, open_pool
from tests.ray_settings import RAY
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "trainers"
NEEDS = {
    "ddp": [],
    "fsdp2": [],
    "fsdp2_trainer": ["transformers", "accelerate"],
    "fsdp2_accelerate": ["transformers", "accelerate"],
    "lightning_loop": ["lightning"],
    "fabric_loop": ["lightning"],
    "accelerate_loop": ["accelerate"],
    "huggingface_loop": ["transformers", "accelerate"],
    "peft_loop": ["transformers", "accelerate", "peft"],
    "ignite_loop": ["ignite"],
    "ray_loop": ["ray", "pandas"],
    "torchtitan_loop": ["torchtitan", "tyro"],
}
"""By script: the packages that it needs. The pipeline is examples/pipeline.py, with a test of its
own (tests/trainers/test_pipeline_example.py)."""
CASES = [
    (name, ranks)
    for name in NEEDS
    for ranks in (1, 2)
    if (ranks == 2) == name.startswith(("ddp", "fsdp", "torchtitan"))
]
CASES += [("huggingface_loop", 2), ("peft_loop", 2), ("ray_loop", 2), ("torchtitan_loop", 1)]
QUICK = "ignite_loop"  # the one that every run of the tests has; the others take minutes


def run(folder: Path, name: str, ranks: int, dies_at: int = 0) -> str:
    """Run a script in a folder of its own below the pool's; its last line, or what it died of."""
    command, ray = [sys.executable], name.startswith("ray")
    if (ranks > 1 and not ray) or name.startswith("torchtitan"):
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / "tests" / "fault" / "dying_script.py"), str(dies_at)]
    command += [str(SCRIPTS / f"{name}.py"), "pool.toml"]
    command += ["--workers", str(ranks)] if ray else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"HPSTORE_POOLS": str(folder / "pools.toml"), **RAY}
    with tempfile.TemporaryDirectory(prefix="r") as short:  # the names of Ray's sockets are long
        done = subprocess.run(
            command,
            cwd=folder,
            env={**environment, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=250,
        )
    if dies_at:
        assert done.returncode != 0, done.stdout
        others = ranks > 1 or ray or "torch.distributed.run" in command  # it is a child that dies
        assert others or done.returncode == -9, done.stderr
        return ""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    return lines[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_script_killed_in_a_save_ends_with_the_weights_of_one_never_stopped(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Killed at its third save, that of step 9; two devices are lost besides."""
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if not LONG and name != QUICK:
        pytest.skip("three starts of a trainer: HPSTORE_LONG_TESTS=1")
    ends = []
    for kind in ("straight", "killed"):
        folder = tmp_path / kind
        folder.mkdir()
        toml = make_pool(folder)
        (folder / "pools.toml").write_text(f'{load_config(toml).name} = "pool.toml"\n')
        with open_pool(folder) as pool:
            runpy.run_path(str(SCRIPTS / "parts.py"))["write_rows"](pool)
        if kind == "killed":
            run(folder, name, ranks, dies_at=3)
            for device in ("d1", "d4"):
                shutil.rmtree(folder / device)
        ends.append(run(folder, name, ranks))
    assert ends[0].startswith("step 12 weights ")
    assert ends[0] == ends[1]


def test_every_script_is_short_and_in_the_list() -> None:
    """A launcher that is added is killed, too."""
    found = {path.stem: len(path.read_text().splitlines()) for path in SCRIPTS.glob("*.py")}
    assert found.pop("parts")
    assert found.keys() == NEEDS.keys()
    assert max(found.values()) < 80
