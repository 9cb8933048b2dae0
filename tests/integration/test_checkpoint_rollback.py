"""`ckpt.rollback()` (rule 24): later steps are hidden, kept for a time, and can be taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpstore
from hpstore.checkpoint.catalog.fence_record import fence_session
from hpstore.errors import CheckpointError, ConfigError, IntegrityError
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.rolled_back import RUN, checkpointer, held, save, state_of

run = rolled_back.run  # a fixture
both = rolled_back.both  # a fixture


@pytest.mark.usefixtures("both")
def test_later_steps_are_hidden_and_their_numbers_are_free(
    run: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """From all that lists, reads or restores; the run goes on with the same numbers."""
    with checkpointer(run) as ckpt:
        done = ckpt.rollback(2)
        assert (done.step, done.hidden) == (2, (3, 4))
        assert "went back to step 2: the later steps [3, 4] are hidden" in caplog.text
        assert (ckpt.steps(), ckpt.latest_valid()) == ([1, 2], 2)
        assert list(ckpt.watch(timeout=0.0)) == [1, 2]
        state = state_of(0.0)
        assert ckpt.restore(state) == 2
        with pytest.raises(CheckpointError, match="no checkpoint of step 4"):
            ckpt.read(4)
        save(ckpt, 3, 5, shift=0.5)
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.5, 5: 5.5}
        assert [found.name for found in ckpt.steps.rollbacks()] == [done.name]


@pytest.mark.usefixtures("both")
def test_it_can_be_taken_back(run: Pool) -> None:
    """Every byte of it; once."""
    with checkpointer(run) as ckpt:
        ckpt.rollback(2)
        assert ckpt.steps.undo_rollback().hidden == (3, 4)
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
        with pytest.raises(CheckpointError, match="none has hidden steps that are still kept"):
            ckpt.steps.undo_rollback()
        save(ckpt, 5)
        assert ckpt.steps.collect_garbage() == 0
        assert held(ckpt)[5] == 5.0


def test_nothing_later_is_nothing_to_hide(run: Pool) -> None:
    with checkpointer(run) as ckpt:
        before = set(run.list())
        assert ckpt.rollback(4).hidden == ()
        assert set(run.list()) == before | {f"{RUN}/writer"}
        assert ckpt.steps.rollbacks() == []


def test_a_run_that_went_on_is_not_mixed_with_what_was_hidden(run: Pool) -> None:
    """The undo is refused and disturbs no training; the new line can be hidden in its turn."""
    with checkpointer(run) as ckpt:
        first = ckpt.rollback(2)
        save(ckpt, 3, shift=0.5)
        with (
            checkpointer(run) as other,
            pytest.raises(CheckpointError, match=r"has committed the steps \[3\] since"),
        ):
            other.steps.undo_rollback()
        save(ckpt, 5, shift=0.5)  # it has its fence still
        assert ckpt.rollback(2).hidden == (3, 5)
        assert ckpt.steps.undo_rollback(first.name).hidden == (3, 4)
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
        with pytest.raises(CheckpointError, match=r"has committed the steps \[3, 4\] since"):
            ckpt.steps.undo_rollback()
        with pytest.raises(CheckpointError, match="no rollback 'other' under 'run'"):
            ckpt.steps.undo_rollback("other")


@pytest.mark.usefixtures("segments_apart")
def test_a_step_that_nothing_can_go_on_from_changes_nothing(run: Pool) -> None:
    """One that is not there or cannot be read: no step is hidden, no session loses the fence."""
    with checkpointer(run) as ckpt:
        save(ckpt, 5)
        session = fence_session(run, RUN)
        with checkpointer(run) as other:
            with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
                other.rollback(9)
            run.delete(other.steps.manifest(2).objects[-1].key)
            with pytest.raises(hpstore.errors.ObjectNotFound):
                other.rollback(2)
        assert ckpt.steps() == [1, 2, 3, 4, 5]
        assert fence_session(run, RUN) == session


def test_a_damaged_later_step_is_named_and_nothing_is_hidden(run: Pool) -> None:
    """It could not be taken back: to delete it is for the user to decide."""
    with checkpointer(run) as ckpt:
        run.put(f"{RUN}/step-{3:012d}/manifest", b"junk")
        with pytest.raises(IntegrityError, match="step-000000000003"):
            ckpt.rollback(2)
        assert ckpt.steps() == [1, 2, 3, 4]
        ckpt.delete(3)
        assert ckpt.rollback(2).hidden == (4,)


def test_protected_steps_are_hidden_by_force_alone(run: Pool) -> None:
    """And are protected again when they are back."""
    with checkpointer(run) as ckpt:
        ckpt.steps.protect(3, "best")
        ckpt.steps.protect(1, "first")
        with pytest.raises(CheckpointError, match="step 3 is protected as 'best'"):
            ckpt.rollback(2)
        assert ckpt.steps() == [1, 2, 3, 4]
        ckpt.rollback(2, force=True)
        assert ckpt.steps.protected() == {"first": 1}
        ckpt.steps.undo_rollback()
        assert ckpt.steps.protected() == {"first": 1, "best": 3}


def test_retention_forgets_the_step_that_was_hidden(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was left for later with step 4, which is not there to stand for older ones any more."""
    with checkpointer(pool, keep_last=3) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        ckpt.rollback(3)
        assert ckpt.steps() == [1, 2, 3]
        assert ckpt.counters["retentions_postponed_total"] == 0
    assert "older steps are kept" not in caplog.text


def test_wrong_arguments_and_read_only_pools_are_refused(run: Pool, tmp_path: Path) -> None:
    with checkpointer(run) as ckpt:
        for seconds in (-1, float("nan"), float("inf"), 10**400, 10**5000, "1", True, None):
            with pytest.raises(ConfigError, match="grace_seconds"):
                ckpt.rollback(2, grace_seconds=seconds)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="step"):
            ckpt.rollback(-1)
    with hpstore.open(tmp_path / "pool.toml", read_only=True) as reading:
        reader = checkpointer(reading)
        with pytest.raises(CheckpointError, match="read-only"):
            reader.rollback(2)
        assert reader.steps() == [1, 2, 3, 4]
