"""Runs a target with inputs that nobody vouches for: no crash, no hang, no large allocation.

A target takes bytes. It may return, or raise an HpstoreError: everything else is a finding. Memory
is bounded by the address space of the process, which is what an allocation asks for whether it is
used or not; time by the processor time of one input.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hpstore.errors import HpstoreError
from tests.fuzz.mutation import mutated, mutated_parts

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES = 192 << 20  # beyond what the process has when an input comes
SECONDS = 4.0  # of processor time an input


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser of bytes that come from a device, an archive, a file or another process.

    `seeds()`: inputs that are right. `take_apart` and `put_together`: the bodies of an input
    without what seals them, and back.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    take_apart: Callable[[bytes], list[bytes]] | None = None
    put_together: Callable[[list[bytes]], bytes] | None = None
    known: dict[str, list[bytes]] = field(default_factory=dict)  # corpus and seeds, once read

    def inputs(self) -> list[bytes]:
        """The seeds, and what is kept in the corpus: findings of earlier runs."""
        if "all" not in self.known:
            kept = sorted((CORPUS / self.name).glob("*"))
            self.known["all"] = [*self.seeds(), *(path.read_bytes() for path in kept)]
        return self.known["all"]

    def mutant(self, rng: random.Random) -> bytes:
        """A changed copy of one of the inputs; half of them sealed again."""
        known = self.inputs()
        data, other = rng.choice(known), rng.choice(known)
        if self.take_apart is None or self.put_together is None or rng.random() < 0.25:
            return mutated(rng, data, other)
        try:
            parts = self.take_apart(data)
            return self.put_together(mutated_parts(rng, parts, parts))
        except Exception:  # noqa: BLE001 (what does not come apart, or fit together, is mutated whole)
            return mutated(rng, data, other)


class Hang(BaseException):
    """An input took more than SECONDS of processor time."""


class Finding(AssertionError):
    """An input that ended otherwise than it may."""


def _too_long(_: int, __: FrameType | None) -> None:
    raise Hang


@contextlib.contextmanager
def bounded(memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Inside, this process has so much more address space and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory_bytes, hard))
    before = signal.signal(signal.SIGVTALRM, _too_long)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def take(target: Target, data: bytes, *, seconds: float = SECONDS) -> None:
    """Run one input, inside bounded(). Raises Finding."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        target.run(data)
    except HpstoreError:
        return
    except Hang:
        raise Finding(f"{target.name}: more than {seconds} s for {_shown(data)}") from None
    except BaseException as error:
        raise Finding(
            f"{target.name}: {type(error).__name__}: {str(error)[:300]} for {_shown(data)}"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def mutants(target: Target, seed: int, first: int = 0) -> Iterator[bytes]:
    """Inputs without end; input n is a function of target, corpus, seed and n."""
    rng = random.Random()
    start = (zlib.crc32(target.name.encode()) << 32) + (seed << 64)
    while True:
        rng.seed(start + first)
        yield target.mutant(rng)
        first += 1


def _shown(data: bytes) -> str:
    return f"{len(data)} bytes {data[:200]!r}"
