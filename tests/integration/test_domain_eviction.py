"""A whole host is evicted by its name, in one generation, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hpstore
from hpstore.config import Settings, load_config
from hpstore.errors import MembershipError
from hpstore.format.records import DeviceState, Member, PoolRecord
from hpstore.membership import changes, members
from hpstore.membership.host_names import members_named
from hpstore.testing.memory_pool import Harness
from tests.integration.cli_cases import Cli

KEYS = range(8)


def body(key: int) -> bytes:
    return np.random.default_rng(key).bytes(1000 if key % 3 == 0 else 300_000)


def hosts(tmp_path: Path, count: int = 4, disks: int = 2, *, data: int = 4) -> Harness:
    """4+2 unless said otherwise; host b is domain host-b."""
    names = [f"host-{'abcdefgh'[n // disks]}" for n in range(count * disks)]
    return Harness(tmp_path, data=data, parity=2, devices=count * disks, domains=names)


def filled(harness: Harness) -> None:
    with harness.open() as pool:
        for key in KEYS:
            pool.put(f"k{key}", body(key))


@pytest.mark.parametrize("name", ["host:b", "domain:host-b"])
@pytest.mark.parametrize("dead", [True, False])
def test_a_host_is_evicted_in_one_generation_and_healed(
    tmp_path: Path, name: str, dead: bool
) -> None:
    """Dead or alive: one generation closes it, the next is without it; a rebuild makes up for it,
    and then a second host may go."""
    harness = hosts(tmp_path)
    filled(harness)
    if dead:
        harness.lose(harness.urls[2:4])
    with harness.open() as pool:
        before = pool.admin.record.generation
        pool.evict(name)
        record = pool.admin.record
        assert record.generation == before + 2
        assert [m.url for m in record.evicted] == harness.urls[2:4]
        assert not set(harness.urls[2:4]) & set(load_config(harness.config.path).devices)
        assert pool.rebuild().whole
        assert pool.status().losses_tolerated == 2
        assert [pool.get(f"k{key}") == body(key) for key in KEYS] == [True] * len(KEYS)
    harness.lose(harness.urls[:2])
    with harness.open() as pool:
        assert [pool.get(f"k{key}") == body(key) for key in KEYS] == [True] * len(KEYS)


def test_a_host_is_not_evicted_while_more_than_parity_would_be_away(tmp_path: Path) -> None:
    """PROTOCOL 16, by weight: a disk of another host is away, which with the host weighs 3. Nothing
    is written; all devices take columns still."""
    harness = hosts(tmp_path)
    filled(harness)
    harness.lose(harness.urls[:1])
    with harness.open() as pool:
        before = pool.admin.record
        with pytest.raises(
            MembershipError,
            match=r"2 devices cannot be evicted: .* 3 columns .* 1 are now \(memory://d0\)",
        ):
            pool.evict("host:b")
        assert pool.admin.record.order == before.order
        harness.bring_back()
        pool.admin.refresh()
        pool.evict("host:b")


def test_nothing_is_evicted_while_more_than_parity_is_away(tmp_path: Path) -> None:
    """PROTOCOL 17: two hosts fell away while the pool was open: neither is evicted."""
    harness = hosts(tmp_path, 5)
    filled(harness)
    with harness.open() as pool:
        harness.lose(harness.urls[:4])
        pool.admin.refresh()
        before = pool.admin.record
        for name in ("host:a", "host:c", harness.urls[0]):
            with pytest.raises(MembershipError, match="Nothing was changed"):
                pool.evict(name)
        assert pool.admin.record.order == before.order


def test_a_host_that_was_evicted_and_not_made_up_for_keeps_the_next_one(tmp_path: Path) -> None:
    harness = hosts(tmp_path, 5)
    filled(harness)
    with harness.open() as pool:
        pool.evict("host:a")
        with pytest.raises(MembershipError, match="2 that were evicted since the last rebuild"):
            pool.evict("host:b")
        assert pool.rebuild().whole
        pool.evict("host:b")


def test_a_host_stays_where_the_others_could_take_no_stripe(tmp_path: Path) -> None:
    """Two hosts of two disks: without one no put would have full parity; forced it goes."""
    harness = hosts(tmp_path, 2, data=2)
    filled(harness)
    with harness.open() as pool:
        with pytest.raises(MembershipError, match=r"without 2 devices 2 devices .* 3 are needed"):
            pool.evict("host:b")
        pool.evict("host:b", force=True)
        with pytest.raises(MembershipError, match="without 2 devices 0 devices"):
            pool.evict("host:a", force=True)  # a pool has members


def test_a_host_that_an_object_needs_is_opened_again(tmp_path: Path) -> None:
    """By names: a column is gone elsewhere, so the two of host b are needed. Both disks are online
    again after the refusal."""
    harness = hosts(tmp_path)
    filled(harness)
    for key in ("k1", "k2", "k4", "k5", "k7"):  # one that has columns on host b
        on_b = [row for row in harness.columns(key) if row[0] in harness.urls[2:4]]
        if on_b:
            break
    elsewhere = [row for row in harness.columns(key) if row not in on_b]
    for url, path in elsewhere[: 3 - len(on_b)]:  # 4 columns are needed of the 6
        del harness.devices[url].files[path]
    with harness.open() as pool:
        with pytest.raises(MembershipError, match=f"1 objects need 2 devices .*{key}"):
            pool.evict("host:b")
        assert {m.state for m in pool.admin.record.members} == {DeviceState.ONLINE}


def test_two_evictions_of_hosts_at_once_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL 16: a process is stopped between its look and its commit, another evicts meanwhile:
    the first is refused, and its devices are open again."""
    harness = hosts(tmp_path, 6)
    filled(harness)
    a, b = harness.open(), harness.open()
    plain, calls = members.commit_record, iter(range(10))

    def stopped(*arguments: object, **named: object) -> None:
        if next(calls) == 1:  # the first closes the devices, the second takes them out
            monkeypatch.undo()
            for device in harness.devices.values():
                device.restart()  # its locks are gone, as on another host
            b.evict("host:c")
        plain(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(changes, "commit_record", stopped)
    with pytest.raises(MembershipError, match="another process has changed it"):
        a.evict("host:b")
    a.admin.refresh()
    assert {m.domain for m in a.admin.record.evicted} == {"host-c"}
    assert {m.state for m in a.admin.record.members} == {DeviceState.ONLINE}
    a.close()
    b.close()


def test_a_host_is_evicted_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its disks are named in the JSON; a name of nothing is one line; status shows the hosts."""
    disks = [tmp_path / f"{name}{n}" for name in "abcd" for n in range(2)]
    domains = [f"host-{disk.name[0]}" for disk in disks]
    settings = Settings(run_directory=str(tmp_path / "run"))
    hpstore.create(
        disks,
        data=4,
        parity=2,
        config=tmp_path / "pool.toml",
        domains=domains,
        settings=settings,
    ).close()
    cli = Cli(tmp_path, capsys)
    shown = cli("status", cli.pool)
    assert "host-b  2 of 2  2        online  yes" in shown
    assert "1 more host may be lost" in shown
    assert cli.json("status", cli.pool)["hosts_tolerated"] == 1
    found = cli.json("evict", cli.pool, "host:b", "--yes")
    assert found["name"] == "host:b"
    assert [(row["url"], row["state"]) for row in found["devices"]] == [
        (str(disk), "evicted") for disk in disks[2:4]
    ]
    assert "has no device of this pool" in cli("evict", cli.pool, "host:b", "--yes", code=33)


def test_what_a_name_of_a_host_means() -> None:
    """By URLs first, then by domains; two meanings are none, nor is a name of nothing."""

    def member(number: int, url: str, domain: str) -> Member:
        return Member(device_id=f"{number:032x}", url=url, domain=domain)

    record = PoolRecord(
        pool_id="p",
        generation=1,
        nonce="n",
        parent="",
        data=2,
        parity=1,
        unit_bytes=65536,
        members=(
            member(0, "hpd://b:7200/0", "rack1"),
            member(1, "hpd://c:7200/0", "rack1"),
            member(2, "/mnt/a", "host-d"),
            member(3, "/mnt/b", "b"),
        ),
    )

    def named(name: str) -> list[str] | None:
        found = members_named(record, {}, name)
        return None if found is None else [m.url for m in found]

    assert named("/mnt/a") is None
    assert named("hpd://b:7200/0") is None
    assert named("host:c") == ["hpd://c:7200/0"]
    assert named("host:d") == ["/mnt/a"]
    assert named("domain:rack1") == ["hpd://b:7200/0", "hpd://c:7200/0"]
    with pytest.raises(MembershipError, match=r"may mean the 1 .* Say domain:b"):
        named("host:b")
    for name in ("host:", "host:x", "domain:", "domain:rack2"):
        with pytest.raises(MembershipError, match=r"no device of this pool.*domain:host-d"):
            named(name)
    moved = members_named(record, {record.members[0].device_id: "hpd://e:7200/0"}, "host:e")
    assert moved == [record.members[0]]
    twice = replace(record, members=(*record.members[2:], member(4, "/mnt/c", "host-b")))
    with pytest.raises(MembershipError, match=r"domains b and host-b.* Say domain:b or domain:h"):
        members_named(twice, {}, "host:b")
    several = replace(record, members=record.members[:2])
    assert members_named(several, {}, "host:b") == [record.members[0]]
