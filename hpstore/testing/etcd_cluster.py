"""A cluster of etcd on loopback ports, with members that can be killed, stopped and lose data.

For tests. Needs the programs `etcd` of the machine (Debian: etcd-server).
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any  # what JSON holds

_START_SECONDS = 30.0


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            found.append(int(sock.getsockname()[1]))
        return found


class EtcdCluster:
    """Members in a directory. One thread at a time; `close` ends all.

    An election takes half a second. `certificates`: a directory with ca.crt, server.crt,
    server.key, client.crt and client.key; members then take no clients without a certificate of
    that authority.
    """

    def __init__(self, directory: Path, members: int = 3, certificates: Path | None = None) -> None:
        self.directory, self._certificates = directory, certificates
        ports = free_ports(2 * members)
        self.ports, self._peers = ports[:members], ports[members:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(members):
            self.start(number)
        self.wait()

    @property
    def url(self) -> str:
        """For `hpstore registers set`."""
        scheme = "etcd://" if self._certificates is None else "etcds://"
        return scheme + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        """Start a member that does not run."""
        name, peer = f"m{number}", f"http://127.0.0.1:{self._peers[number]}"
        scheme = "http" if self._certificates is None else "https"
        client = f"{scheme}://127.0.0.1:{self.ports[number]}"
        cluster = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        log = (self.directory / f"{name}.log").open("ab")
        arguments = {
            "name": name,
            "data-dir": str(self.directory / name),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": cluster,
            "initial-cluster-state": "new",
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "log-level": "error",
        }
        if self._certificates is not None:
            arguments |= {
                "cert-file": str(self._certificates / "server.crt"),
                "key-file": str(self._certificates / "server.key"),
                "trusted-ca-file": str(self._certificates / "ca.crt"),
                "client-cert-auth": "true",
            }
        with log:
            self._processes[number] = subprocess.Popen(
                ["etcd", *(f"--{key}={value}" for key, value in arguments.items())],
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
            )

    def kill(self, number: int) -> None:
        """SIGKILL a member."""
        process = self._processes.pop(number)
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()

    def stop(self, number: int) -> None:
        """SIGSTOP a member: its connections stay, nothing is answered."""
        self._processes[number].send_signal(signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        """SIGCONT a member."""
        self._processes[number].send_signal(signal.SIGCONT)

    def lose_data(self) -> None:
        """All members lose their data, and begin as a new cluster on the same ports."""
        for number in list(self._processes):
            self.kill(number)
        for number in range(len(self.ports)):
            shutil.rmtree(self.directory / f"m{number}")
            self.start(number)
        self.wait()

    def leader(self) -> int:
        """The number of the member that leads."""
        for number in self._processes:
            with suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                body = self._ask(number, "/v3/maintenance/status")
                if body["header"]["member_id"] == body["leader"]:
                    return number
        raise TimeoutError("no member of etcd says that it leads")

    def wait(self) -> None:
        """Until it answers reads."""
        until = time.monotonic() + _START_SECONDS
        while True:
            with suppress(OSError, http.client.HTTPException, ValueError, TimeoutError):
                self.leader()
                if all("header" in self._ask(n, "/v3/kv/range") for n in self._processes):
                    return
            if time.monotonic() >= until:
                raise TimeoutError(f"etcd does not start, see {self.directory}/m0.log")
            time.sleep(0.05)

    def _ask(self, number: int, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[number], timeout=2.0)
        if self._certificates is not None:
            context = ssl.create_default_context(cafile=str(self._certificates / "ca.crt"))
            context.load_cert_chain(
                self._certificates / "client.crt", self._certificates / "client.key"
            )
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self.ports[number], timeout=2.0, context=context
            )
        try:
            connection.request("POST", path, json.dumps({"key": "YQ=="} if "range" in path else {}))
            with closing(connection.getresponse()) as answer:
                found: dict[str, Any] = json.loads(answer.read())
            return found
        finally:
            connection.close()

    def close(self) -> None:
        """Kill all members."""
        for number in list(self._processes):
            self.kill(number)
