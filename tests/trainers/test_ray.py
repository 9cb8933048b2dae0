"""Ray Train: checkpoints in a pool, a Checkpointer in its workers, and pyarrow below it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpstore.config import load_config
from hpstore.interop import PoolFileSystem
from tests.integration.ranks import make_pool
from tests.ray_settings import RAY
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]
JOB = """
import os, sys, tempfile
import torch, ray, ray.train
from ray.train.torch import TorchTrainer
import hpstore
from hpstore.checkpoint import Checkpointer

def train(config):
    rank = ray.train.get_context().get_world_rank()
    net = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(net.weight)
    with hpstore.open(config["pool"]) as pool, Checkpointer(pool, "runs/own") as ckpt:
        step = ckpt.restore({"net": net}, strict=False) or 0
        first = ray.train.get_checkpoint()
        assert (first is None) == (step == 0), (first, step)
        if first is not None:
            with first.as_directory() as folder:
                for r in range(2):
                    assert torch.load(f"{folder}/rank-{r}.pt") == {"step": step}
        for step in range(step + 1, step + 3):
            torch.nn.init.constant_(net.weight, step)
            ckpt.save(step, {"net": net, "rank": rank}).result()
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"step": step}, f"{folder}/rank-{rank}.pt")
                found = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=found)

if __name__ == "__main__":
    ray.init(include_dashboard=False, object_store_memory=100 << 20)
    run = ray.train.RunConfig(name="a", storage_path=sys.argv[2])
    scaling = ray.train.ScalingConfig(num_workers=2)
    config = {"pool": os.path.abspath(sys.argv[1])}
    for last in (2, 4):
        keys = {"train_loop_config": config, "scaling_config": scaling, "run_config": run}
        found = TorchTrainer(train, **keys).fit()
        assert found.metrics["step"] == last, found
    print("steps", last)
"""


def test_pyarrow_finds_a_pool_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray's storage does: a directory, an empty file, a file, a list, a removal."""
    fs = pytest.importorskip("pyarrow.fs")
    toml = make_pool(tmp_path)
    (tmp_path / "names.toml").write_text(f'{load_config(toml).name} = "pool.toml"\n')
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    PoolFileSystem.clear_instance_cache()
    name = load_config(toml).name
    files, path = fs.FileSystem.from_uri(f"fsspec+hpstore://{name}/runs")
    assert path == f"{name}/runs"
    files.create_dir(f"{path}/a/checkpoint_1")
    with files.open_output_stream(f"{path}/a/.marker"):
        pass
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "x.bin").write_bytes(b"x" * 70_000)
    (source / "y.bin").write_bytes(b"y")
    fs.copy_files(str(source), f"{path}/a/checkpoint_1", destination_filesystem=files)
    back = tmp_path / "back"
    back.mkdir()
    fs.copy_files(f"{path}/a/checkpoint_1", str(back), source_filesystem=files)
    assert (back / "deep" / "x.bin").read_bytes() == b"x" * 70_000
    found = files.get_file_info(fs.FileSelector(f"{path}/a", recursive=True))
    assert {(info.path.rpartition("/a/")[2], info.is_file) for info in found} == {
        (".marker", True),
        ("checkpoint_1", False),
        ("checkpoint_1/deep", False),
        ("checkpoint_1/deep/x.bin", True),
        ("checkpoint_1/y.bin", True),
    }
    files.delete_dir(f"{path}/a/checkpoint_1")
    assert [info.path for info in files.get_file_info(fs.FileSelector(f"{path}/a"))] == [
        f"{path}/a/.marker"
    ]
    PoolFileSystem.mounts.close()
    PoolFileSystem.clear_instance_cache()


@pytest.mark.timeout(600)
def test_ray_workers_report_to_a_pool_and_use_a_checkpointer(tmp_path: Path) -> None:
    """Two workers, each with a file in the checkpoint; the run of the same name goes on."""
    pytest.importorskip("ray.train.torch", reason="ray[train] is not installed")
    if not LONG:
        pytest.skip("two starts of Ray's workers: HPSTORE_LONG_TESTS=1")
    toml = make_pool(tmp_path)
    name = load_config(toml).name
    (tmp_path / "names.toml").write_text(f'{name} = "pool.toml"\n')
    (tmp_path / "job.py").write_text(JOB)
    environment = {**os.environ, "HPSTORE_POOLS": str(tmp_path / "names.toml")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **RAY}
    with tempfile.TemporaryDirectory(prefix="r") as short:  # the names of Ray's sockets are long
        done = subprocess.run(
            [sys.executable, "job.py", "pool.toml", f"fsspec+hpstore://{name}/ray"],
            cwd=tmp_path,
            env={**environment, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert "steps 4" in done.stdout, done.stderr[-4000:]
