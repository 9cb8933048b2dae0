"""How much of a step each rank is idle, against what the schedule's own plan says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpstore.trainers.pipelining.schedule_plan import ScheduledWork, SchedulePlan, idle_shares, unit
from hpstore.trainers.pipelining.step_record import StepRecord

Json = Any  # Any: what is said between ranks


@dataclass(slots=True, kw_only=True)
class IdleTally:
    """Sums over the steps of one rank since the last report."""

    schedule_seconds: list[float] = field(default_factory=list)  # by step
    busy_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    copy_wait_seconds: float = 0.0
    save_seconds: float = 0.0
    hook_seconds: float = 0.0
    events: int = 0
    idle_bytes: int = 0
    busy_bytes: int = 0
    works: dict[str, tuple[int, float]] = field(default_factory=dict)  # "stage/kind": count, sum

    def add(self, record: StepRecord) -> None:
        """One step more."""
        self.schedule_seconds.append(record.schedule_seconds)
        self.busy_seconds += record.busy_seconds
        self.data_wait_seconds += record.data_wait_seconds
        self.copy_wait_seconds += record.copy_wait_seconds
        self.save_seconds += record.save_seconds
        self.hook_seconds += record.hook_seconds
        self.events += len(record.events)
        self.idle_bytes += record.idle_bytes
        self.busy_bytes += record.busy_bytes
        for event in record.events:
            name = f"{event.stage}/{event.kind}"
            count, total = self.works.get(name, (0, 0.0))
            self.works[name] = (count + 1, total + event.end - event.begin)

    def seconds_of(self, work: ScheduledWork) -> float | None:
        """Mean of a piece of work, as far as it was seen here."""
        found = self.works.get(f"{work.stage}/{work.kind}")
        return None if found is None else found[1] / found[0]

    def seconds_by_kind(self) -> dict[str, float]:
        """Mean seconds of this rank's work, taken for those of the other stages; {} before it has
        measured any."""
        kinds: dict[str, list[float]] = {}
        for name, (count, total) in self.works.items():
            kinds.setdefault(name.partition("/")[2], []).append(total / count)
        return {kind: sum(seen) / len(seen) for kind, seen in kinds.items()}

    def to_dict(self) -> dict[str, Json]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Json]) -> IdleTally:
        """Inverse of to_dict()."""
        works = {name: (int(count), float(total)) for name, (count, total) in raw["works"].items()}
        return cls(**{**raw, "works": works})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBubbles:
    """One rank. Shares are of the step's time, which is that of the slowest rank."""

    rank: int
    idle_share: float
    data_wait_share: float
    hook_seconds_per_event: float
    idle_bytes: int
    busy_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleReport:
    """How much of their steps the ranks of a pipeline were idle: PipelineHooks.bubbles().

    Attributes
    ----------
    steps
        Steps since the last report.
    step_seconds
        Mean seconds of a step in the schedule, of the slowest rank of each step.
    idle_share
        Mean over the ranks, of 0 .. 1.
    theory
        Mean idle share of the plan when a backward takes two forwards and all stages are alike.
        None without a plan.
    modelled
        Mean idle share of the plan with the mean times that were measured. None without a plan, and
        where some of its work was not measured.
    ranks
        One for each rank, in their order.
    """

    steps: int
    step_seconds: float
    idle_share: float  # mean over the ranks
    theory: float | None
    modelled: float | None
    ranks: tuple[RankBubbles, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        shown = ["-" if x is None else f"{x:.0%}" for x in (self.theory, self.modelled)]
        rows = [
            f"{self.steps} steps of {self.step_seconds * 1e3:.0f} ms: idle {self.idle_share:.0%}, "
            f"in theory {shown[0]}, with the measured times {shown[1]}"
        ]
        rows += [
            f"  rank {r.rank}: idle {r.idle_share:.0%}, data wait {r.data_wait_share:.1%}, "
            f"{r.idle_bytes / 1e6:.1f} MB copied while idle, {r.busy_bytes / 1e6:.1f} MB while "
            f"computing, {r.hook_seconds_per_event * 1e6:.0f} us an event"
            for r in self.ranks
        ]
        return "\n".join(rows)


def report_of(tallies: Mapping[int, IdleTally], plan: SchedulePlan | None) -> BubbleReport:
    """From the sums of the ranks of one pipeline, by rank. Their steps are the same ones."""
    steps = min(len(tally.schedule_seconds) for tally in tallies.values())
    by_step = [
        max(tally.schedule_seconds[n] for tally in tallies.values()) for n in range(steps)
    ]  # ranks of a pipeline work on one step together, though they enter and leave it one by one
    span = sum(by_step) or 1e-9
    ranks = [_rank(rank, tally, span) for rank, tally in sorted(tallies.items())]
    return BubbleReport(
        steps=steps,
        step_seconds=span / max(1, steps),
        idle_share=sum(r.idle_share for r in ranks) / len(ranks),
        theory=None if plan is None else mean_idle(plan, []),
        modelled=None if plan is None else mean_idle(plan, list(tallies.values())),
        ranks=tuple(ranks),
    )


def _rank(rank: int, tally: IdleTally, span: float) -> RankBubbles:
    return RankBubbles(
        rank=rank,
        idle_share=max(0.0, 1 - tally.busy_seconds / span),
        data_wait_share=tally.data_wait_seconds / span,
        hook_seconds_per_event=tally.hook_seconds / max(1, tally.events),
        idle_bytes=tally.idle_bytes,
        busy_bytes=tally.busy_bytes,
    )


def mean_idle(plan: SchedulePlan, tallies: Sequence[IdleTally]) -> float | None:
    """Mean idle share of a plan: with unit times, or with the means that ranks have measured.

    None when some of its work was not measured.
    """
    means: dict[tuple[int, str], float] = {}
    for works in plan.orders.values():
        for work in works:
            seen = [s for tally in tallies if (s := tally.seconds_of(work)) is not None]
            if tallies and not seen:
                return None
            means[work.stage, work.kind] = seen[0] if seen else unit(work)
    shares = idle_shares(plan.timeline(lambda work: means[work.stage, work.kind]))
    return sum(shares.values()) / len(shares)
