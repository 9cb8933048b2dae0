"""Network namespaces that stand for hosts: wires on one bridge that can be cut. For tests. Root.

Names and aliases hold process and start time, so that the next network removes what a killed
process left: namespaces, whatever runs in them, wires and bridges.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from hpstore.runtime.closing import Closing
from hpstore.runtime.process_identity import started
from hpstore.testing.process_stop import stop_process
from hpstore.testing.scratch import fails, run

_NAME = re.compile(r"hpnet-(\d+)-(\d+)-.+")
_NAMESPACES = Path("/run/netns")
_LOCK = Path("/run/hpnet.lock")  # held while an address range is chosen
_RANGES = 512  # /24 ranges of 198.18.0.0/15, which is for tests of networks (RFC 2544)
_OF_LINUX = ("setpriv", "nsenter")
_GONE_SECONDS = 10.0  # for processes that were killed
_SERIAL = count()


def network_problem() -> str | None:
    """Why namespaces cannot be used here, or None: makes one and takes it away."""
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    packages = {"ip": "iproute2", "nft": "nftables"} | dict.fromkeys(_OF_LINUX, "util-linux")
    for program, package in packages.items():
        if shutil.which(program) is None:
            return f"needs {program} (Debian: apt-get install {package})"
    try:
        with HostNetwork(["probe"]) as network:
            network.cut("probe")
    except OSError as error:
        return f"network namespaces do not work here: {error}"
    return None


class HostNetwork(Closing):
    """A namespace and an address for each name, on a bridge; this process is on it as `outside`.

    One thread at a time. `close` kills what runs in the namespaces.
    """

    def __init__(self, names: Sequence[str]) -> None:
        sweep_networks()
        self.names, serial, pid = tuple(names), next(_SERIAL), os.getpid()
        self._owner = f"hpnet-{pid}-{started(pid)}-{serial}"
        self._bridge = f"hp{pid}n{serial}"[:15]
        self._wires = {name: f"hp{pid}n{serial}w{n}"[:15] for n, name in enumerate(names)}
        self.addresses: dict[str, str] = {}
        self.outside = ""
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def namespace(self, name: str) -> str:
        """Of a host, as `ip netns` lists it."""
        return f"{self._owner}-{name}"

    def _make(self) -> None:
        with _LOCK.open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            net = _free_range()
            self.outside = f"{net}.254"
            _batch(
                f"link add {self._bridge} type bridge",
                f"link set {self._bridge} alias {self._owner} up",
                f"addr add {self.outside}/24 dev {self._bridge}",
            )
        for number, name in enumerate(self.names, 1):
            space, wire = self.namespace(name), self._wires[name]
            self.addresses[name] = f"{net}.{number}"
            _batch(
                f"netns add {space}",
                f"link add {wire} type veth peer name eth0 netns {space}",
                f"link set {wire} alias {self._owner} master {self._bridge} up",
            )
            _batch(
                "link set lo up",
                f"addr add {self.addresses[name]}/24 dev eth0",
                "link set eth0 up",
                space=space,
            )

    def command(self, name: str, words: Sequence[str]) -> list[str]:
        """A command line that runs there, and ends with the thread of this process that starts
        it."""
        return [*_inside_of(self.namespace(name)), "setpriv", "--pdeathsig", "KILL", *words]

    def cut(self, name: str, other: str = "", *, one_way: bool = False, port: int = 0) -> None:
        """Lose all packets between a host and another one, `outside`, or ("") everything else.

        `one_way`: only those that `name` sends. `port`: only those to this TCP port. Connections
        stay as they are.
        """
        others = [other] if other else ["outside", *(n for n in self.names if n != name)]
        for peer in others:
            self._lose(name, peer, port)
            if not one_way:
                self._lose(peer, name, port)

    def _lose(self, sender: str, receiver: str, port: int) -> None:
        """At the receiver, or where that is this process' namespace, at the sender."""
        to = f"tcp dport {port} " if port else ""
        at, hook = (receiver, "input") if receiver != "outside" else (sender, "output")
        peer = "saddr" if hook == "input" else "daddr"
        who = sender if hook == "input" else receiver
        self._filter(
            at,
            "add table inet cuts",
            f"add chain inet cuts {hook} {{ type filter hook {hook} priority 0; }}",
            f"add rule inet cuts {hook} ip {peer} {self._address(who)} {to}drop",
        )

    def heal(self) -> None:
        """Nothing is lost any more."""
        for name in self.names:
            self._filter(name, "add table inet cuts", "delete table inet cuts")

    def _filter(self, name: str, *lines: str) -> None:
        run(*_inside_of(self.namespace(name)), "nft", "; ".join(lines))

    def _address(self, name: str) -> str:
        return self.outside if name == "outside" else self.addresses[name]

    def processes(self, name: str) -> list[int]:
        """Ids of all that run there."""
        return _inside(self.namespace(name))

    def stop(self, name: str) -> None:
        """SIGSTOP all that run there; on return none of them does."""
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                stop_process(pid)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """SIGKILL all that run there; on return nothing runs."""
        _kill(self.namespace(name))

    def close(self) -> None:
        _remove(self.namespace(name) for name in self.names)
        for link in (*self._wires.values(), self._bridge):
            fails("ip", "link", "del", link)


def sweep_networks() -> list[str]:
    """Remove networks of processes that are dead; what it was. Kills what runs in them."""
    dead = [path.name for path in _namespaces() if _owner_is_dead(path.name)]
    _remove(dead)
    links = json.loads(run("ip", "-json", "link"))
    left = [row["ifname"] for row in links if _owner_is_dead(row.get("ifalias", ""))]
    return dead + [link for link in left if not fails("ip", "link", "del", link)]


def _namespaces() -> list[Path]:
    return sorted(_NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []


def _owner_is_dead(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and started(int(found[1])) != found[2]


def _remove(namespaces: Iterable[str]) -> None:
    for name in namespaces:
        if (_NAMESPACES / name).exists():
            _kill(name)
            fails("ip", "netns", "del", name)


def _inside(namespace: str) -> list[int]:
    try:
        wanted = (_NAMESPACES / namespace).stat().st_ino
    except OSError:
        return []
    found = []
    for place in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # it has ended meanwhile
            if place.stat().st_ino == wanted:
                found.append(int(place.parts[2]))
    return found


def _kill(namespace: str) -> None:
    until = time.monotonic() + _GONE_SECONDS
    while pids := _inside(namespace):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise TimeoutError(f"processes of {namespace} do not end: {pids}")
        time.sleep(0.01)


def _free_range() -> str:
    """The first three bytes of addresses that no interface has. Under the lock."""
    rows = json.loads(run("ip", "-json", "addr"))
    used = {info.get("local", "") for row in rows for info in row.get("addr_info", ())}
    for number in range(_RANGES):
        net = f"198.{18 + number // 256}.{number % 256}"
        if f"{net}.254" not in used:
            return net
    raise OSError(f"all {_RANGES} ranges of addresses for test networks are in use")


def _inside_of(space: str) -> list[str]:
    """The beginning of a command line that runs in a namespace.

    Not by `ip netns exec` or `ip -n`: these copy the mounts, so a filesystem that is unmounted here
    meanwhile stays mounted there, and is not a fresh one when it is mounted again.
    """
    return ["nsenter", f"--net={_NAMESPACES / space}", "--"]


def _batch(*lines: str, space: str = "") -> None:
    """Several commands of ip at once; OSError says what failed."""
    command = [*(_inside_of(space) if space else []), "ip", "-batch", "-"]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
