"""Devices that stop answering under an open pool: what can do without them does not wait (rule 7).

The device deadline is far beyond the tests' limits: nothing here ends by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpstore.errors import ObjectNotFound, TooManyErasures
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.fault.common import Bench, Call, Gates, payload, within

LIMIT, NEVER, SIZE = 60.0, 3600.0, 300 * KIB


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def gates(bench: Bench) -> Iterator[Gates]:
    """A 4+2 pool of eight directories with ten objects; nothing hangs yet."""
    with bench.create(8, data=4, parity=2, device_deadline_seconds=NEVER) as pool:
        for n in range(10):
            pool.put(f"k/{n}", payload(f"k/{n}", SIZE))
        pool.put("small", b"s")
    made = Gates()
    yield made
    made.let_go()


def hang(gates: Gates, bench: Bench, devices: int) -> None:
    """The first devices answer no call at all."""
    gates.shut = {(path, "*") for path in bench.paths[:devices]}


def use(pool: Pool) -> None:
    """Reads, puts, deletes and lists, as they are without any device away."""
    for n in range(10):
        assert pool.get(f"k/{n}") == payload(f"k/{n}", SIZE)
    assert pool.get("small") == b"s"
    assert pool.stat("k/1").size == SIZE
    assert len(pool.list("k/")) == 10
    assert not pool.exists("k/none")
    assert [v.current for v in pool.versions("k/3")] == [True]
    pool.put("k/new", payload("new", SIZE))
    pool.put("k/new", payload("newer", SIZE))
    assert pool.get("k/new") == payload("newer", SIZE)
    pool.delete("k/new")
    with pytest.raises(ObjectNotFound):
        pool.get("k/new")
    version = pool.put("one", b"1", if_absent=True).version
    pool.put("one", b"2", if_version=version)
    assert pool.get("one") == b"2"
    pool.delete("one")


@pytest.mark.parametrize("devices", [1, 2])
def test_devices_that_hang_do_not_hold_what_can_do_without_them(
    bench: Bench, gates: Gates, devices: int
) -> None:
    with bench.open(wrap=gates.wrap) as pool:
        hang(gates, bench, devices)
        within(LIMIT, lambda: use(pool))
        assert gates.waiting >= devices
        waiting = gates.waiting
        within(LIMIT, lambda: use(pool))  # no further calls pile up on them but locks
        assert gates.waiting <= waiting + 16
        gates.let_go()
        within(LIMIT, lambda: use(pool))


def test_a_device_that_answers_again_is_asked_again(bench: Bench, gates: Gates) -> None:
    """At once: the next put has a column there."""
    with bench.open(wrap=gates.wrap) as pool:
        hang(gates, bench, 2)
        within(LIMIT, lambda: pool.put("wide", payload("wide", SIZE)))
        assert len(bench.files("wide")) == 6
        assert not any(str(file).startswith(tuple(bench.paths[:2])) for file in bench.files("wide"))
        owing = within(LIMIT, pool._store.owing)
        assert len(owing) == 2
        gates.let_go()
        for n in range(8):
            pool.put(f"again/{n}", payload("wide", SIZE))
        used = {
            file.parts[: len(Path(bench.paths[0]).parts)]
            for n in range(8)
            for file in bench.files(f"again/{n}")
        }
        assert len(used) == 8


def test_what_cannot_do_without_them_waits_and_is_right(bench: Bench, gates: Gates) -> None:
    """Three of m = 2: nothing is said of an object before one of them answers."""
    with bench.open(wrap=gates.wrap) as pool:
        hang(gates, bench, 3)
        reading, listing = Call(lambda: pool.get("k/1")), Call(lambda: pool.list("k/"))
        absent = Call(lambda: pool.exists("k/none"))
        assert not reading.ended(3.0)
        assert not absent.ended(0.0)
        gates.let_go()
        assert reading.ended(LIMIT)
        assert reading.result() == payload("k/1", SIZE)
        assert listing.ended(LIMIT)
        assert len(listing.result()) == 10  # type: ignore[arg-type]  # a list
        assert absent.ended(LIMIT)
        assert absent.result() is False


def test_what_is_unclear_without_a_device_waits_for_it(bench: Bench, gates: Gates) -> None:
    """Columns of two others are gone, so the device that hangs is needed to read the object: the
    first look is not the last word."""
    with bench.open(wrap=gates.wrap) as pool:
        *_, first, second, third = bench.files("k/1")
        first.unlink()
        second.unlink()
        (holder,) = (path for path in bench.paths if third.is_relative_to(path))
        gates.shut = {(holder, "*")}
        reading = Call(lambda: pool.get("k/1"))
        assert not reading.ended(3.0)
        gates.let_go()
        try:
            assert reading.ended(LIMIT)
            assert reading.result() == payload("k/1", SIZE)
        except TooManyErasures:
            pytest.fail("an early look was believed")


def test_a_device_that_hangs_is_evicted_and_healed_without_being_waited_for(
    bench: Bench, gates: Gates
) -> None:
    with bench.open(wrap=gates.wrap) as pool:
        hang(gates, bench, 1)
        assert within(LIMIT, pool.status).losses_tolerated <= 1
        within(LIMIT, lambda: pool.evict(bench.paths[0]))
        assert within(LIMIT, pool.rebuild).whole
        within(LIMIT, lambda: use(pool))
