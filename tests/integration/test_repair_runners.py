"""A rebuild and a scrub whose keys others repair: in this process, or as tasks of Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

import hpstore
from hpstore.errors import ConfigError, HpstoreError
from hpstore.interop.ray_repairs import RayRepairs, repair_batch
from hpstore.maintenance.repair_runner import Outcome, RepairJob
from hpstore.maintenance.scrub import read_cursor
from hpstore.pool.pool import Pool
from tests.ray_settings import RAY
from tests.thorough import LONG

SIZE = 300_000  # more than four units: six columns
ROOT = Path(__file__).resolve().parents[2]


class Batches:
    """What RayRepairs does without Ray: batches, each by a pool of its own, that may be lost."""

    def __init__(self, pool: Pool, *, lost: int = -1, most_bytes: int = 1 << 30) -> None:
        self._config, self._lost, self._most_bytes = pool.config, lost, most_bytes
        self._pool_id = pool.admin.record.pool_id
        self.tasks = 0

    def __call__(self, keys: Iterable[str], job: RepairJob) -> Iterator[tuple[str, Outcome]]:
        source = iter(keys)
        how = {"verify": job.verify, "include_missing": job.include_missing}
        while batch := tuple(islice(source, 3)):
            while batch:
                self.tasks += 1
                if self.tasks == self._lost:
                    yield from ((key, HpstoreError("its worker died")) for key in batch)
                    break
                done, batch = repair_batch(
                    self._config, batch, how, self._most_bytes, self._pool_id
                )
                yield from done


class Stopping:
    """A pace that ends the work after some objects."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, nbytes: int) -> None:
        pass

    def go_on(self) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Pool]:
    """4+2 over six directories, ten objects; one device is emptied of its columns."""
    devices = [str(tmp_path / f"d{n}") for n in range(6)]
    with hpstore.create(
        devices,
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        unit_bytes=64 << 10,
        allow_root_disk=True,
    ) as pool:
        for n in range(10):
            pool.put(f"o/{n}", bytes([n]) * SIZE)
        for column in (tmp_path / "d3" / "objects").rglob("*"):
            if column.is_file():
                column.unlink()
        yield pool


def _all_there(pool: Pool) -> None:
    for n in range(10):
        assert pool.get(f"o/{n}") == bytes([n]) * SIZE
        assert pool.stat(f"o/{n}").losses_tolerated == 2


def test_what_other_processes_repair_is_counted_as_ones_own(damaged: Pool) -> None:
    """The report of a rebuild by batches has every object once."""
    runner = Batches(damaged)
    report = damaged.admin.rebuild(repairs=runner)
    assert runner.tasks >= 2
    assert report.whole
    assert report.objects == report.rebuilt == report.columns_written == 10
    _all_there(damaged)


def test_a_batch_that_is_lost_is_told_and_found_again(damaged: Pool) -> None:
    """Keys of a worker that died are failed, not lost; the next rebuild does them."""
    report = damaged.admin.rebuild(repairs=Batches(damaged, lost=1))
    assert len(report.failed) == 3
    assert not report.unreadable
    assert not report.whole
    assert set(report.failed.values()) == {"its worker died"}
    again = damaged.admin.rebuild(repairs=Batches(damaged))
    assert again.whole
    assert again.rebuilt == 3
    assert again.objects == 10
    _all_there(damaged)


def test_a_worker_that_finds_another_pool_under_the_urls_repairs_nothing(
    damaged: Pool, tmp_path: Path
) -> None:
    """To a pool of the worker's own host the keys are absent: the rebuild was whole by that."""
    paths = [str(tmp_path / f"e{n}") for n in range(6)]
    with hpstore.create(
        paths, data=4, parity=2, config=tmp_path / "other.toml", allow_root_disk=True
    ) as other:
        config, pool_id = other.config, damaged.admin.record.pool_id
    with pytest.raises(ConfigError, match="not " + pool_id[:8]):
        repair_batch(config, ("o/0",), {}, 1 << 30, pool_id)
    assert damaged.stat("o/0").losses_tolerated == 1


def test_a_task_ends_after_its_bytes_and_the_rest_goes_on(damaged: Pool) -> None:
    """A batch of three objects with a limit of one byte becomes three tasks."""
    runner = Batches(damaged, most_bytes=1)
    report = damaged.admin.scrub(repairs=runner)
    assert report.whole
    assert report.objects == 10
    assert runner.tasks == 10
    _all_there(damaged)


def test_a_scrub_that_is_stopped_goes_on_behind_what_was_reported(damaged: Pool) -> None:
    """The position is that of the last key in order that a worker has reported."""
    first = damaged.admin.scrub(repairs=Batches(damaged), pace=Stopping(4))
    assert first.stopped
    assert first.objects == 4
    assert read_cursor(damaged.admin._store)[1] == "o/3"
    rest = damaged.admin.scrub(repairs=Batches(damaged))
    assert rest.objects == 6
    assert rest.whole
    assert not rest.stopped
    assert read_cursor(damaged.admin._store)[1] == ""
    _all_there(damaged)


JOB = """
import os, signal, sys
import hpstore, ray
from hpstore.interop import ray_repairs
from ray.cluster_utils import Cluster

memory = 80 << 20
cluster = Cluster()
for domain in ("a", "b"):
    here = {"hpstore-host-" + domain: 1}
    cluster.add_node(num_cpus=2, resources=here, object_store_memory=memory)
ray.init(address=cluster.address, log_to_driver=False)
with hpstore.open(sys.argv[1]) as pool:
    repairs = ray_repairs.RayRepairs(pool, batch_objects=2)
    if sys.argv[2] == "kill":
        once = sys.argv[3]

        def dies(*arguments):
            if not os.path.exists(once):
                open(once, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*arguments)

        whole, ray_repairs.repair_batch = ray_repairs.repair_batch, dies
    report = pool.admin.rebuild(repairs=repairs)
    print("nodes", sorted(ray_repairs._nodes_by_domain()))
    print("whole", report.whole, report.objects, report.rebuilt, report.failed)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["straight", "kill"])
def test_a_ray_cluster_rebuilds_and_a_worker_may_die(
    damaged: Pool, tmp_path: Path, how: str
) -> None:
    """Two nodes; a worker killed in its first task: the task is done again by another."""
    pytest.importorskip("ray", reason="ray is not installed")
    if not LONG:
        pytest.skip("starts of Ray: HPSTORE_LONG_TESTS=1")
    (tmp_path / "job.py").write_text(JOB)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **RAY}
    with tempfile.TemporaryDirectory(prefix="r") as short:  # the names of Ray's sockets are long
        done = subprocess.run(
            [sys.executable, "job.py", str(tmp_path / "pool.toml"), how, str(tmp_path / "once")],
            cwd=tmp_path,
            env={**environment, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert "nodes ['a', 'b']" in done.stdout, done.stderr[-3000:]
    assert "whole True 10 10 {}" in done.stdout, done.stdout + done.stderr[-3000:]
    assert (tmp_path / "once").exists() == (how == "kill")
    _all_there(damaged)


def test_without_ray_it_says_what_to_install(
    damaged: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an ImportError out of the middle."""
    monkeypatch.setattr("hpstore.interop.ray_cluster.ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpstore\[ray\]'"):
        RayRepairs(damaged)
