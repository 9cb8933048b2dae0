"""A host's service as a process of the tests, forked from one that has imported all."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from hpstore.config import Settings
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.running_service import run_until_ended, serving
from hpstore.units import MIB


def run(
    answer: Connection,
    port: int,
    tls: str,
    certificates: str,
    disks: list[str],
    registers: Path | None = None,
) -> None:
    """Serve, and say the port."""
    settings = Settings(tls=tls, certificates=certificates, recycle_bytes=64 * MIB)
    limits = HostLimits()
    with serving("127.0.0.1", port, disks, settings, limits, registers=registers) as service:
        run_until_ended(lambda: answer.send(service.address[1]))
