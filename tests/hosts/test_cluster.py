"""The rig of the host tests itself: packets are lost where they are said to be, nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

from hpstore.testing import host_network
from hpstore.testing.host_network import HostNetwork, network_problem, sweep_networks
from hpstore.testing.loopfs import LoopFilesystem, loop_mounts_problem
from hpstore.units import MIB
from tests.fault.common import poll
from tests.hosts.clusters import cluster_or_skip

SERVES = """
import socket, sys
with socket.create_server((sys.argv[1], 80)) as server, socket.create_server((sys.argv[1], 81)):
    print("ready", flush=True)
    while True:
        server.accept()
"""
CONNECTS = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.3)
"""
LEAVES = """
import os, signal, subprocess
from hpstore.testing.host_network import HostNetwork
network = HostNetwork("x")
words = ["nsenter", f"--net=/run/netns/{network.namespace('x')}", "sleep", "300"]
child = subprocess.Popen(words, stdout=subprocess.DEVNULL)
while not network.processes("x"):
    pass
print(network.namespace("x"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    """Of three, of which `a` listens on ports 80 and 81."""
    problem = network_problem()
    if problem is not None:
        pytest.skip(problem)
    with HostNetwork("abc") as made:
        words = [sys.executable, "-c", SERVES, made.addresses["a"]]
        with subprocess.Popen(made.command("a", words), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield made
            made.kill("a")


def reaches(network: HostNetwork, name: str, port: int = 80) -> bool:
    """Whether a connection to `a` can be made from there."""
    if name == "outside":
        try:
            socket.create_connection((network.addresses["a"], port), timeout=0.3).close()
        except TimeoutError:
            return False
        return True
    words = [sys.executable, "-c", CONNECTS, network.addresses["a"], str(port)]
    done = subprocess.run(network.command(name, words), check=False, capture_output=True)
    return done.returncode == 0


def test_what_is_cut_loses_its_packets_and_nothing_else_does(network: HostNetwork) -> None:
    """Two of them, one from all, one from this process, one way, one port; and healed."""

    def seen() -> list[bool]:
        return [reaches(network, name) for name in ("outside", "b", "c")]

    assert seen() == [True, True, True]
    cuts: list[tuple[Callable[[], None], list[bool]]] = [
        (lambda: network.cut("a", "b"), [True, False, True]),
        (lambda: network.cut("a", "b", one_way=True), [True, False, True]),
        (lambda: network.cut("a", "outside"), [False, True, True]),
        (lambda: network.cut("a"), [False, False, False]),
        (lambda: network.cut("b", "a", port=81, one_way=True), [True, True, True]),
    ]
    for cut, expected in cuts:
        cut()
        assert seen() == expected
        network.heal()
    network.cut("b", "a", port=81, one_way=True)
    assert not reaches(network, "b", 81)
    assert reaches(network, "c", 81)
    network.heal()
    assert reaches(network, "b", 81)


def test_a_filesystem_that_is_unmounted_is_held_by_no_host(
    network: HostNetwork, tmp_path: Path
) -> None:
    """Mounted again it is a fresh one, though processes of hosts run: it was as it had been, shut
    down, since they had copies of the mounts."""
    problem = loop_mounts_problem()
    if problem is not None:
        pytest.skip(problem)
    with (
        LoopFilesystem(tmp_path, size_bytes=16 * MIB) as disk,
        subprocess.Popen(network.command("b", ["sleep", "300"])) as child,
    ):
        try:
            poll(60.0, lambda: bool(network.processes("b")))
            Path(disk.path, "a").write_text("x")
            disk.shutdown()
            disk.remount()
            Path(disk.path, "a").write_text("x")
        finally:
            child.kill()


def test_a_killed_test_leaves_nothing_for_long(tmp_path: Path) -> None:
    """SIGKILL of its process: the next sweep removes namespace, wires, bridge, and what runs there;
    what belongs to a live one stays."""
    problem = network_problem()
    if problem is not None:
        pytest.skip(problem)
    with HostNetwork("k") as kept:
        words = [sys.executable, "-c", LEAVES]
        left = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
        assert left.returncode == -signal.SIGKILL
        name = left.stdout.strip()
        assert host_network._inside(name)
        assert name in sweep_networks()
        assert host_network._inside(name) == []
        owner = name.rpartition("-")[0]
        assert not Path("/run/netns", name).exists()
        assert (
            owner
            not in subprocess.run(
                ["ip", "-details", "link"], check=True, capture_output=True, text=True
            ).stdout
        )
        assert Path("/run/netns", kept.namespace("k")).exists()
    assert not Path("/run/netns", kept.namespace("k")).exists()


def test_a_host_is_killed_whole_and_its_clock_is_its_own(tmp_path: Path) -> None:
    """Service and commands end together; a clock is that of what is started from then on."""
    with cluster_or_skip(tmp_path, hosts="a", disks=1, clocks=True) as cluster:
        cluster.start("a")
        child = cluster.popen("a", ["sleep", "300"])
        service = cluster.hosts["a"].service
        assert service is not None
        cluster.kill("a")
        assert child.wait() == service.returncode == -signal.SIGKILL
        assert cluster.network.processes("a") == []
        cluster.skew("a", -3600)
        code = "import time; time.sleep(0.01); print(time.time(), time.monotonic())"
        words = [sys.executable, "-c", code]
        shown = cluster.popen("a", words, stdout=subprocess.PIPE)
        wall, monotonic = map(float, shown.communicate()[0].split())
        assert 3500 < time.time() - wall < 3700
        assert abs(time.monotonic() - monotonic) < 60


@pytest.mark.parametrize("lack", ["ip", "nft", "setpriv"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, lack: str) -> None:
    """The skip says which program, and how it is had."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == lack else f"/sbin/{name}")
    problem = network_problem()
    assert problem is not None
    assert problem.startswith(f"needs {lack} (Debian: apt-get install ")


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert network_problem() == "needs root (network namespaces)"
