"""Samples that are larger than the pool's memory: read piece by piece, in bounded memory."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import hpstore
from hpstore.config import Settings
from hpstore.errors import IntegrityError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field, LoaderMemory
from hpstore.loaders.batching import assembler
from hpstore.loaders.dataset import large_records, piecewise_read, record_reader, row_scatter
from hpstore.loaders.writer import part_writer
from hpstore.units import KIB, MIB
from tests.fault.common import within

LIMIT = 40.0  # below the minute that a read waits for memory
SIZE, MEMORY, PART = 17 * MIB + 777, 16 * MIB, 256 * KIB
FIELDS = {
    "ragged": {"x": Field("bytes"), "s": Field("float32", (None, 3)), "y": Field("int64")},
    "fixed": {"x": Field("uint8", (SIZE,)), "y": Field("int64")},
}

COUNTS = {"ragged": 3, "fixed": 2}


def value(number: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size)


def sample(kind: str, number: int) -> dict[str, Any]:
    """The middle one is small: large and small records meet in a batch."""
    if kind == "fixed":
        return {"x": np.frombuffer(value(number), np.uint8), "y": number}
    size = 100 if number == 1 else SIZE
    return {
        "x": value(number, size),
        "s": np.full((number + 1, 3), number, np.float32),
        "y": number,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with the least memory, and samples that are larger."""
    home = Path(tmp_path_factory.mktemp("large"))
    pool = hpstore.create(
        [home / f"d{i}" for i in range(4)],
        data=2,
        parity=2,
        config=home / "pool.toml",
        unit_bytes=64 * KIB,
        settings=Settings(memory_bytes=MEMORY, run_directory=str(home / "run")),
    )
    with pool:
        for kind, fields in FIELDS.items():
            for compression in ("", "lz4") if kind == "ragged" else ("",):
                name = kind + compression
                with DatasetWriter(
                    pool, name, fields, compression=compression or None, unit_bytes=64 * KIB
                ) as writer:
                    for number in range(COUNTS[kind]):
                        writer.write(sample(kind, number))
    return home


def check(batch: dict[str, Any], kind: str) -> list[int]:
    for row, number in enumerate(batch["y"].tolist()):
        wanted = sample(kind, number)
        assert bytes(memoryview(batch["x"][row].numpy())) == bytes(wanted["x"])
        if kind == "ragged":
            assert torch.equal(batch["s"][row], torch.from_numpy(wanted["s"]))
    return batch["y"].tolist()  # type: ignore[no-any-return]


def as_array(value: Any) -> Any:
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value.numpy()


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["ragged", "fixed", "raggedlz4"])
def test_samples_above_the_pools_memory_are_read(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch: int, lost: int
) -> None:
    """r2_large_sample: they waited for a minute, and failed. With devices gone, too; the pool's
    memory is not exceeded, and a loader has no more batches than one ahead of the user's."""
    for module in (assembler, large_records, record_reader):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(row_scatter, "LARGE_BYTES", PART)  # fixed ones piece by piece as well
    shutil.copytree(
        home, tmp_path / "copy", ignore=shutil.ignore_patterns("run"), copy_function=os.link
    )
    for device in range(lost):
        shutil.rmtree(tmp_path / f"copy/d{device}")
    config = tmp_path / "copy/pool.toml"
    text = config.read_text()
    config.unlink()  # a second name of that of the others
    config.write_text(text.replace(str(home), str(tmp_path / "copy")))
    name = kind.removesuffix("lz4")
    with hpstore.open(config, read_only=True) as pool, Dataset(pool, kind) as data:
        loader = DataLoader(
            data, batch, shuffle=True, cache=0, memory=LoaderMemory(prefetch_bytes="8MiB")
        )
        found = within(LIMIT, lambda: [n for one in loader for n in check(one, name)])
        assert sorted(found) == list(range(COUNTS[name]))
        stats = loader.stats()
        assert stats["batch_memory_bytes"] <= 4 * (batch * SIZE + 2 * MIB) * (1 + (batch > 1))
        loader.close()
        last = value(COUNTS[name] - 1)
        one = within(LIMIT, lambda: data[COUNTS[name] - 1])
        assert np.array_equal(np.frombuffer(last, np.uint8), as_array(one["x"]))
        assert pool._store.buffers.budget.peak_bytes <= MEMORY
        assert pool._store.buffers.budget.used_bytes == 0


def test_a_large_record_that_is_not_what_was_written_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Piece by piece, too, nothing is handed out that does not match its checksum."""
    with hpstore.open(home / "pool.toml", read_only=True) as pool, Dataset(pool, "ragged") as data:
        located = data.locate

        def wrong(*args: Any, **kwargs: Any) -> Any:
            places = located(*args, **kwargs)
            places.checksum[:] += 1
            return places

        monkeypatch.setattr(data, "locate", wrong)
        loader = DataLoader(data, 1, cache=0, memory=LoaderMemory(prefetch_bytes="16MiB"))
        with pytest.raises(IntegrityError, match=r"sample 0 .* cannot be read"):
            within(LIMIT, lambda: next(iter(loader)))
        loader.close()


def test_the_writer_says_what_large_samples_need(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and again only for what is twice as large."""
    monkeypatch.setattr(part_writer, "SAID_BYTES", 1000)
    with hpstore.open(home / "pool.toml") as pool, caplog.at_level(logging.WARNING, "hpstore"):
        writer = DatasetWriter(pool, "said", {"x": Field("bytes")})
        for size in (900, 2000, 2100, 5000):
            writer.write({"x": bytes(size)})
        writer.abandon()
    said = [line for line in caplog.messages if "'said' has a sample of" in line]
    assert len(said) == 2
    assert "loading them that of three" in said[0]


def test_a_record_read_again_from_its_first_byte_is_counted_once() -> None:
    """Where the object is replaced in the midst, pieces come from the first again."""

    class Reader:
        def read_ranges(self, ranges: Any, deliver: Any) -> None:
            ((start, end),) = ranges
            body = np.arange(end - start, dtype=np.uint8)
            deliver(start, body[:4] + 1)
            deliver(start, body[:6])
            deliver(start + 6, body[6:])

    class Place:
        shard, start, length = np.array([0]), np.array([40]), np.array([10])
        checksum = np.array([xxhash.xxh3_64_intdigest(bytes(range(10)))], np.uint64)

    class Plain:
        compression = ""

    out: Any = np.zeros(5, np.uint8)
    reader: Any = Reader()
    stream: Any = Plain()
    place: Any = Place()
    assert piecewise_read.read_large(lambda _: reader, stream, lambda: out, place, [(3, out)])
    assert out.tolist() == [3, 4, 5, 6, 7]
