"""on_failure="retry" of several ranks: one answer on all, from the bytes that are staged."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save import save_failures
from hpstore.errors import CheckpointError, HpstoreError, TooFewDevices
from hpstore.pool.pool import Pool
from tests.fault.common import poll
from tests.integration.ranks import launch, make_pool, open_pool, put_segments

RETRY = SaveOptions(on_failure="retry", warm=False, commit_seconds=60)


class Failing:
    """Puts of this pool of keys with `word` in them fail so many times."""

    def __init__(
        self,
        pool: Pool,
        word: str,
        times: float,
        error: Callable[[], Exception] = lambda: TooFewDevices("three devices are away"),
    ) -> None:
        self.came = 0
        before = pool.put

        def put(key: str, *words: Any, **options: Any) -> Any:
            if word in key:
                self.came += 1
                if self.came <= times:
                    raise error()
            return before(key, *words, **options)

        pool.put = put  # type: ignore[method-assign]
        self.mend: Callable[[], None] = lambda: setattr(pool, "put", before)


def state_of(ckpt: Checkpointer, rank: int, step: int) -> dict[str, Any]:
    shared = torch.full((30_000,), float(step))
    return {"w": shared, "mine": ckpt.per_rank(torch.full((20_000,), step + rank / 10)), "n": step}


def require_saved(ckpt: Checkpointer, rank: int, step: int) -> None:
    found = state_of(ckpt, rank, 0)
    assert ckpt.restore(found) == step
    assert found["n"] == step
    assert bool((found["w"] == step).all())
    assert torch.equal(found["mine"].value, torch.full((20_000,), step + rank / 10))
    assert ckpt.verify(step).ok


def quickly() -> None:
    save_failures.FIRST_WAIT_SECONDS = 0.0


def try_again(rank: int, world: int, directory: Path, kind: str) -> None:
    quickly()
    if kind == "segments":
        put_segments()
    with open_pool(directory) as pool, Checkpointer(pool, "run", save=RETRY) as ckpt:
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        # segments fail on the last rank alone; notes and manifests are put by rank 0
        rounds = [("segment-", world - 1), ("attempts/", 0), ("manifest", 0), ("writer", -1)]
        for step, (word, where) in enumerate(rounds[0 if kind == "segments" else 2 :], start=2):
            failing = Failing(pool, word, 2) if rank == where else None
            state = state_of(ckpt, rank, step)
            handle = ckpt.save(step, state)
            state["mine"].value.fill_(-1)  # what is staged counts
            assert handle.result().step == step
            assert failing is None or failing.came >= 3
            if failing is not None:
                failing.mend()
            require_saved(ckpt, rank, step)
        tried = 6 if kind == "segments" else 2
        assert ckpt.counters["saves_retried_total"] == tried
        assert ckpt.counters["saves_failed_total"] == 0
        assert ckpt.saver.last_failure is None
        assert ckpt.steps.collect_garbage() == 0


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["segments", "within"])
def test_all_ranks_try_again_when_one_fails(tmp_path: Path, world: int, kind: str) -> None:
    """Whichever rank, whichever put, twice: all make the same attempts and commit together."""
    make_pool(tmp_path)
    launch(tmp_path, world, try_again, kind)


def no_retry(rank: int, world: int, directory: Path) -> None:
    quickly()
    put_segments()
    with open_pool(directory) as pool, Checkpointer(pool, "run", save=RETRY) as ckpt:
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        causes: list[Callable[[], Exception]] = [
            lambda: CheckpointError("not for now alone"),
            lambda: RuntimeError("a bug"),
        ]
        for step, cause in enumerate(causes, start=2):
            failing = Failing(pool, "segment-", 1, cause) if rank else None
            handle = ckpt.save(step, state_of(ckpt, rank, step))
            with pytest.raises(CheckpointError, match="rank 1: "):
                handle.result()
            if failing is not None:
                failing.mend()
        # one rank's memory holds a part of its state alone
        stage = ckpt.saver._planner.limit_bytes
        if rank:
            ckpt.saver._planner.limit_bytes = 40_000
        for where in (0, 1):
            failing = Failing(pool, "segment-", 1) if rank == where else None
            step = 4 + where
            with pytest.raises(HpstoreError, match=f"step {step} is not committed"):
                ckpt.save(step, state_of(ckpt, rank, step)).result()
            if failing is not None:
                failing.mend()
        failing = Failing(pool, "attempts/", 1) if not rank else None
        with pytest.raises(HpstoreError, match="step 6 is not committed"):
            ckpt.save(6, state_of(ckpt, rank, 6)).result()
        ckpt.saver._planner.limit_bytes = stage
        assert ckpt.counters["saves_retried_total"] == 0
        assert ckpt.counters["saves_failed_total"] == 5
        ckpt.save(7, state_of(ckpt, rank, 7)).result()
        assert ckpt.steps() == [1, 7]


def test_what_one_rank_cannot_try_again_all_give_up(tmp_path: Path) -> None:
    """An error that another attempt would meet, or a state that is staged in slices, on one rank
    alone: no rank goes on without the others, none waits for them."""
    make_pool(tmp_path)
    launch(tmp_path, 2, no_retry)


def killed_between(rank: int, world: int, directory: Path) -> None:
    put_segments()
    options = SaveOptions(on_failure="retry", commit_seconds=20, drain_seconds=1)
    with open_pool(directory) as pool:
        ckpt = Checkpointer(pool, "run", save=options)
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        if rank == 1:
            save_failures.FIRST_WAIT_SECONDS = 0.0
            waits = threading.Event.wait

            def die(self: threading.Event, timeout: float | None = None) -> bool:
                if self is ckpt.saver._failures._hurry:
                    os.kill(os.getpid(), signal.SIGKILL)
                return waits(self, timeout)

            threading.Event.wait = die  # type: ignore[method-assign]
            Failing(pool, "segment-", 1)
        handle = ckpt.save(2, state_of(ckpt, rank, 2))
        with pytest.raises(CheckpointError, match="died or did not answer"):
            handle.result()
        assert ckpt.steps() == [1]


def test_a_rank_that_dies_between_two_attempts_ends_them(tmp_path: Path) -> None:
    make_pool(tmp_path)
    launch(tmp_path, 4, killed_between, killed=(1,))


def hurried(rank: int, world: int, directory: Path) -> None:
    for name in ("FIRST_WAIT_SECONDS", "LONGEST_WAIT_SECONDS"):
        setattr(save_failures, name, 3.0)
    put_segments()
    with open_pool(directory) as pool, Checkpointer(pool, "run", save=RETRY) as ckpt:
        ckpt.save(1, state_of(ckpt, rank, 1)).result()
        if rank:
            Failing(pool, "segment-", 2)
        older = ckpt.save(2, state_of(ckpt, rank, 2))
        if rank:  # this rank's trainer comes while the other one's is still computing
            poll(30, lambda: ckpt.counters["saves_retried_total"] == 1)
        else:
            assert older.settled(60)
        ckpt.save(3, state_of(ckpt, rank, 3)).result()
        assert isinstance(older.outcome(), CheckpointError)
        assert ckpt.counters["saves_retried_total"] == 1
        assert ckpt.counters["saves_failed_total"] == 1
        require_saved(ckpt, rank, 3)
        assert ckpt.steps() == [1, 3]


def test_a_newer_save_of_one_rank_ends_the_attempts_on_all(tmp_path: Path) -> None:
    """Its trainer is ahead of the others: they bear the older save's failure as it does."""
    make_pool(tmp_path)
    launch(tmp_path, 2, hurried)
