"""Several hosts on one machine: namespaces, `hpstore host serve` in each, etcd. For tests. Root.

A host can be killed, stopped, cut off, have another clock and be started again, with all that runs
on it: its service, its member of etcd, the processes that `popen` has started there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import hpstore
from hpstore.config import Settings
from hpstore.pool.pool import Pool
from hpstore.runtime.closing import Closing
from hpstore.testing.etcd_cluster import EtcdCluster
from hpstore.testing.host_network import HostNetwork, network_problem

PORT = 7200
_START_SECONDS = 60.0
_OUTSIDE = "outside"
_FAKETIME = (
    "/usr/lib/*/faketime/libfaketimeMT.so.1",
    "/usr/lib*/faketime/libfaketimeMT.so.1",
    "/usr/local/lib/faketime/libfaketimeMT.so.1",
)
# libfaketime 0.9.10 lets clock_nanosleep, which time.sleep is, fail with EINVAL
_SLEEPS = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


def cluster_problem(*, etcd: bool = False, clocks: bool = False, tls: bool = False) -> str | None:
    """Why a cluster cannot be made here, or None."""
    problem = network_problem()
    if problem is not None:
        return problem
    if etcd and shutil.which("etcd") is None:
        return "needs etcd (Debian: apt-get install etcd-server)"
    if clocks and _faketime() is None:
        return "needs libfaketime (Debian: apt-get install faketime)"
    try:
        import httptools

        del httptools
        if tls:
            import cryptography

            del cryptography
    except ImportError as error:
        return f"needs {error.name} (pip install 'hpstore[hosts]')"
    return None


def _faketime() -> str | None:
    return next((path for pattern in _FAKETIME for path in glob(pattern)), None)


@dataclass
class ClusterHost:
    """One of them. Its disks outlive what runs on it; `disks` may be changed before it starts."""

    name: str
    address: str
    home: Path  # of its run directory, temporary directory, certificates and pool.toml
    disks: list[str]
    clock_seconds: int = 0  # that processes which are started from now on are ahead
    service: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def urls(self) -> list[str]:
        """Of its disks."""
        return [f"hpd://{self.address}:{PORT}/{number}" for number in range(len(self.disks))]

    @property
    def log(self) -> Path:
        """What its service prints."""
        return self.home / "service.log"


class HostCluster(Closing):
    """Hosts in a directory, none of which runs yet: `up` starts them.

    Everything is started from one thread, which must live as long: what it has started ends with
    it. This process is on the network as `outside`. `etcd`: a member on each host, and the pool's
    registers there. `tls`: as in Settings.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = ("a", "b", "c"),
        *,
        disks: int = 2,
        etcd: bool = False,
        tls: str = "plain",
    ) -> None:
        self.directory, self._tls, self._wants_etcd = directory, tls, etcd
        self.etcd: EtcdCluster | None = None
        self.network = HostNetwork(names)
        self.hosts: dict[str, ClusterHost] = {}
        self._toml = ""
        for name, address in self.network.addresses.items():
            home = directory / name
            places = [home / f"disk{number}" for number in range(disks)]
            for place in (home / "tmp", *places):
                place.mkdir(parents=True)
            self.hosts[name] = ClusterHost(name, address, home, list(map(str, places)))
        (directory / _OUTSIDE).mkdir()
        if tls == "mutual":
            self.write_certificates()

    def write_certificates(self, *, days: int = 30, role: str = "keeper") -> None:
        """New ones for all hosts and what runs on them, in the place of those that are there."""
        from hpstore.hosts.caller_roles import CallerRole
        from hpstore.hosts.certificates import make_caller, make_host

        made = self.directory / "tls"
        for host in self.hosts.values():
            folder = make_host(made, host.name, [host.address], days)
            shutil.copytree(folder, host.home / "tls", dirs_exist_ok=True)
        for name in (*self.hosts, _OUTSIDE):
            folder = make_caller(made, name, CallerRole[role.upper()], days)
            shutil.copytree(folder, self.directory / name / "caller", dirs_exist_ok=True)

    def up(self) -> None:
        """Start etcd and the service of every host; they answer when this returns."""
        names = list(self.hosts)
        for name in names:
            self._launch(self.hosts[name])
        if self._wants_etcd:
            (self.directory / "etcd").mkdir()
            self.etcd = EtcdCluster(
                self.directory / "etcd",
                addresses=list(self.network.addresses.values()),
                command=lambda number, words: self.network.command(names[number], words),
            )
        for name in names:
            self._wait(self.hosts[name])

    def start(self, name: str) -> None:
        """The service of a host, and its member of etcd, where they do not run."""
        host, number = self.hosts[name], list(self.hosts).index(name)
        if self.etcd is not None and not self.etcd.running(number):
            self.etcd.start(number)
        self._launch(host)
        self._wait(host)

    def _launch(self, host: ClusterHost) -> None:
        words = [sys.executable, "-m", "hpstore", "host", "serve", "--tls", self._tls]
        words += ["--listen", f"{host.address}:{PORT}", "--recycle", "64MiB"]
        words += ["--certificates", str(host.home / "tls")] if self._tls == "mutual" else []
        with host.log.open("wb") as log:
            host.service = self.popen(host.name, [*words, *host.disks], stdout=log, stderr=log)

    def _wait(self, host: ClusterHost) -> None:
        assert host.service is not None
        until = time.monotonic() + _START_SECONDS
        while "hpd://" not in host.log.read_text(encoding="utf-8"):
            if host.service.poll() is not None or time.monotonic() > until:
                raise OSError(f"the service of {host.name} does not start, see {host.log}")
            time.sleep(0.02)

    def popen(
        self,
        name: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        # as Popen has them
        stdin: int | None = None,
        stdout: object = None,
        stderr: object = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, with its clock and its temporary directory. `env` is added."""
        host = self.hosts[name]
        shifted = self._shifted(host.clock_seconds) if host.clock_seconds else {}
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            self.network.command(name, words),
            env={**os.environ, "TMPDIR": str(host.home / "tmp"), **shifted, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
        )

    def _shifted(self, seconds: int) -> dict[str, str]:
        """What makes the wall clock of a process, and no other clock, be ahead."""
        repaired = self.directory / "repaired"
        repaired.mkdir(exist_ok=True)
        (repaired / "sitecustomize.py").write_text(_SLEEPS, encoding="utf-8")
        others = os.environ.get("PYTHONPATH", "")
        return {
            "LD_PRELOAD": _faketime() or "",
            "FAKETIME": f"{seconds:+d}",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
            "PYTHONPATH": f"{repaired}{os.pathsep}{others}" if others else str(repaired),
        }

    def kill(self, name: str) -> None:
        """SIGKILL all that runs on a host; on return nothing does."""
        service = self.hosts[name].service
        if service is not None:
            service.kill()  # at once: what else runs there must be looked for
        self.network.kill(name)
        number = list(self.hosts).index(name)
        if self.etcd is not None and self.etcd.running(number):
            self.etcd.kill(number)
        if service is not None:
            service.wait()
        self.hosts[name].service = None

    def kill_service(self, name: str) -> None:
        """SIGKILL the service alone."""
        service = self.hosts[name].service
        assert service is not None
        service.kill()
        service.wait()
        self.hosts[name].service = None

    def stop(self, name: str) -> None:
        """SIGSTOP all that runs on a host: its kernel answers, nothing else does."""
        self.network.stop(name)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        self.network.go_on(name)

    def skew(self, name: str, seconds: int) -> None:
        """Set the wall clock of what is started there from now on."""
        self.hosts[name].clock_seconds = seconds

    def create(self, *, data: int, parity: int, settings: Settings | None = None) -> Pool:
        """A pool over all disks, opened by this process, a failure domain each host."""
        pool = hpstore.create(
            [url for host in self.hosts.values() for url in host.urls],
            data=data,
            parity=parity,
            config=self.settings_file(),
            domains=[host.name for host in self.hosts.values() for _ in host.disks],
            settings=self.settings(settings),
        )
        self._toml = self.settings_file().read_text(encoding="utf-8")
        for name in self.hosts:
            self.settings_file(name)
        if self.etcd is not None:
            pool.admin.move_registers(self.etcd.url)
        return pool

    def settings(self, given: Settings | None = None) -> Settings:
        """Of this process, on `outside`."""
        from dataclasses import replace

        home = self.directory / _OUTSIDE
        return replace(
            given or Settings(),
            tls=self._tls,
            certificates=str(home / "caller"),
            run_directory=str(home / "run"),
        )

    def settings_file(self, name: str = _OUTSIDE) -> Path:
        """pool.toml of a host, which shares no directory with that of another one."""
        path = self.directory / name / "pool.toml"
        if self._toml and not path.exists():
            theirs = self._toml.replace(str(self.directory / _OUTSIDE), str(self.directory / name))
            path.write_text(theirs, encoding="utf-8")
            path.chmod(0o600)
        return path

    def close(self) -> None:
        self.network.close()
        if self.etcd is not None:
            self.etcd.close()
        for host in self.hosts.values():
            if host.service is not None:
                host.service.wait()
                host.service = None
