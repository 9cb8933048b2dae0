"""An agent and a disk that the kernel turns read-only, on real ext4 loop filesystems."""

from __future__ import annotations

import time

import pytest

from hpstore.agent import Agent, AgentConfig
from hpstore.agent.disk_load import Foreground
from hpstore.health.policy.states import PolicyConfig, Role
from hpstore.units import KIB, MIB
from tests.fault.common import Bench, MakeDisks, payload, poll, tree
from tests.thorough import LONG

pytestmark = [
    pytest.mark.fault,
    pytest.mark.root,
    pytest.mark.skipif(not LONG, reason="takes 10 s: make test-fault"),
]
GRACE_SECONDS = 1.0


def test_agent_drains_a_disk_that_turned_read_only(bench: Bench, make_disks: MakeDisks) -> None:
    """Of 2+1, under an open pool: kept for its grace, then copied off and evicted; not one file
    there is touched, every object keeps its full parity."""
    disks = make_disks(5)
    content = {f"k/{i}": payload(str(i), size) for i, size in enumerate([2 * KIB, 2 * MIB] * 4)}
    bench.create(disks, data=2, parity=1).close()
    policy = PolicyConfig(role=Role.AGENT, grace_seconds=GRACE_SECONDS, retry_seconds=1.0)
    config = AgentConfig(
        scrub_days=0.0, smart_hours=0.0, probe_seconds=0.05, survey_seconds=0.2, policy=policy
    )
    with bench.open() as pool:
        for key, body in content.items():
            pool.put(key, body)
        quiet = Foreground(activity=dict, own=lambda: 0)
        with Agent(pool, config, threads=False, foreground=quiet) as agent:
            agent.tick()
            disks[0].read_only()
            before, began = tree(disks[0].path), time.monotonic()

            def state() -> str:
                found = agent.tick()
                agent.finish_jobs()
                return next(d.state for d in found.devices if d.url == disks[0].path)

            poll(30.0, lambda: state() == "read-only")
            assert pool.status().losses_tolerated == 1
            poll(60.0, lambda: state() == "evicted")
            assert time.monotonic() - began >= GRACE_SECONDS
            assert tree(disks[0].path) == before
        status = pool.status()
        assert (status.degraded, status.losses_tolerated) == (0, 1)
        assert {key: pool.get(key) for key in content} == content
        assert pool.scrub().clean
