"""Copies past the cache move the bytes that they are told to move, and none else."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
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
from hpstore.loaders.batching import streaming_copy
from hpstore.loaders.batching.streaming_copy import (
    LARGE_BYTES,
    PIECE_BYTES,
    Join,
    past_the_cache,
    tried,
)
from tests.fault.common import poll

SPEC = importlib.util.find_spec("hpstore._nontemporal")
WIDTH = 0 if SPEC is None or SPEC.origin is None else ctypes.CDLL(SPEC.origin).hpstore_width()
built = pytest.mark.skipif(not WIDTH, reason="no C compiler when hpstore was installed, or no AVX2")
EDGE = 64  # bytes on both sides that nobody is to write


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    streaming_copy._installed.cache_clear()
    streaming_copy._library.cache_clear()
    yield
    streaming_copy._installed.cache_clear()
    streaming_copy._library.cache_clear()


def function() -> Any:
    """hpstore_join_1 of its own library object, whose argument types no other test has set."""
    assert SPEC is not None
    return ctypes.CDLL(SPEC.origin).hpstore_join_1


def much() -> Join | None:
    """For what is just worth it."""
    return past_the_cache(LARGE_BYTES, 1)


@built
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 3000) | st.integers(0, 3)), max_size=12
    ),
    shift=st.integers(0, 63),
    width=st.sampled_from([64, 32] if WIDTH == 64 else [32]),
)
@example(parts=[(1, 64), (0, 256), (7, 257), (3, 319), (5, 1)], shift=0, width=WIDTH)
@example(parts=[(1, 64), (0, 256), (7, 257), (3, 319), (5, 1)], shift=1, width=32)
def test_all_pieces_come_one_after_another(
    parts: list[tuple[int, int]], shift: int, width: int
) -> None:
    """Wherever they and their target begin, of any length, by both kinds of stores."""
    source = np.random.default_rng(1).integers(0, 256, 8000, np.uint8)
    lengths = np.array([n for _, n in parts], np.int64)
    memory = np.full(int(lengths.sum()) + 2 * EDGE + shift, 7, np.uint8)
    out = memory[EDGE + shift : len(memory) - EDGE]
    starts = np.array([start for start, _ in parts], np.uint64)
    tried(function(), width)(starts + np.uint64(address_of(source)), lengths, out)
    assert out.tobytes() == b"".join(source[a : a + n].tobytes() for a, n in parts)
    assert (memory[: EDGE + shift] == 7).all()
    assert (memory[len(memory) - EDGE :] == 7).all()


@built
@pytest.mark.parametrize("room", [99, 101, 0])
def test_no_room_too_little_or_too_much(room: int) -> None:
    """Nothing is written then."""
    join, source = tried(function(), WIDTH), np.ones(100, np.uint8)
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
    join = past_the_cache(size, 1)
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
        poll(60, lambda: turns[0] > 0)
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


@built
@pytest.mark.parametrize(
    "change",
    [
        lambda a, n, out: (a.astype(np.int64), n, out),
        lambda a, n, out: (a, n.astype(np.int32), out),
        lambda a, n, out: (a, n, out.view(np.int8)),
        lambda a, n, out: (np.repeat(a, 2)[::2], n, out),
        lambda a, n, out: (a, n.reshape(-1, 1), out),
        lambda a, n, out: (a, np.array([101, -1]), out),
        lambda a, n, out: (a, n, np.frombuffer(bytes(100), np.uint8)),
    ],
    ids=["addresses", "lengths", "out", "gaps", "table", "negative", "read-only"],
)
def test_nothing_is_taken_for_what_it_is_not(change: Any) -> None:
    """The library would read, or write, whatever lies there."""
    join, source = tried(function(), WIDTH), np.ones(100, np.uint8)
    out = np.zeros(100, np.uint8)
    addresses = np.array([address_of(source)] * 2, np.uint64)
    with pytest.raises(ValueError, match=r"wanted|read-only|-1 bytes"):
        join(*change(addresses, np.array([60, 40]), out))
    assert not out.any()


@built
@pytest.mark.parametrize(
    ("nbytes", "pieces", "past"),
    [
        (LARGE_BYTES, 1, True),
        (LARGE_BYTES - 1, 1, False),
        (10 * LARGE_BYTES, 10 * LARGE_BYTES // PIECE_BYTES, True),
        (10 * LARGE_BYTES, 10 * LARGE_BYTES // PIECE_BYTES + 1, False),
    ],
)
def test_what_is_small_is_left_in_the_cache(nbytes: int, pieces: int, past: bool) -> None:
    """In all, or in its pieces: whoever reads it next finds it there."""
    assert (past_the_cache(nbytes, pieces) is not None) == past


@built
def test_much_goes_past_the_cache_where_it_can(caplog: pytest.LogCaptureFixture) -> None:
    assert much() is not None
    assert not streaming_copy.missed(LARGE_BYTES, 1)
    assert not caplog.records


@pytest.mark.parametrize(("machine", "warned"), [("x86_64", True), ("aarch64", False)])
def test_what_was_not_built_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, warned: bool
) -> None:
    """And what to do about it; not where nothing can be done."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert [much() for _ in range(3)] == [None] * 3
    assert streaming_copy.missed(LARGE_BYTES, 1) == warned
    assert not streaming_copy.missed(LARGE_BYTES - 1, 1)
    assert len(caplog.records) == warned
    assert ("install it anew" in caplog.text) == warned


@built
def test_a_processor_that_cannot_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Old:
        hpstore_join_1 = None

        def hpstore_width(self) -> int:
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Old())
    assert much() is None
    assert not streaming_copy.missed(LARGE_BYTES, 1)
    assert not caplog.records


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
    assert much() is None
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert where in caplog.text
    assert streaming_copy.missed(LARGE_BYTES, 1)  # counted, too


@built
def test_a_library_that_copies_wrongly_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its self-test finds it, before a batch does."""

    def careless(found: Any, width: int) -> Join:
        def call(out: int, addresses: int, lengths: int, count: int, width: int) -> None:
            real(out, addresses, lengths, count - 1, width)

        real = found
        real.argtypes, real.restype = [ctypes.c_void_p] * 3 + [ctypes.c_int64, ctypes.c_int], None
        return tried(call, width)  # type: ignore[arg-type]

    monkeypatch.setattr(streaming_copy, "tried", careless)
    assert much() is None
    assert "self-test" in caplog.text
    assert streaming_copy.missed(LARGE_BYTES, 1)
