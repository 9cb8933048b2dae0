"""Pools whose failure domains hold more devices than parity: a whole domain may go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpstore.config import PoolConfig, load_config, save_config
from hpstore.errors import MembershipError, ObjectNotFound, TooFewDevices
from hpstore.format.records import DeviceState, Member, PoolRecord
from hpstore.membership.open_members import unlisted
from hpstore.testing.memory_pool import Harness

SHAPES = [(4, 4, 4, 2), (3, 6, 6, 3)]
KEYS = range(12)


def fleet(tmp_path: Path, hosts: int, disks: int, k: int, m: int) -> Harness:
    domains = [f"h{n // disks}" for n in range(hosts * disks)]
    return Harness(tmp_path, data=k, parity=m, devices=hosts * disks, domains=domains)


def body(key: int) -> bytes:
    """Small objects, which are copies, and large ones, which are columns."""
    return np.random.default_rng(key).bytes(1000 if key % 3 == 0 else 300_000)


def test_an_eviction_leaves_domains_for_a_stripe(tmp_path: Path) -> None:
    """PROTOCOL 3, 14: the last disk of a host stays while the other hosts have room for m columns
    only. It went, as four disks were left, and nothing could be put any more (seed 619)."""
    harness = fleet(tmp_path, 3, 2, 1, 2)
    with harness.open() as pool:
        pool.evict(harness.urls[0])
        assert pool.rebuild().whole
        with pytest.raises(MembershipError, match="2 devices"):
            pool.evict(harness.urls[1])
        pool.put("k", body(1))


@pytest.mark.parametrize(("hosts", "disks", "k", "m"), SHAPES)
def test_a_pool_opens_and_works_without_a_domain(
    tmp_path: Path, hosts: int, disks: int, k: int, m: int
) -> None:
    """t_64, t_open, PROTOCOL 14: read, put, delete, absent keys, evict disk by disk, rebuild; then
    a second domain goes, as far as the arithmetic allows."""
    harness = fleet(tmp_path, hosts, disks, k, m)
    with harness.open() as pool:
        for key in KEYS:
            pool.put(f"k{key}", body(key))
        pool.delete("k11")
    dead = harness.urls[:disks]
    harness.lose(dead)
    with harness.open() as pool:
        assert [pool.get(f"k{key}") == body(key) for key in KEYS[:-1]] == [True] * 11
        with pytest.raises(ObjectNotFound):
            pool.get("k11")
        with pytest.raises(ObjectNotFound):
            pool.get("never")
        assert len(pool.list(certain=True)) == 11
        pool.put("new", body(1))
        pool.delete("k10")
        for url in dead:
            pool.evict(url)
        assert pool.rebuild().whole
    usable = (hosts - 1) * min(disks, -(-(k + m) // hosts))
    second = min(disks, -(-(k + m) // hosts))
    with harness.open() as pool:
        assert pool.get("new") == body(1)
        assert pool.stat("k1").data == min(k, usable - m)
    harness.lose(harness.urls[disks : 2 * disks])
    assert second <= m
    with harness.open() as pool:
        assert [pool.get(f"k{key}") == body(key) for key in KEYS[:10]] == [True] * 10


def test_two_domains_that_cannot_bound_a_stripe_count_devices(tmp_path: Path) -> None:
    """Without a bound a device counts one: four away at m = 2 do not open the pool."""
    harness = fleet(tmp_path, 2, 4, 4, 2)
    harness.lose(harness.urls[:4])
    with pytest.raises(TooFewDevices):
        harness.open()


def test_a_pool_of_before_has_no_bound(tmp_path: Path) -> None:
    """A record without `spread` counts as it did: its objects were placed without a bound."""
    harness = fleet(tmp_path, 4, 4, 4, 2)
    with harness.open() as pool:
        record = pool._store.view.record
        old = replace(record, spread=None, generation=record.generation + 1)
    for device in harness.devices.values():
        device.write_small("pool.json", old.encode(harness.config.key))
    harness.lose(harness.urls[:4])
    with pytest.raises(TooFewDevices):
        harness.open()


def grown_elsewhere(tmp_path: Path) -> Harness:
    """Another host has added two devices, which the settings of this one do not list."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    before = load_config(harness.config.path)
    with harness.open() as pool:
        for n in (7, 8):
            pool.add_device(f"memory://d{n}")
        for n in range(8):
            pool.put(f"k/{n}", b"x" * 300_000)
    save_config(before)
    return harness


def test_devices_that_the_settings_do_not_list_are_looked_for_where_the_record_has_them(
    tmp_path: Path,
) -> None:
    """r12: also by a process that has the pool open already."""
    harness = grown_elsewhere(tmp_path)
    with harness.open() as pool:
        assert len(pool.admin.devices.places) == 6
        assert all(pool.stat(f"k/{n}").losses_tolerated == 1 for n in range(8))
        harness.lose(["memory://d7"])
        pool.admin.refresh()
        harness.bring_back()
        pool.admin.refresh()
        assert len(pool.admin.devices.places) == 6


def test_what_is_not_listed_and_not_found_is_named(tmp_path: Path) -> None:
    """r12: the message says which devices the settings of this host do not list."""
    harness = grown_elsewhere(tmp_path)
    harness.lose(["memory://d7", "memory://d8"])
    with pytest.raises(TooFewDevices, match=r"does not list memory://d7, memory://d8"):
        harness.open()


@pytest.mark.parametrize("url", ["s3://bucket/d9", "ssh://root@elsewhere/d9"])
def test_a_record_cannot_send_a_host_to_other_protocols(tmp_path: Path, url: str) -> None:
    with Harness(tmp_path, data=2, parity=1, devices=4).open() as pool:
        others = pool.admin.record.members

    def grown(url: str) -> PoolRecord:
        return replace(
            pool.admin.record, members=(*others, Member(device_id="d9", url=url, domain="x"))
        )

    known = {m.device_id for m in others}
    config = PoolConfig(path=tmp_path, name="p", devices=("/mnt/a", "gs://bucket/b"))
    assert unlisted(config, grown(url), known) == []
    assert unlisted(config, grown("gs://bucket/c"), known) == ["gs://bucket/c"]
    assert unlisted(config, grown("gs://bucket/c"), {*known, "d9"}) == []
    longer = replace(config, devices=("/mnt/a", "gs://bucket/b", "/mnt/c", "/mnt/d", "/mnt/e"))
    assert unlisted(longer, grown("gs://bucket/c"), known) == []  # it has all, elsewhere


def test_an_evicted_devices_place_is_looked_at_by_the_settings_protocols_alone(
    tmp_path: Path,
) -> None:
    """t19_ssrf: one forged record had the agent, and readmit, ask a server of the network."""
    harness = Harness(tmp_path, data=2, parity=1, devices=4)
    with harness.open() as pool:
        url = "http://10.0.0.1/latest/meta-data"
        gone = Member(device_id="f" * 32, url=url, domain="x", state=DeviceState.EVICTED)
        view = pool._store.view
        pool._store.view = replace(view, record=replace(view.record, evicted=(gone,)))
        assert url not in pool.admin.devices.unanswered_places(())
        with pytest.raises(MembershipError, match="settings use no such protocol"):
            pool._session.find_device(gone)
