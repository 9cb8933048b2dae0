"""Certificates that end, on hosts that are processes of their own, with clocks that differ.

The rows of docs/hosts.md: a host's has ended, a caller's has, a host's clock is so far ahead that
all others' have for it; and callers whose role is too low.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")
pytest.importorskip("cryptography", reason="needs the extra hosts")

import hpstore
from hpstore.errors import DeviceDenied, HpstoreError, MembershipError
from hpstore.format.records import DeviceState
from hpstore.hosts.caller_roles import CallerRole
from hpstore.hosts.certificates import make_caller, make_host
from hpstore.pool.pool import Pool
from hpstore.testing.host_cluster import HostCluster
from hpstore.units import MIB
from tests.fault.common import payload
from tests.hosts.clusters import cluster_or_skip, short
from tests.hosts.test_certificates import expire
from tests.thorough import LONG

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
DATA = payload("certificates", 3 * MIB + 1)
DAYS_AHEAD = 40 * 86_400  # seconds; certificates of the cluster are for 30 days


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HostCluster]:
    if not LONG:
        pytest.skip("with HPSTORE_LONG_TESTS")
    with cluster_or_skip(tmp_path, clocks=True, tls="mutual") as made:
        made.up()
        yield made


def restart(cluster: HostCluster, *names: str) -> None:
    """So that all connections are made again: those that are open go on."""
    for name in names:
        cluster.kill_service(name)
        cluster.start(name)


def problems(cluster: HostCluster, pool: Pool) -> dict[str, set[str]]:
    """Of the disks of each host, as status has them."""
    found = {device.url: device.problem for device in pool.status().devices}
    return {name: {found[url] for url in host.urls} for name, host in cluster.hosts.items()}


def use(pool: Pool, key: str) -> None:
    """Put, conditional put, get, rebuild."""
    pool.put(key, DATA)
    pool.put(f"{key}/once", b"x", if_absent=True)
    assert bytes(pool.get(key)) == DATA
    assert bytes(pool.get("first")) == DATA
    assert not pool.rebuild().unreadable


def is_whole(cluster: HostCluster, pool: Pool) -> None:
    """Nothing is left of what was: all disks are there, and whole after a rebuild."""
    use(pool, "whole")
    pool.delete("whole/once")
    status = pool.status()
    assert {device.problem for device in status.devices} == {""}
    assert status.losses_tolerated == 2
    with hpstore.open(cluster.settings_file()) as other:
        assert bytes(other.get("first")) == DATA


def test_certificates_that_end_and_are_renewed(
    cluster: HostCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host's: it is missing, the rest goes on, and status names it and the reason. A caller's:
    nothing goes on, and the error says why. Renewed: all goes on, in the same process."""
    b = cluster.hosts["b"]
    with cluster.create(data=4, parity=2, settings=short()) as pool:
        pool.put("first", DATA)
        with monkeypatch.context() as patch:
            expire(patch)
            made = make_host(cluster.directory / "tls", "b", [b.address], 1)
        shutil.copytree(made, b.home / "tls", dirs_exist_ok=True)
        restart(cluster, "b")
        use(pool, "ended")
        (reason,) = {text.partition(": ")[2] for text in problems(cluster, pool)["b"]}
        assert "refused by TLS: certificate has expired" in reason
        cluster.write_certificates()
        is_whole(cluster, pool)

        cluster.kill("b")
        cluster.skew("b", DAYS_AHEAD)
        cluster.start("b")
        use(pool, "ahead")
        assert all("CERTIFICATE_EXPIRED" in text for text in problems(cluster, pool)["b"])
        cluster.kill("b")
        cluster.skew("b", 0)
        cluster.start("b")
        is_whole(cluster, pool)

        with monkeypatch.context() as patch:
            expire(patch)
            made = make_caller(cluster.directory / "tls", "outside", CallerRole.KEEPER, 1)
        shutil.copytree(made, cluster.directory / "outside" / "caller", dirs_exist_ok=True)
        restart(cluster, *cluster.hosts)
        for call in operations(pool):
            with pytest.raises(DeviceDenied, match="CERTIFICATE_EXPIRED"):
                call()
        with pytest.raises(HpstoreError, match="CERTIFICATE_EXPIRED"):
            hpstore.open(cluster.settings_file())
        cluster.write_certificates()
        is_whole(cluster, pool)


def operations(pool: Pool) -> list[Callable[[], object]]:
    return [
        lambda: pool.get("first"),
        lambda: pool.put("new", b"x"),
        lambda: pool.put("new", b"x", if_absent=True),
        lambda: pool.delete("first"),
    ]


def test_a_caller_may_do_what_its_role_allows_and_is_told_so(cluster: HostCluster) -> None:
    """A writer puts and evicts nothing; a reader reads. Their certificates were replaced while the
    pool is open, and a keeper's makes all of it good again."""
    with cluster.create(data=4, parity=2, settings=short()) as pool:
        pool.put("first", DATA)
        gone = cluster.hosts["b"].urls[0]
        for role in ("writer", "reader"):
            cluster.write_certificates(role=role)
            restart(cluster, *cluster.hosts)
            get, *changes = operations(pool)
            get()
            if role == "writer":
                pool.put("by a writer", DATA)
            else:
                for call in changes:
                    with pytest.raises(DeviceDenied, match="needs the role writer"):
                        call()
            with pytest.raises(MembershipError, match=r"needs the role (writer|keeper)"):
                pool.evict(gone)
            with hpstore.open(cluster.settings_file(), read_only=True) as other:
                assert bytes(other.get("first")) == DATA
        cluster.write_certificates()
        restart(cluster, *cluster.hosts)
        is_whole(cluster, pool)
        assert {member.state for member in pool.admin.record.members} == {DeviceState.ONLINE}
