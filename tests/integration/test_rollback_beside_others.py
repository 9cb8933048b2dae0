"""Rollbacks beside other processes: savers, collectors, watches, ranks, protections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.catalog import rollback
from hpstore.checkpoint.catalog.hidden_steps import Rollback
from hpstore.checkpoint.catalog.segment_safety import require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.format.checkpoint_manifest import Listing, Manifest
from hpstore.errors import CheckpointError, DeviceTimeout, RedundancyError, VersionConflict
from hpstore.pool.pool import Pool
from tests.integration import rolled_back
from tests.integration.ranks import launch, make_pool
from tests.integration.rolled_back import EVERY, RUN, SIZE, checkpointer, held, save, state_of
from tests.integration.test_checkpoint_crashes import before_put

run = rolled_back.run  # a fixture
both = rolled_back.both  # a fixture
between = rolled_back.between  # a fixture
clock = rolled_back.clock  # a fixture


@pytest.mark.usefixtures("both")
def test_the_old_line_commits_nothing_more(run: Pool, tmp_path: Path) -> None:
    """A trainer that still runs fails at its next save; what it has committed is hidden."""
    with hpstore.open(tmp_path / "pool.toml") as pool, checkpointer(pool) as old:
        save(old, 5)
        with checkpointer(run) as ckpt:
            ckpt.rollback(2)
            with pytest.raises(VersionConflict, match="another checkpointer"):
                old.save(6, state_of(6.0)).result()
            assert ckpt.steps() == [1, 2]
            save(ckpt, 3, shift=0.5)
            assert held(ckpt) == {1: 1.0, 2: 2.0, 3: 3.5}


@pytest.mark.usefixtures("both")
def test_a_save_in_the_middle_of_its_commit_is_ended_or_hidden(run: Pool, tmp_path: Path) -> None:
    """The rollback comes right before the manifest of the old line is put."""
    with (
        hpstore.open(tmp_path / "pool.toml") as pool,
        checkpointer(pool) as old,
        checkpointer(run) as ckpt,
    ):
        save(old, 5)
        before_put(pool, "step-000000000006/manifest", lambda: ckpt.rollback(2))
        with pytest.raises((VersionConflict, CheckpointError)):
            old.save(6, state_of(6.0)).result()
        assert ckpt.steps() == [1, 2]
        assert ckpt.steps.rollbacks()[-1].hidden == (3, 4, 5)


def test_a_save_that_cannot_be_ended_keeps_all_as_it_is(run: Pool) -> None:
    """It might commit a later step after the rollback."""
    with checkpointer(run) as ckpt:
        run.put(f"{RUN}/attempts/000000000005-00ff", b"who knows")
        with pytest.raises(CheckpointError, match=r"saves of the steps \[5\] .* may be under way"):
            ckpt.rollback(2)
        assert ckpt.steps() == [1, 2, 3, 4]
        assert ckpt.steps.rollbacks() == []


@pytest.mark.usefixtures("segments_apart")
def test_what_hidden_steps_name_stays(run: Pool) -> None:
    """Rule 24: deletes, retention and garbage collection of the new line leave their segments."""
    with checkpointer(run) as ckpt:
        ckpt.rollback(3)
    with checkpointer(run, keep_last=1) as ckpt:
        assert ckpt.restore(state_of(0.0)) == 3
        save(ckpt, 10, 11, shift=0.5)
        assert ckpt.steps() == [11]
        assert ckpt.steps.collect_garbage() == 0
        ckpt.delete(11)
        ckpt.steps.undo_rollback()
        assert held(ckpt) == {4: 4.0}


@pytest.mark.usefixtures("segments_apart")
@pytest.mark.parametrize("back", [False, True])
def test_no_moment_of_a_move_leaves_a_segment_unnamed(pool: Pool, back: bool) -> None:
    """Rule 24: another process deletes step 1, to which step 3 alone refers, while that is hidden
    or taken back between its looks."""
    with checkpointer(pool) as ckpt, checkpointer(pool) as other:
        save(ckpt, 1)
        ckpt.save(2, {"free": torch.zeros(SIZE)}).result()
        ckpt.restore(state_of(0.0), 1)
        assert ckpt.save(3, state_of(3.0)).result().referenced_bytes == 4 * SIZE
        if back:
            ckpt.rollback(2)
        catalog: StepCatalog = other.steps._catalog
        listing, moved = catalog.listing, list[Rollback]()

        def moving() -> Listing:
            """Steps are listed just before they come back, or just after they are hidden."""
            if back and not moved:
                found = listing()
                moved.append(ckpt.steps.undo_rollback())
                return found
            if not moved:
                moved.append(ckpt.rollback(2))
            return listing()

        catalog.listing = moving  # type: ignore[method-assign]
        other.delete(1)
        assert moved
        if not back:
            ckpt.steps.undo_rollback()
        assert ckpt.verify(3).ok
        assert ckpt.restore(state_of(0.0)) == 3


def test_a_watch_passes_over_what_was_hidden_and_gives_nothing_twice(run: Pool) -> None:
    with checkpointer(run) as ckpt, checkpointer(run) as other:
        found = other.watch(timeout=0.0)
        assert [next(found), next(found), next(found)] == [1, 2, 3]
        ckpt.rollback(2)
        assert list(found) == []


def _job(rank: int, world: int, directory: Path) -> None:
    """Both ranks go back together, and save on."""
    with hpstore.open(directory / "pool.toml") as pool, Checkpointer(pool, RUN) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"n": step, "own": ckpt.per_rank(rank)}).result()
        with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
            ckpt.rollback(9)
        done = ckpt.rollback(1)
        assert isinstance(done, Rollback)
        assert done.hidden == (2, 3)
        state = {"n": 0, "own": ckpt.per_rank(-1)}
        assert ckpt.restore(state) == 1
        ckpt.save(2, {"n": 20, "own": ckpt.per_rank(rank)}).result()
        assert ckpt.steps() == [1, 2]


def test_ranks_go_back_together(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 2, _job)


def test_a_target_that_is_removed_before_others_are_hidden_ends_it(
    run: Pool, between: Callable[..., None]
) -> None:
    """By the retention of the old line, which looked at the fence before that was taken."""
    with checkpointer(run) as ckpt:
        between("_copy", 3, lambda: StepCatalog(run, RUN).delete(2))
        with pytest.raises(CheckpointError, match=r"step 2 was removed .* Nothing was hidden"):
            ckpt.rollback(2)
        assert held(ckpt) == {1: 1.0, 3: 3.0, 4: 4.0}
        assert not [key for key in run.list(RUN) if "/rolled-back/" in key]


@pytest.mark.usefixtures("both")
def test_a_target_that_is_removed_while_others_are_hidden_is_no_success(
    run: Pool, between: Callable[..., None]
) -> None:
    """What was hidden can be taken back, by the name in the error."""
    with checkpointer(run) as ckpt:
        between("_remove_original", 3, lambda: StepCatalog(run, RUN).delete(2))
        with pytest.raises(
            CheckpointError, match=r"step 2 was removed .* brings them back"
        ) as told:
            ckpt.rollback(2)
        name = ckpt.steps.rollbacks()[-1].name
        assert f"undo_rollback('{name}')" in str(told.value)
        assert ckpt.steps.undo_rollback(name).hidden == (3, 4)
        assert held(ckpt) == {1: 1.0, 3: 3.0, 4: 4.0}


def test_a_record_that_expires_before_steps_are_hidden_ends_it(
    run: Pool, between: Callable[..., None]
) -> None:
    """By a clock that is ahead: nothing that was hidden then could be taken back."""
    with checkpointer(run) as ckpt, checkpointer(run) as other:
        between("_copy", 4, lambda: other.steps.collect_garbage())
        with pytest.raises(CheckpointError, match="longer grace_seconds"):
            ckpt.rollback(2, grace_seconds=0)
        assert held(ckpt) == EVERY
        assert not [key for key in run.list(RUN) if "/rolled-back/" in key]


@pytest.mark.parametrize("moves", [False, True])
def test_a_hold_that_goes_on_while_its_step_is_hidden(
    run: Pool, between: Callable[..., None], moves: bool
) -> None:
    """An evaluator lets it go, or has the next one, which keeps its protection."""
    with checkpointer(run) as ckpt:
        ckpt.steps.protect(4, "watch-eval")
        catalog = StepCatalog(run, RUN)

        def going_on() -> None:
            catalog.protect(1, "watch-eval") if moves else catalog.unprotect("watch-eval")

        between("_remove_original", 3, going_on)
        assert ckpt.rollback(2, force=True).hidden == (3, 4)
        assert ckpt.steps.protected() == ({"watch-eval": 1} if moves else {})


def test_an_undo_takes_no_protection_away(run: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """A name that protects another step by then stays there; retention would delete that step."""
    with checkpointer(run, keep_last=1) as ckpt:
        ckpt.steps.protect(3, "best")
        done = ckpt.rollback(2, force=True)
        ckpt.steps.protect(2, "best")
        ckpt.steps.undo_rollback()
        assert ckpt.steps.protected() == {"best": 2, f"best-{done.name}": 3}
        assert f"protected as 'best-{done.name}'" in caplog.text
        save(ckpt, 5)
        assert ckpt.steps() == [2, 3, 5]


def test_an_undo_that_is_called_again_protects_once(
    run: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped after its protections, which are its own."""
    with checkpointer(run) as ckpt:
        for step, name in ((3, "best"), (4, "x" * 100), (4, "y" * 100)):
            ckpt.steps.protect(step, name)
        done = ckpt.rollback(2, force=True)
        for name in ("best", "x" * 100, "y" * 100):
            ckpt.steps.protect(1, name)
        moved = rollback._moved

        def stopped(steps: StepCatalog, found: Any, state: Any) -> Any:
            if state == "returned":
                raise KeyboardInterrupt
            return moved(steps, found, state)

        monkeypatch.setattr(rollback, "_moved", stopped)
        with pytest.raises(KeyboardInterrupt):
            ckpt.steps.undo_rollback()
        monkeypatch.setattr(rollback, "_moved", moved)
        ckpt.steps.undo_rollback()
        back = {name: step for name, step in ckpt.steps.protected().items() if step != 1}
        assert back == {f"best-{done.name}": 3, f"protected-{done.name}": 4}


def test_an_undo_restores_no_hold_of_a_watch(run: Pool) -> None:
    """Nobody may be left to let it go."""
    with checkpointer(run) as ckpt:
        ckpt.steps.protect(4, "watch-eval")
        ckpt.rollback(2, force=True)
        ckpt.steps.undo_rollback()
        assert ckpt.steps.protected() == {}


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("get", RedundancyError("devices are away")),
        ("get", DeviceTimeout("no answer")),
        ("safe", CheckpointError("would not survive one more lost device")),
    ],
)
@pytest.mark.usefixtures("segments_apart")
def test_a_step_that_cannot_be_read_for_a_moment_is_not_given_up(
    run: Pool, monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception
) -> None:
    """The undo of the others would be the end of it: nothing is changed, and it is called again."""
    with checkpointer(run) as ckpt:
        done = ckpt.rollback(2)
        copied = f"{RUN}/rolled-back/{done.name}/step-{4:012d}"
        own = {s.key for s in Manifest.decode(run.get(copied), where="").objects}
        get, safe = run.get, require_safe

        def failing(key: str, *args: Any) -> Any:
            if key == copied:
                raise error
            return get(key, *args)

        def unsafe(pool: Pool, key: str, **options: Any) -> int:
            if key in own:
                raise error
            return safe(pool, key, **options)

        with monkeypatch.context() as trouble:
            if broken == "get":
                trouble.setattr(run, "get", failing)
            else:
                trouble.setattr(rollback, "require_safe", unsafe)
            with pytest.raises(CheckpointError, match=r"Nothing was changed\. Bring missing dev"):
                ckpt.steps.undo_rollback()
        assert ckpt.steps() == [1, 2]
        assert ckpt.steps.undo_rollback().hidden == (3, 4)
        assert held(ckpt) == EVERY
