"""What one repetition of one contender does in its own process: saves, or loads.

Saves: the first one into new files, two more that warm everything up (the second is watched for its
memory), then the measured one. Warm loads follow in the same process with nothing dropped: peers
find their file in the page cache, hpstore whatever it kept. Cold loads have a process to
themselves, the page cache dropped before each.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from hpstore.benchmarks.checkpoint_ours import Copy, Ours
from hpstore.benchmarks.checkpoint_peers import PEERS, Peer
from hpstore.benchmarks.checkpoint_state import Content, State, empty_state, leaves, state_bytes
from hpstore.benchmarks.devices import BLOCK_BYTES, DATA, PARITY, RawFiles
from hpstore.benchmarks.measure import seconds
from hpstore.benchmarks.sessions import Found, Sections
from hpstore.buffers import aligned_array
from hpstore.units import div_ceil, round_up

WARM_SAVES = 2  # after the first: with two steps kept, the fourth save is the first into old files
LAST_STEP = WARM_SAVES + 2
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a session is to do."""

    contender: str
    directory: Path
    size_bytes: int


def contender(spec: Spec) -> Peer:
    """The one that a spec names."""
    known: dict[str, type[Peer]] = {**PEERS, Ours.name: Ours}
    return known[spec.contender](spec.directory / spec.contender)


def resident_bytes() -> int:
    """Memory of this process, exactly: statm is off by megabytes."""
    with Path("/proc/self/smaps_rollup").open() as lines:
        for line in lines:
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Highest resident memory while it is entered, sampled by a thread."""

    def __enter__(self) -> PeakMemory:
        self.bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory")
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.bytes = max(self.bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def drop_cache(directory: Path) -> None:
    """Nothing under a directory is in the page cache afterwards (what is dirty is synced)."""
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def save_session(sections: Sections, spec: Spec) -> Found:
    """First save, steady save, memory, and warm loads."""
    content, state = Content(), empty_state(spec.size_bytes)
    content.fill(state, 1)
    base = resident_bytes()
    ours = contender(spec)
    ours.prepare(state)
    with sections.measured():
        first = ours.save(state, 1)
    content.advance(state, 2)
    with PeakMemory() as peak:
        ours.save(state, 2)
    for step in range(3, LAST_STEP):
        content.advance(state, step)
        ours.save(state, step)
    content.advance(state, LAST_STEP)
    with sections.measured():
        copy = Copy(state).seconds() if isinstance(ours, Ours) else 0.0
        gc.collect()
    with sections.measured():
        steady = ours.save(state, LAST_STEP)
    target = empty_state(spec.size_bytes)
    warm = {}
    for name, load in ours.loads.items():
        load(target, LAST_STEP)
        with sections.measured():
            warm[name] = seconds(lambda load=load: load(target, LAST_STEP))  # type: ignore[misc]
        content.check(target, LAST_STEP, f"{spec.contender} ({name}, warm)")
    ours.close()
    return {
        "first": asdict(first),
        "steady": asdict(steady),
        "copy_seconds": copy,
        "load_warm_seconds": warm,
        "memory_bytes": peak.bytes - base,
        "state_bytes": state_bytes(state),
        "tensors": len(list(leaves(state))),
    }


def load_session(sections: Sections, spec: Spec) -> Found:
    """Cold loads, and hpstore's with m devices gone."""
    content, target = Content(), empty_state(spec.size_bytes)
    ours = contender(spec)
    cold = {name: _cold(sections, spec, content, ours, name, target) for name in ours.loads}
    ours.close()
    found: Found = {"load_cold_seconds": cold}
    if isinstance(ours, Ours):
        logging.getLogger("hpstore").setLevel(logging.ERROR)  # that they are gone is known
        ours.lose_devices()
        name = next(iter(ours.loads))
        found["load_degraded_seconds"] = _cold(sections, spec, content, ours, name, target)
        ours.close()
    return found


def _cold(
    sections: Sections, spec: Spec, content: Content, ours: Peer, name: str, target: State
) -> float:  # fmt: skip
    for _, tensor in leaves(target):
        tensor.zero_()  # so that a load of nothing is seen
    with sections.measured():
        drop_cache(spec.directory / spec.contender)
        taken = seconds(lambda: ours.loads[name](target, LAST_STEP))
    content.check(target, LAST_STEP, f"{spec.contender} ({name}, cold)")
    return taken


def raw_session(sections: Sections, spec: Spec) -> Found:
    """The directories without hpstore: one copy, k + m raw files written new and over, k read."""
    content, state = Content(), empty_state(spec.size_bytes)
    content.fill(state, 1)
    with sections.measured():
        copy = Copy(state).seconds()
    size = state_bytes(state)
    del state
    gc.collect()
    places = [spec.directory / spec.contender / f"d{i}" for i in range(DATA + PARITY)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    memory = aligned_array(max(size, 2 * BLOCK_BYTES), populate=True)
    raw = RawFiles(places, round_up(div_ceil(size, DATA), 4096), 2 * (DATA + PARITY))
    found: Found = {"copy_seconds": copy, "state_bytes": size}
    for name, new in (("write_new_seconds", True), ("write_over_seconds", False)):
        with sections.measured():
            found[name] = raw.write(memory, new=new)
    with sections.measured():
        found["read_seconds"] = raw.read(memory, DATA)
    raw.remove()
    return found


__all__ = ["Spec", "drop_cache", "load_session", "raw_session", "save_session"]
