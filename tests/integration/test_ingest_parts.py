"""ingest_parts: several workers write one dataset; any of them, or the caller, may die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hpstore
from hpstore.errors import ConfigError, HpstoreError, IngestError, VersionConflict
from hpstore.interop import ray_cluster
from hpstore.loaders import (
    Dataset,
    Field,
    PartsProgress,
    PartsReport,
    ingest,
    ingest_parts,
    remove_orphans,
    verify_dataset,
    written_parts,
)
from hpstore.loaders.ingestion import write_part as write_part_module
from hpstore.loaders.ingestion.ingest_parts import Outcome
from hpstore.loaders.ingestion.ray_parts import RayParts, part_task
from hpstore.loaders.ingestion.write_part import PartJob, write_part
from hpstore.pool.pool import Pool
from tests.integration.cli_cases import PoolCommands
from tests.integration.ingest_cases import make_pool
from tests.ray_settings import RAY
from tests.thorough import LONG

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def tables(folder: Path, count: int = 5, rows: int = 30) -> list[str]:
    """Parquet files with the numbers 0, 1, 2 ... over all of them, and a text."""
    folder.mkdir(exist_ok=True, parents=True)
    made = []
    for number in range(count):
        x = np.arange(number * rows, (number + 1) * rows)
        table = pa.table({"x": x, "text": [f"row {n}" for n in x]})
        made.append(str(folder / f"{number:03d}.parquet"))
        pq.write_table(table, made[-1], row_group_size=7)
    return made


def numbers(pool: Pool, name: str = "train") -> list[int]:
    data = Dataset(pool, name)
    found = [data[n] for n in range(len(data))]
    assert [sample["text"] for sample in found] == [f"row {sample['x']}" for sample in found]
    return [int(sample["x"]) for sample in found]


class Several:
    """Workers with pools of their own. `dies` is asked before and after each part."""

    def __init__(self, pool: Pool, dies: Callable[[PartJob, str], bool] | None = None) -> None:
        self._pool, self._dies = pool, dies or (lambda job, when: False)
        self.jobs: list[PartJob] = []

    def __call__(self, jobs: Iterable[PartJob]) -> Iterator[tuple[PartJob, Outcome]]:
        self.jobs = list(jobs)
        with ThreadPoolExecutor(3) as threads:
            yield from zip(self.jobs, threads.map(self._one, self.jobs), strict=True)

    def _one(self, job: PartJob) -> Outcome:
        if self._dies(job, "before"):
            return HpstoreError("its worker died")
        made = part_task(self._pool.config, self._pool.admin.record.pool_id, job)
        return HpstoreError("its worker died") if self._dies(job, "after") else made


@pytest.mark.parametrize("parts", [None, 1, 2, 5])
def test_several_workers_write_what_one_writes(
    pool: Pool, tmp_path: Path, parts: int | None
) -> None:
    """The same samples in the same order with the same fingerprint, in so many parts."""
    files = tables(tmp_path / "in")
    seen: list[PartsProgress] = []
    report = ingest_parts(
        pool, "train", files, parts=parts, runner=Several(pool), progress=seen.append
    )
    assert numbers(pool) == list(range(150))
    assert (report.samples, report.parts, report.resumed, report.sources) == (
        150,
        parts or 5,
        0,
        5,
    )
    assert (seen[-1].done, seen[-1].rows) == (parts or 5, 150)
    alone = ingest_parts(pool, "alone", str(tmp_path / "in"), parts=parts)
    assert alone.fingerprint == report.fingerprint
    assert verify_dataset(pool, "train").clean
    assert not written_parts(pool, "train")
    assert remove_orphans(pool, "train") == 0
    lineage = Dataset(pool, "train").metadata["ingest"]
    assert (lineage["sources"], lineage["order"]) == (5, {"kind": "sequential"})


def test_what_died_workers_left_is_done_by_the_next_call(pool: Pool, tmp_path: Path) -> None:
    """One before its part, one after it: the second part is not written again."""
    files = tables(tmp_path / "in")
    dying = {(1, "before"), (3, "after")}
    runner = Several(pool, lambda job, when: (job.part[0], when) in dying)
    with pytest.raises(IngestError, match=r"3 of 5 parts .* part 1 was not written: its worker"):
        ingest_parts(pool, "train", files, runner=runner)
    assert not pool.exists("data/train/manifest")
    report = ingest_parts(pool, "train", files, runner=Several(pool))
    assert report.resumed == 4
    assert numbers(pool) == list(range(150))


def test_a_call_killed_after_it_had_published_does_no_harm(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes of its parts are still there: the next call, which replaces, writes new parts."""
    files = tables(tmp_path / "in", 2)
    kept = {}
    delete = Pool.delete

    def keep(this: Pool, key: str, **options: Any) -> None:
        if "/parts/" in key:
            kept[key] = True
            raise HpstoreError("killed")
        delete(this, key, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "delete", keep)
        ingest_parts(pool, "train", files)
    assert len(kept) == len(written_parts(pool, "train")) == 2
    with pytest.raises(VersionConflict):
        ingest_parts(pool, "train", files)
    report = ingest_parts(pool, "train", files, parts=1, overwrite=True)  # another count
    assert report.resumed == 0
    assert numbers(pool) == list(range(60))
    assert verify_dataset(pool, "train").clean
    assert remove_orphans(pool, "train") == 0


def test_a_file_that_changed_is_not_mixed_with_what_is_stored(pool: Pool, tmp_path: Path) -> None:
    """Nor are other files in its place: refused, then all is written again when that is asked."""
    files = tables(tmp_path / "in")
    with pytest.raises(IngestError):
        ingest_parts(pool, "train", files, runner=Several(pool, lambda job, when: job.part[0] == 4))
    with pytest.raises(IngestError, match=r"part 0 of 5 .* of other files .* resume=False"):
        ingest_parts(pool, "train", files[::-1])
    pq.write_table(pa.table({"x": [7], "text": ["row 7"]}), files[0])
    with pytest.raises(IngestError, match=r"part 0 of 5 .* a file has changed"):
        ingest_parts(pool, "train", files)
    assert len(written_parts(pool, "train")) == 4
    report = ingest_parts(pool, "train", files, resume=False)
    assert report.resumed == 0
    assert numbers(pool) == [7, *range(30, 150)]
    assert remove_orphans(pool, "train") == 0


def test_of_two_calls_with_other_files_one_is_refused(pool: Pool, tmp_path: Path) -> None:
    """Both at once, and one that begins again in the middle of the other: no mixture of both."""
    files = tables(tmp_path / "in")

    def begins_again(jobs: Iterable[PartJob]) -> Iterator[tuple[PartJob, Outcome]]:
        for job in jobs:
            yield job, write_part(pool, job)
            if job.part[0] == 2:
                other = Several(pool, lambda job, when: job.part[0] != 0)
                with pytest.raises(IngestError):
                    ingest_parts(pool, "train", files[::-1], runner=other, resume=False)

    with pytest.raises(IngestError, match="part 0 is gone or another one"):
        ingest_parts(pool, "train", files, runner=begins_again)
    assert not pool.exists("data/train/manifest")
    ingest_parts(pool, "train", files, resume=False)
    assert numbers(pool) == list(range(150))


def test_two_workers_with_one_part_are_one(pool: Pool, tmp_path: Path) -> None:
    """Both write it at once: one is published, the other finds it there and takes its own away."""
    files = tables(tmp_path / "in", 1)
    runner = Several(pool, lambda job, when: True)
    with pytest.raises(IngestError):
        ingest_parts(pool, "train", files, runner=runner)
    job, both = runner.jobs[0], threading.Barrier(2)

    def at_once(_: int) -> Any:
        with hpstore.open(str(tmp_path / "pool.toml")) as own:
            both.wait()
            return write_part(own, job)

    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(at_once, range(2)))
    assert [report.rows for report in made] == [30, 30]
    assert ingest_parts(pool, "train", files).resumed == 1
    assert numbers(pool) == list(range(30))
    assert remove_orphans(pool, "train") == 0


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"x": [1], "text": ["row 1"], "y": [2]}, "its 'y' is .*the first source not there"),
        ({"x": [1]}, "has no 'text', which the first source has"),
        ({"x": [1.5], "text": ["row 1"]}, "its 'x' is .*float64"),
        ({"x": [None, 1], "text": ["a", "b"]}, "its 'x' is "),
    ],
)
def test_a_file_with_other_fields_is_refused_by_name(
    pool: Pool, tmp_path: Path, table: dict[str, Any], said: str
) -> None:
    """Nothing is dropped or converted; nothing is visible, and no part behind it is begun."""
    files = tables(tmp_path / "in", 3)
    pq.write_table(pa.table(table), files[1])
    with pytest.raises(IngestError, match=f"part 1 was not written: .*001.parquet.*{said}"):
        ingest_parts(pool, "train", files)
    assert not pool.exists("data/train/manifest")
    assert list(written_parts(pool, "train")) == [(0, 3)]


def test_a_folder_is_the_table_that_ingest_takes(pool: Pool, tmp_path: Path) -> None:
    """Without files beside it; with nulls of any file. Folders that hold a column are refused."""
    folder = tmp_path / "in"
    files = tables(folder, 2)
    pq.write_table(pa.table({"x": [None, 1], "text": ["a", "b"]}), files[1])
    (folder / "cache-0123456789abcdef.arrow").write_bytes(b"what map() of datasets leaves")
    (folder / ".part.parquet").write_bytes(b"what is being written")
    made = ingest_parts(pool, "train", str(folder))
    assert (made.samples, made.sources) == (32, 2)
    assert [Dataset(pool, "train")[n]["x"] for n in (0, 30, 31)] == [0, None, 1]
    divided = tmp_path / "divided"
    for day in ("1", "2"):
        tables(divided / f"day={day}", 1)
    with pytest.raises(ConfigError, match=r"is divided by day, .* ingest"):
        ingest_parts(pool, "days", str(divided))


def test_a_file_that_is_gone_ends_its_part(pool: Pool, tmp_path: Path) -> None:
    """Like any other error; the parts that are stored are kept."""
    files = tables(tmp_path / "in", 3)
    Path(files[1]).unlink()
    with pytest.raises(IngestError, match=r"1 of 3 parts .* part 1 was not written: .*001.parquet"):
        ingest_parts(pool, "train", files)
    assert list(written_parts(pool, "train")) == [(0, 3)]


def test_a_file_that_changes_while_it_is_read_ends_its_part(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples may be of both."""
    files = tables(tmp_path / "in", 2)
    copied = write_part_module._copy

    def changed(source: Any, job: PartJob, writer: Any) -> None:
        copied(source, job, writer)
        if job.part[0] == 1:
            tables(tmp_path / "in", 2, rows=31)

    monkeypatch.setattr(write_part_module, "_copy", changed)
    with pytest.raises(IngestError, match=r"001.parquet was changed while it was read"):
        ingest_parts(pool, "train", files)
    assert list(written_parts(pool, "train")) == [(0, 2)]


def test_given_fields_are_taken_of_every_file(pool: Pool, tmp_path: Path) -> None:
    """By name, or with types where files hold None."""
    files = tables(tmp_path / "in", 2)
    pq.write_table(pa.table({"x": [None, 1], "more": [1, 2]}), files[1])
    with pytest.raises(IngestError, match="its 'x' is "):
        ingest_parts(pool, "train", files, fields=["x"])
    optional = {"x": Field("int64", (), optional=True)}
    made = ingest_parts(pool, "train", files, fields=optional, resume=False)
    assert made.samples == 32
    data = Dataset(pool, "train")
    assert [data[n]["x"] for n in (0, 30, 31)] == [0, None, 1]


def test_files_of_lines_and_a_bad_record(pool: Pool, tmp_path: Path) -> None:
    """JSON Lines and CSV by pattern; a bad line ends its part and is named."""
    for number in range(3):
        lines = [json.dumps({"x": number * 4 + n, "t": "a"}) for n in range(4)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
        (tmp_path / f"{number}.csv").write_text("x\n" + "\n".join(map(str, range(4))) + "\n")
    made = ingest_parts(pool, "lines", str(tmp_path / "*.jsonl"), parts=2)
    assert (made.samples, made.parts) == (12, 2)
    assert [int(Dataset(pool, "lines")[n]["x"]) for n in range(12)] == list(range(12))
    assert ingest_parts(pool, "table", f"{tmp_path}/{{0..2}}.csv").samples == 12
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"x": 1}\n')
    with pytest.raises(IngestError, match=r"1\.jsonl.*'t' is missing"):
        ingest_parts(pool, "bad", [tmp_path / "0.jsonl", tmp_path / "1.jsonl"])


def test_samples_are_mixed_within_parts(pool: Pool, tmp_path: Path) -> None:
    """By the seed; each part has its own samples."""
    files = tables(tmp_path / "in", 2)
    ingest_parts(pool, "train", files, shuffle=True, seed=3)
    found = numbers(pool)
    assert found != sorted(found)
    assert sorted(found[:30]) == list(range(30))
    assert sorted(found) == list(range(60))
    assert Dataset(pool, "train").metadata["ingest"]["order"] == {"kind": "parts", "seed": 3}


def test_arguments_that_cannot_be_are_said_before_anything(pool: Pool, tmp_path: Path) -> None:
    """Also parts of another count, of which an unfinished call has some."""
    files = tables(tmp_path / "in")
    for wrong, said in (
        ({"sources": []}, "is empty"),
        ({"sources": files, "parts": 6}, "parts=6 of 5 sources"),
        ({"sources": files, "parts": 0}, "parts"),
        ({"sources": [3]}, "sources is a list"),
        ({"sources": str(tmp_path / "*.npy")}, "format|no file"),
        ({"sources": files, "fields": ["z"]}, "has no 'z'"),
        ({"sources": files, "fields": "x"}, "list"),
    ):
        with pytest.raises(ConfigError, match=said):
            ingest_parts(pool, "train", **wrong)
    runner = Several(pool, lambda job, when: job.part[0] == 1)
    with pytest.raises(IngestError):
        ingest_parts(pool, "train", files, parts=3, runner=runner)
    with pytest.raises(IngestError, match=r"parts of an ingest into 3, .*parts=3"):
        ingest_parts(pool, "train", files)
    made = ingest_parts(pool, "train", files, resume=False)
    assert (made.parts, made.resumed) == (5, 0)
    assert remove_orphans(pool, "train") == 0


def test_classes_that_differ_between_files_are_refused(pool: Pool, tmp_path: Path) -> None:
    """The same number would stand for two names."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number, names in enumerate((["cat", "dog"], ["dog", "cow"])):
        column = pa.array(names).dictionary_encode()
        pq.write_table(pa.table({"label": column}), folder / f"{number}.parquet")
    fields = {"label": Field("int64")}
    with pytest.raises(IngestError, match=r"of .*1.parquet differs from that of .*0.parquet"):
        ingest_parts(pool, "train", str(folder), fields=fields)
    assert not pool.exists("data/train/manifest")


def test_an_empty_file_is_a_part_without_samples(pool: Pool, tmp_path: Path) -> None:
    """Between two others, and alone."""
    files = tables(tmp_path / "in", 3)
    empty = pq.read_table(files[1]).slice(0, 0)
    pq.write_table(empty, files[1])
    ingest_parts(pool, "train", files)
    assert numbers(pool) == [*range(30), *range(60, 90)]
    assert ingest_parts(pool, "none", files[1:2]).samples == 0


def test_the_same_samples_as_by_ingest(pool: Pool, tmp_path: Path) -> None:
    """With the types that ingest gives them."""
    files = tables(tmp_path / "in", 3)
    report: PartsReport = ingest_parts(pool, "one", files)
    ingest(pool, "whole", str(tmp_path / "in"), shuffle=False)
    assert numbers(pool, "one") == numbers(pool, "whole")
    assert Dataset(pool, "one").fields == Dataset(pool, "whole").fields
    assert report.samples == 90


def test_a_task_on_a_host_with_another_pool_writes_nothing(pool: Pool, tmp_path: Path) -> None:
    """ConfigError with both ids; without Ray it says what to install."""
    runner = Several(pool, lambda job, when: True)
    with pytest.raises(IngestError):
        ingest_parts(pool, "train", tables(tmp_path / "in", 1), runner=runner)
    with pytest.raises(ConfigError, match="not 00000000"):
        part_task(pool.config, "0" * 32, runner.jobs[0])
    assert not written_parts(pool, "train")


JOB = """
import os, signal, sys
import hpstore, ray
from hpstore.loaders.ingestion import ray_parts
from hpstore.loaders import ingest_parts
from ray.cluster_utils import Cluster

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
ray.init(address=cluster.address, log_to_driver=False)
whole, who, place = ray_parts.part_task, sys.argv[2], sys.argv[3]

def dies(config, pool_id, job):
    once = os.path.join(place, f"{who}-{job.part[0]}")
    if who == "worker" and job.part[0] == 1 and not os.path.exists(once):
        open(once, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(config, pool_id, job)

def ended(step):
    if who == "driver" and step.done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

ray_parts.part_task = dies
with hpstore.open(sys.argv[1]) as pool:
    files = os.path.join(place, "in")
    runner = ray_parts.RayParts(pool)
    report = ingest_parts(pool, "train", files, runner=runner, progress=ended)
    print("done", report.samples, report.parts, report.resumed)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["nothing", "worker", "driver"])
def test_a_ray_cluster_ingests_and_a_worker_or_the_driver_may_die(
    pool: Pool, tmp_path: Path, who: str
) -> None:
    """A killed worker's part is done by another; of a killed driver the next call finds parts."""
    pytest.importorskip("ray", reason="ray is not installed")
    if not LONG:
        pytest.skip("starts of Ray: HPSTORE_LONG_TESTS=1")
    tables(tmp_path / "in")
    (tmp_path / "job.py").write_text(JOB)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **RAY}
    with tempfile.TemporaryDirectory(prefix="r") as short:  # the names of Ray's sockets are long
        done = subprocess.run(
            [sys.executable, "job.py", str(tmp_path / "pool.toml"), who, str(tmp_path)],
            cwd=tmp_path,
            env={**environment, "RAY_TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=280,
        )
    if who == "driver":
        assert done.returncode == -9, done.stderr[-3000:]
        assert ingest_parts(pool, "train", str(tmp_path / "in")).resumed >= 2
    else:
        assert "done 150 5 0" in done.stdout, done.stdout + done.stderr[-3000:]
        assert (tmp_path / "worker-1").exists() == (who == "worker")
    assert numbers(pool) == list(range(150))


def test_without_ray_it_says_what_to_install(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an ImportError out of the middle."""
    monkeypatch.setattr(ray_cluster, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpstore\[ray\]'"):
        RayParts(pool)


def test_the_command_goes_on_with_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hpstore dataset ingest-parts, and what ls shows in between."""
    tables(tmp_path / "in")
    ask = ("ingest-parts", "train", str(tmp_path / "in"), "--parts", "3")
    with make_pool(tmp_path) as pool:
        runner = Several(pool, lambda job, when: job.part[0] == 1 and when == "before")
        with pytest.raises(IngestError):
            ingest_parts(pool, "train", str(tmp_path / "in"), parts=3, runner=runner)
    cli = PoolCommands(tmp_path, capsys, "dataset")
    wanted = {"name": "train", "state": "unfinished", "parts": 2, "parts_in_all": 3}
    assert cli.json("ls") == [wanted]
    assert "2 of 3 parts written" in cli("ls")
    assert "parts=3" in cli(*ask[:3], code=45)
    report = json.loads(cli(*ask, "--json"))
    assert (report["samples"], report["parts"], report["resumed"]) == (150, 3, 2)
    assert "in 3 parts, 0 of them before" in cli(*ask, "--overwrite")


def test_a_null_that_comes_late_in_a_part_says_what_to_give(pool: Pool, tmp_path: Path) -> None:
    """Parts have fields in common, which were taken from the first rows: the same call would end
    there again, whatever it was said to do."""
    paths = []
    for number in range(2):
        values: list[int | None] = list(range(6000))
        values[4500] = None if number else 4500
        paths.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), paths[-1])
    for _ in range(2):
        with pytest.raises(IngestError, match=r"optional=True.*resume=False") as found:
            ingest_parts(pool, "train", paths)
        assert "The same call" not in str(found.value)
    fields = {"x": Field("int64", optional=True)}
    report = ingest_parts(pool, "train", paths, fields=fields, resume=False)
    assert report.samples == 12_000
    assert verify_dataset(pool, "train").clean
