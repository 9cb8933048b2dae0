"""`ckpt.watch()`: each commit of a run once, in another process too, whatever restarts."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.catalog import step_watch
from hpstore.checkpoint.catalog.step_watch import LISTING_SECONDS, WatchLoop, WatchOptions
from hpstore.errors import CheckpointError, ConfigError, ObjectNotFound, TooFewDevices
from hpstore.pool.admin import PoolAdmin

RUN = "run"
WATCH = "hpstore.checkpoint.catalog.step_watch"
PATIENCE = 60.0


class Turns(threading.Event):
    """A clock, and what happens in the pool while a watch waits: one action a wait, then the end.

    Each wait takes a minute, so every look lists, unless `seconds` says otherwise."""

    def __init__(self, *actions: Callable[[], object], seconds: float = LISTING_SECONDS) -> None:
        super().__init__()
        self.now, self._seconds, self._actions = 0.0, seconds, list(actions)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout > 0
        self.now += self._seconds
        if self._actions:
            self._actions.pop(0)()
        else:
            self.set()
        return self.is_set()


def save(pool: hpstore.Pool, *steps: int, value: float = 0.0, overwrite: bool = False) -> None:
    """By a trainer of its own: a restart for each call."""
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        for step in steps:
            ckpt.save(step, {"w": torch.full((3,), value)}, overwrite=overwrite).result()


def watched(pool: hpstore.Pool, turns: Turns, **options: Any) -> Iterator[int]:
    """A watch by the time of the turns."""
    with Checkpointer(pool, RUN) as ckpt:
        found = WatchOptions(**options)
        found.check(ckpt.steps._catalog)
        yield from WatchLoop(ckpt.steps._catalog, found, turns, lambda: turns.now).steps()


def test_each_step_comes_once_in_order(pool: hpstore.Pool) -> None:
    """Those that are there, then those that are committed while it waits."""
    save(pool, 1, 2)
    turns = Turns(
        lambda: save(pool, 3), lambda: None, lambda: save(pool, 4, 5), lambda: save(pool, 9)
    )
    assert list(watched(pool, turns)) == [1, 2, 3, 4, 5, 9]


def test_a_run_that_went_back_is_followed_by_its_commits(pool: hpstore.Pool) -> None:
    """Later steps that were deleted, or saved again, come again under their numbers, as they are
    new commits."""

    def go_back() -> None:
        with Checkpointer(pool, RUN) as ckpt:
            ckpt.delete(3)
            ckpt.delete(2)
        save(pool, 2, value=7.0)

    save(pool, 1, 2, 3)
    turns = Turns(go_back, lambda: save(pool, 2, value=8.0, overwrite=True), lambda: save(pool, 3))
    assert list(watched(pool, turns)) == [1, 2, 3, 2, 2, 3]


def test_a_manifest_that_is_laid_out_or_put_again_is_no_new_commit(pool: hpstore.Pool) -> None:
    """The same bytes under another version, as who ends a dead save leaves them."""
    save(pool, 1, 2)
    key = f"{RUN}/step-{2:012d}/manifest"
    turns = Turns(lambda: pool.put(key, pool.get(key)), lambda: save(pool, 3))
    assert list(watched(pool, turns)) == [1, 2, 3]


def test_what_a_rollback_hides_comes_once_when_it_is_back(pool: hpstore.Pool) -> None:
    """It has new versions then, but is what it was; what the new line commits is new."""
    with Checkpointer(pool, RUN, rng=False) as ckpt:
        save(pool, 1, 2, 3)
        turns = Turns(
            lambda: ckpt.rollback(1),
            ckpt.steps.undo_rollback,
            lambda: ckpt.rollback(2),
            lambda: save(pool, 3, value=3.0),
        )
        assert list(watched(pool, turns)) == [1, 2, 3, 3]


def test_a_step_that_goes_before_its_turn_is_passed_over_and_said(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention took it while the evaluator was at the one before."""
    save(pool, 1, 2, 3)
    seen = []
    for step in watched(pool, Turns()):
        seen.append(step)
        if step == 1:
            with Checkpointer(pool, RUN) as ckpt:
                ckpt.delete(2)
    assert seen == [1, 3]
    assert "step 2 under 'run' was removed before it was looked at" in caplog.text


def test_a_damaged_manifest_is_passed_over_and_said(
    pool: hpstore.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    save(pool, 1, 2)
    pool.put(f"{RUN}/step-{1:012d}/manifest", b"junk")
    assert list(watched(pool, Turns())) == [2]
    assert "step 1 is passed over" in caplog.text


def test_after_goes_on_behind_the_commit_of_that_step(pool: hpstore.Pool) -> None:
    """By commits where the step is there: steps of a run that went back have smaller numbers. By
    numbers where it is gone."""
    save(pool, 10, 20, 30)
    assert list(watched(pool, Turns(), after=20)) == [30]
    save(pool, 5)
    assert list(watched(pool, Turns(), after=30)) == [5]
    assert list(watched(pool, Turns(lambda: save(pool, 26, 2)), after=25)) == [30, 26, 2]


def test_a_cursor_survives_the_evaluator(pool: hpstore.Pool) -> None:
    """What it was at when it died comes again, what was done does not, also where the run went
    back meanwhile."""
    save(pool, 1, 2, 3)
    for step in watched(pool, Turns(), cursor="eval"):
        if step == 2:
            break
    assert list(watched(pool, Turns(), cursor="eval")) == [2, 3]
    assert list(watched(pool, Turns(), cursor="eval")) == []
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.delete(3)
    save(pool, 2, overwrite=True)
    assert list(watched(pool, Turns(), cursor="eval")) == [2]
    assert list(watched(pool, Turns(), cursor="other")) == [1, 2]


def test_two_evaluators_with_one_cursor_do_not_go_on_together(pool: hpstore.Pool) -> None:
    """The one that began last has it; the older ends when it would note a step as done."""
    save(pool, 1, 2, 3)
    older = watched(pool, Turns(), cursor="eval")
    assert next(older) == 1
    newer = watched(pool, Turns(), cursor="eval")
    assert next(newer) == 1
    with pytest.raises(CheckpointError, match="another process has begun to watch with the cursor"):
        next(older)
    assert list(newer) == [2, 3]


def test_a_hold_keeps_a_step_while_it_is_out(pool: hpstore.Pool) -> None:
    """Retention leaves it alone until the next one is asked for; a name of one's own stays."""
    save(pool, 1, 2)
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.steps.protect(2, "eval")
        found = watched(pool, Turns(), hold="eval")
        assert next(found) == 1
        assert ckpt.steps.protected() == {"watch-eval": 1, "eval": 2}
        with pytest.raises(CheckpointError, match="protected as 'watch-eval'"):
            ckpt.delete(1)
        assert next(found) == 2
        assert ckpt.steps.protected() == {"watch-eval": 2, "eval": 2}
        assert list(found) == []
        assert ckpt.steps.protected() == {"eval": 2}


def test_a_step_that_goes_before_it_is_held_is_passed_over(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its removal came between the look and the protection; nothing is left protected."""
    save(pool, 1, 2)
    with Checkpointer(pool, RUN) as ckpt:
        catalog = ckpt.steps._catalog
        protect = catalog.protect

        def late(step: int, name: str) -> None:
            protect(step, name)
            if step == 1:
                pool.delete(f"{RUN}/step-{1:012d}/manifest")

        monkeypatch.setattr(catalog, "protect", late)
        turns = Turns()
        options = WatchOptions(hold="eval")
        loop = WatchLoop(catalog, options, turns, lambda: turns.now)
        assert list(loop.steps()) == [2]
        assert ckpt.steps.protected() == {}
    assert "removed before it could be held" in caplog.text


def test_between_listings_only_the_expected_step_is_looked_at(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing a minute, whatever poll_seconds; a step at the usual distance is found at once."""
    listings: list[float] = []
    turns = Turns(*[lambda: None] * 7, lambda: save(pool, 30), *[lambda: None] * 2, seconds=5.0)
    listed = step_watch.StepWatch._list

    def counted(commits: Any) -> None:  # Any: it is private
        listings.append(turns.now)
        listed(commits)

    save(pool, 10, 20)
    monkeypatch.setattr(step_watch.StepWatch, "_list", counted)
    found = watched(pool, turns)
    assert [next(found), next(found), next(found)] == [10, 20, 30]
    assert listings == [0.0, 40.0]
    assert list(found) == []
    assert listings == [0.0, 40.0]


def test_trouble_is_waited_out_and_a_timeout_in_it_raises(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More devices are away than parity covers: said once; what was committed comes later."""
    listed = PoolAdmin.versions_under

    def broken(_: PoolAdmin, prefix: str) -> dict[str, Any]:
        raise TooFewDevices(f"devices of {prefix} are away")

    save(pool, 1)
    monkeypatch.setattr(PoolAdmin, "versions_under", broken)
    turns = Turns(lambda: None, lambda: monkeypatch.setattr(PoolAdmin, "versions_under", listed))
    with caplog.at_level(logging.WARNING, logger=WATCH):
        assert list(watched(pool, turns)) == [1]
    assert caplog.text.count("cannot be looked for now") == 1
    monkeypatch.setattr(PoolAdmin, "versions_under", broken)
    with pytest.raises(TooFewDevices, match="are away"):
        list(watched(pool, Turns(*[lambda: None] * 9), timeout=150.0))


def test_a_timeout_ends_it_after_the_last_step(pool: hpstore.Pool) -> None:
    """Counted from when the evaluator came back with the last one."""
    save(pool, 1)
    turns = Turns(lambda: None, lambda: save(pool, 2), *[lambda: None] * 9)
    assert list(watched(pool, turns, timeout=150.0)) == [1, 2]
    assert turns.now == 120.0 + 180.0


def test_an_event_ends_it(pool: hpstore.Pool) -> None:
    save(pool, 1, 2)
    stop = threading.Event()
    with Checkpointer(pool, RUN) as ckpt:
        for step in ckpt.watch(stop=stop):
            assert step == 1
            stop.set()
        assert list(ckpt.watch(stop=stop)) == []
        assert list(ckpt.watch(timeout=0.0)) == [1, 2]


def test_wrong_arguments_are_refused_when_they_are_given(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Not at the first step; what would write is refused in a pool that is read-only."""
    wrong: list[dict[str, Any]] = [
        {"after": -1},
        {"after": 1.5},
        {"after": 1, "cursor": "a"},
        {"cursor": ""},
        {"cursor": "a/b"},
        {"hold": "a/b"},
        {"poll_seconds": 0},
        {"poll_seconds": float("nan")},
        {"poll_seconds": "1"},
        {"timeout": -1},
        {"timeout": float("inf")},
    ]
    with Checkpointer(pool, RUN) as ckpt:
        for options in wrong:
            with pytest.raises(ConfigError):
                ckpt.steps.watch(**options)
    reading = hpstore.open(tmp_path / "pool.toml", read_only=True)
    with reading, Checkpointer(reading, RUN) as ckpt:
        with pytest.raises(ConfigError, match="read-only"):
            ckpt.steps.watch(cursor="a")
        with pytest.raises(ConfigError, match="read-only"):
            ckpt.steps.watch(hold="a")


def test_a_forged_cursor_is_an_error_of_bytes(pool: hpstore.Pool) -> None:
    """Never taken for another place to begin."""
    save(pool, 1)
    pool.put(f"{RUN}/watchers/eval", b"junk")
    with pytest.raises(hpstore.errors.IntegrityError):
        list(watched(pool, Turns(), cursor="eval"))


def _evaluate(toml: Path, found: Queue[Any], done: Any) -> None:
    """Another process: a read-only pool, each step restored."""
    with hpstore.open(toml, read_only=True) as pool, Checkpointer(pool, RUN) as ckpt:
        state = {"w": torch.zeros(3)}
        for step in ckpt.watch(poll_seconds=0.02, timeout=PATIENCE, stop=done):
            assert ckpt.restore(state, step) == step
            found.put((step, float(state["w"][0])))


def test_another_process_sees_what_trainers_commit(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Read-only, beside trainers that end and begin again; it restores each step."""
    context = multiprocessing.get_context("forkserver")
    found, done = context.Queue(), context.Event()
    process = context.Process(target=_evaluate, args=(tmp_path / "pool.toml", found, done))
    save(pool, 10, value=10.0)
    process.start()
    try:
        seen = [found.get(timeout=PATIENCE)]
        for step in (20, 30, 40):
            save(pool, step, value=float(step))  # each by a trainer of its own
            seen.append(found.get(timeout=PATIENCE))
    finally:
        done.set()
        process.join(PATIENCE)
    assert process.exitcode == 0
    assert seen == [(step, float(step)) for step in (10, 20, 30, 40)]
    assert f"{RUN}/watchers/eval" not in pool.list()
    with pytest.raises(ObjectNotFound):
        pool.stat(f"{RUN}/watchers/eval")
