"""What the installed torch has of parts that its schedules do not make public.

Each is asked for here, so that another torch is found out at the first step and not in the middle
of one. tests/contract/test_torch_pipelining.py holds for the versions that were tried.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, SupportsIndex

from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.plan import Plan

_log = logging.getLogger(__name__)
_LAZY_ARGUMENTS = ("arg_mbs", "kwarg_mbs", "target_mbs", "losses")


# Any below: torch's schedules have no public type that tells what is asked here
def microbatches_of(schedule: Any) -> int:
    """How many micro-batches a step has. ConfigError where this torch does not tell."""
    found = getattr(schedule, "_n_microbatches", None)
    if type(found) is not int:
        raise ConfigError(
            f"{type(schedule).__name__} of this torch does not tell its number of micro-batches: "
            "give PipelineHooks(microbatches=)"
        )
    return found


def plan_of(schedule: Any, num_stages: int) -> Plan | None:
    """The order of work that a schedule announces; None when it announces none, or one that cannot
    be read or played here (logged): deadlines and the theory of a report are then missing."""
    orders = getattr(schedule, "pipeline_order", None)
    if not orders:
        return None
    try:
        plan = Plan.of(orders, num_stages)
        plan.deadlines()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _log.warning("the plan of %s of this torch is not understood: %r", type(schedule).__name__,
                     error)  # fmt: skip
        return None
    return plan


def options_of_step(schedule: Any) -> dict[str, bool]:
    """Without outputs that nobody asked for, where this torch can leave them out."""
    known = inspect.signature(schedule.step).parameters
    return {"return_outputs": False} if "return_outputs" in known else {}


def not_lazy(schedule: Any) -> str:
    """Why micro-batches cannot be handed to a schedule one by one; "" when they can."""
    run = getattr(schedule, "_step_microbatches", None)
    if not callable(run):
        return "it has no _step_microbatches()"
    lacking = [n for n in _LAZY_ARGUMENTS if n not in inspect.signature(run).parameters]
    if lacking:
        return f"_step_microbatches() does not take {', '.join(lacking)}"
    if not isinstance(getattr(schedule, "_has_backward", None), bool):
        return "it does not tell whether there is a backward"
    return ""


class Lazily(list[Any]):
    """A list whose entries are made when a schedule first asks for them, and kept for the step."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        super().__init__([None] * count)
        self._make, self._made = make, set[int]()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            raise TypeError("micro-batches are handed out one by one")
        at = range(len(self))[index]
        if at not in self._made:
            self[at] = self._make(at)
            self._made.add(at)
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:  # list's own would not ask
        return (self[index] for index in range(len(self)))


class Given(NamedTuple):
    """The data of a step: arguments of the first stage, targets of the last. With `lazy` lists
    that are filled while it runs, or None."""

    arguments: Any = ()
    target: Any = None
    lazy: bool = False


def run_schedule(
    schedule: Any, stages: Iterable[Any], given: Given, losses: list[Any] | None
) -> None:
    """One step of a schedule. `losses`: filled by the last stage, None elsewhere."""
    if given.lazy:
        run_lazily(schedule, stages, arguments=given.arguments, targets=given.target, losses=losses)
        return
    options: dict[str, Any] = options_of_step(schedule)
    if losses is not None:
        options |= {"target": given.target, "losses": losses}
    schedule.step(*given.arguments, **options)


def run_lazily(
    schedule: Any, stages: Iterable[Any], *, arguments: Lazily | None, targets: Lazily | None,
    losses: list[Any] | None,
) -> None:  # fmt: skip
    """What schedule.step() does, with micro-batches that are made when they are needed."""
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    options: dict[str, Any] = {"arg_mbs": arguments, "kwarg_mbs": None, "target_mbs": targets,
                               "losses": losses}  # fmt: skip
    if "return_outputs" in inspect.signature(schedule._step_microbatches).parameters:
        options["return_outputs"] = False
    schedule._step_microbatches(**options)


__all__ = ["Given", "Lazily", "microbatches_of", "not_lazy", "options_of_step", "plan_of",
           "run_schedule"]  # fmt: skip
