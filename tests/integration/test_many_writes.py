"""put_many and delete_many do what as many single calls do, with fewer calls on devices.

The case: `rm -r` of 5,000 small files took 31 s, `put` of a directory of them 34 s.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from hpstore.codec.galois import Bytes
from hpstore.devices.base import Device
from hpstore.devices.horizon_guard import HORIZON
from hpstore.devices.wrappers import DeviceWrapper, SimulatedCrash
from hpstore.errors import (
    ConfigError,
    DeviceError,
    HpstoreError,
    InvalidKey,
    ObjectNotFound,
    RedundancyError,
    SomeFailed,
    TooFewDevices,
)
from hpstore.objects.write import many_writes
from hpstore.objects.write.many_writes import MOST_KEYS, SMALL_BYTES, SmallPut
from hpstore.objects.write.put_source import MemorySource
from hpstore.pool.many_objects import put_batches
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.fault.common import Bench, Hangs
from tests.integration.test_crash_steps import loss_patterns
from tests.thorough import crash_points

T = TypeVar("T")
KEYS = [f"many/{number:03}" for number in range(10)]
SIZES = [0, 1, 4096, 70_000, SMALL_BYTES, SMALL_BYTES + 1, 1000, 128 << 10, 200_000, 5]
BODIES = {key: os.urandom(size) for key, size in zip(KEYS, SIZES, strict=True)}


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path, data=4, parity=2, devices=7)


def names(harness: Harness, keys: Iterable[str]) -> dict[str, int]:
    """How many files there are of each key, past the code under test."""
    return {key: len(harness.columns(key)) for key in keys}


@pytest.mark.parametrize("threads", [False, True])
def test_objects_put_together_are_those_that_single_puts_store(
    harness: Harness, threads: bool
) -> None:
    """Over nothing, an older version and a deleted one: bytes, facts, metadata and files alike."""
    with harness.open(threads=threads) as pool:
        pool.put(KEYS[1], b"old" * 100_000)
        pool.put(KEYS[2], b"old")
        pool.delete(KEYS[2])
        alone = {key: pool.put(f"one/{key}", body, {"a": 1}) for key, body in BODIES.items()}
        together = pool.put_many(BODIES, {"a": 1})
        assert list(together) == KEYS
        for key, body in BODIES.items():
            assert pool.get(key) == body
            assert pool.stat(key) == together[key]
            same = ("size", "data", "parity", "losses_tolerated", "metadata")
            for fact in same:
                assert getattr(together[key], fact) == getattr(alone[key], fact), (key, fact)
        assert list(names(harness, KEYS).values()) == [
            len(harness.columns(f"one/{key}")) for key in KEYS
        ]
        assert pool.scrub().clean
        assert pool.metrics.value("written_together_total") == 9  # all but the large one


@pytest.mark.parametrize("threads", [False, True])
def test_objects_deleted_together_are_gone_and_leave_what_single_deletes_leave(
    harness: Harness, threads: bool
) -> None:
    """m + 1 tombstones of each key and no column; what is not there is named, the others go."""
    with harness.open(threads=threads) as pool:
        pool.put_many(BODIES)
        pool.delete(KEYS[3])
        with pytest.raises(SomeFailed) as caught:
            pool.delete_many([*KEYS, KEYS[0], "absent"])
        assert caught.value.done == tuple(key for key in KEYS if key != KEYS[3])
        assert list(caught.value.failed) == [KEYS[3], "absent"]
        assert {type(e) for e in caught.value.failed.values()} == {ObjectNotFound}
        assert "2 of 11 objects are not deleted" in str(caught.value)
        assert pool.list() == []
        assert set(names(harness, KEYS).values()) == {3}
        pool.delete_many([*KEYS, "absent"], missing_ok=True)
        with pytest.raises(InvalidKey):
            pool.delete_many([KEYS[0], "../x"])
        pool.delete_many([])
        assert pool.put_many({}) == {}


def test_calls_on_devices_do_not_grow_with_the_objects(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 64 makes a dozen calls on each device's lane at most, where single ones make
    hundreds."""
    with harness.open() as pool:
        pool.put("warm", b"1")
        calls: Counter[str] = Counter()
        plain = pool._store.scheduler.submit

        def submit(device: str, call: Callable[[], T], **named: bool) -> object:
            calls[device] += 1
            return plain(device, call, **named)

        monkeypatch.setattr(pool._store.scheduler, "submit", submit)
        keys = [f"k/{number:02}" for number in range(MOST_KEYS)]
        pool.put_many(dict.fromkeys(keys, b"x"))
        assert max(calls.values()) <= 12
        calls.clear()
        pool.delete_many(keys)
        assert max(calls.values()) <= 12
        assert set(names(harness, keys).values()) == {3}


def act_put(pool: Pool) -> None:
    pool.put_many(dict.fromkeys(KEYS[:3], b"new"))


def act_delete(pool: Pool) -> None:
    pool.delete_many(KEYS[:3])


@pytest.mark.parametrize("act", [act_put, act_delete])
@pytest.mark.parametrize("crash", [Harness.restart, Harness.power_cut])
def test_a_crash_leaves_each_object_old_or_new(
    tmp_path: Path, act: Callable[[Pool], None], crash: Callable[[Harness], None]
) -> None:
    """PROTOCOL 4, 12: before every operation; each key by itself, with any two devices lost once it
    is acknowledged. It reads the same after a rebuild."""
    final = b"new" if act is act_put else None
    for crash_at in crash_points():
        directory = tmp_path / str(crash_at)
        directory.mkdir()
        harness = Harness(directory, data=2, parity=2, devices=4, clock=FakeClock())
        with harness.open() as pool:
            pool.put_many(dict.fromkeys(KEYS[:3], b"old"))
        pool, _ = harness.open_crashing(crash_at)
        try:
            act(pool)
            finished = True
        except SimulatedCrash:
            finished = False
        crash(harness)
        with harness.open() as pool:
            found = {key: read(pool, key) for key in KEYS[:3]}
            assert set(found.values()) <= ({final} if finished else {b"old", final})
            assert not pool.rebuild().unreadable
            assert {key: read(pool, key) for key in KEYS[:3]} == found
        for lost in loss_patterns(harness, 2):
            harness.lose(lost)
            with harness.open(read_only=True) as pool:
                assert {key: read(pool, key) for key in KEYS[:3]} == found, lost
            harness.bring_back()
        if finished:
            assert crash_at > 0
            return


def read(pool: Pool, key: str) -> bytes | None:
    try:
        return pool.get(key)
    except ObjectNotFound:
        return None


class Logging(DeviceWrapper):
    """Notes the operations of writes; those named in `broken` fail from then on."""

    def __init__(self, inner: Device, log: list[tuple[str, str]], broken: set[str]) -> None:
        super().__init__(inner)
        self._log, self._broken = log, broken

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation in ("create", "write", "sync", "publish", "sync_directory"):
            self._log.append((operation, self.url))
            if f"{operation} {self.url}" in self._broken:
                raise DeviceError(f"{operation} fails", device=self.url)
        return super().around(operation, nbytes, call)


def logging(log: list[tuple[str, str]], broken: set[str], _: str, device: Device) -> Device:
    return Logging(device, log, broken)


@pytest.mark.parametrize("threads", [False, True])
def test_nothing_has_a_name_before_its_bytes_are_durable(harness: Harness, threads: bool) -> None:
    """PROTOCOL 4: of every device all files are synced, then they are named, then the names are
    synced; no column is written twice."""
    log: list[tuple[str, str]] = []
    with harness.open(partial(logging, log, set()), threads=threads) as pool:
        pool.put_many({"warm": b"1", "w": b"1"})
        for act in (
            partial(pool.put_many, dict.fromkeys(KEYS, b"x")),
            partial(pool.delete_many, KEYS),
        ):
            log.clear()
            act()
            counts = Counter(operation for operation, _ in log)
            assert set(counts) == {"create", "write", "sync", "publish", "sync_directory"}
            assert set(counts.values()) == {3 * len(KEYS)}
            operations = [operation for operation, _ in log]
            last_sync = max(at for at, name in enumerate(operations) if name == "sync")
            assert last_sync < operations.index("publish")


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("breaks", ["create", "write", "sync", "publish", "sync_directory"])
def test_a_device_that_fails_costs_no_object_its_redundancy(
    harness: Harness, breaks: str, threads: bool
) -> None:
    """One device fails at each step: all is stored as single puts store it, with two losses to
    spare or a debt, then all is deleted, and stays so without any two devices."""
    broken: set[str] = set()
    small = {key: body for key, body in BODIES.items() if len(body) <= SMALL_BYTES}
    with harness.open(partial(logging, [], broken), threads=threads) as pool:
        pool.put_many(dict.fromkeys(small, b"old"))
        broken.add(f"{breaks} {harness.urls[2]}")
        stored = pool.put_many(small)
        named = breaks in ("publish", "sync_directory")  # then a large one has its floor: a debt
        assert {info.losses_tolerated for info in stored.values()} <= ({1, 2} if named else {2})
        assert {key: pool.get(key) for key in small} == small
        assert pool.metrics.value("written_together_again_total") > 0
        pool.delete_many(small)
        assert pool.list() == []
        broken.clear()
    for lost in loss_patterns(harness, 2):
        harness.lose(lost)
        with harness.open(read_only=True) as pool:
            assert pool.list() == [], lost
        harness.bring_back()


def test_with_devices_away_it_works_as_single_calls_do(harness: Harness) -> None:
    """Two of seven away: stored and deleted. Three: each key says that it cannot be, and nothing
    has changed."""
    with harness.open() as pool:
        pool.put_many(BODIES)
    harness.lose(harness.urls[:2])
    with harness.open() as pool:
        pool.delete_many(KEYS[:5])
        pool.put_many(dict.fromkeys(KEYS[:2], b"new"))
        harness.lose(harness.urls[2:3])
        for act in (partial(pool.delete_many, KEYS), partial(pool.put_many, BODIES)):
            with pytest.raises(SomeFailed) as caught:
                act()
            assert caught.value.done == ()
            assert all(isinstance(e, RedundancyError) for e in caught.value.failed.values())
    harness.bring_back()
    with harness.open() as pool:
        assert pool.list() == sorted([*KEYS[:2], *KEYS[5:]])
        assert {pool.get(key) for key in KEYS[:2]} == {b"new"}
        harness.lose(harness.urls[:1])
        with pytest.raises(TooFewDevices, match="10 objects"):
            pool.put_many(BODIES, min_losses_tolerated=2)


def test_a_horizon_that_rose_meanwhile_is_written_above(harness: Harness) -> None:
    """PROTOCOL 12: a sweep passes the versions of a batch before they have names: each is written
    again, above the horizon."""
    clock = FakeClock()
    harness.clock = clock
    with harness.open() as pool:
        pool.put_many({"warm": b"1", "w": b"2"})
        ahead = clock.wall_ms() + 1000
        plain = many_writes._fill

        def passed(*args: object) -> None:
            plain(*args)  # type: ignore[arg-type]
            for device in pool._store.view.devices.values():
                device.raise_counter(HORIZON, ahead, pool._store.pool_key)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(many_writes, "_fill", passed)
            pool.put_many({"a": b"a", "b": b"b"})
        assert (pool.get("a"), pool.get("b")) == (b"a", b"b")
        assert pool.metrics.value("written_together_again_total") == 2


def test_a_membership_that_moved_meanwhile_is_planned_on(harness: Harness) -> None:
    """PROTOCOL 4: another process evicts a device between the files and their names: the batch is
    planned again, and nothing counts that lies on the evicted one."""
    with harness.open() as pool, harness.open() as other:
        pool.put_many({"warm": b"1", "w": b"2"})
        plain = many_writes._fill

        def moved(*args: object) -> None:
            plain(*args)  # type: ignore[arg-type]
            if harness.urls[0] in [m.url for m in other.status().devices if m.state == "online"]:
                other.evict(harness.urls[0])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(many_writes, "_fill", moved)
            stored = pool.put_many(dict.fromkeys(KEYS, b"x"))
        assert {info.losses_tolerated for info in stored.values()} <= {1, 2}
        pool.rebuild()
        assert all(url != harness.urls[0] for key in KEYS for url, _ in harness.columns(key))
        assert {pool.get(key) for key in KEYS} == {b"x"}


def test_a_membership_that_moved_after_the_names_counts_for_none(harness: Harness) -> None:
    """PROTOCOL 4: a device is evicted between the names and the acknowledgement: no object of the
    batch counts, each is put again on the members that are left."""
    with harness.open() as pool, harness.open() as other:
        pool.put_many({"warm": b"1", "w": b"2"})
        plain = many_writes._acknowledge

        def moved(*args: object) -> None:
            other.evict(harness.urls[0])
            plain(*args)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(many_writes, "_acknowledge", moved)
            pool.put_many({"a": b"a", "b": b"b"})
        assert pool.metrics.value("written_together_again_total") == 2
        for key in ("a", "b"):
            newest = harness.columns(key)
            assert all(url != harness.urls[0] for url, _ in newest[-3:])
            assert pool.get(key) == key.encode()


def test_two_at_once_end_as_one_of_them(harness: Harness) -> None:
    """Two pools delete the same keys, and one puts while one deletes: each key is gone, or whole as
    it was put; every key has an answer in both."""
    keys = [f"k/{number:03}" for number in range(100)]
    with harness.open(threads=True) as one, harness.open(threads=True) as other:
        for act in ((one.delete_many, other.delete_many), (rewriting(one), other.delete_many)):
            one.put_many(dict.fromkeys(keys, b"x" * 1000))
            failed: list[dict[str, Exception]] = []
            threads = [threading.Thread(target=noting, args=(call, keys, failed)) for call in act]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert all(isinstance(e, ObjectNotFound) for some in failed for e in some.values())
            left = one.list()
            assert left == other.list()
            assert {other.get(key) for key in left} <= {b"y" * 500}
            assert one.scrub().clean
            one.delete_many(left)


def rewriting(pool: Pool) -> Callable[[list[str]], object]:
    return lambda keys: pool.put_many(dict.fromkeys(keys, b"y" * 500))


def noting(
    call: Callable[[list[str]], object], keys: list[str], failed: list[dict[str, Exception]]
) -> None:
    try:
        call(keys)
    except SomeFailed as error:
        failed.append(dict(error.failed))


@pytest.mark.parametrize("after", ["", "W", "P"])
def test_a_device_that_hangs_holds_a_batch_once(tmp_path: Path, after: str) -> None:
    """Not once for each object: within some deadlines all is stored elsewhere, then deleted. At
    once, after a first write, or after a first name; what it does late changes nothing."""
    bench = Bench(tmp_path)
    hangs = Hangs(bench)
    deadline = 0.5
    quick = {"device_deadline_seconds": deadline, "straggler_seconds": 0.2}
    bench.create(7, data=4, parity=2, **quick).close()
    pool = bench.open(wrap=hangs.wrap)
    try:
        pool.put_many(dict.fromkeys(KEYS, b"old"))
        hangs.hang(pool.config.devices[0], f"{after}H*")
        began = time.monotonic()
        stored = pool.put_many(dict.fromkeys(KEYS, b"new"))
        pool.delete_many(KEYS[:5])
        assert time.monotonic() - began < len(KEYS) * deadline
        assert {info.losses_tolerated for info in stored.values()} <= {1, 2}
        assert pool.list() == KEYS[5:]
    finally:
        hangs.release()
        pool.close()
    with bench.open() as pool:
        assert pool.list() == KEYS[5:]
        assert {pool.get(key) for key in KEYS[5:]} == {b"new"}
        assert not pool.rebuild().unreadable
        assert pool.list() == KEYS[5:]


class Shortened(MemorySource):
    """A file that becomes shorter while it is read."""

    def read_into(self, start: int, out: Bytes) -> None:
        raise HpstoreError("the source file became shorter while it was read")


def test_a_source_that_cannot_be_read_fails_alone(harness: Harness) -> None:
    """The others of its batch are stored, and it is told of what was stored before."""
    sources = {key: MemorySource(b"new") for key in KEYS}
    sources[KEYS[1]] = Shortened(b"new")
    with harness.open() as pool:
        pool.put(KEYS[1], b"old")
        wanted = {key: SmallPut(source=source, metadata={}) for key, source in sources.items()}
        answers = many_writes.put_objects(pool._store, wanted)
        failed = {key: str(a) for key, a in answers.items() if isinstance(a, Exception)}
        assert failed == {KEYS[1]: "the source file became shorter while it was read"}
        assert [pool.get(key) for key in KEYS] == [b"new", b"old", *[b"new"] * 8]
        assert pool.scrub().clean


def test_a_header_that_does_not_fit_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """In a pool with a key there is room for 16 bytes less: no device is blamed for it."""
    harness = Harness(tmp_path, data=24, parity=8, devices=32, unit_bytes=4096)
    harness.config = replace(
        harness.config, settings=replace(harness.config.settings, memory_bytes=64 << 20)
    )
    key, refused = "/".join(['"' * 250] * 4), list[Exception]()
    wanted = {key: b"x" * 200_000, "beside": b""}
    with harness.open() as pool:
        for length in range(400, 900, 8):
            try:
                pool.put_many(wanted, {"a": "b" * length})
            except SomeFailed as error:
                refused.append(error.failed[key])
                break
        assert [type(error) for error in refused] == [ConfigError]
        assert pool.metrics.value("column_write_error_total") == 0


def test_batches_are_bounded_in_number_and_bytes() -> None:
    """Of small objects 64, and 1 MiB; larger ones go by themselves."""
    sizes = [100] * 130 + [SMALL_BYTES] * 9 + [SMALL_BYTES + 1] + [1]
    sources = {str(n): MemorySource(bytes(size)) for n, size in enumerate(sizes)}
    batches = list(put_batches(sources))
    assert sorted(int(key) for batch in batches for key in batch) == list(range(len(sizes)))
    for batch in batches:
        assert len(batch) <= MOST_KEYS
        large = [source for source in batch.values() if source.size > SMALL_BYTES]
        assert len(large) == (1 if len(batch) == 1 and large else 0)
        assert large or sum(source.size for source in batch.values()) <= 1 << 20
