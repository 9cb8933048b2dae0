"""Evicted devices that return: judged by what the others know, or not taken back (PROTOCOL 12)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hpstore.devices.base import Device
from hpstore.devices.horizon_guard import HORIZON
from hpstore.devices.wrappers import DeviceWrapper
from hpstore.errors import DeviceError, MembershipError
from hpstore.membership.changes import reconcile
from hpstore.objects import survey
from hpstore.objects.context import PoolContext
from hpstore.objects.read import resolve
from hpstore.objects.survey import Survey
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import FakeClock, Harness
from tests.fault.common import payload

T = TypeVar("T")
SIZE = 300_000


class Stale(DeviceWrapper):
    """A device that somebody holds open, and that is gone."""

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        raise DeviceError(f"device {self.url} fails", device=self.url)


class Unlisted(DeviceWrapper):
    """A device whose directories cannot be listed."""

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        if operation == "list":
            raise DeviceError(f"device {self.url} fails", device=self.url)
        return call()


def evict_of_ten(harness: Harness, pool: Pool, gone: str) -> None:
    """A device leaves that holds columns of ten objects; they are rebuilt without it."""
    for number in range(10):
        pool.put(f"k{number}", payload(f"k{number}", SIZE))
    harness.lose([gone])
    pool.evict(gone)
    pool.rebuild()


def test_a_returning_device_that_cannot_be_listed_does_not_return(tmp_path: Path) -> None:
    """PROTOCOL 12: what was not judged is not served; it stays evicted, and keeps what it has."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=5, clock=clock)
    gone = harness.urls[0]
    with harness.open() as pool:
        evict_of_ten(harness, pool, gone)
        for number in range(10):
            pool.delete(f"k{number}")
        clock.advance(2 * pool.config.settings.tombstone_seconds)
        assert pool.scrub().swept > 0  # nothing tells of them any more
    harness.bring_back()
    before = dict(harness.devices[gone].files)

    def unlisted(url: str, device: Device) -> Device:
        return Unlisted(device) if url == gone else device

    with harness.open(unlisted) as pool:
        with pytest.raises(MembershipError, match="cannot be listed"):
            pool.readmit(gone)
        assert gone not in pool.admin.devices.places.values()
    now = {f for f in harness.devices[gone].files if not f.startswith("tmp/")}
    assert before.keys() == now - {HORIZON}  # that rises first
    with harness.open() as pool:
        found = pool.readmit(gone)
        assert found is not None
        assert (found.kept, found.quarantined > 0) == (0, True)
        assert pool.list() == []


def test_a_return_is_not_judged_while_others_may_have_what_decides(tmp_path: Path) -> None:
    """PROTOCOL 12 with more than m members away: refused, nothing set aside; with them back the
    columns that are still needed serve again."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=9, clock=clock)
    with harness.open() as pool:
        for number in range(30):
            pool.put(f"k{number}", payload(f"k{number}", SIZE))
        files = {
            url: sum(f.startswith("objects/") for f in device.files)
            for url, device in harness.devices.items()
        }
        gone = max(harness.urls, key=files.__getitem__)
        held = files[gone]
        assert held > 3
        harness.lose([gone])
        pool.evict(gone, force=True)
        clock.advance(2 * pool.config.settings.tombstone_seconds)
        holders = ([url for url, _ in harness.columns(f"k{n}")] for n in range(30))
        away = next(urls for urls in holders if gone in urls)
        away = [url for url in away if url != gone]
        away.append(next(url for url in harness.urls[1:] if url not in (*away, gone)))
        harness.bring_back()
        harness.lose(away)
        with pytest.raises(MembershipError, match="3 members do not answer"):
            pool.readmit(gone)
        assert not [f for f in harness.devices[gone].files if f.startswith("quarantine/")]
        harness.bring_back()
        found = pool.readmit(gone)
        assert found is not None
        assert (found.kept, found.removed, found.quarantined) == (held, 0, 0)
        assert all(pool.get(f"k{n}") == payload(f"k{n}", SIZE) for n in range(30))
        assert pool.scrub().clean


def test_a_return_that_members_cannot_note_touches_no_file(tmp_path: Path) -> None:
    """Two of them have no room for a record: that nothing was changed is said before what it holds
    is removed or set aside."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5, clock=FakeClock())
    gone = harness.urls[0]
    with harness.open() as pool:
        evict_of_ten(harness, pool, gone)
        for number in range(10):
            pool.put(f"k{number}", b"newer")
        harness.bring_back()
        before = {f for f in harness.devices[gone].files if not f.startswith("tmp/")}
        for url in harness.urls[1:3]:
            harness.devices[url].takes_records = lambda: False  # type: ignore[method-assign]
        with pytest.raises(MembershipError, match="Nothing was changed"):
            pool.readmit(gone)
        now = {f for f in harness.devices[gone].files if not f.startswith("tmp/")}
        assert now == before


def test_a_member_is_not_reconciled(tmp_path: Path) -> None:
    """PROTOCOL 7, 12: what a member holds counts, however long it was away."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        pool.put("k", payload("k", SIZE))
        store = pool._store
        device, opened = next(iter(store.view.devices.items()))
        with pytest.raises(MembershipError, match="is a member"):
            reconcile(store, device, opened)
        assert pool.stat("k").losses_tolerated == 1


def test_what_fails_for_a_missing_member_looks_for_it_first(tmp_path: Path) -> None:
    """A process that opened while a device was away finds it when it is needed: no refresh is."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())
    body = bytes(300_000)
    with harness.open() as pool:
        for n in range(8):
            pool.put(f"k/{n}", body)
    acts: list[Callable[[Pool], bool]] = [
        lambda pool: all(pool.get(f"k/{n}") == body for n in range(8)),
        lambda pool: len(pool.list("k/", certain=True)) == 8,
    ]
    for act in acts:
        harness.lose(harness.urls[:1])
        with harness.open() as pool:
            harness.bring_back()
            harness.lose(harness.urls[1:3])
            assert act(pool)
            assert len(pool.admin.devices.places) == 6
        harness.bring_back()


def test_what_another_thread_has_found_meanwhile_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device was away at the open, and the membership was read anew while a read waited for two
    others that had gone: no member is missing any more, and the read is tried again."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())
    with harness.open() as pool:
        pool.put("k", b"x" * 300_000)
    harness.lose(harness.urls[:1])
    with harness.open() as pool:
        harness.bring_back()
        harness.lose(harness.urls[1:3])
        look = survey.survey_key

        def refreshed(store: PoolContext, key: str, **how: Any) -> Survey:
            found = look(store, key, **how)
            if how["patience"] is None:
                pool.admin.refresh()
            return found

        monkeypatch.setattr(resolve, "survey_key", refreshed)
        assert pool.get("k") == b"x" * 300_000


def test_who_fails_while_another_looks_waits_for_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads fail together for a member that is back: both find it, not the first alone."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())
    with harness.open() as pool:
        pool.put("k", b"x" * 300_000)
    harness.lose(harness.urls[:1])
    with harness.open() as pool:
        harness.bring_back()
        harness.lose(harness.urls[1:3])
        looks = pool._store.refresh

        def slowly() -> None:
            time.sleep(0.5)
            looks()

        monkeypatch.setattr(pool._store, "refresh", slowly)
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(pool.get, ["k", "k"]))
        assert found == [b"x" * 300_000] * 2


def test_a_device_that_was_exchanged_is_opened_anew_before_a_read_fails(tmp_path: Path) -> None:
    """A member that answered at the open, and whose place is another file system since: what holds
    it open gets errors for ever, and opens its place again when it needs it."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6, clock=FakeClock())
    with harness.open() as pool:
        pool.put("k", b"x" * 300_000)
        store = pool._store
        first = next(m.device_id for m in store.view.record.members if m.url == harness.urls[0])
        stale = Stale(store.view.devices[first])
        store.view = replace(store.view, devices={**store.view.devices, first: stale})
        harness.lose(harness.urls[1:3])
        assert pool.get("k") == b"x" * 300_000
