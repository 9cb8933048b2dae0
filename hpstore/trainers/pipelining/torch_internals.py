"""What the installed torch has of parts that its schedules do not make public.

Each is asked for here, so that another torch is found out at the first step and not in the middle
of one. tests/contract/test_torch_pipelining.py holds for the versions that were tried.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

from hpstore.errors import ConfigError
from hpstore.trainers.pipelining.schedule_plan import SchedulePlan

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


def plan_of(schedule: Any, num_stages: int) -> SchedulePlan | None:
    """The order of work that a schedule announces; None when it announces none, or one that cannot
    be read or played here (logged): deadlines and the theory of a report are then missing."""
    orders = getattr(schedule, "pipeline_order", None)
    if not orders:
        return None
    try:
        plan = SchedulePlan.of(orders, num_stages)
        plan.deadlines()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _log.warning(
            "the plan of %s of this torch is not understood: %r", type(schedule).__name__, error
        )
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
    if not callable(getattr(schedule, "_split_inputs", None)):
        return "it has no _split_inputs()"
    return ""


def can_be_lazy(schedule: Any, counters: dict[str, int]) -> bool:
    """Whether micro-batches can be handed out one by one; where not, counted and logged once."""
    reason = not_lazy(schedule)
    if reason:
        counters["lazy_refused_total"] += 1
        if counters["lazy_refused_total"] == 1:
            _log.warning(
                "lazy=True is not possible with %s of this torch: %s. Whole batches are used.",
                type(schedule).__name__,
                reason,
            )
    return not reason


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


class StepInputs(NamedTuple):
    """The data of a step: arguments of the first stage, targets of the last, keyword arguments of
    each. With `lazy` lists that are filled while it runs, or None."""

    arguments: Any = ()
    target: Any = None
    lazy: bool = False
    keywords: Any = None


def run_schedule(
    schedule: Any,
    stages: Iterable[Any],
    given: StepInputs,
    losses: list[Any] | None,
    keywords: Mapping[str, Any],
) -> None:
    """One step of a schedule. `losses`: filled by the last stage, None elsewhere; `keywords`:
    arguments of each stage for the whole batch, which the schedule cuts up."""
    if given.lazy:
        run_lazily(schedule, stages, given, losses, keywords)
        return
    options: dict[str, Any] = options_of_step(schedule)
    if losses is not None:
        options |= {"target": given.target, "losses": losses}
    schedule.step(*given.arguments, **options, **(given.keywords or {}), **keywords)


def run_lazily(
    schedule: Any,
    stages: Iterable[Any],
    given: StepInputs,
    losses: list[Any] | None,
    keywords: Mapping[str, Any],
) -> None:
    """What schedule.step() does, with micro-batches that are made when they are needed."""
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    each: Any = given.keywords
    if keywords:
        _, cut = schedule._split_inputs((), dict(keywords))
        kept = given.keywords
        each = cut if kept is None else Lazily(len(cut), lambda n: {**kept[n], **cut[n]})
    options: dict[str, Any] = {
        "arg_mbs": given.arguments or None,
        "kwarg_mbs": each,
        "target_mbs": given.target,
        "losses": losses,
    }
    if "return_outputs" in inspect.signature(schedule._step_microbatches).parameters:
        options["return_outputs"] = False
    schedule._step_microbatches(**options)


def require_keywords(schedule: Any, keywords: Iterable[str]) -> None:
    """Raise ConfigError for arguments of stages that step() of the schedule takes for its own."""
    names = list(keywords)
    if not names:
        return
    own = [
        p.name
        for p in inspect.signature(schedule.step).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    ]
    taken = [name for name in names if name in own]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)}: a schedule's step() takes {', '.join(own)} for itself, and hooks "
            "give it what it needs. Rename the argument of your stages."
        )
