"""Run a schedule: its turns, then the end, where all devices answer and all must be well."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpstore.config import PoolConfig, save_config
from hpstore.devices.base import Device
from hpstore.devices.memory import MemoryDevice
from hpstore.membership.members import create_members
from hpstore.testing.simulation.actions import ActionScene, Client, Finding, settings_of
from hpstore.testing.simulation.end_phase import end
from hpstore.testing.simulation.fibers import Fiber
from hpstore.testing.simulation.forgeries import POOL_KEY, forge_files
from hpstore.testing.simulation.host_turns import EVENTS, HOST_ACTIONS, domain_of, happen
from hpstore.testing.simulation.machinery import STAGE
from hpstore.testing.simulation.schedule import ENVIRONMENT, Schedule, Turn
from hpstore.testing.simulation.simulated_registers import URL, outside_installed
from hpstore.testing.simulation.snapshots import Snapshot
from hpstore.testing.simulation.world import Process, World
from hpstore.units import KIB

UNIT_BYTES = 4 * KIB


def act(client: Client, turn: Turn) -> None:
    """What an agent does, or an operator of hosts; or a trainer: it saves, restores, or collects
    what dead saves have left."""
    if turn.action in HOST_ACTIONS:
        HOST_ACTIONS[turn.action](client, turn)
        return
    from hpstore.testing.simulation import checkpoint_turns  # which needs torch

    getattr(checkpoint_turns, turn.action)(client, turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """What came of a simulation."""

    schedule: Schedule
    findings: tuple[Finding, ...]
    trace: tuple[str, ...]
    pairs: Counter[tuple[str, str]]  # (action, fault) -> how often they met
    steps: int

    @property
    def digest(self) -> str:
        """Equal for equal runs."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=16).hexdigest()


def run(schedule: Schedule) -> SimulationOutcome:
    """Run it. Within machinery.installed(); one at a time in a process."""
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="hpstore-simulation-", dir=parent))
    world = World(schedule.setup, schedule.seed)
    STAGE.world, world.hidden = world, str(directory)
    quiet = logging.getLogger("hpstore")
    level, quiet.disabled = quiet.level, quiet.disabled
    logging.disable(logging.CRITICAL)
    try:
        simulation = _Simulation(schedule, world, directory)
        if schedule.setup.outside:
            with outside_installed(simulation.scene.registers):
                simulation.move_registers()
                simulation.run()
        else:
            simulation.run()
        findings = tuple(simulation.scene.findings)
    finally:
        world.close()
        STAGE.world = None
        logging.disable(logging.NOTSET)
        quiet.setLevel(level)
        shutil.rmtree(directory, ignore_errors=True)
    return SimulationOutcome(
        schedule=schedule,
        findings=findings,
        trace=tuple(world.trace),
        pairs=world.pairs,
        steps=world.steps,
    )


class _Simulation:
    """One run."""

    def __init__(self, schedule: Schedule, world: World, directory: Path) -> None:
        self._schedule, self._world = schedule, world
        setup = schedule.setup
        urls = [f"memory://d{i}" for i in range(setup.devices)]
        config = PoolConfig(
            path=directory / "pool.toml",
            name="test",
            devices=tuple(urls),
            settings=settings_of(setup, str(directory / "run")),
            key=POOL_KEY if setup.keyed else None,
        )
        save_config(config)
        domains = [f"h{i % setup.domains}" for i in range(len(urls))] if setup.domains else None
        if setup.hosts:
            domains = [domain_of(world.network.host_of(url)) for url in urls]
        create_members(
            urls,
            domains,
            self._plain,
            config,
            data=setup.data,
            parity=setup.parity,
            unit_bytes=UNIT_BYTES,
        )
        self.scene = ActionScene(world, config, directory, setup.parity)
        self._clients: list[Client] = []
        for number in range(setup.processes):
            process = self._process(number)
            world.processes.append(process)
            place = f"run{number}" if setup.own_places or setup.hosts else "run"
            self._clients.append(Client(self.scene, process, place, act))

    def _plain(self, url: str) -> Device:
        return self._world.device(url)

    def _process(self, number: int) -> Process:
        setup = self._schedule.setup
        return Process(self._world, f"p{number}", setup.offsets_ms[number], setup.drifts[number])

    def move_registers(self) -> None:
        """Off the devices, before anything else happens."""
        pool = self.scene.open(self._world.observer, "run")
        pool.admin.move_registers(URL)
        pool.close()

    def run(self) -> None:
        """All turns, then the end."""
        for turn in self._schedule.turns:
            self._world.turn_id = turn.number
            self._world.wake(turn.number)
            self._world.note(f"TURN {turn}")
            if turn.process == ENVIRONMENT:
                self._world.pairs["environment", turn.action] += 1
                if turn.action in EVENTS:
                    happen(self.scene, turn)
                else:
                    ENVIRONMENTS[turn.action](self, turn)
            else:
                self._process_turn(turn)
            if self.scene.findings:
                return
        self._finish_all()
        if not self.scene.findings:
            end(self.scene, self._world, self._schedule)

    def _process_turn(self, turn: Turn) -> None:
        number = turn.process % len(self._clients)
        client, process = self._clients[number], self._world.processes[number]
        if self._world.network.stands_still(process.host):
            self._world.note(f"{process.name} is on a host that stands still")
            return
        self._finish(process)
        if process.dead:
            fresh = self._process(number)
            fresh.clock.offset_ms = process.clock.offset_ms
            self._world.processes[number] = client.process = process = fresh
            client.pool = None
            client.seen.clear()
        self._world.pairs[turn.action, "none"] += not turn.faults
        process.begin(turn)
        process.fiber = fiber = Fiber(self._world.crew, process.name, lambda: client.run(turn))
        self._world.owners[fiber] = process
        self._world.resume(fiber)

    def _finish(self, process: Process) -> None:
        """Let its operation come to its end."""
        for _ in range(64):
            if not process.busy:
                return
            for held in [h for h in self._world.held if h.fiber is process.fiber]:
                self._world.let_go(held)
        process.die()

    def _finish_all(self) -> None:
        self._world.network.all_well()
        self.scene.registers.all_well()
        for process in self._world.processes:
            self._finish(process)
        self.scene.close_ended()

    # --- the environment --------------------------------------------------------------------

    def _device(self, turn: Turn) -> tuple[str, MemoryDevice | None]:
        url = f"memory://d{turn.device}"
        return url, self._world.devices.get(url)

    def _away(self, turn: Turn) -> None:
        self._world.lose(self._device(turn)[0])

    def _back(self, turn: Turn) -> None:
        url, device = self._device(turn)
        if device is not None and url not in self.scene.dead:
            device.missing = False

    def _wipe(self, turn: Turn) -> None:
        url, device = self._device(turn)
        if device is not None and self.scene.may_lose(url):
            self.scene.wiped.add(url)
            device.files.clear()
            device._durable_names.clear()

    def _die(self, turn: Turn) -> None:
        url, device = self._device(turn)
        if device is not None and self.scene.may_lose(url):
            device.missing = True
            self.scene.dead.add(url)

    def _flip(self, turn: Turn) -> None:
        """Flip a bit of a column; several of one device, which counts as damaged."""
        url, device = self._device(turn)
        if device is None or not self.scene.may_lose(url):
            return
        self.scene.flipped.add(url)
        names = sorted(n for n in device.files if n.startswith("objects/"))
        for name in names:
            file = device.files[name]
            if file.bytes:  # a forged tombstone is empty
                file.bytes[turn.size % len(file.bytes)] ^= 1
                file.durable = bytes(file.bytes)

    def _snapshot(self, turn: Turn) -> None:
        """What is durable on a device now is kept elsewhere."""
        url, device = self._device(turn)
        if device is not None and not device.missing:
            self.scene.snapshots[url] = Snapshot.of(device)

    def _restore(self, turn: Turn) -> None:
        """A device goes back to its snapshot, under the pool."""
        url, device = self._device(turn)
        snapshot = self.scene.snapshots.get(url)
        if device is not None and snapshot is not None and self.scene.may_lose(url):
            self.scene.stale.add(url)
            self.scene.spoil(snapshot.restore(device))

    def _forge(self, turn: Turn) -> None:
        """A device makes newer tombstones and copies of all objects that it knows of."""
        device = self._device(turn)[1]
        if device is not None and not device.missing:
            forge_files(device, self.scene.event())

    def _full(self, turn: Turn) -> None:
        device = self._device(turn)[1]
        if device is not None:
            device.capacity_bytes = 1 + sum(len(f.bytes) for f in device.files.values())

    def _roomy(self, turn: Turn) -> None:
        device = self._device(turn)[1]
        if device is not None:
            device.capacity_bytes = 1 << 40

    def _read_only(self, turn: Turn) -> None:
        device = self._device(turn)[1]
        if device is not None:
            device.read_only = True

    def _writable(self, turn: Turn) -> None:
        device = self._device(turn)[1]
        if device is not None:
            device.read_only = False

    def _sleep(self, turn: Turn) -> None:
        self._world.now += turn.seconds
        self._world.network.pass_time(turn.seconds)

    def _clock(self, turn: Turn) -> None:
        process = self._world.processes[turn.device % len(self._world.processes)]
        process.clock.offset_ms += int(turn.seconds * 1000)

    def _power(self, turn: Turn) -> None:
        self._world.power_cut()

    def _kill(self, turn: Turn) -> None:
        self._world.processes[turn.device % len(self._world.processes)].die()
        self._world.bury()


ENVIRONMENTS: dict[str, Callable[[_Simulation, Turn], None]] = {
    name: getattr(_Simulation, f"_{name}")
    for name in (
        "away",
        "back",
        "wipe",
        "die",
        "flip",
        "full",
        "roomy",
        "read_only",
        "writable",
        "sleep",
        "clock",
        "power",
        "kill",
        "snapshot",
        "restore",
        "forge",
    )
}
