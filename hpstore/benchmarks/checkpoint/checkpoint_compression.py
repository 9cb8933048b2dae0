"""What compression costs and what it saves: hpstore with each codec, on three kinds of content."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpstore.benchmarks.checkpoint.checkpoint_ours import make_checkpointer, open_or_make
from hpstore.benchmarks.checkpoint.checkpoint_sessions import CheckpointSpec
from hpstore.benchmarks.checkpoint.checkpoint_state import (
    NOISE_WORDS,
    State,
    TensorContents,
    leaves,
    map_state,
    state_bytes,
)
from hpstore.benchmarks.harness.bench_verdicts import spread
from hpstore.benchmarks.harness.measure import seconds
from hpstore.benchmarks.harness.memory_use import drop_cache
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.checkpoint import SaveOptions
from hpstore.checkpoint.format.segment_codecs import CODECS

NONE = "none"
WARM_SAVES = 2  # one step is kept: the third save is the first into recycled files
SAMPLES = 2
_SCALE = 0.02  # of weights, as models are initialised


def gaussian() -> torch.Tensor:
    """Independent normal numbers: what weights and moments look like to a codec."""
    return torch.randn(NOISE_WORDS, generator=torch.Generator().manual_seed(0)) * _SCALE


def smooth() -> torch.Tensor:
    """A sine of 64 Ki numbers a turn: neighbours differ in their last bits only."""
    return torch.sin(torch.arange(NOISE_WORDS) * (2 * torch.pi / 65536)) * _SCALE


CONTENTS: dict[str, tuple[str, Callable[[], torch.Tensor | None]]] = {
    "noise": (
        "the state of the other figures: 26 random bits of every 32, the rest constant",
        lambda: None,
    ),
    "gaussian": (
        "weights (bf16) and moments (fp32) are independent normal numbers: close to real ones",
        gaussian,
    ),
    "smooth": (
        "weights (bf16) and moments (fp32) follow a slow sine: far more regular than real ones",
        smooth,
    ),
}


def compression_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Every codec, and none, on the content that `spec.contender` names."""
    content = TensorContents(CONTENTS[spec.contender][1]())
    found: Found = {}
    for codec in (NONE, *CODECS):
        directory = spec.directory / spec.contender / codec
        found[codec] = _saves(sections, spec, directory, content, codec)
        found[codec]["load_cold_seconds"] = _loads(sections, spec, directory, content)
        shutil.rmtree(directory)
    return found


def _saves(
    sections: Sections, spec: CheckpointSpec, directory: Path, content: TensorContents, codec: str
) -> Found:
    state = map_state(spec.state, spec.size_bytes)
    stalls, durables = [], []
    sections.warm(spec.copy)
    with (
        open_or_make(directory) as pool,
        make_checkpointer(
            pool,
            keep_last=1,
            example=state,
            save=SaveOptions(compression=None if codec == NONE else codec),
        ) as checkpointer,
    ):
        for step in range(1, WARM_SAVES + SAMPLES + 1):
            content.fill(state, step)
            checkpointer.wait()
            sections.warm(0)
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            stalls.append(time.perf_counter() - began)
            report = handle.result()
            durables.append(time.perf_counter() - began)
    return {
        "stall_seconds": stalls[WARM_SAVES:],
        "durable_seconds": durables[WARM_SAVES:],
        "stored_to_state": report.bytes / state_bytes(state),
    }


def _loads(
    sections: Sections, spec: CheckpointSpec, directory: Path, content: TensorContents
) -> list[float]:
    """From a pool that was just opened, without an arena that could hold the step."""
    target, step, taken = map_state(spec.target, spec.size_bytes), WARM_SAVES + SAMPLES, []

    def load(into: State) -> None:
        with open_or_make(directory) as pool, make_checkpointer(pool) as checkpointer:
            checkpointer.restore(into, step)

    for _ in range(SAMPLES):
        for _, tensor in leaves(target):
            tensor.zero_()
        drop_cache(directory)
        sections.warm(spec.copy)
        taken.append(seconds(lambda: load(target)))
        content.check(target, step, f"{spec.contender} ({directory.name})")
    return taken


def compression_report(found: Mapping[str, Found]) -> dict[str, Any]:  # Any: JSON
    """Medians by content and codec, and what they are to no compression."""
    return {
        kind: {"content": CONTENTS[kind][0]}
        | {codec: _row(codecs[codec], codecs[NONE]) for codec in codecs}
        for kind, codecs in found.items()
    }


def _row(figures: Found, plain: Found) -> dict[str, Any]:  # Any: JSON
    row: dict[str, Any] = {"stored_to_state": round(figures["stored_to_state"], 3)}
    for name in ("stall", "durable", "load_cold"):
        median = spread(figures[f"{name}_seconds"])["median"]
        row[f"{name}_seconds"] = median
        row[f"{name}_to_none"] = round(median / spread(plain[f"{name}_seconds"])["median"], 2)
    return row
