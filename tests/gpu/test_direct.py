"""GPUDirect where there is a GPU: detection, the engine's contract over cuFile, whole objects.

Stages 1, 4 and 5 of the plan in docs/gpu.md: what must be equal. `pytest tests/gpu -s` shows the
verdict; --basetemp=DIR chooses the filesystem. Where cuFile is off, the tests that need it are
skipped with its reason. test_direct_figures.py measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hpstore
from hpstore.format.geometry import block_span
from hpstore.loaders.gpu.direct.cufile import CuFile
from hpstore.loaders.gpu.direct.cufile_queue import DirectEngine
from hpstore.loaders.gpu.direct.detect import Detection, Route, process_detector
from hpstore.loaders.gpu.direct.device_columns import DirectColumn
from hpstore.loaders.gpu.direct.gpu_checksums import verify
from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs, decode
from hpstore.testing import pattern
from hpstore.testing.direct_contract import DirectContract
from hpstore.units import KIB, MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KERNELS = Path(__file__).parents[1] / "integration" / "kernels.py"


@pytest.fixture
def verdict(tmp_path: Path) -> Detection:
    """What detection says of the test's own filesystem."""
    return process_detector().detect(str(tmp_path))


@pytest.fixture
def cufile(verdict: Detection) -> Detection:
    """The verdict, where cuFile may be opened in this process."""
    if verdict.route is Route.OFF:
        pytest.skip(f"cuFile is off here: {verdict.reason}")
    return verdict


def test_detection_comes_to_a_verdict(verdict: Detection) -> None:
    """Any verdict is right for some machine; it has a reason, and the process lives."""
    print("\n" + json.dumps(verdict.as_dict(), indent=1))
    assert verdict.reason
    assert verdict.direct == (verdict.route not in (Route.OFF, Route.COMPAT))
    torch.ones(1, device="cuda").sum().item()


@pytest.mark.usefixtures("cufile")
class TestCuFile(DirectContract):
    """The same contract as the stand-in of CI."""

    def make_engine(self) -> DirectEngine:
        return DirectEngine(CuFile(), threads=4)


@pytest.mark.usefixtures("cufile")
def test_no_log_is_left_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libcufile likes to; the environment is as before."""
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    DirectEngine(CuFile(), threads=1).close()
    assert list(tmp_path.glob("*.log")) == []
    assert dict(os.environ) == before


def test_compiled_kernels_agree_with_the_reference() -> None:
    """The checks that CI runs interpreted: the codec's bytes, xxhash's digests, flipped bits."""
    pytest.importorskip("triton")
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, KERNELS, "cuda"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    assert len(answers) == 8
    assert set(answers.values()) == {""}


@pytest.mark.usefixtures("cufile")
def test_an_object_with_two_lost_columns_arrives_whole(tmp_path: Path) -> None:
    """Four of six columns straight to the GPU, checked there, the two lost ones decoded there."""
    pytest.importorskip("triton")
    data = pattern(33 * MIB + 777)
    devices = [tmp_path / f"d{i}" for i in range(6)]
    with hpstore.create(devices, data=4, parity=2, config=tmp_path / "pool.toml") as pool:
        pool.put("a", data)
    paths = [path for device in devices for path in (device / "objects").rglob("@*")]
    paths.sort(key=lambda path: path.name.rpartition(".")[0])
    have, want = (0, 2, 4, 5), (1, 3)
    with DirectEngine(CuFile()) as engine:
        columns = {i: DirectColumn(engine, str(paths[i])) for i in have}
        geometry = columns[0].header.geometry
        size = geometry.column_bytes
        with engine.allocate(6 * size) as arena:
            reads = []
            for i, column in columns.items():
                for start in range(0, size, MIB):
                    end = min(start + MIB, size)
                    reads.append(column.read(start, end, arena, i * size + start))
            for read in reads:
                read.result()
            for i, column in columns.items():
                span = block_span(0, size, size)
                assert bool(verify(arena.tensor, column.blocks(*span, i * size)).all())
            jobs = DecodeJobs(
                data=4,
                parity=2,
                have=have,
                want=want,
                length=size,
                sources=np.array([[i * size for i in have]]),
                targets=np.array([[i * size for i in want]]),
            )
            decode(arena.tensor, jobs)
            found = arena.tensor.cpu().numpy()
            arena.tensor[2 * size + 100] ^= 1
            good = verify(arena.tensor, columns[2].blocks(0, 64 * KIB, 2 * size))
            assert not bool(good.any())
        for column in columns.values():
            column.close()
    for stripe in range(geometry.stripe_count):
        unit, at = geometry.unit_bytes_of(stripe), geometry.column_offset_of(stripe)
        whole = np.concatenate([found[i * size + at : i * size + at + unit] for i in range(4)])
        wanted = data[stripe * geometry.stripe_bytes :][: 4 * unit]
        assert (whole[: len(wanted)] == wanted).all()
