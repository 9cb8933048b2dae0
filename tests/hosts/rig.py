"""Hosts on the loopback: a process each, that serves some directories and can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import hpstore
from hpstore.config import Settings
from hpstore.testing.process_stop import stop_process
from hpstore.units import MIB
from tests.hosts import serve


@dataclass
class RigHost:
    """One host: its disks outlive its service, its port stays."""

    name: str
    disks: list[Path]
    tls: str = "plain"
    certificates: str = ""
    port: int = 0
    registers: Path | None = None
    process: ForkServerProcess | None = field(default=None, repr=False)

    def start(self) -> None:
        processes = multiprocessing.get_context("forkserver")
        ours, theirs = processes.Pipe()
        disks = list(map(str, self.disks))
        self.process = processes.Process(
            target=serve.run,
            args=(theirs, self.port, self.tls, self.certificates, disks, self.registers),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self.port = ours.recv()
        ours.close()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGSTOP; on return it answers nothing."""
        assert self.process is not None
        assert self.process.pid is not None
        stop_process(self.process.pid)

    def kill(self) -> None:
        """SIGKILL; on return it is gone."""
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.join()
        self.process = None

    def urls(self) -> list[str]:
        return [f"hpd://127.0.0.1:{self.port}/{i}" for i in range(len(self.disks))]


@contextmanager
def rig(base: Path, hosts: int, disks: int) -> Iterator[list[RigHost]]:
    """So many hosts of so many disks, started side by side."""
    made = []
    for name in "abcdefgh"[:hosts]:
        places = [base / f"{name}{i}" for i in range(disks)]
        for place in places:
            place.mkdir()
        made.append(RigHost(name, places, registers=base / f"registers-{name}"))
    try:
        for host in made:
            host.start()
        yield made
    finally:
        for host in made:
            if host.process is not None:
                host.send(signal.SIGCONT)
                host.kill()


def settings(base: Path, *, deadline_seconds: float = 20.0) -> Settings:
    return Settings(
        memory_bytes=64 * MIB,
        run_directory=str(base / "run"),
        tls="plain",
        device_deadline_seconds=deadline_seconds,
    )


def create(base: Path, hosts: list[RigHost], *, deadline_seconds: float = 20.0) -> hpstore.Pool:
    """4+2 over the hosts' disks, a failure domain each."""
    return hpstore.create(
        [url for host in hosts for url in host.urls()],
        data=4,
        parity=2,
        config=base / "pool.toml",
        domains=[host.name for host in hosts for _ in host.disks],
        settings=settings(base, deadline_seconds=deadline_seconds),
    )
