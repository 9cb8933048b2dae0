"""Whoever asks for bytes gets those that were filled: they are in memory once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.interop.filesystem.filesystem import PoolFileSystem
from hpstore.runtime.fresh_bytes import fresh_bytes
from hpstore.units import MIB

SIZE = 8 * MIB
DATA = np.random.default_rng(5).bytes(SIZE)


@pytest.mark.parametrize("nbytes", [0, 1, 2, 4095, 4 * MIB + 3])
def test_bytes_are_what_was_written_into_their_memory(nbytes: int) -> None:
    """Also of one byte, of which Python keeps one for all."""
    made, memory = fresh_bytes(nbytes)
    assert memory.shape == (nbytes,)
    memory[:] = np.frombuffer(DATA[:nbytes], np.uint8)
    assert type(made) is bytes
    assert made == DATA[:nbytes]
    assert hash(made) == hash(DATA[:nbytes])
    if nbytes:
        memory[0] ^= 1
        assert fresh_bytes(nbytes)[0] is not made


def whole(fs: PoolFileSystem) -> bytes:
    with fs.open("x") as file:
        return bytes(file.read())


def counted(fs: PoolFileSystem) -> bytes:
    with fs.open("x") as file:
        return bytes(file.read(SIZE))


CALLS: dict[str, Callable[[hpstore.Pool, PoolFileSystem], Any]] = {
    "get": lambda pool, fs: pool.get("x"),
    "cat_file": lambda pool, fs: fs.cat_file("x"),
    "read": lambda pool, fs: whole(fs),
    "read of so many": lambda pool, fs: counted(fs),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_object_is_in_memory_once(tmp_path: Path, call: str) -> None:
    """It was twice, and the second time in fresh pages, which cost more than the read."""
    places = [tmp_path / f"d{n}" for n in range(3)]
    with hpstore.create(places, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        pool.put("x", DATA)
        fs = PoolFileSystem(pool=pool)
        assert CALLS[call](pool, fs) == DATA
        tracemalloc.start()
        try:
            found = CALLS[call](pool, fs)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found == DATA
        assert peak < 1.5 * SIZE


@pytest.mark.parametrize("first", [0, 1, 300_000])
def test_a_stream_reads_on_from_where_it_is(tmp_path: Path, first: int) -> None:
    """A large read after a small one, to the end and beyond, and of nothing at the end."""
    places = [tmp_path / f"d{n}" for n in range(3)]
    with hpstore.create(places, data=2, parity=1, config=tmp_path / "pool.toml") as pool:
        pool.put("x", DATA)
        for count in (-1, None, SIZE, 5 * MIB):
            with PoolFileSystem(pool=pool).open("x") as file:
                assert file.read(first) == DATA[:first]
                rest = DATA[first:] if count in (-1, None) else DATA[first : first + count]
                assert file.read(count) == rest
                assert file.tell() == first + len(rest)
                assert file.read() == DATA[first + len(rest) :]
                assert file.read() == file.read(9) == b""
        with PoolFileSystem(pool=pool).open("x") as file, pytest.raises(ValueError, match="-1"):
            file.read(-2)
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read(SIZE)
