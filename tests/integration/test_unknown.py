"""What is not known is not decided: sequences that once lost, hid or made up something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.errors import MembershipError, ObjectNotFound, TooFewDevices, TooManyErasures
from hpstore.format.keys import ColumnName, Kind, Version
from hpstore.objects import survey as survey_module
from hpstore.objects.write.column_writer import ColumnSet, MembershipMoved
from hpstore.testing.memory_pool import FakeClock, Harness


def payload(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def put_raw(harness: Harness, url: str, path: str, data: bytes) -> None:
    harness.devices[url].write_small(path, data)


def test_a_key_whose_copies_may_all_be_out_of_sight_is_not_absent(tmp_path: Path) -> None:
    """PROTOCOL 7: with m + 1 devices evicted or away, "absent" cannot be told, until a rebuild."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("small", b"x")
        holders = [url for url, _ in harness.columns("small")]
        pool.evict(holders[0])
        harness.lose(holders[1:])
    with harness.open() as pool:
        for act in (pool.get, pool.exists, pool.delete):
            with pytest.raises(TooManyErasures, match="it is unknown whether object"):
                act("small")
        with pytest.raises(TooManyErasures):
            pool.put("small", b"y", if_absent=True)
        harness.bring_back()
    with harness.open() as pool:
        assert pool.get("small") == b"x"
        pool.rebuild()
        harness.lose(holders[1:])
    with harness.open() as pool:
        assert pool.get("small") == b"x"
        assert not pool.exists("other")


def test_evictions_that_could_lose_unseen_objects_are_refused(tmp_path: Path) -> None:
    """PROTOCOL 16: the third eviction without a rebuild could take all copies of something."""
    harness = Harness(tmp_path, data=2, parity=2, devices=8)
    with harness.open() as pool:
        pool.evict(harness.urls[0])
        pool.evict(harness.urls[1])
        with pytest.raises(MembershipError, match="3 columns of an object would be away"):
            pool.evict(harness.urls[2])
        pool.rebuild()
        pool.evict(harness.urls[2])


def test_copies_that_left_lately_are_served_again(tmp_path: Path) -> None:
    """PROTOCOL 12: forced out and readmitted within the horizon, the last copies still count."""
    harness = Harness(tmp_path, data=2, parity=2, devices=7)
    with harness.open() as pool:
        pool.put("small", b"x")
        holders = [url for url, _ in harness.columns("small")]
        for url in holders:
            pool.evict(url, force=True)
        for url in holders:
            pool.readmit(url)
        assert pool.get("small") == b"x"


def test_a_blank_header_is_damage_not_recycling(tmp_path: Path) -> None:
    """PROTOCOL 10: a zeroed first sector costs one column, and scrub mends it."""
    harness = Harness(tmp_path, data=3, parity=2, devices=5)
    data = payload(500_000)
    with harness.open() as pool:
        pool.put("k", data)
        url, path = harness.columns("k")[0]
        harness.devices[url].files[path].bytes[:4096] = bytes(4096)
        assert pool.get("k") == data
        assert pool.scrub().columns_written == 1
        assert pool.scrub().clean


def test_an_absurd_counter_in_a_file_name_hides_nothing(tmp_path: Path) -> None:
    """PROTOCOL 1: names out of range are nobody's; puts stay visible, also of other keys."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", b"one")
        for counter, column in ((2**64 - 1, 0), (2**62 - 2, 0)):
            name = ColumnName(
                version=Version(counter, 1), kind=Kind.COPY, column=column, data=1, parity=1
            )
            put_raw(harness, harness.urls[0], f"objects/k/{name}", b"rubbish")
        pool.put("other", b"two")
        assert pool.get("other") == b"two"
        assert pool.get("k") == b"one"
        pool.put("k", b"three")
        assert pool.get("k") == b"three"


def test_draining_a_device_that_does_not_answer_moves_and_evicts_nothing(tmp_path: Path) -> None:
    """PROTOCOL 16: what cannot be listed cannot be drained."""
    harness = Harness(tmp_path, data=2, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        url = harness.columns("k")[0][0]
        harness.lose([url])
        with pytest.raises(MembershipError, match="does not answer"):
            pool.drain(url)
        assert "evicted" not in {d.state for d in pool.status().devices}


def test_a_listing_that_straddles_an_overwrite_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 7: half the devices listed before an overwrite, half after: neither looks whole."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("k", payload(600_000, 1))
        before = survey_module.survey_key(pool._store, "k")
        pool.put("k", payload(600_000, 2))
        after = survey_module.survey_key(pool._store, "k")
        half = set(sorted(pool._store.view.devices)[:3])
        mixed = replace(
            after,
            files=tuple(f for f in before.files if f.device in half)
            + tuple(f for f in after.files if f.device not in half),
        )
        surveys = [mixed]
        original = survey_module.survey_key

        def survey_key(*asked: Any, **options: Any) -> object:
            return surveys.pop() if surveys else original(*asked, **options)

        monkeypatch.setattr("hpstore.objects.read.resolve.survey_key", survey_key)
        assert pool.get("k") == payload(600_000, 2)
        assert not surveys


def test_a_relayout_that_is_cut_short_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 1: two re-layouts share names, so neither may take back what it has published."""
    harness = Harness(tmp_path, data=3, parity=2, devices=6)
    data = payload(500_000)
    with harness.open() as pool:
        pool.put("k", data)
        for url, _ in harness.columns("k")[:2]:
            pool.evict(url)
        original, calls = ColumnSet.check_generations, []

        def moved(columns: ColumnSet) -> None:
            calls.append(1)
            if len(calls) == 1:
                raise MembershipMoved("another process changed it")
            original(columns)

        monkeypatch.setattr(ColumnSet, "check_generations", moved)
        deleted: list[str] = []
        for device in harness.devices.values():
            monkeypatch.setattr(device, "delete", deleted.append)
        pool.rebuild()
        assert not [path for path in deleted if path.startswith("objects/k/")]
        assert calls
        assert pool.get("k") == data
        assert pool.stat("k").losses_tolerated == 2


def test_names_that_are_no_keys_are_left_alone(tmp_path: Path) -> None:
    """Directories that escape() never makes do not stand for keys, and do not stop a walk."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        url = harness.columns("k")[0][0]
        name = harness.columns("k")[0][1].rsplit("/", 1)[1]
        for odd in ("%41", "%2e%2e", "bad\udcff"):
            put_raw(harness, url, f"objects/{odd}/{name}", b"rubbish")
        assert pool.list() == ["k"]
        assert pool.scrub().objects == 1
        pool.drain(url)
        pool.readmit(url)
        assert pool.get("k") == payload(300_000)


def test_settle_says_when_it_cannot(tmp_path: Path) -> None:
    """PROTOCOL 8: an absent key and too few devices are errors, not silence."""
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        with pytest.raises(ObjectNotFound):
            pool.admin.settle("nothing")
        pool.admin.settle("k")
        harness.lose(harness.urls[:2])
        with pytest.raises(TooFewDevices):
            pool.admin.settle("k")
        assert pool.get("k") == payload(300_000)


def test_a_stale_scrub_position_is_not_believed(tmp_path: Path) -> None:
    """A device that was away says where a scrub was long ago; the next scrub covers everything."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    with harness.open() as pool:
        for number in range(66):
            pool.put(f"k{number:02d}", b"x")
        stopped = 0

        def stop(step: object) -> None:
            nonlocal stopped
            stopped += 1
            clock.advance(1)  # the position is noted every minute
            if stopped == 65:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pool.scrub(progress=stop)
        harness.lose(harness.urls[:1])
        clock.advance(10)
        assert pool.scrub().objects == 6  # goes on where it was
        harness.bring_back()
        clock.advance(10)
        assert pool.scrub().objects == 66


def test_a_column_replaced_during_a_scrub_gives_its_memory_back(tmp_path: Path) -> None:
    """Leases are returned when the object changes underneath."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", payload(400_000))
        url, path = harness.columns("k")[0]
        harness.flip(url, path, 70_000)
        pool.scrub()
        with pool.open("k") as reader:
            pool.delete("k")
            reader._reader.columns.clear()  # so that it has to open what is gone
            with pytest.raises(ObjectNotFound):
                reader.read_into(bytearray(400_000))
        assert pool._store.buffers.budget.used_bytes == 0
