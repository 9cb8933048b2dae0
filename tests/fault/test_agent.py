"""A real agent in a process of its own, over directories that stand for devices."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.units import KIB, MIB
from tests.fault.agents import PATIENCE, Agents
from tests.thorough import LONG

pytestmark = [pytest.mark.fault]
long = pytest.mark.skipif(not LONG, reason="takes 10 s: make test-fault")


class Node(Agents):
    """A pool of 3+2 on seven directories, its content, and its agent."""

    def __init__(self, directory: Path, *, grace: float = 0.5, extra: str = "") -> None:
        toml = directory / "pool.toml"
        self.content = {f"k/{i}": bytes([i]) * (300_000 + i) for i in range(12)}
        with hpstore.create(
            [directory / f"d{i}" for i in range(7)],
            data=3,
            parity=2,
            config=toml,
            unit_bytes=64 * KIB,
            settings=Settings(memory_bytes=32 * MIB, run_directory=str(directory / "run")),
        ) as pool:
            for key, body in self.content.items():
                pool.put(key, body)
        super().__init__(toml, directory, grace=grace, extra=extra)

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=self.environment(),
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def state_of(self, number: int) -> str:
        return self.state(str(self.directory / f"d{number}"))

    def check(self) -> None:
        """Every object has its bytes and survives two losses."""
        with hpstore.open(self.toml, read_only=True) as pool:
            for key, body in self.content.items():
                assert pool.get(key) == body
            assert pool.status().losses_tolerated == 2


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_device_vanishes_is_healed_returns_and_is_taken_back(node: Node) -> None:
    """PROTOCOL 12, 17, with a grace of half a second; page and metrics are served meanwhile."""
    lost, away = node.directory / "d2", node.directory / "away"
    with node.agent("--listen", "127.0.0.1:0") as process:
        node.until("looking", lambda: node.state_of(2) == "online/online")
        lost.rename(away)
        node.until("healed", lambda: node.state_of(2) == "evicted/healed")
        node.until("whole", node.whole)
        node.check()
        with hpstore.open(node.toml) as pool:
            pool.put("k/0", b"newer" * 60_000)  # what d2 holds of it is superseded
        node.content["k/0"] = b"newer" * 60_000
        away.rename(lost)
        node.until("taken back", lambda: node.state_of(2) == "online/online")
        log = node.log.read_text()
        url = log.split("metrics at ")[1].split()[0]
        page = urllib.request.urlopen(url, timeout=60).read().decode()
        assert str(lost) in page
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
        assert "hpstore_pool_losses_tolerated 2.0" in metrics
        body = json.loads(urllib.request.urlopen(f"{url}/status.json", timeout=60).read())
        assert len(body["devices"]) == 7
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{url}/etc/passwd", timeout=60)
        reasons = [d["reason"] for d in body["decisions"]]
        assert "it does not answer" in reasons
        assert "its columns are reconciled" in reasons
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    node.check()


@long
def test_an_agent_that_is_killed_in_a_rebuild_ends_it_after_a_restart(tmp_path: Path) -> None:
    """SIGKILL with some objects healed and others not; the next agent does the rest."""
    node = Node(tmp_path, extra="heal_bytes_per_second = 400000")
    (node.directory / "d2").rename(node.directory / "away")

    def under_way() -> bool:
        job = node.status().get("job")
        return isinstance(job, dict) and job["kind"] == "rebuild" and 0 < job["done"] < job["total"]

    with node.agent("--listen", "none") as process:
        node.until("rebuilding", under_way)
        process.kill()
        process.wait()
    assert not node.whole()
    node.configure()
    with node.agent("--listen", "none"):
        node.until("healed", lambda: node.state_of(2) == "evicted/healed")
        node.until("whole", node.whole)
    node.check()


@long
def test_one_round_by_the_command_line_and_a_dry_run(node: Node) -> None:
    """--dry-run says what it would do and leaves every file as it was; --once does it."""
    (node.directory / "d2").rename(node.directory / "away")

    def files() -> dict[str, int]:
        return {
            str(path): path.stat().st_mtime_ns
            for path in node.directory.rglob("*")
            if path.is_file() and path.suffix != ".lock"
        }

    before = files()
    found = json.loads(node.run("agent", "--once", "--dry-run", "--json"))
    assert (found["dry_run"], found["condition"]["degraded"] > 0) == (True, True)
    assert files() == before
    for _ in range(3):  # notes the absence; a fifth of a second later it is one; then the grace
        node.run("agent", "--once")
    node.until("over", lambda: "evicted" in node.run("agent", "--once"))
    assert node.whole()
    node.check()


def held_below(process: int, directory: Path) -> list[str]:
    """Files of a process that lie in the directories of devices."""
    found = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(f"{directory}/d")]


@long
def test_a_terminal_that_shows_an_agents_rounds_holds_no_device(node: Node) -> None:
    """Else one that was evicted could not be unmounted. Without an agent it asks the pool."""
    ours, theirs = os.openpty()
    with node.agent("--listen", "none") as agent:
        node.until("looking", lambda: node.state_of(2) == "online/online")
        watching = subprocess.Popen(
            node.command("status", "--watch"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**node.environment(), "TERM": "xterm"},
        )
        os.close(theirs)
        sent = bytearray()

        def shows(words: bytes) -> Callable[[], bool]:
            def look() -> bool:
                if select.select([ours], [], [], 0)[0]:
                    sent.extend(os.read(ours, 1 << 16))
                return words in sent

            return look

        try:
            node.until("shown", shows(b", agent "))
            node.until("let go", lambda: not held_below(watching.pid, node.directory))
            agent.kill()
            agent.wait()
            (node.run_directory / "agent-status.json").unlink()
            node.until("shown by itself", shows(b"no agent runs on this node"))
            assert held_below(watching.pid, node.directory)
        finally:
            watching.kill()
            watching.wait()
            os.close(ours)


@long
def test_two_agents_of_one_pool_do_not_run_on_one_node_rule_15(node: Node) -> None:
    """PROTOCOL 15: the second says so in one line; orders go to the first."""
    with node.agent("--listen", "none"):
        node.until("looking", lambda: node.state_of(0) == "online/online")
        text = node.run("agent", "--once", code=34)
        assert "agent of pool" in text
        assert text.count("\n") == 1
        assert "the agent obeys" in node.run("sit-out", str(node.directory / "d0"))
        node.until("sitting out", lambda: node.state_of(0) == "sitout/online")
        node.run("readmit", str(node.directory / "d0"))
        node.until("back", lambda: node.state_of(0) == "online/online")
