"""Compressed frames: round trips, and frames whose stated length is wrong."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.codec.compression import NAMES, decode, encoder
from hpstore.errors import IntegrityError
from hpstore.units import MIB

RAW = os.urandom(100) * 40 + b"x" * 96
MAGIC = b"\x28\xb5\x2f\xfd"


def decoded(name: str, stored: bytes, length: int) -> bytes:
    """What a frame gives; nothing beside its place is written."""
    memory = np.full(length + 64, 7, np.uint8)
    try:
        decode(name, np.frombuffer(stored, np.uint8), memory[32 : 32 + length])
    finally:
        assert memory[:32].tobytes() == memory[32 + length :].tobytes() == b"\7" * 32
    return memory[32 : 32 + length].tobytes()


@pytest.mark.parametrize("name", NAMES)
@given(raw=st.binary(min_size=1, max_size=500), times=st.sampled_from([1, 3, 2000]))
def test_what_was_compressed_comes_back(name: str, raw: bytes, times: int) -> None:
    """Through several blocks, too."""
    stored = encoder(name)(np.frombuffer(raw * times, np.uint8), 1)
    assert decoded(name, stored, len(raw) * times) == raw * times


def repeating(nbytes: int, *, says: int | None = None) -> bytes:
    """A zstd frame of so many equal bytes, of 4 bytes for each 128 KiB."""
    head = b"\0\x68" if says is None else b"\xc0\x68" + says.to_bytes(8, "little")
    blocks = [
        bytes([2 | (at == nbytes - 131072), 0, 16, ord("z")]) for at in range(0, nbytes, 131072)
    ]
    return MAGIC + head + b"".join(blocks)


@pytest.mark.parametrize(
    "behind",
    [
        repeating(256 * MIB),
        repeating(256 * MIB, says=256 * MIB),
        repeating(131072, says=1 << 40),
        repeating(131072, says=(1 << 63) + 5),
        repeating(131072, says=(1 << 64) - 4096),
        bytes(encoder("zstd")(np.frombuffer(RAW, np.uint8), 1)),
        b"\x50\x2a\x4d\x18\4\0\0\0skip",
        b"abc",
        b"\0",
    ],
    ids=["bomb", "open bomb", "2^40", "2^63+5", "2^64-4096", "two", "skippable", "garbage", "zero"],
)
def test_nothing_comes_behind_a_frame(behind: bytes) -> None:
    """zstd goes on with the frames behind the first, whose length alone was looked at: 8 KiB took
    256 MiB, and one that says 2^63 was an error of the interpreter."""
    stored = encoder("zstd")(np.frombuffer(RAW, np.uint8), 1)
    assert decoded("zstd", stored, len(RAW)) == RAW
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="compressed frame"):
            decoded("zstd", stored + behind, len(RAW))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_a_frame_of_other_length_is_refused() -> None:
    """Cut off anywhere, or of another number of bytes than it says."""
    stored = encoder("zstd")(np.frombuffer(RAW, np.uint8), 1)
    for length in range(len(stored)):
        with pytest.raises(IntegrityError):
            decoded("zstd", stored[:length], len(RAW))
    for length in (131072, 2 * 131072):
        made = repeating(length, says=131072)
        if length == 131072:
            assert decoded("zstd", made, 131072) == b"z" * 131072
        else:
            with pytest.raises(IntegrityError):
                decoded("zstd", made, 131072)
