"""Plans of pipelines and ledgers of samples, against slow and obvious answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstore.loaders.sampling.order import GlobalOrder
from hpstore.trainers.pipelining.consumed_samples import Ledger, Span
from hpstore.trainers.pipelining.events import ComputeEvent
from hpstore.trainers.pipelining.idle_time import IdleTally, mean_idle, report_of
from hpstore.trainers.pipelining.schedule_plan import ScheduledWork, SchedulePlan, idle_shares
from hpstore.trainers.pipelining.step_record import StepRecord, slack_of

stages, microbatches = st.integers(1, 6), st.integers(1, 12)


def gpipe(count: int, mbs: int) -> SchedulePlan:
    """All forwards, then all backwards."""
    orders = {
        rank: tuple(ScheduledWork(rank, kind, mb) for kind in "FB" for mb in range(mbs))
        for rank in range(count)
    }
    return SchedulePlan(orders=orders, num_stages=count)


@given(stages, microbatches, st.floats(0.1, 5), st.floats(0.1, 5))
def test_gpipe_is_idle_for_k_minus_1_of_m_plus_k_minus_1(
    count: int, mbs: int, forward: float, backward: float
) -> None:
    """On every rank, whatever a forward and a backward take: (K - 1) / (M + K - 1)."""
    plan = gpipe(count, mbs)
    shares = idle_shares(plan.timeline(lambda w: forward if w.kind == "F" else backward))
    for share in shares.values():
        assert share == pytest.approx((count - 1) / (mbs + count - 1), abs=1e-9)
    assert mean_idle(plan, []) == pytest.approx((count - 1) / (mbs + count - 1), abs=1e-9)


@given(stages, microbatches)
def test_deadlines_of_gpipe_are_a_forward_apart(count: int, mbs: int) -> None:
    """The first stage needs micro-batch i after i forwards; its target K forwards later."""
    due = gpipe(count, mbs).deadlines()
    assert due.inputs == tuple(float(mb) for mb in range(mbs))
    assert due.targets == tuple(float(mb + count) for mb in range(mbs))


@given(stages, microbatches)
def test_a_timeline_does_everything_once_and_nothing_too_soon(count: int, mbs: int) -> None:
    """Each piece of work once, on one rank at a time, after what it waits for."""
    plan = gpipe(count, mbs)
    slots = {slot.work: slot for slot in plan.timeline()}
    assert len(slots) == 2 * count * mbs
    for work, slot in slots.items():
        before = ScheduledWork(work.stage - 1, "F", work.microbatch)
        after = ScheduledWork(work.stage + 1, "B", work.microbatch)
        if work.kind == "F" and work.stage:
            assert slots[before].end <= slot.begin
        if work.kind == "B":
            assert slots[ScheduledWork(work.stage, "F", work.microbatch)].end <= slot.begin
            assert work.stage == count - 1 or slots[after].end <= slot.begin
    for rank in plan.orders:
        mine = sorted((s.begin, s.end) for s in slots.values() if s.rank == rank)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))


def test_a_plan_that_waits_for_itself_is_refused() -> None:
    """A backward before the forward that it belongs to."""
    plan = SchedulePlan(
        orders={0: (ScheduledWork(0, "B", 0), ScheduledWork(0, "F", 0))}, num_stages=1
    )
    with pytest.raises(ValueError, match="nobody does"):
        plan.timeline()


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(0, 3))
def test_a_ledger_does_not_depend_on_how_samples_are_shared(cuts: list[int], epoch: int) -> None:
    """Any split of an epoch into steps and micro-batches, in any order, gives the same ledger."""
    order = GlobalOrder(60, 5)
    edges = sorted({0, 60, *cuts})
    spans = [Span(epoch=epoch, start=a, stop=b) for a, b in itertools.pairwise(edges)]
    whole = Ledger().after([Span(epoch=epoch, start=0, stop=60)], order)
    one_by_one = Ledger()
    for span in reversed(spans):
        one_by_one = one_by_one.after([span], order)
    assert Ledger().after(spans, order) == one_by_one == whole
    assert whole.samples == 60
    assert Ledger.from_dict(whole.to_dict()) == whole


@given(st.integers(0, 58), st.integers(0, 3))
def test_a_ledger_shows_a_sample_lost_and_one_read_twice(at: int, epoch: int) -> None:
    """One sample replaced by its neighbour: as many samples, another digest. Another epoch, too."""
    order = GlobalOrder(60, 5)

    class Wrong:
        def indices(self, epoch: int, start: int, stop: int) -> Any:
            ids = order.indices(epoch, start, stop)
            ids[at] = ids[at + 1]
            return ids

    span = Span(epoch=epoch, start=0, stop=60)
    right, wrong = Ledger().after([span], order), Ledger().after([span], Wrong())
    assert right.samples == wrong.samples
    assert right.digest != wrong.digest
    sequential = Ledger().after([span], None)
    assert sequential == right  # the same samples in another order
    assert Ledger().after([Span(epoch=epoch + 1, start=0, stop=60)], None) != sequential


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.booleans())
def test_slack_is_to_the_nearest_deadline(ready: list[float], first: bool) -> None:
    """Lazily each micro-batch has its own deadline; else all are needed at the begin."""
    due = gpipe(2, len(ready)).deadlines()
    times = due.inputs if first else due.targets
    found = slack_of(due, ready, 5.0, first=first, lazy=True)
    assert found == min(5.0 + times[n] - ready[n] for n in range(len(ready)))
    assert slack_of(due, ready, 5.0, first=first, lazy=False) == 5.0 - max(ready)
    assert slack_of(due, [], 5.0, first=first, lazy=True) is None


@given(st.integers(2, 4), st.integers(1, 6), st.floats(0.5, 2))
def test_a_report_of_a_perfect_run_shows_the_theory(count: int, mbs: int, unit: float) -> None:
    """Events exactly as planned: idle, theory and model are one number."""
    plan = gpipe(count, mbs)
    slots = plan.timeline(lambda w: unit if w.kind == "F" else 2 * unit)
    tallies = {rank: IdleTally() for rank in plan.orders}
    span = max(slot.end for slot in slots)
    for rank, tally in tallies.items():
        events = tuple(
            ComputeEvent(
                stage=s.work.stage,
                kind=s.work.kind,
                microbatch=s.work.microbatch,
                begin=s.begin,
                end=s.end,
            )
            for s in slots
            if s.rank == rank
        )
        for _ in range(3):
            tally.add(record(events, span))
        assert IdleTally.from_dict(tally.to_dict()) == tally
    found = report_of(tallies, plan)
    assert found.steps == 3
    assert found.step_seconds == pytest.approx(span)
    for value in (found.idle_share, found.modelled):
        assert value == pytest.approx(found.theory, abs=1e-6)


def record(events: tuple[ComputeEvent, ...], seconds: float) -> StepRecord:
    """A step with these events."""
    return StepRecord(
        step=0,
        losses=(),
        events=events,
        microbatches=1,
        schedule_seconds=seconds,
        data_wait_seconds=0,
        late_microbatches=0,
        copy_wait_seconds=0,
        save_seconds=0,
        hook_seconds=0,
        idle_bytes=0,
        busy_bytes=0,
        saved=None,
    )


def test_hashes_of_samples_spread() -> None:
    """Neighbouring samples and epochs differ in about half of the bits."""
    from hpstore.trainers.pipelining.consumed_samples import hashes

    words = hashes(0, np.arange(1000, dtype=np.int64))
    flips = [int(a ^ b).bit_count() for a, b in itertools.pairwise(words.tolist())]
    assert 30 < np.mean(flips) < 34
    assert len(set(words.tolist()) | set(hashes(1, np.arange(1000)).tolist())) == 2000
