"""Histories of conditional puts from several hosts, whose clocks differ, while they fail (rule 6).

Four clients on hosts of their own replace a few objects by what they have seen. They are killed and
started again, stopped for longer than a claim lasts, and cut off. The history of each object must
have one order; no condition is met twice.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import pytest

pytest.importorskip("httptools", reason="needs the extra hosts")

from hpstore.testing.histories import Observed, is_linearizable
from hpstore.testing.host_cluster import HostCluster
from tests.hosts.clusters import cluster_or_skip, short
from tests.thorough import LONG

pytestmark = [pytest.mark.fault, pytest.mark.timeout(2400)]
KEYS = 4
PUTS = 2000 if LONG else 60  # acknowledged ones, of all
SECONDS = 1800.0 if LONG else 240.0  # by which it must be over
CLOCKS = {"a": 0, "b": 3600, "c": -3600, "d": 0}
TURN_SECONDS = 1.0  # between two events
CLIENT = """
import json, random, sys, time, hpstore
from hpstore.errors import HpstoreError, VersionConflict
def say(*what):
    print(json.dumps([time.monotonic(), *what]), flush=True)
rng, number = random.Random(sys.argv[2]), 0
while True:
    try:
        pool = hpstore.open(sys.argv[1])
        break
    except HpstoreError:
        time.sleep(0.1)
while True:
    key = f"chain/{rng.randrange(int(sys.argv[3]))}"
    try:
        seen, number = pool.stat(key), number + 1
        name = f"{sys.argv[2]}-{number}"
        say("begins", key, seen.metadata["put"], name)
        pool.put(key, b"x", if_version=seen.version, metadata={"put": name})
        say("done")
    except VersionConflict:
        say("refused")
    except HpstoreError as error:
        say("failed", f"{type(error).__name__}: {error}")
        time.sleep(0.05)
"""


@dataclass
class Client:
    """A process on a host, started again with another name when it was killed."""

    host: str
    logs: list[Path] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    stopped: bool = False

    def start(self, cluster: HostCluster) -> None:
        path = cluster.hosts[self.host].home / f"client-{len(self.logs)}.jsonl"
        self.logs.append(path)
        name = f"{self.host}{len(self.logs)}"
        words = [sys.executable, "-c", CLIENT, str(cluster.settings_file(self.host)), name]
        with path.open("wb") as log:
            self.process = cluster.popen(self.host, [*words, str(KEYS)], stdout=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.stopped = False

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT if self.stopped else signal.SIGSTOP)
        self.stopped = not self.stopped


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[HostCluster]:
    """Disks on a, b, c; clients on them and on d, with clocks of their own."""
    with cluster_or_skip(tmp_path, hosts="abcd", disks=2, etcd=True, clocks=True) as made:
        made.up()
        for name, seconds in CLOCKS.items():
            made.skew(name, seconds)
        yield made


def histories(clients: list[Client]) -> tuple[dict[str, list[Observed]], Counter[str]]:
    """By object; and how often which outcome. Only what was acknowledged has surely happened: what
    was refused may have been there and been overtaken."""
    found: dict[str, list[Observed]] = {}
    fates: Counter[str] = Counter()
    for path in (log for client in clients for log in client.logs):
        begun: tuple[float, str, str, str] | None = None
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            at, what, *rest = json.loads(line)
            if what == "begins":
                if begun is not None:
                    note(found, begun, inf)
                begun = (at, rest[0], rest[1], rest[2])
                continue
            fates[what if what != "failed" else rest[0].split(":")[0]] += 1
            if begun is not None and what == "done":
                note(found, begun, at)
                begun = None
        if begun is not None:
            note(found, begun, inf)
    return found, fates


def note(found: dict[str, list[Observed]], begun: tuple[float, str, str, str], end: float) -> None:
    begin, key, seen, made = begun
    found.setdefault(key, []).append(Observed(begin=begin, end=end, seen=seen, written=made))


def doubles(history: list[Observed]) -> list[object]:
    """What two acknowledged puts have replaced."""
    seen = Counter(one.seen for one in history if not one.unsure)
    return [value for value, times in seen.items() if times > 1]


def test_conditional_puts_of_failing_hosts_have_one_order(cluster: HostCluster) -> None:
    """Kill, pause, skew, cut: 0 double acknowledgements, and what is read at the end is last."""
    with cluster.create(data=4, parity=2, settings=short()) as pool:
        for number in range(KEYS):
            pool.put(f"chain/{number}", b"0", metadata={"put": "first"})
        clients = [Client(name) for name in CLOCKS]
        for client in clients:
            client.start(cluster)
        disturb(cluster, clients, random.Random(40))
        for client in clients:
            client.kill()
        found, fates = histories(clients)
        print(f"\n{dict(fates)}")
        assert fates["done"] >= PUTS
        for key, history in found.items():
            now, last = time.monotonic(), pool.stat(key).metadata["put"]
            looked = Observed(begin=now, end=now, seen=last, written=None)
            assert doubles(history) == [], key
            assert is_linearizable([*history, looked], "first"), key


def disturb(cluster: HostCluster, clients: list[Client], rng: random.Random) -> None:
    """Events until there are enough puts."""
    until = time.monotonic() + SECONDS
    while histories(clients)[1]["done"] < PUTS and time.monotonic() < until:
        client = rng.choice(clients)
        event = rng.choice(["kill", "stop", "stop", "stop", "cut", "cut"])
        if event == "kill":
            client.kill()
            client.start(cluster)
        elif event == "stop":
            client.stop()
        else:
            cluster.network.cut(client.host)
        time.sleep(TURN_SECONDS)
        cluster.network.heal()
        for other in clients:
            if other.stopped and other is not client:
                other.stop()
