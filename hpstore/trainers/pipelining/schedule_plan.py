"""The order of work that a schedule announces, and what follows from it. Pure.

Times are computed by playing the plan: a rank does its work in its own order, each piece as soon as
what it needs is there. Messages cost nothing here, so a bubble of the plan is the least there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Seconds = Callable[["ScheduledWork"], float]
UNIT_SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward is two forwards


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """One piece: `kind` is F, B, I or W (events.py)."""

    stage: int
    kind: str
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSlot:
    """A piece of work with its time, in seconds from the step's begin."""

    rank: int
    work: ScheduledWork
    begin: float
    end: float


def unit(work: ScheduledWork) -> float:
    """A forward is 1, a backward 2, each of its halves 1."""
    return UNIT_SECONDS[work.kind]


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """What each rank of a pipeline does in one step, in order."""

    orders: Mapping[int, tuple[ScheduledWork, ...]]
    num_stages: int

    @classmethod
    def of(cls, orders: Mapping[int, Iterable[Any]], num_stages: int) -> SchedulePlan:
        """From the `pipeline_order` of a schedule of torch: actions, None for idle slots."""
        works = {rank: _numbered(_works(actions)) for rank, actions in orders.items()}
        return cls(orders=works, num_stages=num_stages)

    def timeline(self, seconds: Seconds = unit) -> list[PlanSlot]:
        """When what is done. Raises ValueError for a plan that stops halfway."""
        begins, ends = self._times(seconds)
        return [
            PlanSlot(rank=rank, work=work, begin=begin, end=end)
            for (rank, work, _), begin, end in zip(self._sequence, begins, ends, strict=True)
        ]

    def _times(self, seconds: Seconds) -> tuple[list[float], list[float]]:
        """Begin and end of each piece of work, in the order of _sequence."""
        begins, ends = list[float](), list[float]()
        free = dict.fromkeys(self.orders, 0.0)
        for rank, work, before in self._sequence:
            begin = free[rank]
            for earlier in before:
                begin = max(begin, ends[earlier])
            begins.append(begin)
            free[rank] = begin + seconds(work)
            ends.append(free[rank])
        return begins, ends

    @cached_property
    def _sequence(self) -> list[tuple[int, ScheduledWork, tuple[int, ...]]]:
        """Rank, work and the places in this list of what it waits for; those come earlier. It does
        not depend on times, so that steps with new ones need not find it again."""
        places: dict[ScheduledWork, int] = {}
        backward = self._backward()
        at = dict.fromkeys(self.orders, 0)
        found: list[tuple[int, ScheduledWork, tuple[int, ...]]] = []
        moved = True
        while moved:
            moved = False
            for rank, works in self.orders.items():
                while at[rank] < len(works):
                    work = works[at[rank]]
                    needed = self._before(work, backward)
                    if any(before not in places for before in needed):
                        break
                    places[work] = len(found)
                    found.append((rank, work, tuple(places[before] for before in needed)))
                    at[rank] += 1
                    moved = True
        if any(at[rank] < len(works) for rank, works in self.orders.items()):
            raise ValueError("the plan waits for work that nobody does")
        return found

    def _before(
        self, work: ScheduledWork, backward: Mapping[tuple[int, int], str]
    ) -> list[ScheduledWork]:
        """What a piece of work waits for."""
        stage, mb = work.stage, work.microbatch
        if work.kind == "F":
            return [ScheduledWork(stage - 1, "F", mb)] if stage else []
        if work.kind == "W":
            return [ScheduledWork(stage, "I", mb)]
        needed = [ScheduledWork(stage, "F", mb)]
        if stage + 1 < self.num_stages:
            needed.append(ScheduledWork(stage + 1, backward[stage + 1, mb], mb))
        return needed

    def _backward(self) -> Mapping[tuple[int, int], str]:
        """By (stage, micro-batch): whether its backward is B or I."""
        return {
            (w.stage, w.microbatch): w.kind
            for works in self.orders.values()
            for w in works
            if w.kind in "BI"
        }

    def deadlines(self, seconds: Seconds = unit) -> Deadlines:
        """When each micro-batch is needed."""
        begins, ends = self._times(seconds)
        last, inputs, targets = self.num_stages - 1, dict[int, float](), dict[int, float]()
        for (_, work, _), begin, end in zip(self._sequence, begins, ends, strict=True):
            if work.kind == "F" and work.stage == 0:
                inputs[work.microbatch] = begin
            if work.kind == "F" and work.stage == last:
                targets[work.microbatch] = end
        count = 1 + max(work.microbatch for _, work, _ in self._sequence)
        return Deadlines(
            inputs=tuple(inputs[mb] for mb in range(count)),
            targets=tuple(targets[mb] for mb in range(count)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """By micro-batch, seconds from the step's begin: when the first stage needs its input, and
    when the last one has computed what its target is compared with."""

    inputs: tuple[float, ...]
    targets: tuple[float, ...]


def _works(actions: Iterable[Any]) -> Iterable[ScheduledWork]:
    """Compute actions; those that two directions share are taken apart. Older torch has no
    `sub_actions`, and numbers for values of the kinds, which it writes as newer ones do."""
    for action in actions:
        if action is None:
            continue
        if getattr(action, "sub_actions", None) is not None:
            yield from _works(action.sub_actions)
            continue
        named = action.computation_type
        kind = named.value if isinstance(named.value, str) else str(named)
        if kind in UNIT_SECONDS and action.microbatch_index is not None:
            yield ScheduledWork(action.stage_index, kind, action.microbatch_index)


def _numbered(works: Iterable[ScheduledWork]) -> tuple[ScheduledWork, ...]:
    """Forwards counted from 0: torch 2.13 announces F1 .. FM for the last stage of 1F1B, and runs
    F0 .. F(M-1)."""
    found = tuple(works)
    first: dict[int, int] = {}
    for work in found:
        if work.kind == "F":
            first[work.stage] = min(work.microbatch, first.get(work.stage, work.microbatch))
    return tuple(
        ScheduledWork(w.stage, "F", w.microbatch - first[w.stage]) if w.kind == "F" else w
        for w in found
    )


def idle_shares(slots: Sequence[PlanSlot]) -> dict[int, float]:
    """By rank: the share of the step in which it computes nothing."""
    span = max(slot.end for slot in slots) - min(slot.begin for slot in slots)
    busy: dict[int, float] = {}
    for slot in slots:
        busy[slot.rank] = busy.get(slot.rank, 0.0) + slot.end - slot.begin
    return {rank: 1 - used / span for rank, used in sorted(busy.items())}
