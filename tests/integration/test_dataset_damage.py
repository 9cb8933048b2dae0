"""Data sets and damage, data sets and other processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.errors import ConfigError, IntegrityError, ObjectNotFound, TooManyErasures
from hpstore.format.keys import object_directory
from hpstore.loaders import Dataset, DatasetWriter, list_datasets, remove_orphans, verify_dataset
from hpstore.loaders.dataset import open_objects
from hpstore.objects.read.pooled_reader import Readers
from hpstore.pool.pool import Pool
from tests.integration.data_sets import (
    FIELDS,
    SMALL,
    check_sample,
    make_pool,
    sample,
    write_samples,
)

COUNT = 60


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with make_pool(tmp_path) as made:
        yield made


def nothing_but(pool: Pool, *keys: str) -> bool:
    return pool.list("data/") == sorted(keys)


def column_files(directory: Path, key: str) -> list[Path]:
    """Files of an object on the devices, past the code under test."""
    return sorted(
        path for path in directory.glob(f"d*/{object_directory(key)}/@*") if path.is_file()
    )


def test_a_corrupt_record_is_repaired_from_parity(pool: Pool, tmp_path: Path) -> None:
    """Bytes of a column are changed on the device: right samples, counted; m devices may go too."""
    write_samples(pool, "a", range(COUNT)).close()
    data = Dataset(pool, "a")
    stream = data.streams[0]
    for shard in range(stream.shard_count):
        for path in column_files(tmp_path, data.shard_key(stream, shard))[:1]:
            raw = bytearray(path.read_bytes())
            raw[4096 : 4096 + 30_000] = bytes(30_000)
            path.write_bytes(raw)
    for number, found in enumerate(data.__getitems__(range(COUNT))):
        check_sample(found, number)
    assert pool.metrics.value("column_mismatch_total") > 0
    assert verify_dataset(pool, "a").clean
    for i in range(2):
        (tmp_path / f"d{i}").rename(tmp_path / f"gone{i}")
    with hpstore.open(tmp_path / "pool.toml") as degraded:
        for number, found in enumerate(Dataset(degraded, "a").__getitems__(range(COUNT))):
            check_sample(found, number)


def test_a_record_beyond_repair_is_named(pool: Pool) -> None:
    """A shard whose bytes are wrong although the pool's checksums hold: the sample is named."""
    data = write_samples(pool, "a", range(COUNT))
    stream = data.streams[0]
    places = data.locate(stream, np.arange(COUNT))
    key = data.shard_key(stream, 0)
    raw = bytearray(pool.get(key))
    raw[int(places.start[3]) + 11] ^= 1
    pool.put(key, bytes(raw), unit_bytes=stream.unit_bytes)
    data = Dataset(pool, "a")
    with pytest.raises(IntegrityError, match="'a': sample 3 "):
        data.__getitems__([5, 3, 4])
    assert pool.metrics.value("record_mismatch_total") == 1
    check_sample(data[4], 4)
    report = verify_dataset(pool, "a")
    assert (report.clean, report.bad_samples, report.bad_count) == (False, [3], 1)
    assert report.problem_count == 0


@pytest.mark.parametrize("which", ["side", "pages", "column", "index", "short"])
def test_every_other_object_is_verified(pool: Pool, which: str) -> None:
    """A changed side, page or column object, a changed index, a shard that is too short."""
    data = write_samples(pool, "a", range(COUNT))
    stream = data.streams[0]
    key = {
        "side": data.shard_key(stream, 1) + ".side",
        "pages": data.shard_key(stream, 0).rpartition("/")[0] + "/pages",
        "column": next(k for k in pool.list("data/a/") if "column-1" in k),
    }.get(which, data.shard_key(stream, 0))
    raw = bytearray(pool.get(key))
    raw[-5] ^= 1
    pool.put(key, bytes(raw[: -8 if which == "short" else None]))
    report = verify_dataset(pool, "a")
    assert not report.clean
    assert report.problem_count >= 1
    assert any(key in problem or which in problem for problem in report.problems)


def test_a_lost_shard_is_a_problem_and_the_rest_is_verified(pool: Pool) -> None:
    """Its object is gone: named, the others are read on."""
    data = write_samples(pool, "a", range(COUNT))
    key = data.shard_key(data.streams[0], 1)
    pool.delete(key)
    report = verify_dataset(pool, "a")
    assert report.problem_count == 1
    assert key in report.problems[0]
    assert report.bytes > 0


# --- processes -------------------------------------------------------------------------------


def read_all(data: Dataset, first: int) -> None:
    for number in range(first, len(data), 2):
        check_sample(data[number], number)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_open_data_set_is_used_by_child_and_parent(pool: Pool, method: Any) -> None:
    """PROTOCOL 22: opened, shards open, then another process and this one read at once."""
    data = write_samples(pool, "a", range(COUNT))
    check_sample(data[0], 0)
    child = multiprocessing.get_context(method).Process(target=read_all, args=(data, 0))
    child.start()
    read_all(data, 1)
    child.join(60)
    assert child.exitcode == 0


def test_threads_share_open_files(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is looked up once, however many threads want it at the same moment."""
    data = write_samples(pool, "a", range(COUNT))
    stream, looked = data.streams[0], list[str]()
    plain, met = pool.open_many, threading.Barrier(5)

    def readers(keys: list[str], *, preload: bool = False) -> Readers:
        looked.extend(key for key in keys if "stream-" in key and not key.endswith(".side"))
        return plain(keys, preload=preload)

    monkeypatch.setattr(pool, "open_many", readers)
    right: list[bool] = []

    def read() -> None:
        met.wait(60)
        for shard in range(stream.shard_count):
            data.reader(stream, shard)
        for index in (0, COUNT - 1):
            check_sample(data[index], index)
        right.append(True)

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 5
    keys = [data.shard_key(stream, shard) for shard in range(stream.shard_count)]
    assert sorted(looked) == sorted(keys)
    data.close()


def test_a_shard_that_could_not_be_opened_is_tried_again(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_samples(pool, "a", range(COUNT))
    plain = pool.open_many

    def fail(keys: list[str]) -> Readers:
        return {key: TooManyErasures("not now", key=key) for key in keys}

    monkeypatch.setattr(pool, "open_many", fail)
    with pytest.raises(TooManyErasures):
        data.reader(data.streams[0], 0)
    monkeypatch.setattr(pool, "open_many", plain)
    check_sample(data[0], 0)
    data.close()


def test_a_data_set_that_is_dropped_closes_its_files(pool: Pool, tmp_path: Path) -> None:
    """Also what other threads had opened, and without close()."""
    data = write_samples(pool, "a", range(COUNT))
    thread = threading.Thread(target=read_all, args=(data, 0))
    thread.start()
    thread.join(60)
    check_sample(data[0], 0)
    assert descriptors(tmp_path) > 0
    del data, thread
    gc.collect()
    assert descriptors(tmp_path) == 0


def descriptors(root: Path) -> int:
    """Open files of records under a directory."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.isfile(link)]
    return sum(path.startswith(str(root)) and "stream-0" in path for path in paths)


def test_open_shards_are_few_and_closed_with_their_thread(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than the limit in each thread, and of those that are shared; none after close()."""
    monkeypatch.setattr(open_objects, "LEAST_READERS", 2)
    monkeypatch.setattr(open_objects, "FILES_SHARE", 1 << 40)
    data = write_samples(pool, "a", range(COUNT))
    stream = data.streams[0]
    assert stream.shard_count > 4

    for shard in range(stream.shard_count):
        data.reader(stream, shard)
    here = descriptors(tmp_path)
    assert 0 < here <= 2 * (pool.data + pool.parity)
    counts: list[int] = []

    def read() -> None:
        for shard in range(stream.shard_count):
            data.reader(stream, shard)
        counts.append(descriptors(tmp_path))

    left: list[int] = []
    for _ in range(3):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(60)
        left.append(descriptors(tmp_path))
    assert max(counts) <= 6 * (pool.data + pool.parity)
    assert left[0] == left[1] == left[2] <= 4 * (pool.data + pool.parity)
    data.close()
    assert descriptors(tmp_path) == 0
    with pytest.raises(ConfigError, match="is closed"):
        data.reader(stream, 0)


def test_it_pickles_as_pool_and_name(pool: Pool) -> None:
    """PROTOCOL 22: small, with the fields that were chosen."""
    write_samples(pool, "a", range(COUNT))
    data = Dataset(pool, "a", fields=["label"])
    raw = pickle.dumps(data)
    assert len(raw) < 2000
    again = pickle.loads(raw)
    assert list(again.fields) == ["label"]
    assert int(again[5]["label"]) == 5
    again.pool.close()


def test_a_writer_stays_in_its_process(pool: Pool) -> None:
    """It holds samples that nobody else has: no pickle, no use in a forked child."""
    writer = DatasetWriter(pool, "a", FIELDS, **SMALL)
    with pytest.raises(ConfigError, match=r"part=\(i, n\)"):
        pickle.dumps(writer)
    writer.write(sample(0))

    def child() -> None:
        try:
            writer.write(sample(1))
        except ConfigError as error:
            os._exit(0 if "another process" in str(error) else 1)
        os._exit(2)

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(60)
    assert forked.exitcode == 0
    writer.close()
    check_sample(Dataset(pool, "a")[0], 0)


KILLED = """
import sys, hpstore
from hpstore.loaders import DatasetWriter
from tests.integration.data_sets import FIELDS, SMALL, sample
pool = hpstore.open(sys.argv[1])
with DatasetWriter(pool, "a", FIELDS, **SMALL) as writer:
    for number in range(10**9):
        writer.write(sample(number))
        if number == 40:
            print("written", flush=True)
"""


def test_a_writer_that_is_killed_leaves_nothing_visible(pool: Pool, tmp_path: Path) -> None:
    """SIGKILL in mid-write: no data set; what is left is removed on request; the name is free."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "pool.toml")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"written\n"
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    assert list_datasets(pool) == []
    with pytest.raises(ObjectNotFound):
        Dataset(pool, "a")
    left = len(pool.list("data/a/"))
    assert left > 0
    assert remove_orphans(pool, "a") == left
    assert nothing_but(pool)
    check_sample(write_samples(pool, "a", range(3))[2], 2)
