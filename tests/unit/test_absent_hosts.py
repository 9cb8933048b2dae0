"""A host that is away is waited for by what was seen of it, and by no wall clock."""

from __future__ import annotations

import errno
import socket

import pytest

from hpstore.agent import own_devices
from hpstore.agent.absent_hosts import AbsentHosts
from hpstore.agent.own_devices import OwnDevices, is_own_address
from hpstore.format.records import Member, PoolRecord, RegisterPlace
from hpstore.membership.host_names import host_domains, over_several_hosts
from hpstore.pool.host_status import hosts_tolerated

HOSTS = {"host-a": frozenset({"1", "2"}), "host-b": frozenset({"3"})}


def seen(times: list[float], present: set[str], hosts: AbsentHosts) -> None:
    for at in times:
        hosts.look(at, HOSTS, present)


def test_a_host_is_gone_once_it_was_seen_away_for_long_enough() -> None:
    """Looked at each five seconds: 899 s are too few, 900 s are enough."""
    hosts = AbsentHosts(900.0, 60.0)
    seen([float(n) for n in range(0, 900, 5)], {"3"}, hosts)
    assert hosts.waited_for() == {"host-a": 5.0}
    assert hosts.devices_waited_for() == {"1", "2"}
    assert hosts.gone() == {}
    hosts.look(900.0, HOSTS, {"3"})
    assert hosts.gone() == {"host-a": frozenset({"1", "2"})}
    assert hosts.waited_for() == {}


def test_one_device_that_answers_is_a_host_that_is_there() -> None:
    """It was back for a moment: the wait begins again."""
    hosts = AbsentHosts(10.0, 60.0)
    seen([0.0, 8.0], {"3"}, hosts)
    hosts.look(9.0, HOSTS, {"2", "3"})
    assert not hosts.waited_for()
    seen([11.0, 20.0], {"3"}, hosts)
    assert hosts.waited_for() == {"host-a": 1.0}


def test_an_agent_that_was_stopped_for_an_hour_has_not_seen_an_hour() -> None:
    hosts = AbsentHosts(900.0, 60.0)
    seen([0.0, 5.0, 3605.0], set(), hosts)
    assert hosts.waited_for() == {"host-a": 835.0, "host-b": 835.0}


def test_what_was_seen_before_another_agent_decided_counts_no_more() -> None:
    hosts = AbsentHosts(10.0, 60.0)
    seen([0.0, 9.0], {"3"}, hosts)
    hosts.forget()
    seen([11.0, 20.0], {"3"}, hosts)
    assert hosts.waited_for() == {"host-a": 1.0}


def record(*members: tuple[str, str], registers: RegisterPlace | None = None) -> PoolRecord:
    made = [
        Member(device_id=str(n), url=url, domain=domain) for n, (url, domain) in enumerate(members)
    ]
    return PoolRecord(
        pool_id="p",
        generation=1,
        nonce="n",
        parent="",
        data=4,
        parity=2,
        unit_bytes=65536,
        members=tuple(made),
        spread=2,
        registers=registers,
    )


def test_a_pool_on_one_host_has_no_hosts_and_elects_nobody() -> None:
    """Whatever its domains are called; disks of others, or registers outside, make it shared."""
    alone = record(("/mnt/a", "d000"), ("/mnt/b", "rack1"), ("s3://bucket/x", "d002"))
    assert host_domains(alone) == {}
    assert not over_several_hosts(alone)
    place = RegisterPlace(url="devices", epoch="0" * 16)
    assert not over_several_hosts(record(("/mnt/a", "d"), registers=place))
    place = RegisterPlace(url="etcd://a:2379", epoch="0" * 16)
    assert over_several_hosts(record(("/mnt/a", "d"), registers=place))
    grown = record(("/mnt/a", "d000"), ("hpd://b:7200/0", "rack2"), ("/mnt/c", "rack2"))
    assert host_domains(grown) == {"rack2": {"1", "2"}}
    assert over_several_hosts(grown)


def test_own_devices_are_local_paths_and_disks_at_own_addresses() -> None:
    """A store is on no host; a name in the settings goes before addresses."""
    rows = (
        ("/mnt/a", "host-a"),
        ("hpd://127.0.0.1:7200/0", "host-127.0.0.1"),
        ("hpd://203.0.113.9:7200/0", "host-203.0.113.9"),
        ("s3://bucket/x", "d3"),
    )
    found, places = record(*rows), {str(n): url for n, (url, _) in enumerate(rows)}
    assert OwnDevices("").among(places, found) == {"0", "1"}
    assert OwnDevices("").stores(places) == {"3"}
    assert OwnDevices("203.0.113.9").among(places, found) == {"2"}
    assert OwnDevices("a").among(places, found) == {"0"}
    assert OwnDevices("x").among(places, found) == set()
    assert is_own_address("127.0.0.1")
    assert not is_own_address("203.0.113.9")  # of documentation: nobody's


def test_a_name_that_was_not_resolved_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that starts before the network does."""
    rows = (("hpd://node-7:7200/0", "host-node-7"),)
    found, places = record(*rows), {"0": rows[0][0]}
    own = OwnDevices("")
    asked: list[str] = []

    def resolve(host: str) -> bool:
        asked.append(host)
        if len(asked) == 1:
            raise OSError("temporary failure in name resolution")
        return True

    monkeypatch.setattr(own_devices, "is_own_address", resolve)
    assert own.among(places, found) == set()
    assert own.among(places, found) == own.among(places, found) == {"0"}
    assert len(asked) == 2


def test_a_host_that_is_none_of_the_pool_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = (("hpd://a:7200/0", "host-a"),)
    found, places = record(*rows), {"0": rows[0][0]}
    own = OwnDevices("typo")
    assert own.among({}, found) == own.among(places, found) == own.among(places, found) == set()
    assert caplog.text.count("[agent] host = 'typo'") == 1
    OwnDevices("a").among(places, found)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("answering", "losses", "count"),
    [
        ("012345", 2, 1),
        ("012345", 1, 0),
        ("01", 2, 1),
        ("0123456", 4, 2),
        ("06", 1, 1),  # one disk of each answers: each costs a column
        ("", 2, 0),
    ],
)
def test_hosts_that_may_be_lost_are_counted_the_heaviest_first(
    answering: str, losses: int, count: int
) -> None:
    hosts = [(f"hpd://{'abcd'[n // 2]}:7200/{n % 2}", f"host-{'abcd'[n // 2]}") for n in range(8)]
    assert hosts_tolerated(record(*hosts), set(answering), losses) == count


def test_a_host_without_ipv6_finds_its_own_address_behind_one_of_that_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """/etc/hosts names ::1, and the kernel has no such sockets: each round of the agent failed."""
    plain = socket.socket

    def without(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return plain(family, kind)

    def both(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [
            (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("::1", 0, 0, 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 0)),
        ]

    monkeypatch.setattr(socket, "socket", without)
    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert is_own_address("b")
