"""Hosts in network namespaces for tests, or a skip that names what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstore.config import Settings
from hpstore.testing.host_cluster import HostCluster, cluster_problem
from hpstore.units import MIB


def cluster_or_skip(
    directory: Path,
    *,
    hosts: str = "abc",
    disks: int = 2,
    etcd: bool = False,
    clocks: bool = False,
    tls: str = "plain",
) -> HostCluster:
    """A cluster that does not run yet, with a letter for each host."""
    problem = cluster_problem(etcd=etcd, clocks=clocks, tls=tls == "mutual")
    if problem is not None:
        pytest.skip(problem)
    return HostCluster(directory, tuple(hosts), disks=disks, etcd=etcd, tls=tls)


def short(*, deadline_seconds: float = 3.0) -> Settings:
    """Settings whose deadlines pass within a test."""
    return Settings(
        memory_bytes=64 * MIB,
        device_deadline_seconds=deadline_seconds,
        claim_seconds=0.5,
        registers_deadline_seconds=5.0,  # a member that is stopped takes two of them
        lock_deadline_seconds=30.0,  # a hold that could not be given back is free after 15
    )
