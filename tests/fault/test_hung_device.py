"""A device that hangs: every call of the pool ends in time, nothing is lost, nothing is late."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

import pytest

from hpstore.errors import HpstoreError
from hpstore.pool.pool import Pool
from hpstore.units import KIB
from tests.fault.common import Bench, Hangs, attempt, payload, poll, value, within

pytestmark = pytest.mark.fault
LIMIT = 60.0  # seconds for any one call; the deadlines below add up to far less
SIZES = pytest.mark.parametrize("size", [1 * KIB, 700 * KIB], ids=["copies", "striped"])


@pytest.fixture
def hangs(bench: Bench) -> Iterator[Hangs]:
    """A 2+1 pool of four directories with short deadlines; hangs are released at the end."""
    bench.create(
        4,
        data=2,
        parity=1,
        device_deadline_seconds=0.5,
        straggler_seconds=0.3,
        open_deadline_seconds=0.5,
        lock_deadline_seconds=2.0,
    ).close()
    made = Hangs(bench)
    yield made
    made.release()


def holds(pool: Pool, *keys: str, size: int) -> None:
    """Each key has the bytes of its name."""
    for key in keys:
        assert within(LIMIT, lambda key=key: value(pool, key)) == payload(key, size)  # type: ignore[misc]


def tmp_files(bench: Bench) -> list[str]:
    """What lies in tmp/ of all devices."""
    return [name for path in bench.paths for name in glob.glob(f"{path}/tmp/*")]


@SIZES
def test_get_and_put_end_in_time_when_a_device_hangs_after_open(hangs: Hangs, size: int) -> None:
    """Two devices in turn hang under an open pool; gets are right, puts are acknowledged."""
    for number, path in enumerate(hangs.bench.paths[1:3]):
        with hangs.bench.open(wrap=hangs.wrap) as pool:
            pool.put(f"old{number}", payload(f"old{number}", size))
            hangs.hang(path)
            holds(pool, f"old{number}", size=size)
            within(LIMIT, lambda: pool.put(f"new{number}", payload(f"new{number}", size)))  # noqa: B023
            holds(pool, f"old{number}", f"new{number}", size=size)
            within(LIMIT, lambda: pool.delete(f"old{number}"))  # noqa: B023
            assert within(LIMIT, lambda: value(pool, f"old{number}")) is None  # noqa: B023
            hangs.release()
        with hangs.bench.open() as pool:
            holds(pool, f"new{number}", size=size)
            assert value(pool, f"old{number}") is None


@pytest.mark.parametrize("operation", ["C", "W", "Y", "P"])
@SIZES
def test_put_ends_in_time_when_one_of_its_steps_hangs(
    hangs: Hangs, operation: str, size: int
) -> None:
    """Hang after a create, write, sync, publish ... of an overwrite; old or new, and new if acked.

    The late call is then released: it changes nothing that was read before.
    """
    with hangs.bench.open(wrap=hangs.wrap) as pool:
        pool.put("x", payload("old", size))
        hangs.hang(hangs.bench.paths[1], f"{operation}H*")
        acknowledged = within(LIMIT, lambda: attempt(lambda: pool.put("x", payload("new", size))))
        assert acknowledged, "three devices are enough for 2+1"
        assert within(LIMIT, lambda: pool.get("x")) == payload("new", size)
        hangs.release()
        within(LIMIT, pool.close)
    with hangs.bench.open() as pool:
        assert pool.get("x") == payload("new", size)
        pool.rebuild()
        assert pool.scrub().clean
        assert pool.get("x") == payload("new", size)


def test_open_ends_in_time_when_a_device_hangs(hangs: Hangs) -> None:
    """Each device in turn hangs from the start; the pool opens without it and serves."""
    with hangs.bench.open() as pool:
        pool.put("x", payload("x", 700 * KIB))
    for path in hangs.bench.paths:
        hangs.hang(path)
        pool = within(LIMIT, lambda: hangs.bench.open(wrap=hangs.wrap))
        holds(pool, "x", size=700 * KIB)
        within(LIMIT, lambda: pool.put("y", payload("y", 700 * KIB)))  # noqa: B023
        holds(pool, "y", size=700 * KIB)
        hangs.release()
        within(LIMIT, pool.close)


@pytest.mark.parametrize("plan", ["H*", "..H*"], ids=["asked who it is", "proved"])
def test_a_device_that_can_be_done_without_does_not_cost_the_open_deadline(
    bench: Bench, plan: str
) -> None:
    """PROTOCOL 14: who answers is enough; the others are looked for when they are needed."""
    bench.create(4, data=2, parity=1, open_deadline_seconds=300.0).close()
    hangs = Hangs(bench)
    hangs.hang(bench.paths[1], plan)
    try:
        with within(LIMIT, lambda: bench.open(wrap=hangs.wrap)) as pool:
            assert len(pool.admin.devices.places) == 3
            within(LIMIT, pool.admin.refresh)
            hangs.release()

            def is_back() -> bool:
                within(LIMIT, pool.admin.refresh)
                return len(pool.admin.devices.places) == 4

            poll(LIMIT, is_back)  # its late call has to end first
    finally:
        hangs.release()


def test_open_says_what_is_missing_when_too_many_devices_hang(hangs: Hangs) -> None:
    """Two of four devices hang at a parity of one: the error comes in time and names both."""
    for path in hangs.bench.paths[:2]:
        hangs.hang(path)
    with pytest.raises(HpstoreError) as caught:
        within(LIMIT, lambda: hangs.bench.open(wrap=hangs.wrap))
    for path in hangs.bench.paths[:2]:
        assert path in str(caught.value)


def test_status_ends_in_time_when_a_device_hung_at_open(hangs: Hangs) -> None:
    """`status` is what an operator runs first: it shows the hung device as missing."""
    hangs.hang(hangs.bench.paths[1])
    with within(LIMIT, lambda: hangs.bench.open(wrap=hangs.wrap)) as pool:
        try:
            status = within(LIMIT, pool.status)
        finally:
            hangs.release()
        states = {device.url: device.state for device in status.devices}
        assert states[hangs.bench.paths[1]] == "missing"


def test_status_ends_in_time_when_a_device_hangs_after_open(hangs: Hangs) -> None:
    """The same under an open pool."""
    with hangs.bench.open(wrap=hangs.wrap) as pool:
        pool.put("x", payload("x", 700 * KIB))
        hangs.hang(hangs.bench.paths[1])
        try:
            assert within(LIMIT, pool.status).objects == 1
        finally:
            hangs.release()


def test_evict_of_a_device_that_hung_at_open_ends_in_time(hangs: Hangs) -> None:
    """A hung device does not block its own eviction (PROTOCOL 15)."""
    with hangs.bench.open() as pool:
        pool.put("x", payload("x", 700 * KIB))
    hangs.hang(hangs.bench.paths[1])
    with within(LIMIT, lambda: hangs.bench.open(wrap=hangs.wrap)) as pool:
        try:
            within(LIMIT, lambda: pool.evict(hangs.bench.paths[1]))
            holds(pool, "x", size=700 * KIB)
        finally:
            hangs.release()


def test_evict_of_a_device_that_hangs_after_open_ends_in_time(hangs: Hangs) -> None:
    """The same under an open pool; then a rebuild makes everything whole without it."""
    with hangs.bench.open(wrap=hangs.wrap) as pool:
        pool.put("x", payload("x", 700 * KIB))
        hangs.hang(hangs.bench.paths[1])
        try:
            within(LIMIT, lambda: pool.evict(hangs.bench.paths[1]))
            holds(pool, "x", size=700 * KIB)
            within(LIMIT, pool.rebuild)
            assert within(LIMIT, lambda: pool.stat("x")).losses_tolerated == 1
        finally:
            hangs.release()


def test_rebuild_ends_in_time_when_a_device_hangs(hangs: Hangs) -> None:
    """A rebuild waits for nobody: it heals what it can on the devices that answer."""
    with hangs.bench.open(wrap=hangs.wrap) as pool:
        for number in range(5):
            pool.put(f"x/{number}", payload(f"x/{number}", 200 * KIB))
        hangs.hang(hangs.bench.paths[1])
        try:
            report = within(LIMIT, lambda: pool.rebuild(include_missing=True))
            assert not report.unreadable
        finally:
            hangs.release()


def test_close_ends_in_time_when_a_device_hangs(hangs: Hangs) -> None:
    """Close joins its threads with a limit; what was acknowledged is there afterwards."""
    pool = hangs.bench.open(wrap=hangs.wrap)
    pool.put("x", payload("x", 700 * KIB))
    hangs.hang(hangs.bench.paths[1])
    within(LIMIT, lambda: pool.get("x"))
    within(LIMIT, pool.close)
    hangs.release()
    with hangs.bench.open() as pool:
        assert pool.get("x") == payload("x", 700 * KIB)


def test_nothing_is_left_in_tmp_when_a_hung_put_is_released(hangs: Hangs) -> None:
    """A put leaves a hung device out; when that answers at last, its file is dropped.

    Then, not before: the pool has opened the device anew by now, and close does not wait for the
    old one's last call.
    """
    with hangs.bench.open(wrap=hangs.wrap) as pool:
        hangs.hang(hangs.bench.paths[0], "WH*")
        hangs.hang(hangs.bench.paths[1], "YH*")
        for number in range(4):
            attempt(lambda number=number: pool.put(f"x/{number}", payload("x", 700 * KIB)))  # type: ignore[misc]
        hangs.release()
        within(LIMIT, pool.close)
    poll(LIMIT, lambda: not tmp_files(hangs.bench), lambda: f"empty: {tmp_files(hangs.bench)}")
    assert os.path.isdir(f"{hangs.bench.paths[0]}/tmp")
