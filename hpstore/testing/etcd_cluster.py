"""A cluster of etcd, with members that can be killed, stopped and lose data.

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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any  # what JSON holds

from hpstore.testing.process_stop import stop_process

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

    They are on ports of loopback, or on etcd's own at `addresses`; `command` makes of a member's
    number and command line the one that runs it, such as in a namespace of its own. An election
    takes half a second. `certificates`: a directory with ca.crt, server.crt, server.key,
    client.crt and client.key; members then take no clients without a certificate of that authority.
    """

    def __init__(
        self,
        directory: Path,
        members: int = 3,
        certificates: Path | None = None,
        *,
        addresses: Sequence[str] = (),
        command: Callable[[int, list[str]], list[str]] = lambda _, words: words,
    ) -> None:
        self.directory, self._certificates = directory, certificates
        self._command = command
        self._hosts = list(addresses) or ["127.0.0.1"] * members
        members = len(self._hosts)
        ports = [2379, 2380] * members if addresses else free_ports(2 * members)
        self.ports, self._peers = ports[::2], ports[1::2]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(members):
            self.start(number)
        self.wait()

    @property
    def url(self) -> str:
        """For `hpstore registers set`."""
        scheme = "etcd://" if self._certificates is None else "etcds://"
        return scheme + ",".join(map(self._address, range(len(self.ports))))

    def _address(self, number: int) -> str:
        return f"{self._hosts[number]}:{self.ports[number]}"

    def start(self, number: int) -> None:
        """Start a member that does not run."""
        peers = [f"http://{at}:{port}" for at, port in zip(self._hosts, self._peers, strict=True)]
        name, peer = f"m{number}", peers[number]
        scheme = "http" if self._certificates is None else "https"
        client = f"{scheme}://{self._address(number)}"
        cluster = ",".join(f"m{n}={url}" for n, url in enumerate(peers))
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
            words = ["etcd", *(f"--{key}={value}" for key, value in arguments.items())]
            self._processes[number] = subprocess.Popen(
                self._command(number, words),
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

    def running(self, number: int) -> bool:
        """Whether a member was started and not killed since."""
        return number in self._processes

    def stop(self, number: int) -> None:
        """SIGSTOP a member: its connections stay, nothing is answered."""
        stop_process(self._processes[number].pid)

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
        connection = http.client.HTTPConnection(self._address(number), timeout=2.0)
        if self._certificates is not None:
            context = ssl.create_default_context(cafile=str(self._certificates / "ca.crt"))
            context.load_cert_chain(
                self._certificates / "client.crt", self._certificates / "client.key"
            )
            connection = http.client.HTTPSConnection(
                self._address(number), timeout=2.0, context=context
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
