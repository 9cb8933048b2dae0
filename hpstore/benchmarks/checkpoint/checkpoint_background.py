"""What a save costs a loop of Python code beside it, written by threads and by a writer process."""

from __future__ import annotations

import time
from contextlib import ExitStack

from hpstore.benchmarks.checkpoint.checkpoint_ours import open_or_make
from hpstore.benchmarks.checkpoint.checkpoint_sessions import CheckpointSpec
from hpstore.benchmarks.checkpoint.checkpoint_state import TensorContents, map_state
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save.save_options import BACKGROUND

_STEP_NUMBERS = 20_000  # of an addition each: a millisecond of the interpreter
_QUIET_STEPS = 300
_WARM_SAVES, _SAMPLES = 2, 5
_QUIET, _WORST = 0.5, 0.99  # quantiles


def background_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Seconds of a step of pure Python, quiet and beside saves of either kind, one after the other.

    A sample has quiet steps, a save with steps beside it, and what the save took.
    """
    content, state = TensorContents(), map_state(spec.state, spec.size_bytes)
    sections.warm(2 * spec.copy)  # an arena each
    found: Found = {background: [] for background in BACKGROUND}
    with ExitStack() as stack:
        savers: dict[str, Checkpointer] = {}
        for background in BACKGROUND:
            pool = stack.enter_context(open_or_make(spec.directory / spec.contender / background))
            options = SaveOptions(background=background)
            made = Checkpointer(
                pool, background, rng=False, keep_last=1, example=state, save=options
            )
            savers[background] = stack.enter_context(made)
        for step in range(1, _WARM_SAVES + _SAMPLES + 1):
            for background, checkpointer in savers.items():
                content.fill(state, step)
                checkpointer.wait()
                quiet = [_python_step() for _ in range(_QUIET_STEPS)]
                handle = checkpointer.save(step, state)
                beside = [_python_step()]
                while not handle.done():
                    beside.append(_python_step())
                durable = handle.result().durable_seconds
                if step > _WARM_SAVES:
                    found[background].append(_sample(quiet, beside, durable))
    return found


def _python_step() -> float:
    """Seconds of a little work that holds the GIL whenever it can."""
    began, total = time.perf_counter(), 0
    for number in range(_STEP_NUMBERS):
        total += number
    return time.perf_counter() - began


def _sample(quiet: list[float], beside: list[float], durable: float) -> Found:
    return {
        "quiet_seconds": _quantile(quiet, _QUIET),
        "mean_seconds": sum(beside) / len(beside),
        "worst_seconds": _quantile(beside, _WORST),
        "steps": len(beside),
        "durable_seconds": durable,
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
