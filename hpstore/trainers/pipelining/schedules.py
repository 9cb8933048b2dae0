"""The schedules of torch.distributed.pipelining by short names, and which stages a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Their names in torch."""
ONE_STAGE = ("gpipe", "1f1b")
"""With one stage a rank; the others have two here."""
_V_SHAPED = ("zbv", "dualpipe-v")


def stages_of(name: str, rank: int, world: int) -> list[int]:
    """The stages of one rank of a pipeline of `world` ranks."""
    if name in ONE_STAGE:
        return [rank]
    return [rank, 2 * world - 1 - rank if name in _V_SHAPED else world + rank]


def make_schedule(
    name: str, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[..., Any]
) -> Any:  # Any: torch's schedules have no common public type
    """A schedule over this rank's stages."""
    kind: Any = get_schedule_class(SCHEDULES[name])
    return kind(stages[0] if name in ONE_STAGE else list(stages), microbatches, loss_fn=loss)
