"""A store with compare-and-swap in memory, which loses answers and delays requests at will."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpstore.agreement.swap_store import StoredRecord, Swap
from hpstore.errors import RegistersUnavailable


@dataclass(slots=True)
class MemoryRecords:
    """What several processes' stores share. `late`: swaps that were sent, and are on their way."""

    records: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    revision: int = 0
    late: list[tuple[Swap, ...]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)  # guards all of it

    def swap(self, swaps: Sequence[Swap]) -> bool:
        """Compare and write, all or nothing."""
        with self.lock:
            for one in swaps:
                if str(self.records.get(one.name, ("",))[0]) != one.revision:
                    return False
            for one in swaps:
                self.revision += 1
                self.records[one.name] = (self.revision, one.data)
            return True

    def arrive(self) -> None:
        """What is late arrives."""
        with self.lock:
            late, self.late = self.late, []
            for swaps in late:
                self.swap(swaps)


class MemorySwaps:
    """A SwapStore over shared records.

    `fault`: asked before each request, "read" or "swap": "" it works; "down": it does not arrive;
    "lost": it is done, and not answered; "late": it arrives at MemoryRecords.arrive().
    """

    batch = 100
    at_once = 4

    def __init__(
        self, shared: MemoryRecords, fault: Callable[[str], str] = lambda _: "", prefix: str = ""
    ) -> None:
        self.shared, self.fault, self._prefix = shared, fault, prefix

    def read(self, name: str, limit_seconds: float) -> StoredRecord:
        if self.fault("read"):
            raise RegistersUnavailable("the store does not answer.")
        with self.shared.lock:
            revision, data = self.shared.records.get(self._prefix + name, ("", None))
        return StoredRecord(data=data, revision=str(revision))

    def swap(self, name: str, data: bytes, revision: str, limit_seconds: float) -> bool:
        return self.swap_many([Swap(name=name, data=data, revision=revision)], limit_seconds)

    def read_many(self, names: Sequence[str], limit_seconds: float) -> list[StoredRecord]:
        return [self.read(name, limit_seconds) for name in names]

    def swap_many(self, swaps: Sequence[Swap], limit_seconds: float) -> bool:
        named = [
            Swap(name=self._prefix + one.name, data=one.data, revision=one.revision)
            for one in swaps
        ]
        fault = self.fault("swap")
        if not fault:
            return self.shared.swap(named)
        if fault == "lost":
            self.shared.swap(named)
        elif fault == "late":
            with self.shared.lock:
                self.shared.late.append(tuple(named))
        raise RegistersUnavailable("the store does not answer.")

    def remove(self, name: str, limit_seconds: float) -> None:
        with self.shared.lock:
            self.shared.records.pop(self._prefix + name, None)

    def reachable(self, limit_seconds: float) -> dict[str, str]:
        return {"memory": self.fault("read")}

    def close(self) -> None:
        """Nothing is open."""
