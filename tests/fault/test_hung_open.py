"""A device hangs as a file on it is opened: who can do without it does not wait a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpstore.format.column_header import HEADER_BYTES
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.fault.common import Bench, Gates, column_number, flip, payload, within

pytestmark = pytest.mark.fault
LIMIT = 60.0  # seconds for any one call
DEADLINE = 300.0  # of a device


@pytest.fixture
def gates(bench: Bench) -> Iterator[Gates]:
    """Of a 2+1 pool of three directories that waits long for a device; opened at the end."""
    bench.create(3, data=2, parity=1, device_deadline_seconds=DEADLINE).close()
    made = Gates()
    yield made
    made.let_go()


def place_of(bench: Bench, key: str, column: int) -> tuple[str, Path]:
    """The device that has a column of an object, and the file."""
    file = next(f for f in bench.files(key) if column_number(f) == column)
    return next(path for path in bench.paths if str(file).startswith(path)), file


def read_whole(pool: Pool, key: str) -> bytes:
    """By a reader of many ranges."""
    with pool.open(key) as reader:
        found = bytearray(reader.size)
        reader.read_into(found)
    return bytes(found)


def read_among_many(pool: Pool, key: str) -> bytes:
    """By one of several readers that are opened together."""
    readers = pool.open_many([key, "other"])
    found = bytearray()
    for name, reader in readers.items():
        assert not isinstance(reader, Exception)
        if name == key:
            found = bytearray(reader.size)
            reader.read_into(found)
        reader.close()
    return bytes(found)


WAYS = pytest.mark.parametrize(
    "read", [Pool.get, read_whole, read_among_many], ids=["get", "reader", "several readers"]
)
SIZES = pytest.mark.parametrize("size", [1 * KIB, 700 * KIB], ids=["copies", "striped"])


@WAYS
@SIZES
def test_a_device_that_hangs_at_an_open_does_not_cost_its_deadline(
    bench: Bench, gates: Gates, size: int, read: Callable[[Pool, str], bytes]
) -> None:
    """PROTOCOL 14: everything shows without it; the first read waits a second, the next none."""
    with bench.open(wrap=gates.wrap) as pool:
        pool.put("x", payload("x", size))
        pool.put("other", payload("other", size))
        gates.shut.add((place_of(bench, "x", 0)[0], "open"))
        assert within(LIMIT, lambda: read(pool, "x")) == payload("x", size)
        began = time.monotonic()
        for _ in range(8):
            assert within(LIMIT, lambda: read(pool, "x")) == payload("x", size)
        assert time.monotonic() - began < LIMIT
        gates.let_go()


@WAYS
def test_a_device_that_is_needed_after_all_is_waited_for(
    bench: Bench, gates: Gates, read: Callable[[Pool, str], bytes]
) -> None:
    """It was given up while another column looked whole; the bytes of that are damaged."""
    size = 700 * KIB
    with bench.open(wrap=gates.wrap) as pool:
        pool.put("x", payload("x", size))
        pool.put("other", payload("other", size))
        flip(place_of(bench, "x", 1)[1], HEADER_BYTES + 100)
        gates.shut.add((place_of(bench, "x", 0)[0], "open"))
        release = threading.Timer(3.0, gates.let_go)
        release.start()
        assert within(LIMIT, lambda: read(pool, "x")) == payload("x", size)
        release.join()
