"""Objects opened together are those that reader() opens one by one, errors too."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpstore.errors import AlreadyClosed, DeviceMissing, TooManyErasures
from hpstore.objects.context import PoolContext
from hpstore.objects.read import open_many
from hpstore.objects.read.column_reader import ColumnReader
from hpstore.objects.read.object_reader import ObjectReader
from hpstore.objects.read.open_columns import open_files
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.objects.survey import Survey, survey_keys
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from tests.fault.common import Bench, Hangs, column_number, flip, payload, poll, within

KEYS = [f"objects/{i:02d}" for i in range(12)]
BODIES = [payload(key, 200_000 + 1000 * number) for number, key in enumerate(KEYS)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    with made.create(6, data=3, parity=2) as pool:
        for key, body in zip(KEYS, BODIES, strict=True):
            pool.put(key, body)
    return made


def said(found: PooledReader | Exception) -> bytes | tuple[type[Exception], str]:
    """All bytes of a reader, which is closed, or the error."""
    if isinstance(found, Exception):
        return type(found), str(found)
    with found:
        body = bytearray(found.size)
        try:
            found.read_into(body)
        except TooManyErasures as error:
            return type(error), "while it is read"
        return bytes(body)


def descriptors(root: Path) -> int:
    """Open column files under a directory."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sum(path.startswith(str(root)) and "/@" in path for path in paths)


def one_by_one(pool: Pool, key: str) -> bytes | tuple[type[Exception], str]:
    try:
        return said(pool.open(key))
    except Exception as error:  # noqa: BLE001 (looked at)
        return said(error)


def submits(pool: Pool, call: Callable[[], object]) -> Counter[str]:
    """Calls on each device while `call` runs."""
    scheduler, found = pool._store.scheduler, Counter[str]()
    plain = scheduler.submit

    def submit(device: str, *args: object, **options: object) -> object:
        found[device] += 1
        return plain(device, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "submit", submit)
        patch.setattr(
            "hpstore.runtime.call_tours.Tours.begin", lambda *_: None
        )  # all are made side by side
        call()
    return found


def test_all_are_opened_by_two_calls_on_each_device(bench: Bench, tmp_path: Path) -> None:
    with bench.open() as pool:
        opened: dict[str, PooledReader | Exception] = {}
        calls = submits(pool, lambda: opened.update(pool.open_many(KEYS)))
        assert set(calls) == set(pool._store.view.devices)
        assert max(calls.values()) == 2
        assert [said(opened[key]) for key in KEYS] == BODIES
        assert list(pool.open_many([])) == []
        again = pool.open_many([KEYS[3], KEYS[5], KEYS[3]])
        assert [said(again[key]) for key in (KEYS[3], KEYS[5])] == [BODIES[3], BODIES[5]]
        assert descriptors(tmp_path) == 0


def test_many_are_looked_up_a_bounded_number_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call must end within its deadline: with five a call, twelve take three."""
    monkeypatch.setattr("hpstore.objects.read.pooled_reader.MOST_KEYS", 5)
    with bench.open() as pool:
        opened: dict[str, PooledReader | Exception] = {}
        calls = submits(pool, lambda: opened.update(pool.open_many(KEYS)))
        assert max(calls.values()) == 6
        assert [said(opened[key]) for key in KEYS] == BODIES


@pytest.mark.parametrize("seed", range(6))
def test_what_is_opened_together_is_what_is_opened_alone(tmp_path: Path, seed: int) -> None:
    """PROTOCOL 7 for objects in every state: replaced, deleted, torn, damaged, copies, too few
    columns, absent; with devices missing, up to as many as are survived."""
    rng = random.Random(seed)
    harness = Harness(tmp_path, data=3, parity=2, devices=7)
    keys = [f"k/{i}" for i in range(40)]
    with harness.open(threads=True) as pool:
        for key in keys[:36]:
            for _ in range(rng.choice([1, 1, 2])):
                pool.put(key, rng.randbytes(rng.choice([10, 100_000, 250_000])))
            if rng.random() < 0.1:
                pool.delete(key)
        for key in keys[:36]:
            files = harness.columns(key)
            for url, path in rng.sample(files, min(len(files), rng.choice([0, 0, 1, 2, 3, 5]))):
                if rng.random() < 0.4:
                    file = harness.devices[url].files[path]
                    file.bytes[rng.choice([100, len(file.bytes) // 2])] ^= 1
                else:
                    del harness.devices[url].files[path]
        harness.lose(rng.sample(harness.urls, seed % 3))
    with harness.open(threads=True, read_only=True) as pool:
        expected = {key: one_by_one(pool, key) for key in keys}
        found = pool.open_many(keys)
        assert {key: said(found[key]) for key in keys} == expected
        kinds = {type(value) for value in expected.values()}
        assert kinds == {bytes, tuple}
        held = [
            file.readers for device in harness.devices.values() for file in device.files.values()
        ]
        assert not any(held)  # all are closed again


def test_a_damaged_header_is_noted_and_costs_no_object(bench: Bench) -> None:
    """The column is opened from elsewhere and its object queued for repair."""
    flip(sorted(bench.files(KEYS[4]), key=column_number)[1], 100)
    with bench.open() as pool:
        queued: list[str] = []
        pool._store.damage = queued.append
        opened = pool.open_many(KEYS)
        assert [said(opened[key]) for key in KEYS] == BODIES
        assert queued == [KEYS[4]]
        assert pool.metrics.value("column_mismatch_total") == 1


def test_a_column_that_goes_between_the_two_calls_is_looked_for_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an object is replaced: the newest version is found, and no file stays open."""
    with bench.open() as pool:

        def survey(
            store: PoolContext, keys: Sequence[str], *, patience: float | None = None
        ) -> dict[str, Survey]:
            found = survey_keys(store, keys, patience=patience)
            pool.put(KEYS[2], b"new" * 50_000)
            return found

        monkeypatch.setattr(open_many, "survey_keys", survey)
        opened = pool.open_many(KEYS)
        bodies = [said(opened[key]) for key in KEYS]
        assert bodies == [*BODIES[:2], b"new" * 50_000, *BODIES[3:]]
        assert pool.metrics.value("column_read_error_total") == 0  # it was no device's fault
        assert descriptors(tmp_path) == 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_device_that_hangs_holds_up_none_that_others_can_serve(
    bench: Bench, tmp_path: Path, whole: bool
) -> None:
    """Its late answer is closed, whatever it opens."""
    hangs = Hangs(bench)
    with bench.open(wrap=hangs.wrap) as pool:
        pool._store.settings = pool.config.settings
        object.__setattr__(pool._store.settings, "device_deadline_seconds", 0.5)
        hangs.hang(bench.paths[0], "L" * len(KEYS) + "H*")  # after it has listed them all
        opened = within(60, lambda: pool.open_many(KEYS, preload=whole))
        assert isinstance(opened, dict)
        assert [said(opened[key]) for key in KEYS] == BODIES
        assert pool.metrics.value("column_read_error_total") > 0
        hangs.release()
        poll(30, lambda: not any(map(pool._store.scheduler.queued, pool._store.view.devices)))
        poll(60, lambda: descriptors(tmp_path) == 0)  # closed by who gets the late answer


def test_a_closed_pool_opens_nothing(bench: Bench) -> None:
    pool = bench.open()
    pool.close()
    with pytest.raises(AlreadyClosed):
        pool.open_many(KEYS)


def test_columns_on_a_device_that_has_left_are_lost_not_an_error_of_all(bench: Bench) -> None:
    """It was evicted after a reader had seen its columns: k of the others are opened, and read."""
    with bench.open() as pool:
        store, key = pool.admin._store, KEYS[0]
        layout = survey_keys(store, [key])[key].layouts()[0]
        device = layout.columns[0][0].device
        files = {column: found[0] for column, found in layout.columns.items()}
        here = store.without({device})
        opened = open_files(here, key, files, whole=False, spare=None)
        lost = {column for column, found in opened.items() if isinstance(found, Exception)}
        assert lost == {0}
        assert isinstance(opened[0], DeviceMissing)
        assert f"device {device[:8]} has left the pool" in str(opened[0])
        for found in opened.values():
            if isinstance(found, ColumnReader):
                found.close()
        reader = ObjectReader(here, layout, key)
        assert reader.open_enough()
        assert 0 not in reader.columns
        reader.close()
