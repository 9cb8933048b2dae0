"""Columns of a real pool, read past the host's checks into an arena: the bytes, and what to check.

The driver is the stand-in; tests/gpu does the same with cuFile and the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import hpstore
from hpstore.config import load_config
from hpstore.errors import DirectUnavailable, IntegrityError
from hpstore.format.geometry import BLOCK_BYTES, block_span
from hpstore.loaders.gpu.direct.cufile_queue import DirectEngine
from hpstore.loaders.gpu.direct.device_columns import DirectColumn
from hpstore.loaders.gpu.direct.gpu_checksums import Blocks, verify
from hpstore.loaders.gpu.direct.gpu_decode import DecodeJobs, decode
from hpstore.testing import pattern
from hpstore.testing.fake_direct import FakeCuFile
from hpstore.units import KIB, MIB

SIZE = 9 * MIB + 12345


@pytest.fixture
def columns(tmp_path: Path) -> list[Path]:
    """The column files of one object at 4+2, by column."""
    devices = [tmp_path / f"d{i}" for i in range(6)]
    config = tmp_path / "pool.toml"
    with hpstore.create(devices, data=4, parity=2, config=config) as pool:
        pool.put("a", pattern(SIZE))
    found = [path for device in devices for path in (device / "objects").rglob("@*")]
    assert len(found) == 6
    return sorted(found, key=lambda path: path.name.rpartition(".")[0])


@pytest.fixture
def engine() -> Iterator[DirectEngine]:
    driver = FakeCuFile()
    with DirectEngine(driver, threads=4) as made:
        yield made
    assert driver.misuse == []


def opened_column(engine: DirectEngine, path: Path) -> DirectColumn:
    """With the key of the pool that it is of."""
    return DirectColumn(engine, str(path), pool_key=load_config(path.parents[3] / "pool.toml").key)


def bad(memory: torch.Tensor, blocks: Blocks) -> list[int]:
    """Numbers of blocks that xxhash does not find to be what they must be."""
    bytes_ = memory.numpy()
    return [
        i
        for i, (at, length, seed, wanted) in enumerate(
            zip(blocks.starts, blocks.lengths, blocks.seeds, blocks.expected, strict=True)
        )
        if xxhash.xxh3_64_intdigest(bytes_[at : at + length].tobytes(), int(seed)) != int(wanted)
    ]


def test_units_arrive_as_the_object_and_can_be_checked(
    engine: DirectEngine, columns: list[Path]
) -> None:
    """The code is systematic: k reads side by side are a stripe. Every block can be verified."""
    data = pattern(SIZE).tobytes()
    opened = [opened_column(engine, path) for path in columns]
    geometry = opened[0].header.geometry
    arena = engine.allocate(6 * geometry.column_bytes)
    assert [column.header.column for column in opened] == [0, 1, 2, 3, 4, 5]
    for stripe in range(geometry.stripe_count):
        unit, at = geometry.unit_bytes_of(stripe), geometry.column_offset_of(stripe)
        futures = [c.read(at, at + unit, arena, i * unit) for i, c in enumerate(opened)]
        assert [future.result() for future in futures] == [unit] * 6
        wanted = data[stripe * geometry.stripe_bytes :][: 4 * unit]
        assert arena.tensor[: len(wanted)].numpy().tobytes() == wanted
        for i, column in enumerate(opened):
            blocks = column.blocks(*block_span(at, at + unit, geometry.column_bytes), i * unit)
            assert len(blocks.starts) == -(-unit // BLOCK_BYTES)
            blocks.check(arena.nbytes)
            assert bad(arena.tensor, blocks) == []
            arena.tensor[i * unit + unit // 2] ^= 1
            assert bad(arena.tensor, blocks) == [unit // 2 // BLOCK_BYTES]
    for column in opened:
        column.close()


def test_the_block_of_another_place_is_not_good(engine: DirectEngine, columns: list[Path]) -> None:
    """A misdirected read: right bytes of the wrong column or offset do not pass."""
    with (
        opened_column(engine, columns[0]) as one,
        opened_column(engine, columns[1]) as other,
        engine.allocate(64 * KIB) as arena,
    ):
        one.read(64 * KIB, 128 * KIB, arena, 0).result()
        assert bad(arena.tensor, one.blocks(64 * KIB, 128 * KIB, 0)) == []
        assert bad(arena.tensor, one.blocks(0, 64 * KIB, 0)) == [0]
        assert bad(arena.tensor, other.blocks(64 * KIB, 128 * KIB, 0)) == [0]


@pytest.mark.parametrize(("start", "end"), [(4096, 65536), (0, 4096), (65536, 65536), (-65536, 0)])
def test_parts_of_blocks_cannot_be_checked(
    engine: DirectEngine, columns: list[Path], start: int, end: int
) -> None:
    """ValueError rather than a check of less than was asked for."""
    with (
        opened_column(engine, columns[0]) as column,
        pytest.raises(ValueError, match="no whole blocks"),
    ):
        column.blocks(start, end, 0)


@pytest.mark.parametrize("where", ["header", "table"])
def test_a_damaged_header_or_table_is_found_on_the_host(
    engine: DirectEngine, columns: list[Path], where: str
) -> None:
    """Before anything is read to the GPU."""
    size = columns[0].stat().st_size
    with columns[0].open("r+b") as file:
        file.seek(100 if where == "header" else size - 4096)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IntegrityError):
        opened_column(engine, columns[0])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_column_that_is_being_recycled_is_refused(
    engine: DirectEngine, columns: list[Path]
) -> None:
    """PROTOCOL 11: its header is about to be blanked."""
    import fcntl

    with columns[0].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DirectUnavailable, match="recycled"):
            opened_column(engine, columns[0])


JOBS = DecodeJobs(
    data=2,
    parity=1,
    have=(0, 1),
    want=(2,),
    length=64,
    sources=np.array([[0, 64]]),
    targets=np.array([[128]]),
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 6}, "multiples of 4"),
        ({"length": 0}, "multiples of 4"),
        ({"sources": np.array([[0, 66]])}, "multiples of 4"),
        ({"targets": np.array([[132]])}, "not inside 192"),
        ({"targets": np.array([[-4]])}, "not inside 192"),
        ({"targets": np.array([[64]])}, "overlaps"),
        ({"targets": np.array([[32]])}, "overlaps"),
        ({"sources": np.array([[0]])}, "do not fit"),
        ({"want": (1,)}, "cannot be made"),
        ({"want": (2, 2)}, "do not fit"),
    ],
)
def test_decoding_what_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    """Before a kernel could write anywhere else."""
    JOBS.check(192)
    with pytest.raises(ValueError, match=words):
        decode(torch.zeros(192, dtype=torch.uint8), replace(JOBS, **change))  # type: ignore[arg-type]  # on purpose


BLOCKS = Blocks(
    starts=np.array([0, 1024]),
    lengths=np.array([1024, 2048]),
    seeds=np.zeros(2, np.uint64),
    expected=np.zeros(2, np.uint64),
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"starts": np.array([4, 1024])}, "multiples of 8"),
        ({"lengths": np.array([1024, 1000])}, "1 KiB"),
        ({"lengths": np.array([1024, 0])}, "from 1024"),
        ({"lengths": np.array([1024, 2**26 + 1024])}, "from 1024"),
        ({"lengths": np.array([1024, 65536 + 1024])}, "not inside 3072"),
        ({"starts": np.array([0, 2048])}, "not inside 3072"),
        ({"seeds": np.zeros(1, np.uint64)}, "differ in length"),
    ],
)
def test_checking_what_does_not_fit_is_refused(change: dict[str, object], words: str) -> None:
    """Before a kernel could read anything else."""
    BLOCKS.check(3072)
    with pytest.raises(ValueError, match=words):
        verify(torch.zeros(3072, dtype=torch.uint8), replace(BLOCKS, **change))  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("call", [lambda m: decode(m, JOBS), lambda m: verify(m, BLOCKS)])
def test_without_triton_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, call: object) -> None:
    """DirectUnavailable, not ImportError out of a training loop."""
    import sys

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hpstore.loaders.gpu.direct.kernels", raising=False)
    with pytest.raises(DirectUnavailable, match=r"hpstore\[gpu\]"):
        call(torch.zeros(4096, dtype=torch.uint8))  # type: ignore[operator]
