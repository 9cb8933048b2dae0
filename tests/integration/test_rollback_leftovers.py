"""Rollbacks and older versions, damaged records, copies and notes that are left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpstore
from hpstore.checkpoint.catalog import rollback
from hpstore.checkpoint.catalog.hidden_steps import HiddenSteps
from hpstore.checkpoint.catalog.writer_fence import Heartbeat
from hpstore.errors import CheckpointError, VersionConflict
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.rolled_back import EVERY, RUN, WEEK_MS, checkpointer, held, save
from tests.integration.test_checkpoint_crashes import before_put

run = rolled_back.run  # a fixture
between = rolled_back.between  # a fixture
clock = rolled_back.clock  # a fixture


@pytest.mark.usefixtures("segments_apart")
def test_an_older_collector_takes_only_what_can_be_taken_back(
    run: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of no hidden steps: their segments are garbage to it. The undo says so, and nothing
    that is committed is touched."""
    with checkpointer(run) as ckpt:
        ckpt.rollback(2)
        with monkeypatch.context() as older:
            older.setattr(HiddenSteps, "segments", lambda _: set())
            assert ckpt.steps.collect_garbage() > 0
        with pytest.raises(CheckpointError, match="none of the steps that were hidden can be"):
            ckpt.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0}


def test_one_lost_copy_does_not_keep_the_others_from_coming_back(
    run: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with checkpointer(run) as ckpt:
        done = ckpt.rollback(2)
        run.delete(f"{RUN}/rolled-back/{done.name}/step-{3:012d}")
        assert ckpt.steps.undo_rollback().hidden == (4,)
        assert ckpt.steps() == [1, 2, 4]
        assert "steps [3] under 'run' could not be taken back" in caplog.text


def test_a_damaged_record_keeps_no_other_from_its_way(
    run: Pool, clock: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once and passed over; what others keep comes back, or goes."""
    with checkpointer(run) as ckpt:
        run.put(f"{RUN}/rolled-back/{'0' * 16}/record", b"junk")
        ckpt.rollback(3)
        assert ckpt.steps.undo_rollback().hidden == (4,)
        assert len(ckpt.steps.rollbacks()) == 1
        clock(12 * WEEK_MS)
        assert ckpt.steps.collect_garbage() == 0
        assert ckpt.steps.rollbacks() == []
        assert held(ckpt) == EVERY
        assert caplog.text.count("a rollback is passed over") == 1


@pytest.mark.usefixtures("segments_apart")
def test_copies_without_a_record_are_left_over(run: Pool) -> None:
    """They would keep their segments for ever."""
    with checkpointer(run) as ckpt:
        done = ckpt.rollback(2)
        ckpt.rollback(1)
        run.delete(f"{RUN}/rolled-back/{done.name}/record")
        ckpt.steps.collect_garbage()
        assert not [key for key in run.list(RUN) if f"/{done.name}/" in key]
        named = {s.key for step in (1,) for s in ckpt.steps.manifest(step).objects}
        hidden = ckpt.steps._catalog.hidden.segments()
        assert {key for key in run.list(RUN) if "/segment-" in key} == named | hidden
        ckpt.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0}


@pytest.mark.usefixtures("segments_apart")
def test_a_rollback_that_begins_under_the_look_of_a_collector_keeps_its_copies(run: Pool) -> None:
    """The collector's listing has copies, but not yet the record, which was put before them."""
    with checkpointer(run) as ckpt, checkpointer(run) as other:
        hidden = other.steps._catalog.hidden
        look = hidden.look

        def torn() -> dict[str, str]:
            ckpt.rollback(2)
            return {key: version for key, version in look().items() if "record" not in key}

        hidden.look = torn  # type: ignore[method-assign]
        other.steps.collect_garbage()
        assert ckpt.steps.undo_rollback().hidden == (3, 4)
        assert held(ckpt) == EVERY


def test_a_note_that_this_process_has_left_ends_no_rollback(run: Pool) -> None:
    """The delete of it failed after a save; the process lives on, so its note never ages."""
    with checkpointer(run) as ckpt:
        save(ckpt, 5)
        note = Heartbeat(
            run,
            RUN,
            6,
            "ab" * 8,
            ckpt.saver.session,
            (),
            manifest=f"{RUN}/step-{6:012d}/manifest",
            replaces=False,
        )
        note.fade()
        assert ckpt.rollback(2).hidden == (3, 4, 5)
        assert not [key for key in run.list(RUN) if "/attempts/" in key]


@pytest.fixture
def half_back(run: Pool, clock: Callable[[int], None], between: Callable[..., None]) -> str:
    """An undo that was killed after step 3; the run went on with its own 4 and 5. Its time ends at
    11 weeks."""
    del clock

    def killed() -> None:
        raise KeyboardInterrupt

    with checkpointer(run) as ckpt:
        done = ckpt.rollback(2)
        before_put(run, "step-000000000004/manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            ckpt.steps.undo_rollback()
        assert ckpt.steps() == [1, 2, 3]
    return done.name


@pytest.mark.usefixtures("segments_apart", "half_back")
def test_an_undo_that_was_killed_expires_when_the_run_went_on(
    run: Pool, clock: Callable[[int], None]
) -> None:
    """It is refused from then on; before that it stays, however long."""
    clock(12 * WEEK_MS)
    with checkpointer(run) as ckpt:
        assert len(ckpt.steps.rollbacks()) == 1
        save(ckpt, 4, 5, shift=0.5)
        ckpt.steps.collect_garbage()
        assert ckpt.steps.rollbacks() == []
        assert not [key for key in run.list(RUN) if "/rolled-back/" in key]
        assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.5, 5: 5.5}


@pytest.mark.usefixtures("segments_apart")
@pytest.mark.parametrize("looked", [False, True])
def test_an_undo_that_was_stopped_for_long_commits_nothing_without_segments(
    run: Pool,
    clock: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    looked: bool,
) -> None:
    """The run went on and its record expired under it (rule 24): before its look under the claim,
    or after that, when the put is barred."""
    with (
        hpstore.open(tmp_path / "pool.toml") as pool,
        checkpointer(pool) as undoing,
        checkpointer(run) as ckpt,
    ):
        undoing.rollback(2)
        require = rollback._require_returning

        def went_on(*args: Any) -> None:
            monkeypatch.setattr(rollback, "_require_returning", require)
            if looked:
                require(*args)
            save(ckpt, 5, shift=0.5)
            clock(12 * WEEK_MS)
            ckpt.steps.collect_garbage()
            assert ckpt.steps.rollbacks() == []
            if not looked:
                require(*args)

        monkeypatch.setattr(rollback, "_require_returning", went_on)
        with pytest.raises((VersionConflict, CheckpointError)):
            undoing.steps.undo_rollback()
        assert held(ckpt) == {1: 1.0, 2: 2.0, 5: 5.5}
