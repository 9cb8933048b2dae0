"""Agents of two hosts as processes of their own, over directories that stand for disks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import hpstore
from hpstore.config import Settings
from hpstore.units import KIB, MIB
from tests.fault.agents import PATIENCE, Agents

pytestmark = [pytest.mark.fault]
QUICK = "host = {host!r}\nhost_wait_seconds = {wait}\n[agent.advanced]\nkeeper_seconds = 1.0"


class TwoHosts:
    """4+2 on four hosts of two disks; agents on a and c, each with its own run directory."""

    def __init__(self, base: Path, *, wait: float) -> None:
        self.base = base
        self.content = {f"k/{i}": bytes([i]) * (300_000 + i) for i in range(6)}
        first = base / "a.toml"
        with hpstore.create(
            [base / f"{name}{n}" for name in "abcd" for n in range(2)],
            data=4,
            parity=2,
            config=first,
            domains=[f"host-{name}" for name in "abcd" for _ in range(2)],
            unit_bytes=64 * KIB,
            settings=Settings(memory_bytes=32 * MIB, run_directory=str(base / "run-a")),
        ) as pool:
            for key, body in self.content.items():
                pool.put(key, body)
        (base / "c.toml").write_text(
            first.read_text().replace(str(base / "run-a"), str(base / "run-c"))
        )
        self.agents: dict[str, Agents] = {}
        for name in "ac":
            (base / f"home-{name}").mkdir()
            extra = QUICK.format(host=name, wait=wait).replace("'", '"')
            self.agents[name] = Agents(base / f"{name}.toml", base / f"home-{name}", extra=extra)

    def keeper(self, name: str) -> str:
        """Whom the agent of a host takes for the keeper; "" while it says none."""
        found = self.agents[name].status().get("keeper")
        return str(found["host"]) if isinstance(found, dict) else ""

    def decides(self, name: str) -> bool:
        found = self.agents[name].status().get("keeper")
        return isinstance(found, dict) and found["here"] is True

    def evicted(self) -> set[str]:
        with hpstore.open(self.base / "c.toml", read_only=True) as pool:
            return {m.domain for m in pool.admin.record.evicted}

    def hide(self, host: str) -> None:
        for n in range(2):
            (self.base / f"{host}{n}").rename(self.base / f"away-{host}{n}")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(hosts: TwoHosts, stack: ExitStack, name: str) -> subprocess.Popen[bytes]:
    return stack.enter_context(hosts.agents[name].agent("--listen", "none"))


def stop_and_be_succeeded(hosts: TwoHosts, process: subprocess.Popen[bytes]) -> None:
    """SIGSTOP of a's agent, at the end of a round. Where that hit it while it holds locks of
    registers, which then stay held, it goes on for a round and is stopped again."""
    a, c = hosts.agents["a"], hosts.agents["c"]
    for _ in range(5):
        before = a.status().get("at_ms")
        a.until("another round of a", lambda: a.status().get("at_ms") not in (None, before))  # noqa: B023
        process.send_signal(signal.SIGSTOP)
        try:
            c.until_within(20.0, lambda: hosts.decides("c"))
        except AssertionError:
            process.send_signal(signal.SIGCONT)
        else:
            return
    raise AssertionError(f"c does not take over: {c.status()}")


def test_a_stopped_keeper_is_succeeded_and_its_host_evicted_by_the_other(
    tmp_path: Path, stack: ExitStack
) -> None:
    """SIGSTOP of a's agent, host b away: c's agent takes over, waits, evicts and rebuilds. When a's
    goes on it is no keeper, and nothing more leaves the pool."""
    hosts = TwoHosts(tmp_path, wait=3.0)
    first = start(hosts, stack, "a")
    hosts.agents["a"].until("a decides", lambda: hosts.decides("a"))
    start(hosts, stack, "c")
    hosts.agents["c"].until("c sees a", lambda: hosts.keeper("c") == "a")
    stop_and_be_succeeded(hosts, first)
    hosts.hide("b")
    hosts.agents["c"].until("b has left", lambda: hosts.evicted() == {"host-b"})
    first.send_signal(signal.SIGCONT)
    hosts.agents["a"].until("a sees c", lambda: hosts.keeper("a") == "c")
    hosts.agents["c"].until("whole", hosts.agents["c"].whole)
    assert hosts.decides("c")
    assert hosts.evicted() == {"host-b"}
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE) == 0
    with hpstore.open(tmp_path / "c.toml", read_only=True) as pool:
        for key, body in hosts.content.items():
            assert pool.get(key) == body


def test_a_killed_keeper_is_succeeded_and_a_restarted_one_waits_for_nobody(
    tmp_path: Path, stack: ExitStack
) -> None:
    """SIGKILL and a new agent on the same host: it decides in its first rounds, under the next
    epoch. SIGKILL again: the other host's agent takes over."""
    hosts = TwoHosts(tmp_path, wait=600.0)
    for epoch in (1, 2):
        process = start(hosts, stack, "a")
        hosts.agents["a"].until("a decides", lambda: hosts.decides("a"))
        found = hosts.agents["a"].status()["keeper"]
        assert isinstance(found, dict)
        assert found["epoch"] == epoch
        process.kill()
        process.wait()
    start(hosts, stack, "c")
    hosts.agents["c"].until("c decides", lambda: hosts.decides("c"))
