"""A slow device under an open pool: found, kept off, probed, taken back; bytes are right always.

Times are those of a clock that the tests move, so nothing here depends on the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpstore.config import Settings
from hpstore.health.decision_log import history_path
from hpstore.health.detect.verdicts import HealthState
from hpstore.health.history import History
from hpstore.pool.pool import Pool
from hpstore.runtime.metrics import Metrics
from hpstore.testing import ManualClock
from hpstore.testing.memory_pool import Harness
from hpstore.testing.slow_device import Latencies
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, payload, wrapping

KEYS = [f"k{i}" for i in range(24)]  # fewer than 2 data columns on a device: 1 in 670,000
SIZE = 250 * KIB  # two stripes of 3 x 64 KiB, the last one shrunk
BODIES = {key: payload(key, SIZE) for key in KEYS}


class Slowly:
    """A 3+2 pool over `count` memory devices whose calls take a millisecond of the clock."""

    def __init__(self, directory: Path, count: int = 6, parity: int = 2) -> None:
        self.clock = ManualClock()
        self.harness = Harness(
            directory,
            data=3,
            parity=parity,
            devices=count,
            clock=self.clock,
            settings=Settings(memory_bytes=64 * MIB),
        )
        self.latencies = Latencies(self.clock)
        self.pool = self.open()
        for key in KEYS:
            self.pool.put(key, BODIES[key])

    def open(self) -> Pool:
        def opener(url: str) -> object:
            return self.latencies.wrap(url, self.harness._open_url(url))

        return Pool(
            self.harness.config,
            opener=opener,  # type: ignore[arg-type]
            clock=self.clock,
            threads=False,
            monitor=True,
        )

    @property
    def urls(self) -> list[str]:
        return self.harness.urls

    def id_of(self, url: str) -> str:
        return next(d for d, x in self.pool._store.view.devices.items() if x.url == url)

    def state(self, url: str) -> HealthState:
        return self.pool.admin.health.snapshot().devices[self.id_of(url)].state

    def read_all(self, keys: Sequence[str] = KEYS) -> None:
        for key in keys:
            assert self.pool.get(key) == BODIES[key]

    def round(self, seconds: float = 2.0, keys: Sequence[str] = KEYS) -> None:
        """Read, then a tick."""
        self.read_all(keys)
        self.clock.advance(seconds)
        self.pool.admin.health.tick_now()

    def until(
        self,
        url: str,
        state: HealthState,
        most: int,
        seconds: float = 2.0,
        keys: Sequence[str] = KEYS,
    ) -> int:
        """Rounds until a device is in a state."""
        for number in range(1, most + 1):
            self.round(seconds, keys)
            if self.state(url) is state:
                return number
        raise AssertionError(f"{url} is {self.state(url)} after {most} ticks, not {state}")


@pytest.fixture
def slowly(tmp_path: Path) -> Iterator[Slowly]:
    made = Slowly(tmp_path)
    yield made
    made.pool.close()


class LaneClock(ManualClock):
    """A thread that waits moves its own time alone: what one device is waited for is not in what
    another one is measured at, however their threads are scheduled."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.local()

    def monotonic(self) -> float:
        """Seconds since the clock was made, with what this thread has waited."""
        return super().monotonic() + getattr(self._own, "seconds", 0.0)

    def wait(self, seconds: float) -> None:
        """Let time pass for this thread."""
        self._own.seconds = getattr(self._own, "seconds", 0.0) + max(0.0, seconds)


class SlowFiles(Slowly):
    """The same over six directories."""

    def __init__(self, directory: Path) -> None:
        self.bench, self.clock = Bench(directory), LaneClock()
        self.latencies = Latencies(self.clock)
        with self.bench.create(6, data=3, parity=2) as pool:
            for key in KEYS:
                pool.put(key, BODIES[key])
            config = pool.config
        self.pool = Pool(
            config,
            opener=wrapping(config, self.latencies.wrap),
            clock=self.clock,
            threads=False,
            monitor=True,
        )

    @property
    def urls(self) -> list[str]:
        return self.bench.paths


@pytest.mark.parametrize(("kind", "ticks"), [(Slowly, 6), (SlowFiles, 8)])
def test_a_slow_device_is_found_and_asked_no_more_but_by_probes(
    tmp_path: Path, kind: type[Slowly], ticks: int
) -> None:
    """Three times its peers' time: within six ticks; where the ids of devices, and so which of them
    is read how often, are others in each run, within eight. Every read in between is right."""
    slowly = kind(tmp_path)
    url = slowly.urls[2]
    for _ in range(5):
        slowly.round()
    assert slowly.state(url) is HealthState.ONLINE
    slowly.latencies.slow[url] = 3.0
    slowly.until(url, HealthState.SUSPECT, ticks)
    before, probes = slowly.latencies.reads(url), slowly.pool.metrics.value("read_probe_total")
    slowly.read_all()
    probes = slowly.pool.metrics.value("read_probe_total") - probes
    assert slowly.latencies.reads(url) - before == 2 * probes  # its header, then its bytes
    assert slowly.pool.metrics.value("read_degraded_total") > 0
    slowly.pool.close()


def test_new_objects_have_no_column_on_a_slow_device(slowly: Slowly) -> None:
    """PROTOCOL 3: full parity over the five others; deletes and overwrites go on."""
    url = slowly.harness.urls[0]
    slowly.latencies.slow[url] = 5.0
    slowly.until(url, HealthState.SUSPECT, 10)
    slowly.pool.put("new", payload("new", SIZE))
    holders = {holder for holder, _ in slowly.harness.columns("new")}
    assert holders == set(slowly.harness.urls) - {url}
    assert slowly.pool.get("new") == payload("new", SIZE)
    slowly.pool.put(KEYS[0], payload("over", SIZE))
    slowly.pool.delete(KEYS[1])
    assert slowly.pool.get(KEYS[0]) == payload("over", SIZE)
    assert not slowly.pool.exists(KEYS[1])


def test_slow_devices_never_make_a_pool_refuse_new_objects(slowly: Slowly) -> None:
    """As many are left out as parity, and a place for one data column stays."""
    store = slowly.pool._store
    devices = list(store.view.devices)
    store.routing.no_new = tuple(devices)
    assert {c.device for c in store.candidates()} == set(devices[2:])
    assert len(store.candidates(exclude=devices[2:4])) == 3 - 0
    slowly.pool.put("new", payload("new", SIZE))
    assert slowly.pool.stat("new").losses_tolerated == 2


def test_nobody_is_accused_when_all_are_slow(slowly: Slowly) -> None:
    """A shared cause: ten times for all of them, for a while."""
    for _ in range(22):
        slowly.round()
    slowly.latencies.slow = dict.fromkeys(slowly.harness.urls, 10.0)
    for _ in range(8):
        slowly.round()
    found = slowly.pool.admin.health.snapshot()
    assert {sight.state for sight in found.devices.values()} == {HealthState.ONLINE}
    assert found.shared_slow > 0


def test_a_slow_device_serves_when_too_many_others_are_lost(slowly: Slowly) -> None:
    """PROTOCOL 7, 16: keeping off is never at the price of an object."""
    url, *others = slowly.harness.urls
    slowly.latencies.slow[url] = 5.0
    slowly.until(url, HealthState.SUSPECT, 30)
    for lost in (others[:2], others[2:4], [others[0], others[4]]):
        slowly.harness.lose(lost)
        slowly.read_all()
        slowly.harness.bring_back()


def test_an_open_reader_goes_round_a_slow_device_and_comes_back_to_it(slowly: Slowly) -> None:
    """A loader holds its readers for hours: they follow every change, with the files they have."""
    url = slowly.harness.urls[1]
    body = payload(KEYS[0], SIZE)
    with slowly.pool.open(KEYS[0]) as reader:
        store, device = slowly.pool._store, slowly.id_of(url)
        held = reader._reader.columns
        data_column = next((c for c, r in held.items() if r.device_id == device), None)
        if data_column is None:
            device = held[0].device_id
            url = held[0].url
        buffer = bytearray(SIZE)

        def reads() -> int:
            before = slowly.latencies.reads(url)
            reader.read_into(buffer)
            assert bytes(buffer) == body
            return slowly.latencies.reads(url) - before

        healthy = reads()
        assert healthy > 0
        store.routing.probe = lambda _: False
        store.routing.set_avoided({device: 0.0})
        assert reads() == 0
        store.routing.set_avoided({device: 0.5})
        shared = sum(reads() for _ in range(10))
        assert 0 < shared < 10 * healthy
        store.routing.set_avoided({})
        reads()
        degraded = slowly.pool.metrics.value("read_degraded_total")
        assert reads() >= healthy - 1  # its table is known
        assert slowly.pool.metrics.value("read_degraded_total") == degraded


def test_a_device_that_was_slow_from_the_start_of_a_reader_is_used_once_it_is_well(
    slowly: Slowly,
) -> None:
    """Its column was never opened by this reader; it is, when reads may go there."""
    store = slowly.pool._store
    with slowly.pool.open(KEYS[3]) as probe:
        device = probe._reader.columns[0].device_id
    store.routing.set_avoided({device: 0.0})
    store.routing.probe = lambda _: False
    with slowly.pool.open(KEYS[3]) as reader:
        assert device not in {r.device_id for r in reader._reader.columns.values()}
        store.routing.set_avoided({})
        buffer = bytearray(SIZE)
        reader.read_into(buffer)
        assert bytes(buffer) == payload(KEYS[3], SIZE)
        assert reader._reader.columns[0].device_id == device


def test_an_operators_sit_out_is_heeded_by_open_readers(slowly: Slowly) -> None:
    """Until readmit."""
    with slowly.pool.open(KEYS[2]) as reader:
        url = reader._reader.columns[0].url
        slowly.pool.sit_out(url)
        before = slowly.latencies.reads(url)
        buffer = bytearray(SIZE)
        reader.read_into(buffer)
        assert bytes(buffer) == payload(KEYS[2], SIZE)
        assert slowly.latencies.reads(url) == before
        slowly.pool.readmit(url)
        reader.read_into(buffer)
        assert slowly.latencies.reads(url) > before


def test_a_device_comes_back_over_a_sit_out_and_probation(slowly: Slowly) -> None:
    """Ten minutes, 64 probes, then 5, 25, 100 % of reads; the history has each step."""
    url = slowly.harness.urls[4]
    slowly.latencies.slow[url] = 20.0
    slowly.until(url, HealthState.SITOUT, 60)
    del slowly.latencies.slow[url]
    slowly.until(url, HealthState.PROBATION, 100, 10.0, KEYS[:2])
    assert slowly.pool._store.routing.avoided[slowly.id_of(url)] == 0.05
    slowly.until(url, HealthState.ONLINE, 60, 10.0, KEYS[:2])
    assert not slowly.pool._store.routing.avoided
    degraded = slowly.pool.metrics.value("read_degraded_total")
    slowly.read_all()
    assert slowly.pool.metrics.value("read_degraded_total") == degraded
    store = slowly.pool._store
    path = history_path(store.settings, store.view.record.pool_id)
    steps = [d.becomes for d in reversed(History(path, Metrics(), read_only=True).decisions(50))]
    for state in (HealthState.SUSPECT, HealthState.SITOUT, HealthState.PROBATION):
        assert state in steps
    assert steps[-1] is HealthState.ONLINE


def test_a_device_that_left_and_is_a_member_again_starts_anew(slowly: Slowly) -> None:
    """Evicted, healed and readmitted elsewhere: this process reads it again at once, although the
    errors from before are not ten minutes old."""
    url = slowly.urls[0]
    for _ in range(3):
        slowly.round()
    slowly.harness.lose([url])
    slowly.until(url, HealthState.FAULTED, 10)
    with slowly.harness.open() as other:
        other.evict(url)
        assert other.rebuild().whole
        slowly.pool.admin.refresh()
        slowly.round()
        slowly.harness.bring_back()
        other.readmit(url)
        for key in KEYS:  # what it held was healed elsewhere, and is gone from it
            other.put(key, BODIES[key])
    slowly.pool.admin.refresh()
    before = slowly.latencies.reads(url)
    for _ in range(3):
        slowly.round()
        assert slowly.state(url) is HealthState.ONLINE
    assert slowly.latencies.reads(url) > before


def test_an_object_that_is_not_on_a_suspect_does_not_use_up_its_probe(slowly: Slowly) -> None:
    """Each round reads it first: the suspect is seen all the same, by what others have there."""
    where = {key: slowly.harness.columns(key) for key in KEYS}
    data = [
        url
        for files in where.values()
        for url, path in files
        if any(f".c0{column}." in path for column in range(3))
    ]

    def away(key: str) -> str:
        (url,) = set(slowly.urls) - {url for url, _ in where[key]}
        return url

    # places are random: of the devices that lack an object the one that is read most
    first = max(KEYS, key=lambda key: data.count(away(key)))
    url = away(first)
    slowly.latencies.slow[url] = 20.0
    slowly.until(url, HealthState.SITOUT, 60, keys=sorted(KEYS, key=lambda key: key != first))
    assert slowly.pool.metrics.value("read_probe_total") > 0


def test_status_shows_what_this_process_thinks_and_what_was_decided(slowly: Slowly) -> None:
    url = slowly.harness.urls[3]
    slowly.latencies.slow[url] = 5.0
    slowly.until(url, HealthState.SUSPECT, 10)
    status = slowly.pool.status()
    found = next(d for d in status.devices if d.url == url)
    assert (found.state, found.health) == ("online", "suspect")
    assert found.score > 10
    assert "x its peers" in found.reason
    assert any(url in line and "online -> suspect" in line for line in status.decisions)


def test_damage_that_a_read_meets_counts_against_the_device(slowly: Slowly) -> None:
    """What a scrub finds does not."""
    url, path = slowly.harness.columns(KEYS[0])[0]
    slowly.harness.flip(url, path, 4096 + 77)
    slowly.pool.scrub()
    slowly.pool.admin.health.tick_now()
    assert slowly.pool.admin.health.snapshot().devices[slowly.id_of(url)].checksum_errors == 0
    with slowly.pool.open(KEYS[1]) as reader:
        url, device = reader._reader.columns[0].url, reader._reader.columns[0].device_id
    path = next(p for u, p in slowly.harness.columns(KEYS[1]) if u == url)
    slowly.harness.flip(url, path, 4096 + 77)
    slowly.read_all()
    slowly.pool.admin.health.tick_now()
    assert slowly.pool.admin.health.snapshot().devices[device].checksum_errors == 1


def test_with_health_off_nothing_is_metered_or_decided(tmp_path: Path) -> None:
    """Settings.health: the same reads, and no thread."""
    harness = Harness(
        tmp_path,
        data=3,
        parity=2,
        devices=6,
        settings=Settings(memory_bytes=64 * MIB, health=False),
    )
    with harness.open(threads=True) as pool:
        pool.put("x", payload("x", SIZE))
        assert pool.get("x") == payload("x", SIZE)
        assert pool.admin.health._thread is None
        assert not pool.admin.health.enabled
        assert {type(d).__name__ for d in pool._store.view.devices.values()} == {"MemoryDevice"}
        assert pool.status().devices[0].health == ""
