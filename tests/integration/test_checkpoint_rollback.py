"""`ckpt.rollback()` (rule 24): later steps are hidden, kept for a time, and can be taken back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog import rollback
from hpstore.checkpoint.catalog.hidden_steps import HiddenSteps, Rollback
from hpstore.checkpoint.catalog.segment_safety import require_safe
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.checkpoint.catalog.writer_fence import Heartbeat, fence_session
from hpstore.checkpoint.format.checkpoint_manifest import Listing, Manifest
from hpstore.devices.wrappers import SimulatedCrash
from hpstore.errors import (
    CheckpointError,
    ConfigError,
    DeviceTimeout,
    IntegrityError,
    RedundancyError,
    VersionConflict,
)
from hpstore.pool.pool import Pool
from hpstore.testing.memory_pool import Harness
from hpstore.units import KIB
from tests.integration.ranks import launch, make_pool
from tests.integration.test_checkpoint_crashes import before_put, open_crashing
from tests.thorough import crash_points

RUN = "run"
WEEK_MS = 7 * 24 * 3600 * 1000
SIZE = 30_000  # floats: large enough to be referenced


def state_of(value: float) -> dict[str, torch.Tensor]:
    """What never changes, which later steps refer to, and what does."""
    return {"frozen": torch.full((SIZE,), 7.0), "free": torch.full((SIZE,), value)}


def checkpointer(pool: Pool, **options: Any) -> Checkpointer:
    return Checkpointer(pool, RUN, rng=False, save=SaveOptions(warm=False), **options)


def save(ckpt: Checkpointer, *steps: int, shift: float = 0.0) -> None:
    for step in steps:
        ckpt.save(step, state_of(step + shift)).result()
        ckpt.wait()


def held(ckpt: Checkpointer) -> dict[int, float]:
    """What each committed step holds; all of them must be whole."""
    found = {}
    for step in ckpt.steps():
        assert ckpt.verify(step).ok
        found[step] = float(ckpt.load(step)["free"][0])
    return found


@pytest.fixture
def run(pool: hpstore.Pool) -> Pool:
    """Steps 1 to 4."""
    with checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3, 4)
    return pool


@pytest.fixture(params=["within", "apart"])
def both(request: pytest.FixtureRequest) -> None:
    """Saves within their manifest, and with segments."""
    if request.param == "apart":
        request.getfixturevalue("segments_apart")


# --- what it does ---------------------------------------------------------------------------


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


# --- beside others ----------------------------------------------------------------------------


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


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Callable[[], object]], None]:
    """Once, another process acts right before rollback.py does a thing with a step."""

    def set_up(function: str, at: int, act: Callable[[], object]) -> None:
        original = getattr(rollback, function)

        def acting(steps: StepCatalog, *args: Any) -> Any:
            if at in args:
                monkeypatch.setattr(rollback, function, original)
                act()
            return original(steps, *args)

        monkeypatch.setattr(rollback, function, acting)

    return set_up


def test_a_target_that_is_removed_before_others_are_hidden_ends_it(
    run: Pool, between: Callable[..., None]
) -> None:
    """By the retention of the old line, which looked at the fence before that was taken."""
    with checkpointer(run) as ckpt:
        between("_copy", 3, lambda: StepCatalog(run, RUN).delete_all([2]))
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
        between("_remove_original", 3, lambda: StepCatalog(run, RUN).delete_all([2]))
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


# --- time -------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets this machine's clock, as rollbacks read it."""

    def set_to(milliseconds: int) -> None:
        for module in (
            "catalog.rollback",
            "steps",
            "save.saver",
            "save.collective_rollback",
        ):
            monkeypatch.setattr(
                f"hpstore.checkpoint.{module}.now_milliseconds", lambda: milliseconds
            )

    set_to(10 * WEEK_MS)
    return set_to


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


# --- older versions, and bytes that are not ours ------------------------------------------------


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
            ckpt.saver._session,
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


# --- crashes ----------------------------------------------------------------------------------

EVERY = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
LINES = [dict(list(EVERY.items())[:count]) for count in (2, 3, 4)]  # each ends at a later step


def crash_everywhere(
    tmp_path: Path,
    before: Callable[[Checkpointer], object],
    act: Callable[[Checkpointer], object],
    check: Callable[[Checkpointer, bool], None],
) -> None:
    """`act` with a crash before change 0, 1, 2, ... of a device until it runs through; then what
    the next process finds."""
    logging.getLogger("hpstore").setLevel(logging.CRITICAL)
    harness = Harness(tmp_path, data=2, parity=1, devices=4, unit_bytes=16 * KIB)
    with harness.open() as pool, checkpointer(pool) as ckpt:
        save(ckpt, 1, 2, 3, 4)
        before(ckpt)
    start = {url: (d.files, d._durable_names) for url, d in harness.devices.items()}
    for crash_at in crash_points():
        for url, device in harness.devices.items():
            device.files, device._durable_names = copy.deepcopy(start[url])
        pool, changes = open_crashing(harness, crash_at)
        try:
            act(checkpointer(pool))
        except SimulatedCrash:
            assert changes[0] > crash_at
        finished = changes[0] <= crash_at
        (harness.power_cut if crash_at % 2 else harness.restart)()
        with harness.open() as pool, checkpointer(pool) as ckpt:
            check(ckpt, finished)
        if finished:
            assert crash_at > 20
            return


def all_back(ckpt: Checkpointer) -> None:
    """Take back whatever can be."""
    while True:
        try:
            ckpt.steps.undo_rollback()
        except CheckpointError:
            return


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_in_a_rollback_leaves_a_line_that_ends_later(tmp_path: Path) -> None:
    """Rule 24: called again it is done; all can be taken back, nothing is lost."""

    def check(ckpt: Checkpointer, finished: bool) -> None:
        assert held(ckpt) in (LINES[:1] if finished else LINES)
        ckpt.rollback(2)
        assert held(ckpt) == LINES[0]
        assert ckpt.steps.collect_garbage() == 0
        all_back(ckpt)
        assert held(ckpt) == EVERY

    crash_everywhere(tmp_path, lambda _: None, lambda ckpt: ckpt.rollback(2), check)


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_while_it_is_taken_back_leaves_a_line_too(tmp_path: Path) -> None:
    """Called again, or not needed any more, all is back."""

    def check(ckpt: Checkpointer, finished: bool) -> None:
        assert held(ckpt) in (LINES[-1:] if finished else LINES)
        all_back(ckpt)
        assert held(ckpt) == EVERY
        assert ckpt.steps.collect_garbage() == 0

    crash_everywhere(
        tmp_path,
        lambda ckpt: ckpt.rollback(2),
        lambda ckpt: ckpt.steps.undo_rollback(),
        check,
    )


@pytest.mark.usefixtures("segments_apart")
def test_a_crash_in_the_removal_leaves_all_or_nothing_to_take_back(tmp_path: Path) -> None:
    """What is over is removed by the next process."""

    def check(ckpt: Checkpointer, finished: bool) -> None:
        del finished
        assert held(ckpt) == LINES[0]
        ckpt.steps.collect_garbage()
        keys = ckpt.pool.list(RUN)
        named = {s.key for step in ckpt.steps() for s in ckpt.steps.manifest(step).objects}
        assert {key for key in keys if "/segment-" in key} == named
        assert not [key for key in keys if "/rolled-back/" in key]
        all_back(ckpt)
        assert held(ckpt) == LINES[0]

    crash_everywhere(
        tmp_path,
        lambda ckpt: ckpt.rollback(2, grace_seconds=0),
        lambda ckpt: ckpt.steps.collect_garbage(),
        check,
    )
