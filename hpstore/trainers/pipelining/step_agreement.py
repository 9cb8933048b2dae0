"""A step counts on all ranks or on none: they compare notes before the schedule and before the
optimizer.

A rank that goes through a step alone would send and wait for other micro-batches than its peers
from then on. So what one rank cannot do is raised on all, and the next call of step() has the same
micro-batches again. A schedule that broke off in the middle is another matter (StepBroken).
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from hpstore.checkpoint.ranks.collectives import RankChannel, Ranks
from hpstore.checkpoint.ranks.stop_step import Preempted
from hpstore.errors import CheckpointError, StepVoid


class Note(IntEnum):
    """What a rank says of its step so far."""

    FINE = 0
    NOT_FINITE = 1  # gradients that an optimizer must not see
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Votes:
    """Which votes a step needs: `early`, before gradients are touched, where data come one by one
    or losses are scaled; `late`, before the optimizer, where users' code runs."""

    early: bool = False
    late: bool = False

    @classmethod
    def of_any(cls, wanted: Iterable[Votes]) -> Votes:
        """Those that any rank wants: all take part."""
        votes = list(wanted)
        return cls(any(vote.early for vote in votes), any(vote.late for vote in votes))


NONE = Votes()
PATIENCE_SECONDS = 30.0  # for ranks that may wait elsewhere for one that has failed


@cache
def _void_like(kind: str) -> type[StepVoid]:
    """StepVoid, and the type of that name where it is one of Python's own that takes a text."""
    own = getattr(builtins, kind, None)
    if not isinstance(own, type) or not issubclass(own, Exception) or own is Exception:
        return StepVoid
    try:
        made: type[StepVoid] = type("StepVoid", (StepVoid, own), {"__module__": __name__})
        made("a text")
    except TypeError:
        return StepVoid
    return made


class Agreement:
    """Of the ranks of all pipelines of a job. Every call is one of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.broken = ""  # why no step can follow

    def reach(
        self, step: int, error: Exception | None, *, finite: bool = True, alone: bool = False
    ) -> bool:
        """Whether the gradients of all ranks are finite, once all have come here without an error.

        Raises `error` where there is one and StepVoid everywhere else; CheckpointError, on all,
        when ranks are at different steps. `alone`: the error may have left the others in a
        collective of the user's code, where they hear of nothing but this process's end: they are
        waited for PATIENCE_SECONDS, then `broken` has why no step can follow.
        """
        note = Note.FAILED if error else Note.FINE if finite else Note.NOT_FINITE
        patience = PATIENCE_SECONDS if alone and error else None
        try:
            said = self._ranks.numbers(
                (step, int(note)), RankChannel.TRAINER, within_seconds=patience
            )
        except CheckpointError:
            if error is None or patience is None:
                raise
            self.broken = left_alone(step, error)
            raise error from None
        steps = [number for number, _ in said]
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the ranks are at different steps ({steps}, by rank): one of them has called "
                "step() more often than others, or caught an error that it alone had outside of "
                "it. No further step is made. Committed checkpoints are untouched: end this job; "
                "the next one resumes from the newest of them."
            )
        failed = [rank for rank, (_, what) in enumerate(said) if what == Note.FAILED]
        if failed:
            self._raise(step, failed[0], error)
        return all(what == Note.FINE for _, what in said)

    def _raise(self, step: int, first: int, error: Exception | None) -> None:
        mine = json.dumps([type(error).__name__, str(error)] if error else None).encode()
        told = json.loads(self._ranks.all_gather(mine, RankChannel.TRAINER)[first])
        if error is not None:
            raise error
        kind, text = told
        raise _void_like(kind)(
            f"step {step} is void on all ranks: rank {first}: {kind}: {text}. The next call of "
            "step() has the same micro-batches again."
        )


def broken_off(step: int, error: BaseException) -> str:
    """Why no step can follow one whose schedule has raised; noted on the error, too."""
    text = (
        f"step {step} broke off in the middle of the schedule on this rank "
        f"({type(error).__name__}), and the other ranks of its pipeline wait for what it did not "
        "send. It cannot be repeated in this process. End it: they notice that at once, and the "
        "next job goes on from the newest committed step."
    )
    error.add_note(text)
    return text


def left_alone(step: int, error: BaseException) -> str:
    """Why no step can follow one whose error the other ranks did not come to hear; noted on it."""
    text = (
        f"step {step}: before_optimizer failed on this rank ({type(error).__name__}), and the "
        f"others did not come within {PATIENCE_SECONDS:.0f} s: they wait in a collective of its "
        "that this rank has not reached. It cannot be repeated in this process. End it: they "
        "notice that at once, and the next job goes on from the newest committed step."
    )
    error.add_note(text)
    return text


def preempted_after(step: int) -> Preempted:
    """What stops every rank once the last step of the process is saved."""
    return Preempted(
        f"SIGTERM has come to a rank of this job: step {step} is saved, and all ranks stop. The "
        "next job goes on from it."
    )
