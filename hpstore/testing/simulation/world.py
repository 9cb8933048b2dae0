"""What a simulation has: devices, time, processes, and the faults that a schedule wants.

Processes are fibers. One runs until its operation ends, or until a fault of its turn pauses it,
hangs one of its calls, kills it, or fails a device operation. Time passes by device operations,
waits, pauses and turns of the environment only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hpstore.devices.base import raise_device_error
from hpstore.devices.memory import MemoryDevice
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import DeviceError, DeviceTimeout, RegistersUnavailable
from hpstore.testing.simulation.fibers import Crew, Fiber
from hpstore.testing.simulation.schedule import HOST_FAULTS, NEVER, Fault, Setup, Turn
from hpstore.testing.simulation.simulated_network import SimulatedNetwork
from hpstore.units import KIB

T = TypeVar("T")
BASE_MS = 1_700_000_000_000
STEP_SECONDS = 0.001  # of one device operation
ENDLESS = 200_000  # device operations: no schedule needs so many
_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "ENODEV": errno.ENODEV}
REGISTERS = "registers"  # where calls on registers outside of the devices go
_LASTING = frozenset({"publish", "write_small", "delete", "retire"})  # a kernel may end it alone


class Endless(BaseException):
    """A simulation that does not come to an end. No handler of the code under test sees it."""


class ProcessClock:
    """The clock of one process: the world's time, skewed."""

    def __init__(self, world: World, process: Process, offset_ms: int, drift: float) -> None:
        self._world, self._process = world, process
        self.offset_ms, self.drift = offset_ms, drift

    def wall_ms(self) -> int:
        return BASE_MS + int(self._world.now * 1000 * (1 + self.drift)) + self.offset_ms

    def monotonic(self) -> float:
        return self._world.now

    def wait(self, seconds: float) -> None:
        self._world.idle(self._process, seconds, polls=True)


@dataclass(slots=True)
class HeldFiber:
    """A fiber that is held up: a process that is suspended, or a call that hangs."""

    fiber: Fiber
    process: Process
    until: int  # turn
    at_step: int  # of the world
    firm: bool  # not let go because others wait
    call: bool  # one call of the process only
    seen: int = 0  # its wake was tried while its process waits


class Process:
    """One process: its clock, what it counts in a turn, what became of it."""

    def __init__(self, world: World, name: str, offset_ms: int, drift: float) -> None:
        self.world, self.name = world, name
        self.host = world.network.process_host(name)
        self.clock = ProcessClock(world, self, offset_ms, drift)
        self.dead = False
        world.births += 1
        self.born = world.births  # no other process is this one, whatever its name
        self.later: list[Any] = []  # threads of its operation that run when it waits for them
        self.turn: Turn | None = None
        self.fiber: Fiber | None = None
        self.counts: Counter[str] = Counter()
        self.silent: set[str] = set()  # devices that failed a call in this turn
        self.failing: dict[str, tuple[str, int]] = {}  # device -> error, how often yet
        self.handles: list[Callable[[], None]] = []  # what its death lets go
        self.left: list[Fault] = []  # of this turn, not met yet
        self.faulted = False  # in this turn
        self.stuck: Counter[str] = Counter()  # device -> calls of it that hang
        self.suspended: Fault | None = None  # a call of it met this: all of it is held up
        self.jobs: list[Any] = []  # calls that are not begun
        self.order = random.Random(0)  # in which they are
        self.waits = 0

    def begin(self, turn: Turn) -> None:
        """Start counting again."""
        self.turn, self.left = turn, list(turn.faults)
        self.counts.clear()
        self.failing.clear()
        self.silent.clear()
        self.jobs.clear()
        self.order = random.Random(turn.order)
        self.faulted = False

    @property
    def detached(self) -> bool:
        """Whether calls on devices may be left behind in this turn."""
        return self.turn is not None and any(f.kind == "hang" for f in self.turn.faults)

    @property
    def busy(self) -> bool:
        """Whether its operation has not ended."""
        return self.fiber is not None and not self.fiber.done

    def alive(self) -> None:
        """Raise in a process that is dead."""
        if self.dead:
            raise SimulatedCrash(self.name)

    def step(self, url: str, operation: str, call: Callable[[], T]) -> T:
        """One operation on a device, with what the schedule wants to come before or after it."""
        self.alive()
        world = self.world
        world.tick()
        self.alive()
        self.counts[operation] += 1
        self.counts["*"] += 1
        self.waits = 0
        due = [
            f for f in self.left if self.counts[f.where] == f.nth and f.where in ("*", operation)
        ]
        due.sort(key=lambda fault: fault.kind in ("crash", "power"))  # last, as nothing follows
        for fault in due:
            self.left.remove(fault)
            if not fault.after:
                self._meet(fault, url, operation, call)
        if url in self.failing:
            self._fail(url, operation)
        try:
            result = world.network.call(self, url, operation, call)
        except DeviceError:
            self.silent.add(url)
            raise
        world.acted(self, url, operation)
        for fault in due:
            if fault.after:
                self._meet(fault, url, operation, call)
        if url in self.failing and any(f.after for f in due):
            self._fail(url, operation)  # it took effect, and the process is not told
        return result

    def _meet(self, fault: Fault, url: str, operation: str, call: Callable[[], object]) -> None:
        world, self.faulted = self.world, True
        world.note(f"{self.name} {'after' if fault.after else 'at'} {operation} on {url}: {fault}")
        world.met(self, fault, operation)
        if fault.kind == "pause":
            world.pause(self, fault)
        elif fault.kind == "hang":
            world.hang(self, fault, url, operation, call)
        elif fault.kind == "crash":
            self.die()
            raise SimulatedCrash(operation)
        elif fault.kind == "power":
            world.power_cut()
            raise SimulatedCrash(operation)
        elif fault.kind == "clock":
            self.clock.offset_ms += int(fault.seconds * 1000)
        elif fault.kind == "away":
            world.lose(url)
        elif fault.kind == "error":
            self.failing[url] = (fault.error, fault.times)
        elif fault.kind in HOST_FAULTS:
            world.strike(self, fault, url)

    def _fail(self, url: str, operation: str) -> None:
        self.silent.add(url)
        error, times = self.failing.pop(url)
        if times > 1:
            self.failing[url] = (error, times - 1)
        if url == REGISTERS:
            raise RegistersUnavailable("the registers did not answer.")
        number = _ERRORS[error]
        raise_device_error(OSError(number, os.strerror(number)), url, operation)

    def die(self) -> None:
        """The process is killed: locks on files go with it, what it wrote stays."""
        self.dead = True
        handles, self.handles = self.handles, []
        for release in handles:
            release()


class World:
    """Devices, time and processes of one simulation."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.crew = Crew()
        self.network = SimulatedNetwork(setup.hosts, self.note, self._pass)
        self.rng = random.Random(seed)  # nonces, ids
        self.chance = random.Random(seed ^ 0x5EED)  # what a power cut leaves
        self.now = 0.0
        self.steps = 0
        self.turn_id = 0
        self.births = 0
        self.hidden = ""  # differs from run to run, and is left out of the trace
        self.trace: list[str] = []
        self.pairs: Counter[tuple[str, str]] = Counter()  # (action, fault)
        self.held: list[HeldFiber] = []
        self.trouble: set[str] = set()  # devices with any, since all was whole
        self.devices: dict[str, MemoryDevice] = {}
        self.owners: dict[Fiber, Process] = {}
        self.processes: list[Process] = []
        self.observer = Process(self, "observer", 0, 0.0)
        self.on_call_end: Callable[[Process], None] = lambda process: None

    def device(self, url: str) -> MemoryDevice:
        """A device, made when it is asked for first."""
        if url not in self.devices:
            self.devices[url] = MemoryDevice(url, recycle_bytes=self.setup.recycle_bytes)
        return self.devices[url]

    def process(self) -> Process:
        """Whose code runs now."""
        running = self.crew.running
        return self.observer if running is None else self.owners[running]

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        text = text.replace(self.hidden, "RUN") if self.hidden else text
        self.trace.append(f"{self.steps:5d} {self.now:11.3f} {text}")

    def met(self, process: Process, fault: Fault, operation: str) -> None:
        """Count what a fault has met."""
        action = process.turn.action if process.turn is not None else "observe"
        self.pairs[action, fault.label] += 1

    def acted(self, process: Process, url: str, operation: str) -> None:
        """An operation has taken effect."""
        if operation in ("publish", "delete", "retire", "write_small", "quarantine"):
            self.note(f"{process.name} {operation} {url}")

    # --- time -------------------------------------------------------------------------------

    def tick(self) -> None:
        """A device operation begins: time passes, and what is held up may go on."""
        self.steps += 1
        self.now += STEP_SECONDS
        if self.steps > ENDLESS:
            raise Endless("the simulation does not end")
        for held in [h for h in self.held if h.at_step <= self.steps]:
            self.let_go(held)

    def _pass(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def idle(self, process: Process, seconds: float, *, polls: bool = False) -> None:
        """A process waits. Others that are held up may go on meanwhile."""
        process.alive()
        process.waits += 1
        if polls and process.waits > 8:  # the longer, the longer
            seconds *= 2.0 ** min(process.waits - 8, 8)
        if process.waits > 200_000:
            raise Endless(f"{process.name} waits for ever")
        for held in [h for h in self.held if not h.firm]:
            if self._may_run(held):
                self.let_go(held)
                break
        self.now += max(STEP_SECONDS, seconds)
        process.alive()

    def _may_run(self, held: HeldFiber) -> bool:
        """Not a fiber that waits for the one that runs."""
        fiber: Fiber | None = self.crew.running
        while fiber is not None:
            if fiber is held.fiber:
                return False
            fiber = fiber.parent
        return held in self.held

    def let_go(self, held: HeldFiber) -> None:
        """Let something go on that is held up."""
        if not self._may_run(held):
            return
        self.held.remove(held)
        self.note(f"{held.process.name} goes on{' with a call' if held.call else ''}")
        self.resume(held.fiber)

    def resume(self, fiber: Fiber) -> None:
        """Run a fiber; its death is its own."""
        with contextlib.suppress(SimulatedCrash):
            fiber.resume()
        if fiber.done:
            self.owners.pop(fiber, None)

    def pause(self, process: Process, fault: Fault) -> None:
        """Hold up all of a process; time passes for all others."""
        fiber = self.crew.running
        if fiber is None:
            return
        if fiber is process.fiber:
            self.suspend(process, fault)
            return
        process.suspended = fault  # whoever started this call suspends itself
        fiber.pause()
        process.alive()

    def suspend(self, process: Process, fault: Fault) -> None:
        """Hold up the fiber that runs, which waits for all others of its process."""
        fiber = self.crew.running
        assert fiber is not None
        self.now += fault.seconds
        self._hold(fiber, process, fault, call=False)
        fiber.pause()
        process.alive()

    def _hold(self, fiber: Fiber, process: Process, fault: Fault, *, call: bool) -> None:
        at_step = self.steps + fault.steps if fault.steps else NEVER
        self.held.append(HeldFiber(fiber, process, fault.until, at_step, fault.firm, call))

    def hang(
        self, process: Process, fault: Fault, url: str, operation: str, call: Callable[[], object]
    ) -> None:
        """A call on a device does not answer, and goes on later, or never."""
        process.silent.add(url)
        fiber = self.crew.running
        if fiber is None or fiber is process.fiber:
            self.now += 30.0  # not on a lane
            raise DeviceTimeout(f"device {url} did not answer", device=url)
        self._hold(fiber, process, fault, call=True)
        fiber.pause()
        if process.dead and operation in _LASTING and url in self.devices:
            self.note(f"{operation} of {process.name}, which is dead, takes effect on {url}")
            with contextlib.suppress(OSError, KeyError):
                call()
        self.now += fault.seconds
        process.alive()

    def wake(self, turn_id: int) -> None:
        """Let go what is held up until a turn."""
        self.network.wake(turn_id)
        for held in [h for h in self.held if h.until <= turn_id]:
            self.let_go(held)

    # --- hosts -------------------------------------------------------------------------------

    def strike(self, process: Process, fault: Fault, url: str) -> None:
        """A fault of the link between a process and a device, or of one of their hosts."""
        network, here = self.network, process.host
        there = network.host_of(url)
        if here < 0 or (there < 0 and fault.kind in ("cut", "freeze", "fall")):
            return
        if fault.kind in ("cut", "isolate"):
            others = [there] if fault.kind == "cut" else list(range(network.count))
            self.cut_links(here, others, fault.error, fault.until)
        elif fault.kind == "fall":
            self.fall(there)
            network.due.append((fault.until, partial(self.start_host, there)))
            process.alive()
        else:
            host = here if fault.kind == "stop" else there
            network.freeze(host)
            self.trouble |= network.troubled(self.devices)
            network.due.append((fault.until, partial(network.thaw, host)))
            if host == here:
                self.pause(process, fault)

    def cut_links(self, one: int, others: list[int], way: str, until: int = NEVER) -> None:
        """Cut a host off from others. `way`: "to" them, "from" them, or both; "kept" where what is
        sent arrives when the links are joined."""
        links = [(one, x) for x in others if x != one and "from" not in way]
        links += [(x, one) for x in others if x != one and "to" not in way]
        self.network.cut(links, keeps="kept" in way)
        self.trouble |= self.network.troubled(self.devices)
        if until < NEVER:
            self.network.due.append((until, partial(self.network.join, links)))

    def fall(self, host: int) -> None:
        """A host falls: its processes die, and of what was not synced there some is lost."""
        self.network.fall(host)
        self.trouble |= self.network.troubled(self.devices)
        for url in self.network.disks(self.devices, host):
            torn_crash(self.devices[url], self.chance)
        for process in self.processes:
            if process.host == host:
                process.die()
        self.bury()

    def start_host(self, host: int) -> None:
        """It is there again."""
        self.network.down.discard(host)

    # --- faults of the environment -------------------------------------------------------------

    def lose(self, url: str) -> None:
        """A device stops answering."""
        if url in self.devices:
            self.devices[url].missing = True
            self.trouble.add(url)

    def power_cut(self) -> None:
        """The machine stops: all processes die; of what was not synced some is there."""
        for process in self.processes:
            process.die()
        for device in self.devices.values():
            torn_crash(device, self.chance)
        self.bury()

    def bury(self) -> None:
        """Processes that died while they were held up end; calls that hang go on hanging."""
        for held in [h for h in self.held if h.process.dead and not h.call]:
            self.let_go(held)

    def close(self) -> None:
        """End all fibers."""
        for process in self.processes:
            process.die()
        self.held.clear()
        for fiber in list(self.owners):
            while not fiber.done:
                self.resume(fiber)
        self.crew.close()


def torn_crash(device: MemoryDevice, chance: random.Random) -> None:
    """A power cut that lets some of what was never synced survive: names, and parts of bytes."""
    before = dict(device.files)
    kept = {name for name in sorted(before) if chance.random() < 0.5}
    torn: dict[str, bytes] = {}
    for name in sorted(before):
        file = before[name]
        if file.durable is None or bytes(file.bytes) != file.durable:
            now, old = bytes(file.bytes), file.durable or bytes(len(file.bytes))
            torn[name] = b"".join(
                (now if chance.random() < 0.5 else old)[at : at + 4 * KIB]
                for at in range(0, len(now), 4 * KIB)
            )
    gone = {name for name in device._durable_names.keys() - before.keys() if chance.random() < 0.5}
    device.crash()
    for name in gone:
        device.files.pop(name, None)  # a removal that was not synced, and took place
    for name in sorted(kept - device.files.keys()):
        device.files[name] = file = before[name]
        file.bytes = bytearray(torn.get(name, file.durable or b""))
        file.readers, file.locked = 0, False
    for name, data in torn.items():
        if name in device.files and device.files[name] is before[name]:
            device.files[name].bytes = bytearray(data)
    device._durable_names = dict(device.files)
    for file in device.files.values():
        file.durable = bytes(file.bytes)
