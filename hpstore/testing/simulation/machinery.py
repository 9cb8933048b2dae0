"""In place of threads, clocks and random numbers: what a simulation decides.

`installed()` exchanges names in the modules of hpstore, so that real pool code runs on it. One
simulation at a time in a process of the operating system.
"""

from __future__ import annotations

import concurrent.futures
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from hpstore.codec.galois import Bytes
from hpstore.config import Settings
from hpstore.devices.base import Device, Hold, ReadHandle, WriteHandle
from hpstore.devices.horizon_guard import HorizonGuard
from hpstore.devices.wrappers import DeviceWrapper, WrappedHold, WrappedReader, WrappedWriter
from hpstore.errors import DeviceError, DeviceTimeout
from hpstore.objects.write import stripe_writer
from hpstore.pool import session
from hpstore.runtime.deadline_wait import Patience
from hpstore.runtime.scheduler import Scheduler
from hpstore.testing.simulation.fibers import Fiber
from hpstore.testing.simulation.world import Process, World
from hpstore.units import KIB

T = TypeVar("T")
SMALL_ITEM = 4 * KIB  # tensors below are saved again with every step
SMALL_BYTES = 8 * KIB  # objects up to here are copies: larger ones stay quick to write


class SimulationStage:
    """The world that code under test runs in now."""

    def __init__(self) -> None:
        self.world: World | None = None

    @property
    def now(self) -> World:
        """The world of now."""
        assert self.world is not None
        return self.world


STAGE = SimulationStage()  # what is installed in modules asks here; one simulation at a time


# --- calls on devices --------------------------------------------------------------------------


class SimulatedCall(Future[Any]):
    """A call that is made when it is waited for, or when its turn comes."""

    def __init__(self, process: Process, device: str, call: Callable[[], object]) -> None:
        super().__init__()
        self._process, self.device, self._todo = process, device, call
        self._fiber: Fiber | None = None
        self._stuck = False  # it hangs, and counts so

    @property
    def begun(self) -> bool:
        """Whether it runs, or has run."""
        return self._fiber is not None or self.done() or self.running()

    def start(self) -> None:
        """Make the call: on the fiber of who waits, or on its own where it may be left behind."""
        if not self.set_running_or_notify_cancel():
            return
        world, process = STAGE.now, self._process
        if not process.detached or world.crew.running is None:
            self._run()
            return
        self._fiber = fiber = Fiber(world.crew, f"{process.name} {self.device[:8]}", self._run)
        world.owners[fiber] = process
        world.resume(fiber)
        while process.suspended is not None and not fiber.done:
            fault, process.suspended = process.suspended, None
            world.suspend(process, fault)
            world.resume(fiber)
        if not fiber.done:
            self._stuck = True
            process.stuck[self.device] += 1

    def _run(self) -> None:
        todo, self._todo = self._todo, lambda: None
        try:
            result = todo()
        except Exception as error:  # noqa: BLE001 (the future carries it)
            self.set_exception(error)
        except BaseException as crash:
            self.set_exception(crash)
            raise
        else:
            self.set_result(result)
        finally:
            if self._stuck:
                self._process.stuck[self.device] -= 1

    def result(self, timeout: float | None = None) -> Any:  # of any call
        self._until_done()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._until_done()
        return super().exception(0)

    def _until_done(self) -> None:
        if not self.done():
            sim_wait([self], 600.0)


class SimulatedScheduler(Scheduler):
    """Lanes whose calls are made in the order that the schedule wants, one after another."""

    LANE = 2  # calls that hang and fill a lane

    def submit(self, device: str, call: Callable[[], T], *, bulk: bool = False) -> Future[T]:
        self._require_open()
        process = STAGE.now.process()
        job = SimulatedCall(process, device, call)
        if process.stuck[device] >= self.LANE:
            text = f"device {device} has not answered for {self._stuck_seconds:.0f} s"
            job.set_exception(DeviceTimeout(text, device=device))
        else:
            process.jobs.append(job)
        return job

    def gather(
        self,
        calls: Mapping[str, Callable[[], T]],
        deadline_seconds: float,
        *,
        patience: Patience | None = None,
        brief: str = "",
        ask_late: bool = False,
    ) -> dict[str, T | Exception]:
        # what is made in turn is one order of those that the schedule may want
        return super().gather(calls, deadline_seconds, patience=patience, ask_late=ask_late)

    def gather_once(
        self,
        calls: Mapping[str, Callable[[], T]],
        deadline_seconds: float,
        late: Callable[[str, Future[T]], None] | None = None,
        *,
        patience: Patience | None = None,
    ) -> dict[str, T | Exception]:
        return self.gather(calls, deadline_seconds)


def start_one(process: Process, wanted: Collection[Future[Any]]) -> bool:
    """Make one of the calls that a process waits for; False when all of them are begun."""
    jobs = [j for j in process.jobs if not j.begun]
    waiting = [j for j in jobs if j in wanted] if wanted else jobs
    process.jobs = jobs
    if not waiting:
        return False
    order = process.turn.order if process.turn is not None else 0
    job = waiting[0] if not order else waiting[process.order.randrange(len(waiting))]
    process.jobs.remove(job)
    job.start()
    return True


def sim_wait(
    fs: Collection[Future[T]], timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> tuple[set[Future[T]], set[Future[T]]]:
    """concurrent.futures.wait, in a simulation's time."""
    futures = list(fs)
    world = STAGE.world
    if world is None:
        return _REAL_WAIT(futures, timeout, return_when)
    process = world.process()
    began = world.now
    until = began + (600.0 if timeout is None else timeout)
    while True:
        left = [f for f in futures if not f.done()]
        if not left or (return_when == FIRST_COMPLETED and len(left) < len(futures)):
            break
        if not start_one(process, left):
            if world.now >= until and (world.now > began or timeout == 0.0):
                break  # some time passes in a wait, however short
            world.idle(process, min(0.5, until - world.now))
    done = {f for f in futures if f.done()}
    return Waited(done, set(futures) - done)


class Waited(NamedTuple):
    """What wait() returns."""

    done: set[Any]
    not_done: set[Any]


_REAL_WAIT = concurrent.futures.wait


class InlineExecutor:
    """A ThreadPoolExecutor whose calls are made at once."""

    def __init__(self, *_: object, **__: object) -> None:
        """Takes what a ThreadPoolExecutor takes."""

    def submit(self, call: Callable[..., T], *args: Any, **named: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call(*args, **named))
        except Exception as error:  # noqa: BLE001 (the future carries it)
            future.set_exception(error)
        return future

    def map(self, call: Callable[..., T], *args: Any) -> list[T]:
        return [call(*each) for each in zip(*args, strict=False)]

    def shutdown(self, *_: object, **__: object) -> None:
        """Nothing runs."""

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""


# --- devices -----------------------------------------------------------------------------------


class SimulatedDevice(DeviceWrapper):
    """A device as one process sees it: each operation is a step of the world."""

    def __init__(self, inner: Device, process: Process) -> None:
        super().__init__(inner)
        self.process = process

    def around(self, operation: str, nbytes: int, call: Callable[[], T]) -> T:
        return self.process.step(self.url, operation, call)

    def create(self, size_bytes: int, *, vital: bool = False) -> WriteHandle:
        def make() -> WriteHandle:
            made = self.inner.create(size_bytes, vital=vital)
            self.at_death(partial(_unlock, made))
            return made

        return SimulatedWriter(self, self.around("create", size_bytes, make))

    def open(self, path: str) -> ReadHandle:
        def make() -> ReadHandle:
            made = self.inner.open(path)
            self.at_death(made.close)
            return made

        return SimulatedReader(self, self.around("open", 0, make))

    def hold(self, offset: int, nbytes: int) -> Hold:
        def make() -> Hold:
            made = self.inner.hold(offset, nbytes)
            self.at_death(made.release)
            return made

        return SimulatedHold(self, self.around("lock", 0, make))

    def at_death(self, let_go: Callable[[], None]) -> None:
        """What the death of the process lets go, once its device's host hears of it."""
        self.process.handles.append(partial(self.give_up, let_go))

    def give_up(self, let_go: Callable[[], None]) -> None:
        """Let something go there, now or when the host hears of it."""
        self.process.world.network.give_up(self.process, self.url, let_go)


class _OnHost:
    """Something open on a device, which ends when the device's host falls."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._network, self._url = device.process.world.network, device.url
        self._boot = self._network.boot(device.url)

    @property
    def gone(self) -> bool:
        """Whether the host has fallen since."""
        return self._network.boot(self._url) != self._boot

    def require(self) -> None:
        """Raise DeviceError where it is gone."""
        if self.gone:
            raise DeviceError(f"device {self._url}: its host was started again", device=self._url)


class SimulatedWriter(WrappedWriter):
    """A file being made by a process, which may be dead."""

    def __init__(self, device: SimulatedDevice, inner: WriteHandle) -> None:
        super().__init__(device, inner)
        self._on, self._there = device, _OnHost(device)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        self._there.require()
        super().write(offset, buffers)

    def sync(self) -> None:
        self._there.require()
        super().sync()

    def publish(self, path: str, guard: HorizonGuard | None = None) -> None:
        self._there.require()
        super().publish(path, guard)

    def abort(self) -> None:
        if not self._on.process.dead and not self._there.gone:
            self._on.give_up(self.inner.abort)


class SimulatedReader(WrappedReader):
    """A file that a process reads."""

    def __init__(self, device: SimulatedDevice, inner: ReadHandle) -> None:
        super().__init__(device, inner)
        self._there = _OnHost(device)

    def read_into(self, offset: int, target: Bytes) -> None:
        self._there.require()
        super().read_into(offset, target)


class SimulatedHold(WrappedHold):
    """A range of registers that a process holds, as far as it knows."""

    def __init__(self, device: SimulatedDevice, inner: Hold) -> None:
        super().__init__(device, inner)
        self._on, self._has = device, inner.taken

    @property
    def taken(self) -> bool:
        return self._has

    def finish(self, offset: int, data: bytes) -> None:
        try:
            self._on.around("register", len(data), lambda: self.inner.finish(offset, data))
        except BaseException:
            self.release()
            raise
        self._has = False

    def release(self) -> None:
        if self._has:
            self._has = False
            self._on.give_up(self.inner.release)


def _unlock(made: WriteHandle) -> None:
    """Its writer is dead: a sweep may take it."""
    made._made.locked = False  # type: ignore[attr-defined]  # a MemoryWriter


# --- names in modules --------------------------------------------------------------------------


class _Time(ModuleType):
    """The module `time` as a simulation has it."""

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() if STAGE.world is None else STAGE.world.now

    perf_counter = monotonic

    @staticmethod
    def time_ns() -> int:
        world = STAGE.world
        return time.time_ns() if world is None else world.process().clock.wall_ms() * 1_000_000

    @staticmethod
    def time() -> float:
        return _Time.time_ns() / 1e9

    @staticmethod
    def sleep(seconds: float) -> None:
        if STAGE.world is None:
            time.sleep(seconds)
        else:
            STAGE.world.idle(STAGE.world.process(), seconds)


class _Secrets(ModuleType):
    """The module `secrets` as a simulation has it."""

    @staticmethod
    def randbits(count: int) -> int:
        return _random().getrandbits(count)

    @staticmethod
    def token_bytes(count: int = 32) -> bytes:
        return _random().randbytes(count)

    @staticmethod
    def token_hex(count: int = 32) -> str:
        return _random().randbytes(count).hex()

    @staticmethod
    def randbelow(limit: int) -> int:
        return _random().randrange(limit)


class _Uuid(ModuleType):
    """The module `uuid` as a simulation has it."""

    UUID = uuid.UUID

    @staticmethod
    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=_random().getrandbits(128), version=4)


def _random() -> random.Random:
    return random.SystemRandom() if STAGE.world is None else STAGE.world.rng


def _make_scheduler(settings: Settings, *, threads: bool) -> Scheduler:
    kind = Scheduler if STAGE.world is None else SimulatedScheduler
    return kind(
        workers_per_device=settings.workers_per_device,
        queue_depth=settings.queue_depth,
        compute_threads=settings.compute_threads,
        threads=threads and STAGE.world is None,
        stuck_seconds=settings.device_deadline_seconds,
    )


_NAMES: tuple[tuple[object, object], ...] = (
    (time, _Time("time")),
    (secrets, _Secrets("secrets")),
    (uuid, _Uuid("uuid")),
    (concurrent.futures.wait, sim_wait),
    (concurrent.futures.ThreadPoolExecutor, InlineExecutor),
)


SMALL_NAMES = {"SMALL_OBJECT_BYTES": SMALL_BYTES, "SMALL_ITEM_BYTES": SMALL_ITEM}


@contextmanager
def installed(*, checkpoints: bool = True) -> Iterator[None]:
    """Exchange what is not deterministic in hpstore's modules, for as long as the block runs.

    `checkpoints`: in hpstore.checkpoint, too, which needs torch and seconds to be imported.
    """
    before: list[tuple[Any, str, object]] = []

    def exchange(module: Any, name: str, new: object) -> None:
        before.append((module, name, getattr(module, name)))
        setattr(module, name, new)

    more = import_module("hpstore.testing.simulation.simulated_agents").exchanged()
    if checkpoints:
        more += import_module("hpstore.testing.simulation.checkpoint_turns").exchanged()
    ours = {id(old): new for old, new in _NAMES}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("hpstore.") or ".testing" in module_name:
            continue
        for name, value in list(vars(module).items()):
            if name in SMALL_NAMES:
                exchange(module, name, SMALL_NAMES[name])
            elif id(value) in ours:
                exchange(module, name, ours[id(value)])
    exchange(session, "make_scheduler", _make_scheduler)
    exchange(session, "call_in_children", lambda method: None)  # nothing forks here
    exchange(stripe_writer, "IN_ORDER_SECONDS", 0.0)
    for place, name, new in more:
        exchange(place, name, new)
    try:
        yield
    finally:
        for module, name, old in reversed(before):
            setattr(module, name, old)
