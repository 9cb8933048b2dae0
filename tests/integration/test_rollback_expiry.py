"""Hidden steps go after their time; one process decides whether they go or come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpstore.checkpoint.catalog import rollback
from hpstore.errors import CheckpointError, VersionConflict
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.rolled_back import RUN, WEEK_MS, checkpointer, held, save
from tests.integration.test_checkpoint_crashes import before_put

run = rolled_back.run  # a fixture
clock = rolled_back.clock  # a fixture


@pytest.mark.usefixtures("segments_apart")
def test_hidden_steps_go_after_their_time(run: Pool, clock: Callable[[int], None]) -> None:
    """Not before it, nor by a clock that went back; then all of them, and nothing else."""
    with checkpointer(run) as ckpt:
        assert ckpt.rollback(2).until_ms == 11 * WEEK_MS
        for now in (11 * WEEK_MS - 1, 0):
            clock(now)
            assert ckpt.steps.collect_garbage() == 0
            checkpointer(run).close()
            assert len(ckpt.steps.rollbacks()) == 1
        clock(11 * WEEK_MS)
        checkpointer(run).close()
        assert ckpt.steps.rollbacks() == []
        with pytest.raises(CheckpointError, match="none has hidden steps that are still kept"):
            ckpt.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0}
        named = {s.key for step in (1, 2) for s in ckpt.steps.manifest(step).objects}
        keys = run.list(RUN)
        assert {key for key in keys if "/segment-" in key} == named
        assert not [key for key in keys if "/rolled-back/" in key]


@pytest.mark.usefixtures("segments_apart")
def test_a_training_removes_them_after_its_saves(run: Pool, clock: Callable[[int], None]) -> None:
    """Where retention runs; it is one that goes on for longer than the time."""
    with checkpointer(run, keep_last=3) as ckpt:
        ckpt.rollback(2)
        clock(12 * WEEK_MS)
        save(ckpt, 3, shift=0.5)
        ckpt.saver.flush()
        assert ckpt.steps.rollbacks() == []
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.5}
        named = {s.key for step in (1, 2, 3) for s in ckpt.steps.manifest(step).objects}
        assert {key for key in run.list(RUN) if "/segment-" in key} == named


@pytest.mark.usefixtures("segments_apart")
def test_copies_of_what_was_taken_back_go_and_the_steps_stay(
    run: Pool, clock: Callable[[int], None]
) -> None:
    with checkpointer(run) as ckpt:
        ckpt.rollback(2)
        ckpt.steps.undo_rollback()
        clock(12 * WEEK_MS)
        ckpt.steps.collect_garbage()
        assert not [key for key in run.list(RUN) if "/rolled-back/" in key]
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


@pytest.mark.usefixtures("segments_apart")
def test_one_process_decides_whether_it_goes_or_comes_back(
    run: Pool, clock: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over while it is taken back: either is whole, never a step without segments."""
    with checkpointer(run) as ckpt, checkpointer(run) as other:
        ckpt.rollback(2)
        moved = rollback._moved

        def expiring(*args: Any) -> Any:
            monkeypatch.setattr(rollback, "_moved", moved)
            clock(12 * WEEK_MS)
            other.steps.collect_garbage()
            return moved(*args)

        monkeypatch.setattr(rollback, "_moved", expiring)
        with pytest.raises(VersionConflict):
            ckpt.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0}


@pytest.mark.usefixtures("segments_apart")
def test_what_is_being_removed_is_not_taken_back(
    run: Pool, clock: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undo comes in the middle of the removal: it would commit what has no segments soon."""
    with checkpointer(run) as ckpt, checkpointer(run) as other:
        ckpt.rollback(2)
        clock(12 * WEEK_MS)
        remove = rollback._remove

        def removing(*args: Any) -> None:
            with pytest.raises(CheckpointError, match="none has hidden steps that are still kept"):
                ckpt.steps.undo_rollback()
            remove(*args)

        monkeypatch.setattr(rollback, "_remove", removing)
        other.steps.collect_garbage()
        assert ckpt.steps.rollbacks() == []
        assert held(ckpt) == {1: 1.0, 2: 2.0}


@pytest.mark.usefixtures("segments_apart")
def test_what_is_being_taken_back_never_expires(
    run: Pool, clock: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was stopped for longer than the time that was left."""
    with checkpointer(run) as ckpt, checkpointer(run) as other:
        ckpt.rollback(2)

        def expired() -> None:
            clock(12 * WEEK_MS)
            other.steps.collect_garbage()

        before_put(run, "step-000000000004/manifest", expired)
        ckpt.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
