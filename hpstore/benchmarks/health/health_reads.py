"""A foreground: threads that read ranges of objects now and then, and how long each read took.

Two kinds of read by turns: a whole stripe, and 64 KiB of one unit. A lone unit that is lost costs
the reads of k others, a stripe no more bytes than it has anyway.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from hpstore.benchmarks.health.health_rig import DATA, quantile
from hpstore.codec.galois import Bytes
from hpstore.objects.read.pooled_reader import PooledReader
from hpstore.pool.pool import Pool
from hpstore.runtime.buffers import aligned_array
from hpstore.runtime.closing import Closing
from hpstore.units import KIB, MIB

UNIT_BYTES = MIB
STRIPE_BYTES, SMALL_BYTES = DATA * UNIT_BYTES, 64 * KIB
THREADS = 2
READS_PER_SECOND = 100.0  # of each thread: half a GB a second in all, a part of what disks can do
KINDS = ("stripe", "64 KiB")
_JOIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class EndedRead:
    """One that has ended."""

    began: float
    seconds: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Objects of noise, all of one size."""

    count: int = 24
    stripes: int = 4  # of 5 MiB, each

    @property
    def keys(self) -> list[str]:
        """Of all of them."""
        return [f"reads/{number:03d}" for number in range(self.count)]

    @property
    def nbytes(self) -> int:
        """Of one of them."""
        return self.stripes * STRIPE_BYTES

    def write(self, pool: Pool) -> None:
        """Put all of them."""
        noise = np.random.default_rng(0).bytes(self.nbytes)
        for key in self.keys:
            pool.put(key, noise)


class ForegroundReads(Closing):
    """Reads until it is closed. A failed read ends its thread and is raised by close()."""

    def __init__(self, pool: Pool, objects: Objects, *, seed: int) -> None:
        self._pool, self._objects = pool, objects
        self.ended: list[EndedRead] = []  # append is one step
        self._errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(random.Random(f"{seed} {number}"),),
                name=f"bench-reads-{number}",
                daemon=True,
            )
            for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rng: random.Random) -> None:
        try:
            with ExitStack() as stack:
                keys = self._objects.keys
                readers = [stack.enter_context(self._pool.open(key)) for key in keys]
                buffer = aligned_array(STRIPE_BYTES, populate=True)
                due = time.monotonic()
                while not self._stop.is_set():
                    for kind in KINDS:
                        due = max(due + 1 / READS_PER_SECOND, time.monotonic())
                        self._stop.wait(due - time.monotonic())
                        self._one(rng, readers, kind, buffer)
        except BaseException as error:  # noqa: BLE001 (raised where it is closed)
            self._errors.append(error)

    def _one(
        self, rng: random.Random, readers: Sequence[PooledReader], kind: str, buffer: Bytes
    ) -> None:
        size = STRIPE_BYTES if kind == "stripe" else SMALL_BYTES
        offset = rng.randrange(self._objects.nbytes // size) * size
        reader = rng.choice(readers)
        began = time.monotonic()
        reader.read_into(buffer[:size].data, offset)
        self.ended.append(EndedRead(began, time.monotonic() - began, kind))

    def p99(self, since: float, until: float) -> dict[str, float]:
        """Milliseconds by kind, of reads that began in [since, until), also of those that have not
        ended by then: call it when they have."""
        chosen = [read for read in list(self.ended) if since <= read.began < until]
        return {
            kind: 1e3 * quantile([r.seconds for r in chosen if r.kind == kind], 0.99)
            for kind in KINDS
        }

    def close(self) -> None:
        """Stop; raises what a read has raised. Idempotent."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]
