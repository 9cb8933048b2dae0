"""Pipelines of real processes that die and go on: same losses, no sample lost or read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpstore.trainers.pipelining import SCHEDULES, stages_of
from hpstore.trainers.pipelining.schedules import ONE_STAGE
from tests.integration.ranks import make_pool, open_pool
from tests.thorough import LONG
from tests.trainers.deaths import POINTS
from tests.trainers.pipelines import write_samples
from tests.trainers.runs import Run, order_of, require_each_sample_once, require_same_losses

STEPS = 14  # an epoch and a bit more
SAVED = 3  # the step behind which the second save begins, counted from 0
only_long = pytest.mark.skipif(not LONG, reason="the whole matrix: HPSTORE_LONG_TESTS=1")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with the data set in it."""
    path = tmp_path_factory.mktemp("pipelines")
    make_pool(path)
    with open_pool(path) as pool:
        write_samples(pool)
    return path


@pytest.fixture(scope="module")
def whole(prepared: Path) -> Run:
    """Two stages that nobody stops."""
    run = Run(prepared, "whole")
    assert run.go(2, "1f1b", STEPS) == 0
    require_each_sample_once(run.steps(), STEPS)
    return run


def require_as_if_nothing_had_happened(run: Run, whole: Run, *, exact_to: float = 0.0) -> None:
    """Losses and samples."""
    found = run.steps()
    require_each_sample_once(found, STEPS)
    require_same_losses(found, whole.steps(), exact_to=exact_to)


@pytest.mark.parametrize(
    "death",
    [
        pytest.param("4 0 F 2", id="first stage, forward"),
        pytest.param("4 1 B 1", id="last stage, backward", marks=only_long),
    ],
)
def test_a_killed_pipeline_goes_on_where_it_was_committed(
    prepared: Path, whole: Run, death: str
) -> None:
    """SIGKILL of a stage in the middle of step 4: the next job resumes at the newest commit with as
    many stages, bit by bit as if nothing had happened; samples lost = repeated = 0."""
    victim = int(death.split()[1])
    run = Run(prepared, f"cut-{victim}")
    run.go(2, "1f1b", STEPS, death=death, killed=(victim,), settle=True)
    assert list(run.steps()) == [0, 1, 2, 3]
    assert run.go(2, "1f1b", STEPS) == 4
    require_as_if_nothing_had_happened(run, whole)


def test_three_stages_go_on_as_one_and_as_four(prepared: Path, whole: Run) -> None:
    """Committed by three stages, of which one gets no data, resumed by one, then by four on two
    ranks: the names of all stages are those of the whole model, so nothing is converted."""
    run = Run(prepared, "moved")
    run.go(3, "gpipe", 2)
    assert run.go(1, "gpipe", 4) == 2
    assert run.go(2, "zbv", STEPS) == 4
    require_as_if_nothing_had_happened(run, whole, exact_to=1e-6)


# --- a save that is cut -------------------------------------------------------------------------


@only_long
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "last stage"])
def test_a_save_that_is_cut_is_there_as_a_whole_or_not_at_all(
    prepared: Path, whole: Run, victim: int, point: str
) -> None:
    """SIGKILL of rank 0, and of the last stage, at each line between the optimizer's step and the
    commit: the job resumes at the save before; behind the manifest's put, at this one (PROTOCOL 18,
    20). Keys, samples and losses are those of the run that nobody stopped."""
    if victim and point in ("planned", "published"):
        pytest.skip("the manifest is rank 0's")
    run = Run(prepared, f"save-{victim}-{point}")
    run.go(2, "1f1b", STEPS, death=f"{SAVED} {victim} {point}", killed=(victim,), settle=True)
    assert run.committed() == ([2, 4] if point == "published" else [2])
    assert run.go(2, "1f1b", STEPS) == (4 if point == "published" else 2)
    require_as_if_nothing_had_happened(run, whole)


# --- death in the midst of a step ---------------------------------------------------------------


@only_long
@pytest.mark.timeout(600)
def test_every_micro_batch_of_every_stage_may_be_the_last(prepared: Path, whole: Run) -> None:
    """1F1B, killed behind each forward and each backward of step 3, sixteen times in one run, then
    let go."""
    run = Run(prepared, "each")
    for stage in (0, 1):
        for kind in "FB":
            for microbatch in range(4):
                death = f"3 {stage} {kind} {microbatch}"
                assert run.go(2, "1f1b", STEPS, death=death, killed=(stage,), settle=True) in (0, 2)
                assert run.committed() == [2]
    assert run.go(2, "1f1b", STEPS) == 2
    require_as_if_nothing_had_happened(run, whole)


@only_long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("snapshot", ["free", "bubbles", "inline"])
def test_death_anywhere_in_a_step_loses_nothing(prepared: Path, name: str, snapshot: str) -> None:
    """Every kind of schedule x every way to copy, fed lazily: SIGKILL of the first, a middle and
    the last stage behind the first, a middle and the last micro-batch, forward and backward, while
    the save before may be under way; five times in one run."""
    options: dict[str, Any] = {"snapshot": snapshot, "lazy": True}
    whole, run = (Run(prepared, f"{kind}-{name}-{snapshot}") for kind in ("whole", "cut"))
    whole.go(2, name, STEPS, **options)
    last = (2 if name in ONE_STAGE else 4) - 1
    for step, stage, kinds, microbatch in (
        (2, 0, "F", 0),
        (4, last, "BI", 3),
        (7, last // 2, "BI", 1),
        (8, last, "F", 2),
        (11, 0, "BIW", 3),
    ):
        victim = next(rank for rank in range(2) if stage in stages_of(name, rank, 2))
        death = f"{step} {stage} {kinds} {microbatch}"
        run.go(2, name, STEPS, death=death, killed=(victim,), **options)
    run.go(2, name, STEPS, **options)
    require_as_if_nothing_had_happened(run, whole)


# --- resumed in another shape -------------------------------------------------------------------


@only_long
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_with_what_two_stages_have_saved(
    prepared: Path, whole: Run, name: str
) -> None:
    """And two stages with what it has saved."""
    run = Run(prepared, f"between-{name}")
    run.go(2, "1f1b", 4)
    assert run.go(2, name, 8) == 4
    assert run.go(2, "1f1b", STEPS) == 8
    require_as_if_nothing_had_happened(run, whole, exact_to=1e-6)


@only_long
def test_the_same_step_in_other_micro_batches_has_the_same_loss(prepared: Path, whole: Run) -> None:
    """4 of 2 samples, then 2 of 4, then 8 of 1: the same samples a step, so the same losses but for
    rounding."""
    run = Run(prepared, "cut-otherwise")
    run.go(2, "1f1b", 4)
    assert run.go(2, "1f1b", 8, microbatches=2, rows=4) == 4
    assert run.go(2, "gpipe", STEPS, microbatches=8, rows=1) == 8
    require_as_if_nothing_had_happened(run, whole, exact_to=1e-6)


@only_long
def test_more_micro_batches_are_larger_steps_that_lose_no_sample(
    prepared: Path, whole: Run
) -> None:
    """4 of 2 samples, then 6 of 2: a larger batch, so other losses from there on, as with any
    trainer; but each sample once, and the ledger says so."""
    run = Run(prepared, "larger")
    run.go(2, "1f1b", 4)
    assert run.go(2, "1f1b", STEPS, microbatches=6) == 4
    found, wanted = run.steps(), whole.steps()
    require_each_sample_once(found, STEPS)
    assert sum(len(step.ids) for step in found.values()) == 4 * 8 + 10 * 12
    assert [found[step].ids for step in range(4)] == [wanted[step].ids for step in range(4)]
    assert list(found[4].ids) == order_of(44)[32:]
    assert all(found[step].loss == wanted[step].loss for step in range(4))
    assert abs(found[5].loss - wanted[5].loss) > 1e-6


@only_long
def test_another_world_size_goes_on_with_the_same_samples(prepared: Path, whole: Run) -> None:
    """One pipeline of two ranks, then two of them on four ranks, then two of one rank each: each
    step has the same samples, dealt out to the replicas, and the same loss."""
    run = Run(prepared, "replicas")
    run.go(2, "1f1b", 4)
    assert run.go(4, "1f1b", 8, replicas=2, microbatches=2) == 4
    assert run.go(2, "gpipe", 10, replicas=2, microbatches=2) == 8
    assert run.go(2, "gpipe", STEPS) == 10
    require_as_if_nothing_had_happened(run, whole, exact_to=1e-6)
