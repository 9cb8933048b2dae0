"""Epochs through DataLoader with records read straight to a GPU, over the stand-in.

Every one is compared bit by bit with the loader that reads to the CPU. tests/gpu runs the same
cases on a GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings
from hpstore.errors import AlreadyClosed
from hpstore.loaders import Cache, DataLoader, Dataset, DatasetWriter, Field, GpuTransfer, Mixture
from hpstore.pool.pool import Pool
from hpstore.testing.fake_direct import FakeCuFile
from hpstore.testing.fake_gpu import FakeGpu
from hpstore.units import KIB, MIB
from tests.fault.common import Call, flip
from tests.integration.direct_cases import (
    ALWAYS,
    COUNT,
    KINDS,
    cpu_epoch,
    gpu_epoch,
    holders,
    seen,
    write_direct,
)
from tests.integration.loader_cases import same


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 3+2 pool of five directories with a data set of each kind; nobody changes it."""
    directory = tmp_path_factory.mktemp("pool")
    with make(directory) as pool:
        for kind in KINDS:
            write_direct(pool, kind)
    return directory


def make(directory: Path, **settings: Any) -> Pool:
    settings = {"memory_bytes": 32 * MIB, "run_directory": str(directory / "run"), **settings}
    return hpstore.create(
        [directory / f"d{i}" for i in range(5)],
        data=3,
        parity=2,
        config=directory / "pool.toml",
        settings=Settings(**settings),
    )


@pytest.fixture
def missing() -> Iterator[list[Path]]:
    """Devices that are away; they come back."""
    away: list[Path] = []
    yield away
    for path in away:
        os.rename(path.with_name(f"away-{path.name}"), path)


@pytest.mark.parametrize(
    ("kind", "gone"),
    [("records", 0), ("records", 1), ("records", 2), ("blocks", 0), ("blocks", 2), ("fields", 1)],
)
def test_an_epoch_read_straight_to_the_gpu_is_that_of_the_cpu(
    place: Path, missing: list[Path], kind: str, gone: int
) -> None:
    """Healthy, with one and with m devices missing: bit by bit; lost units are decoded there."""
    with hpstore.open(place / "pool.toml") as pool:
        away = holders(place, Dataset(pool, kind), gone)
    for path in away:
        os.rename(path, path.with_name(f"away-{path.name}"))
        missing.append(path)
    with hpstore.open(place / "pool.toml") as pool:
        data, gpu = Dataset(pool, kind), FakeGpu()
        found, stats = gpu_epoch(data, gpu)
        assert same(found, cpu_epoch(data))
    assert stats["state"] == "on"
    assert stats["records"] > COUNT // 2  # the shrunk last stripes of shards go over the host
    assert stats["records_fallen_back"] == 0
    assert (stats["units_decoded"] > 0) == (gone > 0)
    assert gpu.verified > 0
    assert not gpu.driver_of_all.opened


@pytest.mark.parametrize("plan", ["..E.S" * 6, "E" * 400])
def test_reads_that_fail_are_made_over_the_host(place: Path, plan: str) -> None:
    """Short and negative answers: the same bytes, counted; after three in a row no more of them."""
    with hpstore.open(place / "pool.toml") as pool:
        data, gpu = Dataset(pool, "records"), FakeGpu(FakeCuFile(plan))
        found, stats = gpu_epoch(data, gpu)
        assert same(found, cpu_epoch(data))
    assert stats["records_fallen_back"] > 0
    if len(plan) == 400:
        assert stats["state"] == "off"
        assert len(stats["refused"]) >= 3
        assert all("in a row" in d["reason"] for d in stats["devices"])
        assert stats["records"] == 0


def test_a_hung_read_delays_one_batch_and_its_memory_is_not_used_again(tmp_path: Path) -> None:
    """PROTOCOL 21: the device takes the other way from then on; late bytes land where nobody is."""
    driver = FakeCuFile("." * 40 + "H")
    gpu = FakeGpu(driver)
    with make(tmp_path, device_deadline_seconds=0.5) as pool:
        data = write_direct(pool, "records")
        loader = DataLoader(
            data, device=gpu, gpu=ALWAYS, cache=0, batch_size=10, seed=3, shuffle=True
        )
        access = seen(loader, data)
        assert access is not None
        found = list(loader)
        assert driver.hanging.is_set()
        stats = loader.stats()["direct"]
        assert stats["hung_reads"] >= 1
        assert len(stats["refused"]) == 1
        assert stats["state"] == "on"  # the other devices go on
        assert access.held_bytes > 0
        driver.release.set()
        again = list(loader)
        loader.close()
        assert access.held_bytes == 0
        assert driver.misuse == []
        assert same(found, cpu_epoch(data))
        assert same(again, cpu_epoch(data, epoch=1))


@pytest.mark.parametrize("kind", ["records", "blocks"])
def test_damaged_records_are_found_on_the_gpu_and_repaired_by_the_pool(
    tmp_path: Path, kind: str
) -> None:
    """A flipped bit in a data column: that record comes over the host, from parity."""
    with make(tmp_path) as pool:
        data = write_direct(pool, kind)
        healthy = cpu_epoch(data)
        key = data.shard_key(data.streams[0], 0)
        for number in range(5):
            for file in (
                (tmp_path / f"d{number}" / "objects").joinpath(*key.split("/")).glob("@*.c00.*")
            ):
                flip(file, 4096 + 100)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        found, stats = gpu_epoch(Dataset(pool, kind), FakeGpu())
        assert same(found, healthy)
    assert stats["records_mismatched"] > 0
    assert stats["records"] > COUNT // 2


def test_both_ways_are_measured_and_one_is_chosen(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """direct="auto": eight batches of each way, then the faster one; stats and the log tell."""
    with hpstore.open(place / "pool.toml") as pool, caplog.at_level(logging.INFO):
        data = Dataset(pool, "records")
        found, stats = gpu_epoch(data, FakeGpu(), epochs=2, gpu=GpuTransfer())
        assert same(found, cpu_epoch(data) + cpu_epoch(data, epoch=1))
    assert stats["records"] > 0
    assert stats["records_pinned"] > 0
    measured = [figures for figures in stats["devices"] if figures["chosen"]]
    assert measured
    for figures in measured:
        assert figures["device"].startswith(str(place))
        assert figures["direct_batches"] >= 8 <= figures["pinned_batches"]
        assert figures["chosen"] in ("direct", "pinned")
        assert min(figures["direct_bytes_per_second"], figures["pinned_bytes_per_second"]) > 0
    assert "GB/s direct" in caplog.text
    assert "straight to the GPU where that is faster" in caplog.text


def test_where_detection_says_no_nothing_is_read_directly(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver is never opened; every directory's reason is in stats() and in the log."""
    gpu = FakeGpu(obstacles={"": "compat: through host memory"})
    with hpstore.open(place / "pool.toml") as pool, caplog.at_level(logging.INFO):
        data = Dataset(pool, "records")
        found, stats = gpu_epoch(data, gpu)
        assert same(found, cpu_epoch(data))
    assert stats["state"] == "off"
    assert sorted(stats["refused"]) == sorted(gpu.asked)
    assert {str(Path(url).parent) for url in gpu.asked} == {str(place)}
    assert set(stats["refused"].values()) == {"compat: through host memory"}
    assert gpu.driver_of_all.reads == 0
    assert "compat: through host memory" in caplog.text


@pytest.mark.parametrize("refuse", ["open", "memory", "file"])
def test_a_driver_that_refuses_leaves_the_pinned_way(place: Path, refuse: str) -> None:
    """Driver, arena, files: the same bytes; stats() say why."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        found, stats = gpu_epoch(data, FakeGpu(FakeCuFile(refuse=refuse)))
        assert same(found, cpu_epoch(data))
    assert (stats["state"], stats["records"]) == ("off", 0)
    assert all("was told" in reason for reason in stats["refused"].values())


def test_a_gpu_without_kernels_leaves_the_pinned_way(place: Path) -> None:
    """Triton is not there, or fails: the same bytes, nothing taken unverified."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        found, stats = gpu_epoch(data, FakeGpu(kernels=False))
        assert same(found, cpu_epoch(data))
    assert (stats["state"], stats["records"]) == ("off", 0)
    assert all("no kernels" in reason for reason in stats["refused"].values())


def test_what_runs_on_samples_in_host_memory_keeps_its_batches_there(place: Path) -> None:
    """transform, collate_fn, batch_transform, direct="off", a mixture: pinned, and told why."""
    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("transform", {"transform": lambda sample: sample}),
            ("batch_transform", {"batch_transform": lambda batch: batch}),
            ("collate_fn", {"collate_fn": lambda samples: {"n": len(samples)}}),
            ("one by one", {"batch_size": None}),
            ('direct="off"', {"gpu": GpuTransfer(direct="off")}),
            ("a Cache", {"cache": Cache(memory_bytes=MIB)}),
        )
        for said, options in cases:
            loader = DataLoader(data, device=FakeGpu(), **{"cache": 0, **options})
            next(iter(loader))
            found = loader.stats()["direct"]
            assert found["state"] == "off"
            assert said in found["reason"]
            loader.close()
        mixed = DataLoader(Mixture([data], weights=[1]), device=FakeGpu(), batch_size=4)
        assert next(iter(mixed))["label"].shape == (4,)
        assert "mixture" in mixed.stats()["direct"]["reason"]
        mixed.close()
        with pytest.raises(hpstore.errors.ConfigError, match="auto"):
            DataLoader(data, gpu=GpuTransfer(direct="sometimes"))


def test_small_and_ragged_records_take_the_pinned_way(tmp_path: Path) -> None:
    """Records that lie at no multiple of 4 KiB, or have many sizes: nothing is looked at."""
    fields = {"small": Field("uint8", (100,)), "label": Field("int64"), "raw": Field("bytes")}
    with make(tmp_path) as pool:
        with DatasetWriter(pool, "odd", fields, unit_bytes=64 * KIB, layout="columns") as writer:
            for number in range(30):
                writer.write(
                    {
                        "small": np.full(100, number, np.uint8),
                        "label": number,
                        "raw": bytes([number]) * number,
                    }
                )
        data, gpu = Dataset(pool, "odd"), FakeGpu()
        found, stats = gpu_epoch(data, gpu)
        assert same(found, cpu_epoch(data))
    assert stats["state"] == "unused"
    assert gpu.asked == []


def test_a_batch_without_room_on_the_gpu_takes_the_pinned_way(place: Path) -> None:
    """An arena of 64 KiB: counted, the same bytes."""
    with hpstore.open(place / "pool.toml") as pool:
        data, gpu = Dataset(pool, "records"), FakeGpu()
        small = GpuTransfer(direct="always", arena_bytes=64 * KIB)
        loader = DataLoader(
            data, device=gpu, gpu=small, cache=0, batch_size=10, seed=3, shuffle=True
        )
        access = seen(loader, data)
        assert access is not None
        assert same(list(loader), cpu_epoch(data))
        stats = loader.stats()["direct"]
        loader.close()
    assert stats["batches_without_room"] > 0


def test_closing_waits_for_a_batch_and_the_loader_goes_on(place: Path) -> None:
    """close() while a read is under way: nothing is freed under it. The iterator says that it is
    closed; what is iterated anew is pinned."""
    driver = FakeCuFile()
    with hpstore.open(place / "pool.toml") as pool:
        data, gpu = Dataset(pool, "records"), FakeGpu(driver)
        loader = DataLoader(
            data, device=gpu, gpu=ALWAYS, cache=0, batch_size=10, seed=3, shuffle=True
        )
        seen(loader, data)
        reads, driver._plan = driver.reads, "." * (driver.reads + 3) + "H"
        run = iter(loader)
        driver.hanging.wait()
        closing = Call(loader.close)
        assert not closing.ended(0.05)
        assert driver.opened
        driver.release.set()
        assert closing.ended(20)
        assert not driver.opened
        with pytest.raises(AlreadyClosed, match="the epoch is not over"):
            list(run)
        assert len(list(loader)) == len(loader)
        loader.close()
        assert driver.reads > reads
        assert driver.misuse == []


def test_a_process_that_may_open_no_more_files_goes_on_pinned(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors run out when columns are opened: the same bytes, refused after three times."""

    def full(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    with hpstore.open(place / "pool.toml") as pool:
        data = Dataset(pool, "records")
        monkeypatch.setattr("hpstore.loaders.gpu.direct.column_files.os.dup", full)
        found, stats = gpu_epoch(data, FakeGpu())
        assert same(found, cpu_epoch(data))
    assert (stats["state"], stats["records"]) == ("off", 0)
    assert all("Too many open files" in reason for reason in stats["refused"].values())
