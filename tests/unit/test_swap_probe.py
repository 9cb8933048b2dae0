"""A store is relied on only when it compares before it writes, also while several write at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from hpstore.devices import conditional_writes
from hpstore.devices.conditional_writes import ConditionalWrites
from hpstore.devices.object_store import ObjectStoreDevice
from hpstore.devices.store_client import StoreClient
from hpstore.errors import DeviceTimeout, RegistersUnavailable
from hpstore.runtime.swap_probe import RACERS, ROUNDS, find_lapse
from tests.fault.common import poll


class _Records:
    """A SwapTrial in memory, whose looks and writes are one step. `act` of a swap comes first."""

    def __init__(self, act: Callable[[str], None] = lambda _: None) -> None:
        self.records: dict[str, tuple[bytes, str]] = {}
        self.lock = threading.Lock()
        self._revisions = itertools.count(1)
        self._act = act

    def read(self, name: str) -> tuple[bytes | None, str]:
        return self.records.get(name, (None, ""))

    def swap(self, name: str, data: bytes, revision: str) -> bool:
        self._act(revision)
        with self.lock:
            if self.read(name)[1] != revision:
                return False
            self.write(name, data)
            return True

    def write(self, name: str, data: bytes) -> None:
        self.records[name] = (data, str(next(self._revisions)))

    def remove(self, name: str) -> None:
        self.records.pop(name, None)


class _LooksThenWrites(_Records):
    """All racers have looked before the first writes; `kind` of swaps alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._all = kind, threading.Barrier(RACERS)

    def swap(self, name: str, data: bytes, revision: str) -> bool:
        if (self._kind == "creates") != (revision == ""):
            return super().swap(name, data, revision)
        if self.read(name)[1] != revision:
            return False
        self._all.wait(60)
        with self.lock:
            self.write(name, data)
        return True


class _IgnoresRevisions(_Records):
    """As some stores: If-None-Match is heeded, If-Match is not."""

    def swap(self, name: str, data: bytes, revision: str) -> bool:
        with self.lock:
            if not revision and self.read(name)[1]:
                return False
            self.write(name, data)
            return True


class _ReadsStale(_Records):
    """What is read is what another one wrote."""

    def read(self, name: str) -> tuple[bytes | None, str]:
        data, revision = super().read(name)
        return (b"other" if data else None), revision


@pytest.mark.parametrize(
    ("trial", "lapse"),
    [
        (_Records(), ""),
        (_LooksThenWrites("creates"), "8 of 8 creates were taken"),
        (_LooksThenWrites("swaps"), "8 of 8 swaps of one revision were taken"),
        (_IgnoresRevisions(), "8 of 8 swaps of one revision were taken"),
        (_ReadsStale(), "what was read after creates is not what was written"),
    ],
)
def test_what_a_store_does_wrong_is_found_and_nothing_is_left(trial: _Records, lapse: str) -> None:
    """Each kind by the race that shows it."""
    assert find_lapse(trial, "probe") == lapse
    assert trial.records == {}


def test_an_unanswered_racer_is_no_lapse_and_none_answered_is_an_error() -> None:
    """One racer a race fails, the others still race; without any answer nothing is known."""
    seen, lock = set[str](), threading.Lock()

    def first_of_a_race(revision: str) -> None:
        with lock:
            first = revision not in seen  # of "" that is one of the first race
            seen.add(revision)
        if first:
            raise RegistersUnavailable("no answer")

    def none(_: str) -> None:
        raise DeviceTimeout("no answer in 5 s")

    assert find_lapse(_Records(first_of_a_race), "probe") == ""
    assert len(seen) == 1 + ROUNDS
    trial = _Records(none)
    with pytest.raises(DeviceTimeout, match="no answer in 5 s"):
        find_lapse(trial, "probe")
    assert trial.records == {}


def test_a_device_whose_store_ignores_etags_raises_counters_without_conditions(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It heeds If-None-Match: only the race of swaps shows what it does; one line says so."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
    client = StoreClient(obstore.store.MemoryStore(), url="s3://careless/d")
    assert ConditionalWrites(client, "tmp").enforced()
    real = client.put

    def put(path: str, data: bytes, *, only: str | None = None) -> str:
        return real(path, data, only=None if only else only)

    monkeypatch.setattr(client, "put", put)
    device = ObjectStoreDevice(client, "d")
    assert not device.conditions.enforced()
    assert device.raise_counter("mark.json", 3) == device.counter("mark.json") == 3
    assert "ignores conditions of writes (8 of 8 swaps of one revision were taken)" in caplog.text
    assert client.entries("tmp") == []
    assert client.entries("d/tmp") == []


def test_no_counter_waits_for_a_store_that_lets_losers_of_a_race_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SeaweedFS does, for a second each: the first put of a pool took half a minute, and its
    devices were taken for hung. They are tried meanwhile, once for two devices in one bucket."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")
    go, tried, asked = threading.Event(), threading.Event(), list[str]()

    def slow(trial: object, name: str) -> str:
        asked.append(name)
        go.wait(60)
        tried.set()
        return "8 of 8 creates were taken"

    def told(path: str, data: bytes, *, only: str | None = None) -> str:
        conditions.append(only)
        return put(path, data, only=only)

    monkeypatch.setattr(conditional_writes, "find_lapse", slow)
    monkeypatch.setattr(conditional_writes, "_of_buckets", {})
    monkeypatch.setattr(ConditionalWrites.__init__, "__kwdefaults__", {"seconds": 0.0})
    client = StoreClient(obstore.store.MemoryStore(), url="s3://b", bucket=("http://s", "b"))
    put, conditions = client.put, list[str | None]()
    monkeypatch.setattr(client, "put", told)
    one, two = ObjectStoreDevice(client, "d0"), ObjectStoreDevice(client, "d1")
    assert one.raise_counter("mark.json", 3) == two.raise_counter("mark.json", 3) == 3
    assert conditions == ["", ""]  # as long as it is not known that they are ignored
    go.set()
    assert tried.wait(60)
    poll(60.0, lambda: "ignores conditions of writes" in caplog.text)
    assert one.raise_counter("mark.json", 4) == two.raise_counter("mark.json", 4) == 4
    assert conditions[2:] == [None, None]
    assert len(asked) == 1


def test_a_trial_that_the_end_of_the_process_stops_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs beside the work: a process that ends then starts no more threads for it. Of a thread
    that ends by an exception the tests hear."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed (hpstore[s3])")

    def ending(trial: object, name: str) -> str:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(conditional_writes, "find_lapse", ending)
    client = StoreClient(obstore.store.MemoryStore(), url="s3://b")
    conditions = ConditionalWrites(client, "tmp", seconds=0.0)
    with caplog.at_level("INFO"):
        assert conditions.expected()
        poll(60.0, lambda: "after interpreter shutdown" in caplog.text)
    assert conditions.expected()
