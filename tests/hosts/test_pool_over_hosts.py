"""A pool over the disks of three hosts: a host is killed, restarted in mid-stripe, stopped."""

from __future__ import annotations

import gc
import signal
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

import hpstore
from hpstore.devices.host_device import HostDevice
from hpstore.devices.host_links import HostLinks
from hpstore.errors import DeviceError, DeviceMissing, DeviceTimeout, ObjectNotFound
from hpstore.format.host_calls import DATA_PORT
from hpstore.units import MIB
from tests.hosts.rig import RigHost, create, rig


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[RigHost]]:
    with rig(tmp_path, hosts=3, disks=2) as made:
        yield made


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_a_pool_over_hosts_works_as_on_local_disks(hosts: list[RigHost], tmp_path: Path) -> None:
    """Create, put, get, list, overwrite, delete, status, scrub; the same by a second open."""
    data = {f"k/{n}": noise(n, n) for n in (0, 1, 5000, 3 * MIB + 17, 20 * MIB)}
    with create(tmp_path, hosts) as pool:
        for key, value in data.items():
            pool.put(key, value)
        pool.put("k/1", b"second")
        data["k/1"] = b"second"
        pool.put("gone", b"x")
        pool.delete("gone")
        assert {key: bytes(pool.get(key)) for key in data} == data
        found = pool.status()
        assert all("hpd://127.0.0.1" in device.url for device in found.devices)
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert set(pool.list()) == data.keys()
        assert {key: bytes(pool.get(key)) for key in data} == data
        with pytest.raises(ObjectNotFound):
            pool.get("gone")
        assert pool.scrub().rebuilt == 0


def test_a_killed_host_costs_nothing_and_is_rebuilt(hosts: list[RigHost], tmp_path: Path) -> None:
    """Reads and writes go on without it; the errors name host and disk; when it is back, a rebuild
    repairs what it missed, and another host can be killed."""
    with create(tmp_path, hosts) as pool:
        pool.put("before", noise(5 * MIB, 1))
        hosts[1].kill()
        assert bytes(pool.get("before")) == noise(5 * MIB, 1)
        pool.put("during", noise(5 * MIB, 2))
        pool.put("small", b"s")
        device = pool._store.view.devices
        url = hosts[1].urls()[0]
        (one,) = [d for d in device.values() if d.url == url]
        with pytest.raises(DeviceMissing, match=f"device {url}: .*hpstore host serve"):
            one.usage()
        hosts[1].start()
        pool.rebuild()
        hosts[2].kill()
        for key, value in (("before", noise(5 * MIB, 1)), ("during", noise(5 * MIB, 2))):
            assert bytes(pool.get(key)) == value
        assert bytes(pool.get("small")) == b"s"


def test_a_host_that_is_dead_at_open_is_named(hosts: list[RigHost], tmp_path: Path) -> None:
    """The pool opens without it, and status says which disks are missing."""
    with create(tmp_path, hosts) as pool:
        pool.put("a", noise(MIB))
    hosts[0].kill()
    with hpstore.open(tmp_path / "pool.toml") as pool:
        assert bytes(pool.get("a")) == noise(MIB)
        lost = [d.url for d in pool.status().devices if d.state != "online"]
        assert set(lost) == set(hosts[0].urls())


def test_an_open_reader_survives_a_restart_of_the_service(
    hosts: list[RigHost], tmp_path: Path
) -> None:
    """Its handles are gone; the files are opened again, and are the same."""
    data = noise(24 * MIB, 3)
    with create(tmp_path, hosts) as pool:
        pool.put("a", data)
        with pool.open("a") as reader:
            target = bytearray(MIB)
            reader.read_into(target)
            for host in hosts:
                host.kill()
                host.start()
            found = bytearray(len(data))
            reader.read_into(found)
            assert bytes(found) == data


def test_a_service_restarted_within_a_put_loses_nothing(
    hosts: list[RigHost], tmp_path: Path
) -> None:
    """Killed while stripes flow: the put is acknowledged without that host, or raises; what was
    acknowledged is read back with another host gone."""
    data, seen = noise(64 * MIB, 4), [0]

    def restart(nbytes: int) -> None:
        before, seen[0] = seen[0], seen[0] + nbytes
        if before < len(data) // 2 <= seen[0]:
            hosts[1].kill()
            hosts[1].start()

    with create(tmp_path, hosts) as pool:
        pool.put("a", data, progress=restart)
        assert seen[0] >= len(data)
        assert bytes(pool.get("a")) == data
        pool.rebuild()
        hosts[2].kill()
        assert bytes(pool.get("a")) == data


def test_a_stopped_host_costs_one_pause(hosts: list[RigHost], tmp_path: Path) -> None:
    """SIGSTOP: its kernel answers, it does not. The first read waits as long as an early survey
    does, later ones do not ask it; a put goes round it once."""
    with create(tmp_path, hosts, deadline_seconds=3.0) as pool:
        for number in range(8):
            pool.put(f"k{number}", noise(MIB, number))
        hosts[2].stop()
        began = time.monotonic()
        assert bytes(pool.get("k0")) == noise(MIB, 0)
        first = time.monotonic() - began
        for number in range(8):
            assert bytes(pool.get(f"k{number}")) == noise(MIB, number)
        rest = time.monotonic() - began - first
        pool.put("new", noise(MIB, 99))
        assert bytes(pool.get("new")) == noise(MIB, 99)
        print(f"first get {first:.2f} s, eight more {rest:.2f} s")
        hosts[2].send(signal.SIGCONT)
        pool.rebuild()
        assert bytes(pool.get("new")) == noise(MIB, 99)


def test_beside_a_stopped_host_each_call_after_the_first_waits_little(
    hosts: list[RigHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild asks it for each object: the deadline is waited out by the first calls alone, and
    all of it is there again once the host answers."""
    waits: list[float] = []
    timeout, unreachable = HostLinks._timeout, HostLinks._unreachable

    def late(links: HostLinks, operation: str, seconds: float) -> DeviceTimeout:
        waits.append(seconds)
        return timeout(links, operation, seconds)

    def away(links: HostLinks, seconds: float) -> DeviceMissing:
        waits.append(seconds)
        return unreachable(links, seconds)

    with create(tmp_path, hosts, deadline_seconds=2.0) as pool:
        for number in range(3):
            pool.put(f"k{number}", noise(MIB, number))
        monkeypatch.setattr(HostLinks, "_timeout", late)
        monkeypatch.setattr(HostLinks, "_unreachable", away)
        hosts[2].stop()
        pool.scrub()
        long = [seconds for seconds in waits if seconds > 1]
        assert len(waits) > 2 * len(long)
        assert len(long) <= 8  # of two disks; calls that are under way at once begin alike
        hosts[2].send(signal.SIGCONT)
        del waits[:]
        assert pool.scrub().whole
        assert not waits


@pytest.mark.parametrize("hangs", ["host", "disk"])
def test_a_stopped_host_makes_no_failing_disks(
    hosts: list[RigHost], tmp_path: Path, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only calls that were under way fail with a timeout, which counts as an error of the disk; by
    later ones the host itself is asked first. Where it answers, it is the disk that hangs."""
    device = HostDevice(hosts[0].urls()[0], seconds=1.0)
    device.prepare()
    device.write_small("health.json", b"{}")
    if hangs == "host":
        hosts[0].stop()
    else:
        exchange = HostLinks._exchange

        def hanging(links: HostLinks, stream: Any, operation: str, *rest: Any, **how: Any) -> Any:
            if operation != DATA_PORT:
                raise TimeoutError
            return exchange(links, stream, operation, *rest, **how)

        monkeypatch.setattr(HostLinks, "_exchange", hanging)
    errors = []
    for _ in range(5):
        with pytest.raises(DeviceError) as found:
            device.read_small("health.json", 10)
        errors.append(type(found.value))
    assert errors == [DeviceTimeout, *4 * [DeviceMissing if hangs == "host" else DeviceTimeout]]
    if hangs == "host":
        hosts[0].send(signal.SIGCONT)
    monkeypatch.undo()
    assert device.read_small("health.json", 10) == b"{}"
    device.close()


def test_links_that_are_dropped_close_at_once(hosts: list[RigHost]) -> None:
    """Not at some collection of garbage: the host keeps what they have open until then."""
    links = HostDevice(hosts[0].urls()[0], seconds=5.0)._links
    gone = weakref.ref(links)
    gc.disable()
    try:
        del links
        assert gone() is None
    finally:
        gc.enable()


def test_a_host_that_is_cut_off_is_missing() -> None:
    """No connection is made, and nothing is known of the disk."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # the kernel drops what comes beyond its queue
            one.setblocking(False)
            one.connect_ex(address)
        try:
            with pytest.raises(DeviceMissing, match="the host does not answer"):
                HostDevice(f"hpd://127.0.0.1:{address[1]}/0", seconds=0.6)
        finally:
            for one in waiting:
                one.close()


def test_a_device_of_a_host_that_is_not_there_is_missing(hosts: list[RigHost]) -> None:
    """By its own error, at once; so is a disk that the host does not have."""
    hosts[0].kill()
    with pytest.raises(DeviceMissing, match="hpd://127"):
        HostDevice(hosts[0].urls()[0], seconds=5.0)
