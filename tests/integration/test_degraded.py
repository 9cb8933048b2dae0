"""Devices fail, leave, come back: debts, eviction, shrink and grow, every geometry."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstore.config import Settings
from hpstore.devices.base import Device
from hpstore.devices.wrappers import FaultyDevice
from hpstore.errors import MembershipError, ObjectNotFound, TooFewDevices, TooManyErasures
from hpstore.format.records import DeviceState
from hpstore.membership import changes
from hpstore.pool import admin
from hpstore.testing.memory_pool import FakeClock, Harness, Wrap
from hpstore.units import KIB, MIB

GEOMETRIES = [(k, m) for k in (1, 2, 3, 4, 6) for m in (1, 2, 3)]


def payload(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def objects() -> dict[str, bytes]:
    sizes = (0, 10, 128 * KIB, 128 * KIB + 1, 700_001, 2_000_000)
    return {f"obj/{size}": payload(size, size) for size in sizes}


@pytest.mark.parametrize(("data", "parity"), GEOMETRIES)
def test_every_geometry_survives_m_gone_evicted_shrunk_and_m_more_gone(
    tmp_path: Path, data: int, parity: int
) -> None:
    """PROTOCOL 14, shrink: m devices go and are evicted, the rest re-lays, m more go: all reads."""
    count = data + 2 * parity + 1
    harness = Harness(tmp_path, data=data, parity=parity, devices=count)
    wanted = objects()
    with harness.open() as pool:
        for key, value in wanted.items():
            pool.put(key, value)
    first, second = harness.urls[:parity], harness.urls[parity : 2 * parity]
    harness.lose(first)
    with harness.open() as pool:
        assert all(pool.get(key) == value for key, value in wanted.items())
        for url in first:
            pool.evict(url)
        report = pool.rebuild()
        assert not report.unreadable
        assert pool.status().losses_tolerated == parity
    harness.lose(second)
    with harness.open() as pool:
        assert all(pool.get(key) == value for key, value in wanted.items())


def test_objects_shrink_and_widen_with_the_pool(tmp_path: Path) -> None:
    """Losing a device re-lays 4+2 as 3+2, with the same version; a new device widens it again."""
    harness = Harness(tmp_path, data=4, parity=2, devices=6)
    data = payload(2_000_000)
    with harness.open() as pool:
        before = pool.put("k", data)
        harness.lose(harness.urls[:1])
        pool.evict(harness.urls[0])
        assert pool.rebuild().relaid == 1
        shrunk = pool.stat("k")
        assert (shrunk.data, shrunk.losses_tolerated) == (3, 2)
        assert shrunk.version == before.version
        pool.add_device("memory://new")
        assert pool.rebuild().relaid == 1
        grown = pool.stat("k")
        assert (grown.data, grown.version) == (4, before.version)
        assert pool.get("k") == data
        assert pool.scrub().clean


def test_columns_move_to_a_spare_without_relaying(tmp_path: Path) -> None:
    """With a device outside the stripe only the lost column is rebuilt."""
    harness = Harness(tmp_path, data=3, parity=2, devices=6)
    data = payload(1_000_000)
    with harness.open() as pool:
        pool.put("k", data)
        url, _ = harness.columns("k")[0]
        harness.lose([url])
        pool.evict(url)
        report = pool.rebuild()
        assert (report.rebuilt, report.relaid, report.columns_written) == (1, 0, 1)
        assert pool.get("k") == data
        assert pool.stat("k").losses_tolerated == 2


def faulty(plans: dict[str, str]) -> Wrap:
    def wrap(url: str, device: Device) -> Device:
        return FaultyDevice(device, plans[url]) if url in plans else device

    return wrap


@pytest.mark.parametrize("letter", ["E", "N", "O", "D"])
def test_a_device_failing_in_mid_put_leaves_a_debt_that_is_paid(
    tmp_path: Path, letter: str
) -> None:
    """PROTOCOL 5: acknowledged short of the full stripe with a durable debt; the next open pays."""
    harness = Harness(tmp_path, data=3, parity=2, devices=5)
    data = payload(3_000_000)  # more than what is put by one call a device
    with harness.open(faulty({harness.urls[1]: f"W{letter}*"})) as pool:
        info = pool.put("k", data)
        assert info.losses_tolerated == 1
        assert pool.get("k") == data
        assert pool.status().debts == 1
    with harness.open() as pool:
        assert pool.stat("k").losses_tolerated == 2
        assert pool.status().debts == 0
        assert pool.scrub().clean


def test_an_older_version_stays_while_the_newer_has_a_debt(tmp_path: Path) -> None:
    """PROTOCOL 8: what was settled is removed only when the newer version is settled, too."""
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    with harness.open() as pool:
        pool.put("k", payload(3_000_000, 1))
    older = set(harness.columns("k"))
    with harness.open(faulty({harness.urls[0]: "WE*"})) as pool:
        pool.put("k", payload(3_000_000, 2))
        assert older < set(harness.columns("k"))
    with harness.open() as pool:
        assert pool.get("k") == payload(3_000_000, 2)
        assert len(harness.columns("k")) == len(older)
        assert not older & set(harness.columns("k"))


def test_below_the_floor_nothing_is_acknowledged(tmp_path: Path) -> None:
    """PROTOCOL 5: with too many devices failing the put raises and the old version stays."""
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    with harness.open() as pool:
        pool.put("k", payload(400_000, 1))
    plans = dict.fromkeys(harness.urls[:2], "WE*")
    with harness.open(faulty(plans)) as pool, pytest.raises(TooFewDevices):
        pool.put("k", payload(400_000, 2))
    with harness.open() as pool:
        assert pool.get("k") == payload(400_000, 1)


def test_small_objects_use_other_devices_when_one_fails(tmp_path: Path) -> None:
    """PROTOCOL 5: a small object has all m + 1 copies, on other devices if one fails."""
    harness = Harness(tmp_path, data=2, parity=2, devices=5)
    with harness.open(faulty({harness.urls[0]: "WE*", harness.urls[1]: "WE*"})) as pool:
        for number in range(8):
            assert pool.put(f"k{number}", b"small").spare_columns == 2


def test_more_than_m_lost_is_named_and_nothing_is_deleted(tmp_path: Path) -> None:
    """PROTOCOL 7: an unreadable object raises, the others read, and all return with the devices."""
    harness = Harness(tmp_path, data=2, parity=1, devices=6)
    with harness.open() as pool:
        for number in range(12):
            pool.put(f"k{number}", payload(300_000, number))
        harness.lose([url for url, _ in harness.columns("k0")][:2])
        bad, good = [], []
        for number in range(12):
            try:
                assert pool.get(f"k{number}") == payload(300_000, number)
                good.append(number)
            except TooManyErasures as error:
                bad.append(number if f"k{number}" in str(error) else -1)
        assert bad
        assert good
        report = pool.rebuild()
        assert set(report.unreadable) == {f"k{n}" for n in bad}
        assert pool.status().unreadable == len(bad)
        harness.bring_back()
        assert all(pool.get(f"k{n}") == payload(300_000, n) for n in range(12))


def test_an_older_version_is_never_served_instead(tmp_path: Path) -> None:
    """PROTOCOL 7: when the newest version cannot be read, the one before it is no substitute."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        pool.put("k", payload(300_000, 1))
        old = {(u, p): harness.devices[u].files[p] for u, p in harness.columns("k")}
        pool.put("k", payload(300_000, 2))
        holders = [url for url, _ in harness.columns("k")]
        for (url, path), file in old.items():
            harness.devices[url].files[path] = file  # as if their removal had been undone
        assert pool.get("k") == payload(300_000, 2)
        harness.lose(holders[:2])
        with pytest.raises(TooManyErasures):
            pool.get("k")


def test_evict_refuses_what_would_lose_data(tmp_path: Path) -> None:
    """PROTOCOL 16: a device that an object needs to be readable is not evicted, unless forced."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock())
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        holders = [url for url, _ in harness.columns("k")]
        url, path = harness.columns("k")[2]
        column = harness.devices[url].files.pop(path)
        with pytest.raises(MembershipError, match=r"need .* to be readable"):
            pool.evict(holders[1])
        harness.devices[url].files[path] = column
        harness.lose(holders[:1])
        with pytest.raises(MembershipError, match="2 columns of an object would be away"):
            pool.evict(holders[1])
        assert {d.state for d in pool.status().devices} == {"online", "missing"}
        pool.evict(holders[0])
        pool.rebuild()
        pool.evict(holders[1])
        pool.rebuild()
        assert pool.get("k") == payload(300_000)


def test_an_eviction_that_cannot_be_taken_back_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices leave when it is closed for new columns already: it is refused, and stays draining.
    That nothing was changed would be wrong."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=FakeClock())
    judge = vars(changes)["endangered"]

    def late(*arguments: Any, **options: Any) -> list[str]:
        harness.lose(harness.urls[1:3])
        return list(judge(*arguments, **options))

    monkeypatch.setattr(changes, "endangered", late)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        with pytest.raises(MembershipError, match="may stay draining, take it back") as said:
            pool.evict(harness.urls[0])
        assert "Nothing was changed" not in str(said.value)
        harness.bring_back()
        pool.admin.refresh()
        assert [m.state for m in pool.admin.record.members].count(DeviceState.DRAINING) == 1
        pool.readmit(harness.urls[0])
        assert {m.state for m in pool.admin.record.members} == {DeviceState.ONLINE}


def test_a_rebuild_that_is_done_does_not_fail_where_that_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few devices answer for a change of the membership: the report is of what was rebuilt, and
    the next rebuild notes it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=5, clock=FakeClock())
    commit = vars(admin)["commit_record"]

    def late(*arguments: Any, **options: Any) -> None:
        harness.lose(harness.urls[2:4])
        commit(*arguments, **options)

    with harness.open() as pool:
        pool.put("k", payload(300_000))
        pool.evict(harness.urls[0])
        monkeypatch.setattr(admin, "commit_record", late)
        assert pool.rebuild().whole
        assert pool.metrics.value("healed_not_marked_total") == 1
        harness.bring_back()
        monkeypatch.undo()
        pool.admin.refresh()
        assert pool.admin.record.unhealed()
        assert pool.rebuild().whole
        assert not pool.admin.record.unhealed()


def test_drain_moves_everything_and_evicts(tmp_path: Path) -> None:
    """PROTOCOL 16: drain rescans until clean; afterwards the device holds nothing that counts."""
    harness = Harness(tmp_path, data=3, parity=2, devices=7)
    wanted = objects()
    with harness.open() as pool:
        for key, value in wanted.items():
            pool.put(key, value)
        pool.delete("obj/10")
        del wanted["obj/10"]
        pool.drain(harness.urls[0])
        assert all(pool.get(key) == value for key, value in wanted.items())
        states = {d.url: d.state for d in pool.status().devices}
        assert states[harness.urls[0]] == "evicted"
        assert pool.status().losses_tolerated == 2
    harness.wipe(harness.urls[0])
    harness.lose(harness.urls[1:3])
    with harness.open() as pool:
        assert all(pool.get(key) == value for key, value in wanted.items())


def test_a_returning_device_resurrects_nothing(tmp_path: Path) -> None:
    """PROTOCOL 12: after eviction, deletes, overwrites and a sweep, old files do not come back."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=5, clock=clock)
    with harness.open() as pool:
        for number in range(10):
            pool.put(f"k{number}", payload(300_000, number))
        gone = harness.urls[0]
        harness.lose([gone])
        pool.evict(gone)
        pool.rebuild()
        for number in range(5):
            pool.delete(f"k{number}")
        pool.put("k5", payload(300_000, 55))
        clock.advance(2 * pool.config.settings.tombstone_seconds)
        assert pool.scrub().swept > 0
        harness.bring_back()
        found = pool.readmit(gone)
        assert found is not None
        assert found.quarantined + found.removed > 0
        for number in range(5):
            with pytest.raises(ObjectNotFound):
                pool.get(f"k{number}")
        assert pool.get("k5") == payload(300_000, 55)
        assert all(pool.get(f"k{n}") == payload(300_000, n) for n in range(6, 10))
        pool.rebuild()
        assert pool.scrub().clean


def test_a_missing_member_keeps_tombstones_from_being_swept(tmp_path: Path) -> None:
    """PROTOCOL 12: a delete is remembered until every member has answered."""
    clock = FakeClock()
    harness = Harness(tmp_path, data=2, parity=1, devices=4, clock=clock)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
    away = harness.columns("k")[0][0]
    harness.lose([away])
    with harness.open() as pool:
        pool.delete("k")
        clock.advance(2 * pool.config.settings.tombstone_seconds)
        assert pool.scrub().swept == 0
    harness.bring_back()
    with harness.open() as pool:
        with pytest.raises(ObjectNotFound):
            pool.get("k")
        pool.scrub()
        assert pool.scrub().swept == 0
        assert harness.columns("k") == []


def test_a_wiped_device_is_unknown_not_absent(tmp_path: Path) -> None:
    """PROTOCOL 7, 12: a wiped device never rejoins; what it held is unknown, not absent."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        harness.wipe(harness.urls[0])
        assert pool.get("k") == payload(300_000)
        harness.lose(harness.urls[1:2])
        with pytest.raises(TooManyErasures):
            pool.get("k")
        harness.bring_back()
        assert [d.state for d in pool.status().devices].count("missing") == 1


def test_membership_needs_a_quorum(tmp_path: Path) -> None:
    """PROTOCOL 14: a change needs max(m + 1, majority); forced, it goes on, loudly."""
    harness = Harness(tmp_path, data=2, parity=2, devices=4)
    with harness.open() as pool:
        harness.lose(harness.urls[2:])
        with pytest.raises(MembershipError):
            pool.add_device("memory://new")
        pool.add_device("memory://new", force=True)
        assert len(pool.status().devices) == 5


def test_a_device_that_was_away_is_brought_up_to_date(tmp_path: Path) -> None:
    """PROTOCOL 14: a member that missed a membership change learns of it at the next open."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        harness.lose(harness.urls[:1])
        pool.add_device("memory://new")
        harness.bring_back()
    with harness.open() as pool:
        generations = {
            pool._store.generation_on(d, device) for d, device in pool._store.view.devices.items()
        }
        assert generations == {pool.status().generation}


def test_a_process_sees_members_that_another_added(tmp_path: Path) -> None:
    """A reader that was open before a device was added finds what was put on it."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as reader, harness.open() as writer:
        for number in range(6):
            writer.add_device(f"memory://new{number}")
        for number in range(20):
            writer.put(f"k{number}", payload(300_000, number))
        assert all(reader.get(f"k{n}") == payload(300_000, n) for n in range(20))


def test_failure_domains_bound_the_columns_of_an_object(tmp_path: Path) -> None:
    """PROTOCOL 3: at most ceil((k + m) / domains) columns a domain, so a domain may go."""
    domains = list("aaabbbccc")
    harness = Harness(tmp_path, data=4, parity=2, devices=9, domains=domains)
    with harness.open() as pool:
        for number in range(5):
            pool.put(f"k{number}", payload(600_000, number))
        for first in (0, 3, 6):
            harness.lose(harness.urls[first : first + 3])
            assert all(pool.get(f"k{n}") == payload(600_000, n) for n in range(5))
            harness.bring_back()


def test_flipped_bits_anywhere_are_read_round_found_and_mended(tmp_path: Path) -> None:
    """Header, first, middle and last unit, table: get is right, scrub mends all, then is clean."""
    harness = Harness(tmp_path, data=3, parity=2, devices=5)
    data = payload(1_500_000)
    with harness.open() as pool:
        pool.put("k", data)
        files = harness.columns("k")
        size = len(harness.devices[files[0][0]].files[files[0][1]].bytes)
        places = (0, 100, 4090, 4096, size // 2, size - 4096, size - 4096 + 3)
        for offset, pair in itertools.product(places, itertools.combinations(files, 2)):
            for url, path in pair:
                harness.flip(url, path, offset)
            assert pool.get("k") == data
            report = pool.scrub()
            assert report.columns_written == 2, f"offset {offset}: {report}"
            assert pool.scrub().clean
            assert pool.get("k") == data


def test_more_damage_than_parity_is_reported_and_left(tmp_path: Path) -> None:
    """An object that cannot be mended is named by scrub, and nothing of it is removed."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        files = harness.columns("k")
        for url, path in files[:2]:
            harness.flip(url, path, 5000)
        with pytest.raises(TooManyErasures):
            pool.get("k")
        assert set(pool.scrub().unreadable) == {"k"}
        assert harness.columns("k") == files


def test_rebuild_waits_for_missing_members_while_parity_is_left(tmp_path: Path) -> None:
    """PROTOCOL 17: a device that may return is waited for, unless no parity is left."""
    harness = Harness(tmp_path, data=2, parity=2, devices=6)
    with harness.open() as pool:
        pool.put("k", payload(300_000))
        holders = [url for url, _ in harness.columns("k")]
        harness.lose(holders[:1])
        assert pool.rebuild().waiting == 1
        harness.lose(holders[:2])
        assert pool.rebuild().rebuilt == 1
        assert pool.stat("k").spare_columns == 2


def test_names_that_fold_do_not_mix(tmp_path: Path) -> None:
    """PROTOCOL 13: on a filesystem that folds case, A and a are two objects."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    for device in harness.devices.values():
        device.folds_names = True
    with harness.open() as pool:
        pool.put("Key", b"upper")
        pool.put("key", b"lower")
        assert (pool.get("Key"), pool.get("key")) == (b"upper", b"lower")
        assert pool.list() == ["Key", "key"]


def test_settings_that_cannot_hold_a_stripe_are_refused(tmp_path: Path) -> None:
    """A memory budget below two stripes is an error at create, not a deadlock later."""
    with pytest.raises(ValueError, match="memory_bytes"):
        Harness(
            tmp_path,
            data=8,
            parity=4,
            devices=12,
            unit_bytes=4 * MIB,
            settings=Settings(memory_bytes=16 * MIB),
        )


@pytest.mark.parametrize("gone", [0, 1, 2])
@pytest.mark.parametrize("lost_when", ["before the open", "while it is open"])
def test_what_is_tolerated_counts_what_the_pool_can_still_be_opened_without(
    tmp_path: Path, gone: int, lost_when: str
) -> None:
    """PROTOCOL 5, 14: with `gone` members away a new object has its full parity on the others, yet
    the pool opens with m away alone. As many more losses as are told are survived, not one more."""
    harness = Harness(tmp_path, data=3, parity=2, devices=8)
    lost, rest = harness.urls[:gone], harness.urls[gone:]
    if lost_when == "before the open":
        harness.lose(lost)
    with harness.open() as pool:
        harness.lose(lost)
        infos = [pool.put("big", payload(900_000)), pool.put("small", b"small"), pool.stat("big")]
        assert {info.losses_tolerated for info in infos} == {2 - gone}
        assert {info.spare_columns for info in infos[:2]} == {2}
        assert pool.status().losses_tolerated == 2 - gone
    harness.lose(rest[: 2 - gone])
    with harness.open() as pool:
        assert (len(pool.get("big")), pool.get("small")) == (900_000, b"small")
    harness.lose(rest[: 2 - gone + 1])
    with pytest.raises(TooFewDevices):
        harness.open()
