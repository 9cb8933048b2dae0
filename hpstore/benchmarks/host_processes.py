"""Services of hosts as processes of a benchmark: on the loopback, or in a namespace each."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from hpstore.config import Settings
from hpstore.hosts.host_limits import HostLimits
from hpstore.hosts.running_service import run_until_ended, serving

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_MTU = "9000"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNetwork:
    """Where services of so many hosts listen: an address each, and the namespaces, "" for ours."""

    kind: str
    addresses: Sequence[str]
    namespaces: Sequence[str]


@dataclass(slots=True, kw_only=True)
class BenchHost:
    """The service of one host; its disks outlive it."""

    address: str
    namespace: str
    disks: Sequence[Path]
    registers: Path
    port: int = 0
    process: SpawnProcess | None = field(default=None, repr=False)
    _said: Connection | None = field(default=None, repr=False)

    @property
    def urls(self) -> list[str]:
        """Of its disks."""
        return [f"hpd://{self.address}:{self.port}/{n}" for n in range(len(self.disks))]

    def start(self) -> None:
        """Returns when it listens, on the port that it had before."""
        self.begin()
        self.wait()

    def begin(self) -> None:
        """The same without waiting."""
        processes = multiprocessing.get_context("spawn")
        ours, theirs = processes.Pipe()
        disks = list(map(str, self.disks))
        self.process = processes.Process(
            target=serve_host,
            args=(theirs, self.address, self.port, disks, str(self.registers), self.namespace),
            daemon=True,
        )
        self.process.start()
        theirs.close()
        self._said = ours

    def wait(self) -> None:
        """Until it listens."""
        assert self._said is not None
        self.port = int(self._said.recv())
        self._said.close()

    def send(self, number: signal.Signals) -> None:
        """Pause it, or let it go on."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """On return it is gone."""
        if self.process is not None:
            self.send(signal.SIGCONT)
            self.process.kill()
            self.process.join()
            self.process = None


def serve_host(
    answer: Connection,
    address: str,
    port: int,
    disks: list[str],
    registers: str,
    namespace: str,
) -> None:
    """A process: the service of one host."""
    if namespace:
        _enter(namespace)
    settings, limits = Settings(tls="plain"), HostLimits()
    with serving(address, port, disks, settings, limits, registers=Path(registers)) as service:
        run_until_ended(lambda: answer.send(service.address[1]))


def _enter(namespace: str) -> None:
    """Move this process there. Raises OSError."""
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(file, _NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, f"namespace {namespace}: {os.strerror(number)}")
    finally:
        os.close(file)


@contextlib.contextmanager
def bench_network(count: int) -> Iterator[BenchNetwork]:
    """Namespaces behind a bridge where this user may make them; the loopback else."""
    if os.geteuid() or shutil.which("ip") is None:
        yield _loopback(count)
        return
    with contextlib.ExitStack() as stack:
        try:
            found = _namespaces(count, stack)
        except subprocess.CalledProcessError:  # root of a container without that right
            stack.close()
            found = _loopback(count)
        yield found


def _loopback(count: int) -> BenchNetwork:
    return BenchNetwork(kind="loopback", addresses=["127.0.0.1"] * count, namespaces=[""] * count)


def _namespaces(count: int, stack: contextlib.ExitStack) -> BenchNetwork:
    """A bridge in our own namespace, and a pair of veth to each host's."""
    mark = os.getpid() % 60000
    bridge, net = f"hpb{mark}", f"10.{200 + mark % 50}.{mark // 50 % 250}"
    _ip("link", "add", bridge, "mtu", _MTU, "type", "bridge")
    stack.callback(_ip_quietly, "link", "del", bridge)
    _ip("addr", "add", f"{net}.1/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    names = [f"{bridge}-{number}" for number in range(count)]
    for number, name in enumerate(names):
        _ip("netns", "add", name)
        stack.callback(_ip_quietly, "netns", "del", name)
        ours = f"hpv{mark}-{number}"
        _ip("link", "add", ours, "mtu", _MTU, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", ours, "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{net}.{10 + number}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "mtu", _MTU, "up")
        _ip("-n", name, "link", "set", "lo", "up")
    return BenchNetwork(
        kind="namespaces and veth",
        addresses=[f"{net}.{10 + number}" for number in range(count)],
        namespaces=names,
    )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _ip_quietly(*words: str) -> None:
    subprocess.run(["ip", *words], check=False, capture_output=True)


@contextlib.contextmanager
def bench_hosts_of(
    network: BenchNetwork, place: Path, hosts: int, disks: int
) -> Iterator[list[BenchHost]]:
    """So many hosts of so many disks, below `place`."""
    made = []
    for number in range(hosts):
        places = [place / f"host{number}-disk{disk}" for disk in range(disks)]
        for one in places:
            one.mkdir()
        made.append(
            BenchHost(
                address=network.addresses[number],
                namespace=network.namespaces[number],
                disks=places,
                registers=place / f"host{number}-registers",
            )
        )
    try:
        for host in made:
            host.begin()
        for host in made:
            host.wait()
        yield made
    finally:
        for host in made:
            host.kill()
