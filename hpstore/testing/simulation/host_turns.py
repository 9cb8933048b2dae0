"""What happens to hosts and registers in turns of the environment, and what agents do in theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from hpstore.agent import Agent, AgentConfig
from hpstore.agent.disk_load import Foreground
from hpstore.errors import HpstoreError
from hpstore.health.policy.states import PolicyConfig, Role
from hpstore.testing.simulation.actions import ActionScene, Client
from hpstore.testing.simulation.schedule import Turn
from hpstore.testing.simulation.world import World

ROUND_SECONDS = 5.0
HOST_WAIT_SECONDS = 40.0  # that an agent waits for a host: some rounds


def domain_of(host: int) -> str:
    """The failure domain of a host, by which agents know it for one."""
    return f"host-{host}"


# --- agents ------------------------------------------------------------------------------------


def tend(client: Client, turn: Turn) -> None:
    """Rounds of the agent of a process' host, with the jobs that they ask for."""
    scene, world = client.scene, client.scene.world
    agent = client.agent
    if not isinstance(agent, Agent):
        agent = client.agent = _agent(client)
    for _ in range(max(1, int(turn.seconds / ROUND_SECONDS))):
        world.now += ROUND_SECONDS
        before = {m.device_id: m.url for m in client.open_pool.admin.record.members}
        try:
            agent.tick()
            agent.finish_jobs()
        finally:
            after = {m.device_id for m in client.open_pool.admin.record.members}
            gone = sorted(url for device, url in before.items() if device not in after)
            scene.lost |= set(gone)
            if gone:
                world.note(f"{client.process.name} sees {gone} leave the pool")
        scene.claims.look_at_keepers(scene, world)


def _agent(client: Client) -> Agent:
    process = client.process
    config = AgentConfig(
        host=domain_of(process.host).removeprefix("host-"),
        host_wait_seconds=HOST_WAIT_SECONDS,
        scrub_days=0.0,
        smart_hours=0.0,
        rebalance_spread=0.0,
        survey_seconds=60.0,
        policy=PolicyConfig(role=Role.AGENT),
    )
    foreground = Foreground(activity=dict, own=lambda: 0)
    made = Agent(client.open_pool, config, threads=False, foreground=foreground)
    client.scene.claims.agents[process.name] = (process, made)
    process.handles.append(partial(_bury_agent, made))
    return made


def _bury_agent(agent: Agent) -> None:
    """Its process died: the lock of its directory is free, and nothing else is done."""
    with contextlib.suppress(HpstoreError, OSError):
        agent._stack.close()


def evict_host(client: Client, turn: Turn) -> None:
    """Evict all devices of a host by one change."""
    scene = client.scene
    if scene.flipped:
        return  # names do not show what is damaged
    domain = domain_of(turn.device)
    record = client.open_pool.admin.record
    urls = {member.url for member in record.members if member.domain == domain}
    scene.world.trouble |= urls
    scene.lost |= urls  # also where it is refused: some devices may have it
    client.open_pool.evict(f"domain:{domain}")


def reset_registers(client: Client, _: Turn) -> None:
    """Make registers again that are lost; refused where they are not."""
    client.open_pool.admin.reset_registers()


HOST_ACTIONS: dict[str, Callable[[Client, Turn], None]] = {
    "tend": tend,
    "evict_host": evict_host,
    "reset_registers": reset_registers,
}


# --- the environment ---------------------------------------------------------------------------


def _isolate(world: World, turn: Turn) -> None:
    """Cut a host off from all others."""
    world.cut_links(turn.device % world.network.count, _hosts(world), turn.way)


def _freeze(world: World, turn: Turn) -> None:
    """Stop all of a host."""
    world.network.freeze(turn.device % world.network.count)
    world.trouble |= world.network.troubled(world.devices)


def _fall(world: World, turn: Turn) -> None:
    """A host falls."""
    world.fall(turn.device % world.network.count)


def _rejoin(world: World, turn: Turn) -> None:
    """A host is well again, with its links."""
    network, host = world.network, turn.device % world.network.count
    world.start_host(host)
    network.thaw(host)
    network.join([link for link in list(network.cuts) if host in link])
    for link in [link for link in network.slow if host in link]:
        del network.slow[link]


def _slow(world: World, turn: Turn) -> None:
    """All links to a host take a second."""
    host = turn.device % world.network.count
    world.network.slow |= {(other, host): 1.0 for other in _hosts(world) if other != host}


def _hosts(world: World) -> list[int]:
    return list(range(world.network.count))


def _registers_down(scene: ActionScene) -> None:
    scene.registers.down = True


def _registers_slow(scene: ActionScene) -> None:
    scene.registers.slow = True


def _registers_back(scene: ActionScene) -> None:
    scene.registers.all_well()


def _registers_lost(scene: ActionScene) -> None:
    scene.registers.lose()


_OF_HOSTS: dict[str, Callable[[World, Turn], None]] = {
    "isolate": _isolate,
    "freeze": _freeze,
    "fall": _fall,
    "rejoin": _rejoin,
    "slow": _slow,
}
_OF_REGISTERS: dict[str, Callable[[ActionScene], None]] = {
    "registers_down": _registers_down,
    "registers_slow": _registers_slow,
    "registers_back": _registers_back,
    "registers_lost": _registers_lost,
}
EVENTS = frozenset({*_OF_HOSTS, *_OF_REGISTERS})


def happen(scene: ActionScene, turn: Turn) -> None:
    """A turn of the environment that is one of EVENTS; nothing where there are no hosts."""
    if turn.action in _OF_REGISTERS:
        _OF_REGISTERS[turn.action](scene)
    elif scene.world.network.count:
        _OF_HOSTS[turn.action](scene.world, turn)
