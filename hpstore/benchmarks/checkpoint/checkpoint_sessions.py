"""What one repetition of one contender does in its own process: saves, or loads.

Saves: the first one into new files, more that warm everything up (the second is watched for its
memory), then the measured one: the third, or the fourth where files are recycled (Peer.last_step).
Warm loads follow in the same process with nothing dropped: peers
find their file in the page cache, hpstore whatever it kept. Cold loads have a process to
themselves, the page cache dropped before each.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from hpstore.benchmarks.checkpoint.checkpoint_contenders import kind_of
from hpstore.benchmarks.checkpoint.checkpoint_ours import Copy, HpstoreSaver
from hpstore.benchmarks.checkpoint.checkpoint_peers import SaverPeer
from hpstore.benchmarks.checkpoint.checkpoint_state import (
    State,
    TensorContents,
    leaves,
    map_state,
    state_bytes,
)
from hpstore.benchmarks.harness.measure import seconds
from hpstore.benchmarks.harness.memory_use import PeakMemory, drop_cache, resident_bytes
from hpstore.benchmarks.harness.raw_devices import BLOCK_BYTES, DATA, PARITY, RawFiles
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.runtime.buffers import aligned_array
from hpstore.units import MIB, div_ceil, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """What a session is to do. `state` (filled) and `target` are paths of shared states."""

    contender: str
    directory: Path
    size_bytes: int
    state: str
    target: str

    @property
    def copies(self) -> int:
        """Bytes that a save or a load may take: one copy in memory, one in the page cache."""
        return int(2.1 * self.size_bytes) + 64 * MIB

    @property
    def copy(self) -> int:
        """Bytes of one copy: what a save takes when its staging is there."""
        return int(1.05 * self.size_bytes) + 64 * MIB


def contender(spec: CheckpointSpec) -> SaverPeer:
    """The one that a spec names."""
    return kind_of(spec.contender)(spec.directory / spec.contender)


def save_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """First save, steady save, memory, and warm loads."""
    content, state = TensorContents(), map_state(spec.state, spec.size_bytes)
    content.fill(state, 1)
    base = resident_bytes()
    who = contender(spec)
    sections.warm(spec.copy)
    who.prepare(state)
    gc.collect()  # of what was imported: else it falls into one save or another
    sections.warm(spec.copies)
    first = who.save(state, 1)
    sections.warm(0)
    peak = _warm_up(spec, who, content, state)
    sections.warm(spec.copy)
    copy = Copy(state).seconds() if isinstance(who, HpstoreSaver) else 0.0
    gc.collect()
    sections.warm(spec.copy)
    steady = who.save(state, who.last_step)
    warm = _warm_loads(sections, spec, who, content)
    who.close()
    drop_cache(spec.directory / spec.contender)  # these pages are warm: the ballast takes them
    return {
        "first": asdict(first),
        "steady": asdict(steady),
        "copy_seconds": copy,
        "load_warm_seconds": warm,
        "memory_bytes": peak - base,
        "state_bytes": state_bytes(state),
        "tensors": len(list(leaves(state))),
    }


def _warm_up(spec: CheckpointSpec, who: SaverPeer, content: TensorContents, state: State) -> int:
    """The saves that are not timed; the highest resident memory during the first of them."""
    highest = 0
    for step in range(2, who.last_step):
        drop_cache(spec.directory / spec.contender)  # copies that nobody reads any more
        content.fill(state, step)
        if step == 2:
            with PeakMemory() as peak:
                who.save(state, step)
            highest = peak.bytes
        else:
            who.save(state, step)
    drop_cache(spec.directory / spec.contender)
    content.fill(state, who.last_step)
    return highest


def _warm_loads(
    sections: Sections, spec: CheckpointSpec, who: SaverPeer, content: TensorContents
) -> dict[str, float]:
    """Seconds of the second load after a save, by way to load."""
    target, found = map_state(spec.target, spec.size_bytes), {}
    for name, load in who.loads.items():
        sections.warm(spec.copy)
        load(target, who.last_step)
        gc.collect()
        sections.warm(spec.copy)  # what is loaded is in the page cache, or in hpstore's arena
        found[name] = seconds(lambda load=load: load(target, who.last_step))  # type: ignore[misc]
        content.check(target, who.last_step, f"{spec.contender} ({name}, warm)")
    return found


def load_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Cold loads, and hpstore's with m devices gone."""
    content, target, who = (
        TensorContents(),
        map_state(spec.target, spec.size_bytes),
        contender(spec),
    )

    def cold(name: str) -> float:
        load = who.loads[name]
        for _, tensor in leaves(target):
            tensor.zero_()  # so that a load of nothing is seen
        drop_cache(spec.directory / spec.contender)
        gc.collect()  # else a full collection falls into one load or another
        sections.warm(spec.copies)
        taken = seconds(lambda: load(target, who.last_step))
        content.check(target, who.last_step, f"{spec.contender} ({name}, cold)")
        who.close()
        drop_cache(spec.directory / spec.contender)
        return taken

    found: Found = {"load_cold_seconds": {name: cold(name) for name in who.loads}}
    if isinstance(who, HpstoreSaver):
        logging.getLogger("hpstore").setLevel(logging.ERROR)  # that they are gone is known
        who.lose_devices()
        found["load_degraded_seconds"] = cold(next(iter(who.loads)))
    return found


def raw_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """The directories without hpstore: one copy, k + m raw files written new and over, k read."""
    state = map_state(spec.state, spec.size_bytes)
    sections.warm(spec.copy)
    copy = Copy(state).seconds()
    size = state_bytes(state)
    places = [spec.directory / spec.contender / f"d{i}" for i in range(DATA + PARITY)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    sections.warm(spec.copy)
    memory = aligned_array(max(size, 2 * BLOCK_BYTES), populate=True)
    raw = RawFiles(places, round_up(div_ceil(size, DATA), 4096), 2 * (DATA + PARITY))
    found: Found = {"copy_seconds": copy, "state_bytes": size}
    for name, new in (("write_new_seconds", True), ("write_over_seconds", False)):
        found[name] = raw.write(memory, new=new)
    found["read_seconds"] = raw.read(memory, DATA)
    raw.remove()
    return found
