"""Registers outside of the devices, as a simulation has them: one linearisable store.

A process asks it by steps of its own, "look" and "swap", so that faults meet them: a swap that an
error precedes did not arrive, one that an error follows is made and not answered. The store has a
member on each host: a process that reaches no majority gets no answer. While it is `slow` a swap is
not answered and takes effect later, `down` it answers no process, and `lose()` loses all it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from hpstore.agreement import record_holds, registers, swap_registers
from hpstore.agreement.swap_store import StoredRecord, Swap
from hpstore.errors import DeviceError, RegistersUnavailable, ThreadsExhausted
from hpstore.format.records import RegisterPlace
from hpstore.membership import outside_registers, register_moves
from hpstore.objects.context import PoolContext
from hpstore.testing.memory_swaps import MemoryRecords, MemorySwaps
from hpstore.testing.simulation.machinery import STAGE, InlineExecutor
from hpstore.testing.simulation.world import REGISTERS, Process, World

T = TypeVar("T")
URL = "etcd://a:2379,b:2379,c:2379/simulated"
BUCKETS = 16  # instead of 4,096: a move writes them all


@dataclass(slots=True)
class RegisterStore:
    """The store of one simulation."""

    world: World
    shared: MemoryRecords = field(default_factory=MemoryRecords)
    down: bool = False
    slow: bool = False
    losses: int = 0  # how often it lost its data

    def fault(self, process: Process, operation: str) -> str:
        """What becomes of a request, as MemorySwaps has it."""
        if self.down or not self.world.network.has_majority(process.host):
            return "down"
        return "late" if self.slow and operation == "swap" else ""

    def lose(self) -> None:
        """It comes back empty. Calls under way are lost."""
        self.shared.records.clear()
        self.shared.late.clear()
        self.losses += 1

    def all_well(self) -> None:
        """It answers every process, and late calls have taken effect."""
        self.down = self.slow = False
        self.shared.arrive()


class SimulatedSwaps(MemorySwaps):
    """The store as the processes see it: each request is a step of the process that runs."""

    def __init__(self, store: RegisterStore, prefix: str) -> None:
        super().__init__(store.shared, lambda _: "", prefix)
        self._store = store

    def _step(self, process: Process, operation: str, call: Callable[[], T]) -> T:
        self.fault = partial(self._store.fault, process)
        try:
            return process.step(REGISTERS, operation, call)
        except DeviceError as error:  # of a fault that hangs it
            raise RegistersUnavailable(f"the registers did not answer: {error}") from error

    def read(self, name: str, limit_seconds: float) -> StoredRecord:
        """One step."""
        process, look = STAGE.now.process(), super().read
        return self._step(process, "look", lambda: look(name, limit_seconds))

    def swap_many(self, swaps: Sequence[Swap], limit_seconds: float) -> bool:
        """One step."""
        process, swap = STAGE.now.process(), super().swap_many
        return self._step(process, "swap", lambda: swap(swaps, limit_seconds))


def _no_thread(thread: object) -> object:
    raise ThreadsExhausted("a simulation renews no holds: they last shorter than their time")


@contextmanager
def outside_installed(store: RegisterStore) -> Iterator[None]:
    """Exchange what pools take for etcd, for as long as the block runs. Within installed()."""

    def swap_store(_: PoolContext, place: RegisterPlace) -> SimulatedSwaps:
        return SimulatedSwaps(store, f"{place.epoch}/")

    exchanged: tuple[tuple[object, str, object], ...] = (
        (outside_registers, "swap_store", swap_store),
        (swap_registers, "WorkerThreads", InlineExecutor),
        (record_holds, "start_thread", _no_thread),
        (register_moves, "probe_swaps", lambda *_: None),
        (registers, "BUCKETS", BUCKETS),
    )
    before = [(place, name, getattr(place, name)) for place, name, _ in exchanged]
    for place, name, new in exchanged:
        setattr(place, name, new)
    try:
        yield
    finally:
        for place, name, old in before:
            setattr(place, name, old)
