"""Copies past the cache move the bytes that they are told to move, and none else."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpstore.codec import address_of
from hpstore.loaders import nontemporal
from hpstore.loaders.nontemporal import LARGE_BYTES, Join, past_the_cache, tried
from tests.fault.common import poll

SPEC = importlib.util.find_spec("hpstore._nontemporal")
built = pytest.mark.skipif(SPEC is None, reason="hpstore was installed without a C compiler")
EDGE = 64  # bytes on both sides that nobody is to write


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    nontemporal._installed.cache_clear()
    yield
    nontemporal._installed.cache_clear()


def function() -> Any:
    """hpstore_join of its own library object, whose argument types no other test has set."""
    assert SPEC is not None
    return ctypes.CDLL(SPEC.origin).hpstore_join


@built
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 3000) | st.integers(0, 3)), max_size=12
    ),
    shift=st.integers(0, 63),
    wide=st.booleans(),
)
@example(parts=[(1, 64), (0, 256), (7, 257), (3, 319), (5, 1)], shift=0, wide=True)
@example(parts=[(1, 64), (0, 256), (7, 257), (3, 319), (5, 1)], shift=1, wide=False)
def test_all_pieces_come_one_after_another(
    parts: list[tuple[int, int]], shift: int, wide: bool
) -> None:
    """Wherever they and their target begin, of any length, by both kinds of stores."""
    source = np.random.default_rng(1).integers(0, 256, 8000, np.uint8)
    lengths = np.array([n for _, n in parts], np.int64)
    memory = np.full(int(lengths.sum()) + 2 * EDGE + shift, 7, np.uint8)
    out = memory[EDGE + shift : len(memory) - EDGE]
    starts = np.array([start for start, _ in parts], np.uint64)
    tried(function(), wide=wide)(starts + np.uint64(address_of(source)), lengths, out)
    assert out.tobytes() == b"".join(source[a : a + n].tobytes() for a, n in parts)
    assert (memory[: EDGE + shift] == 7).all()
    assert (memory[len(memory) - EDGE :] == 7).all()


@built
@pytest.mark.parametrize("room", [99, 101, 0])
def test_no_room_too_little_or_too_much(room: int) -> None:
    """Nothing is written then."""
    join, source = tried(function()), np.ones(100, np.uint8)
    out = np.zeros(room, np.uint8)
    addresses = np.array([address_of(source)], np.uint64)
    with pytest.raises(ValueError, match="100 bytes"):
        join(addresses, np.array([100]), out)
    with pytest.raises(ValueError, match="1 pieces, 2 lengths"):
        join(addresses, np.array([room, 0]), out)
    assert not out.any()


@built
def test_the_interpreters_lock_is_not_held() -> None:
    """Others go on while a batch is copied."""
    size = 8 * LARGE_BYTES
    join = past_the_cache(size)
    assert join is not None
    source, out = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    addresses, lengths = np.array([address_of(source)], np.uint64), np.array([size])
    over, turns, usual = threading.Event(), [0], sys.getswitchinterval()

    def count() -> None:
        while not over.wait(0.001):
            turns[0] += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        poll(10, lambda: turns[0] > 0)
        sys.setswitchinterval(60)  # others run only where the lock is given up
        before = turns[0]
        for _ in range(500):
            join(addresses, lengths, out)
            if turns[0] > before:
                break
        assert turns[0] > before
    finally:
        over.set()
        other.join()
        sys.setswitchinterval(usual)


def test_little_is_left_in_the_cache() -> None:
    """Whoever reads it next finds it there."""
    assert past_the_cache(LARGE_BYTES - 1) is None


@built
def test_much_goes_past_the_cache_where_it_can(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert past_the_cache(LARGE_BYTES) is not None
    assert not caplog.records


def test_what_was_not_built_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what to do about it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert [past_the_cache(LARGE_BYTES) for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.text
    assert "install it anew" in caplog.text


@pytest.mark.parametrize("what", ["no library", "another library"])
def test_a_library_that_does_not_work_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, what: str
) -> None:
    """With a warning that names it."""
    path = tmp_path / "broken.so"
    path.write_bytes(b"not a library")
    other = next(iter(Path(np.__file__).parent.glob("_core/_multiarray_umath*.so")))
    where = str(path if what == "no library" else other)
    spec = ModuleSpec("hpstore._nontemporal", None, origin=where)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert past_the_cache(LARGE_BYTES) is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert where in caplog.text


@built
def test_a_library_that_copies_wrongly_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its self-test finds it, before a batch does."""

    def careless(found: Any, *, wide: bool = True) -> Join:
        def call(out: int, addresses: int, lengths: int, count: int, wide: bool) -> None:
            found(out, addresses, lengths, count - 1, wide)

        real = found
        real.argtypes, real.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int], None
        return tried(call)  # type: ignore[arg-type]

    monkeypatch.setattr(nontemporal, "tried", careless)
    assert past_the_cache(LARGE_BYTES) is None
    assert "self-test" in caplog.text
