"""Whole pools that commit 6b78450 has written: opened, read, damaged, healed and written to."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import ObjectNotFound
from hpstore.loaders import DataLoader, Dataset, verify_dataset
from tests.golden.pools_v1.make_pools import (
    DATASETS,
    KINDS,
    RECORDS,
    SIZES,
    content,
    record,
    state,
    trained,
)

HERE = Path(__file__).parent / "pools_v1"
RUNS = ("runs/None", "runs/zstd")


@pytest.fixture(params=KINDS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Directory of a pool as it was written, at another place than then."""
    with tarfile.open(HERE / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    toml = tmp_path / "pool.toml"
    toml.write_text(toml.read_text().replace("ROOT", str(tmp_path)))
    return tmp_path


@pytest.fixture
def pool(old: Path) -> Iterator[hpstore.Pool]:
    """The same, open."""
    with hpstore.open(old / "pool.toml") as opened:
        yield opened


def check_objects(pool: hpstore.Pool) -> None:
    """All bytes, and no others."""
    for size in SIZES:
        assert pool.get(f"objects/{size}") == content(size), size
        middle = content(size)[size // 3 : size // 2]
        assert pool.get(f"objects/{size}", start=size // 3, end=size // 2) == middle
    assert pool.get("objects/again") == b"the second version"
    with pytest.raises(ObjectNotFound):
        pool.get("objects/gone")
    known = {f"objects/{size}" for size in SIZES} | {"objects/again"}
    assert set(pool.list("objects/")) - {"objects/owed"} == known


def check_records(pool: hpstore.Pool) -> None:
    """Each field of each sample, alone and in shuffled batches."""
    for name in DATASETS:
        data: Any = Dataset(pool, name)
        assert len(data) == RECORDS
        for number in range(RECORDS):
            found, wanted = data[number], record(number)
            assert found.keys() == wanted.keys()
            for field, value in wanted.items():
                assert np.array_equal(np.asarray(found[field]), np.asarray(value)), (name, field)
        loader: Any = DataLoader(data, 25, shuffle=True, seed=3)
        labels = torch.cat([batch["label"] for batch in loader])
        loader.close()
        assert sorted(labels.tolist()) == [number - 7 for number in range(RECORDS)]
        assert verify_dataset(pool, name).clean


def check_steps(pool: hpstore.Pool) -> None:
    """Each step restores into other values, type by type."""
    for prefix in RUNS:
        with Checkpointer(pool, prefix, rng=False) as ckpt:
            assert ckpt.steps() == [1, 2, 3]
            for step in (1, 3):
                assert ckpt.verify(step).ok
                into = state(9)
                into["frozen"].zero_()
                assert ckpt.restore(into, step=step) == step
                check_state(into, step)


def check_state(found: dict[str, Any], step: int) -> None:
    model, optimizer = trained(step)
    for mine, old in zip(found["model"].parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, old)
        for slot, value in optimizer.state[old].items():
            assert torch.equal(found["optimizer"].state[mine][slot], value), slot
    assert torch.equal(found["frozen"], state(step)["frozen"])
    assert found["step"] == step
    nested = found["nested"]
    assert (nested["tuple"], nested["bytes"]) == ((1, "two", None), b"\x00\xff")
    assert nested["nan"] != nested["nan"]


def test_what_was_written_reads_back(pool: hpstore.Pool) -> None:
    """Objects, datasets and checkpoints, without and with devices that are away."""
    check_objects(pool)
    check_records(pool)
    check_steps(pool)


def test_what_was_written_survives_two_more_devices(old: Path) -> None:
    """As many as its parity, one of which the pool had lost when it was archived."""
    gone = [place for place in sorted(old.glob("d?")) if place.is_dir()]
    already = 6 - len(gone)
    for place in gone[: 2 - already]:
        shutil.rmtree(place)
    with hpstore.open(old / "pool.toml") as pool:
        check_objects(pool)
        check_records(pool)
        check_steps(pool)


def test_an_old_pool_is_healed_and_written_to(pool: hpstore.Pool) -> None:
    """Evict what is away, rebuild, scrub; new objects and steps stand beside the old ones."""
    for device in pool.status().devices:
        if device.state == "missing":
            pool.evict(device.device)
    pool.rebuild()
    report = pool.scrub()
    assert (report.healthy, report.unreadable, report.failed) == (report.objects, {}, {})
    pool.put("objects/again", b"the second version")
    pool.put("new", content(700_000))
    with Checkpointer(pool, RUNS[0], rng=False) as ckpt:
        into = state(9)
        assert ckpt.restore(into) == 3
        ckpt.save(4, into).result()
        assert ckpt.verify(4).ok
        assert ckpt.steps() == [1, 2, 3, 4]
    assert pool.get("new") == content(700_000)
    check_objects(pool)
    check_records(pool)
