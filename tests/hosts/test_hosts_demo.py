"""examples/hosts_demo.py: it shows what it says, leaves nothing, and names what is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpstore.testing.host_cluster import cluster_problem
from hpstore.testing.host_network import _namespaces
from tests.fault.common import poll
from tests.thorough import LONG

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


def demonstration(directory: Path, *extra: str, path: str = "") -> subprocess.Popen[str]:
    """With `directory` for temporary files."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples/hosts_demo.py"), *extra],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(directory),
            "COLUMNS": "200",
            "PATH": path or os.environ["PATH"],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def of(process: subprocess.Popen[str]) -> list[Path]:
    return [space for space in _namespaces() if space.name.startswith(f"hpnet-{process.pid}-")]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """One line, before anything is made."""
    process = demonstration(tmp_path, path=str(tmp_path))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("hosts demo: needs ")
    assert len(said.splitlines()) == 1


@pytest.mark.skipif(not LONG, reason="takes two minutes: make test-fault")
def test_every_loss_is_that_of_the_undisturbed_run(tmp_path: Path) -> None:
    """The demonstration ends with 1 where something it shows does not hold."""
    lack = cluster_problem(etcd=True, clocks=True, tls=True)
    if lack is not None:
        pytest.skip(lack)
    process = demonstration(tmp_path, "--pause", "20")
    said, _ = process.communicate(timeout=380)
    assert process.returncode == 0, said[-3000:]
    assert "bit-identical to the undisturbed run" in said
    assert of(process) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hpfault-")] == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.skipif(not LONG, reason="with HPSTORE_LONG_TESTS")
def test_one_that_is_ended_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    """Told to, it cleans up itself; killed, its processes die with it, and the next one does."""
    lack = cluster_problem(etcd=True, clocks=True, tls=True)
    if lack is not None:
        pytest.skip(lack)
    process = demonstration(tmp_path)
    assert process.stdout is not None
    while "pool: 4+2" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(how)
    process.communicate(timeout=60)
    if how is signal.SIGKILL:
        second = demonstration(tmp_path)
        poll(
            60.0, lambda: of(process) == [] and not list(tmp_path.glob(f"hpfault-{process.pid}-*"))
        )
        second.terminate()
        second.communicate(timeout=60)
        assert of(second) == []
    assert of(process) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hpfault-")] == []
