"""When to save, with real steps: one process that is started again, and ranks that must agree."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import (
    AtTimes,
    Checkpointer,
    EveryInterval,
    EverySteps,
    OnPredicate,
    SaveOptions,
)
from hpstore.errors import CheckpointError, ConfigError
from tests.integration.ranks import launch, make_pool, open_pool


def train(ckpt: Checkpointer, state: dict[str, torch.Tensor], start: int, end: int) -> list[int]:
    """Steps that were saved."""
    found = []
    for step in range(start + 1, end + 1):
        state["w"] += 1
        if ckpt.should_save(step):
            ckpt.save(step, state)
            found.append(step)
            assert not ckpt.should_save(step)
    return found


def test_a_run_that_is_started_again_saves_at_the_same_steps(pool: hpstore.Pool) -> None:
    """Killed at step 17, restored from 14: the multiples of 7, whatever the process' beginning."""
    state = {"w": torch.zeros(3)}
    with Checkpointer(pool, "run", when=EverySteps(7)) as ckpt:
        assert train(ckpt, state, ckpt.restore(state) or 0, 17) == [7, 14]
    state = {"w": torch.zeros(3)}
    with Checkpointer(pool, "run", when=EverySteps(7)) as ckpt:
        assert (start := ckpt.restore(state)) == 14
        assert train(ckpt, state, start, 30) == [21, 28]
        assert ckpt.restore(state, 7) == 7
        assert ckpt.should_save(15)  # 14 was passed over
        assert ckpt.steps() == [7, 14, 21, 28]


def test_a_skipped_save_is_not_made_good(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """on_busy="skip": the next save is that of its own time; the counter has the skipped one."""
    with Checkpointer(pool, "run", when=EverySteps(3), save=SaveOptions(on_busy="skip")) as ckpt:
        assert ckpt.should_save(3)
        ckpt.save(3, {"w": torch.ones(3)}).result()
        with monkeypatch.context() as patch:
            patch.setattr(ckpt.saver, "_may_begin", lambda: False)
            assert ckpt.should_save(6)
            assert ckpt.save(6, {"w": torch.ones(3)}).skipped
        assert ckpt.should_save(6)  # the same answer, as it was not saved
        assert [step for step in range(7, 13) if ckpt.should_save(step)] == [9, 12]
        assert ckpt.counters["saves_skipped_total"] == 1


def test_it_cannot_be_asked_without_a_policy_or_after_close(pool: hpstore.Pool) -> None:
    """Errors that name what to do."""
    with Checkpointer(pool, "run") as ckpt, pytest.raises(ConfigError, match="without when="):
        ckpt.should_save(1)
    with Checkpointer(pool, "run", when=EverySteps(1)) as ckpt:
        pass
    with pytest.raises(CheckpointError, match="closed"):
        ckpt.should_save(1)
    with pytest.raises(ConfigError, match="when: 'hourly' is not a policy"):
        Checkpointer(pool, "run", when="hourly")  # type: ignore[arg-type]  # on purpose


def agree(rank: int, world: int, directory: Path) -> None:
    """Clocks of ranks differ by years and the function says no but on rank 0: one answer for all.

    Rank 1 asks each step twice: that sends nothing.
    """
    when = (
        EverySteps(5)
        | EveryInterval("200 d")
        | AtTimes("03:00", zone="UTC")
        | OnPredicate(lambda step: rank == 0 and step in (3, 11))
    )
    state = {"w": torch.zeros(8)}
    with open_pool(directory) as pool, Checkpointer(pool, "run", when=when) as ckpt:
        schedule = ckpt._schedule
        schedule._wall = lambda: time.time() + 10**8 * rank
        schedule._monotonic = lambda: time.monotonic() + 10**8 * rank
        found = []
        for step in range(1, 13):
            due = ckpt.should_save(step)
            assert rank != 1 or ckpt.should_save(step) == due
            if due:
                ckpt.save(step, state)
                found.append(step)
        ckpt.wait()
        assert ckpt.steps() == found
        # near three o'clock AtTimes is due once as well
        assert {3, 5, 10, 11} <= set(found)
        assert len(found) <= 5


def test_ranks_whose_clocks_differ_save_the_same_steps(tmp_path: Path) -> None:
    """Rank 0's clock and function alone decide; three ranks commit each step together."""
    make_pool(tmp_path)
    launch(tmp_path, 3, agree)


def disagree(rank: int, world: int, directory: Path) -> None:
    with open_pool(directory) as pool:
        with pytest.raises(CheckpointError, match="the ranks have different when"):
            Checkpointer(pool, "run", when=EverySteps(5 + rank))
        with pytest.raises(CheckpointError, match="the ranks have different when"):
            Checkpointer(pool, "run", when=EverySteps(5) if rank else None)

        def wrong(step: int) -> bool:
            raise OSError("no such file")

        with Checkpointer(pool, "run", when=OnPredicate(wrong)) as ckpt:
            kind: type[Exception] = CheckpointError if rank else OSError
            said = "the policy failed on rank 0" if rank else "no such"
            with pytest.raises(kind, match=said):
                ckpt.should_save(1)
            # all have come to it, and go on together
            ckpt.save(1, {"w": torch.ones(3)}).result()
        with Checkpointer(pool, "other", when=EveryInterval(1000)) as ckpt:
            if rank:
                with pytest.raises(
                    CheckpointError, match="rank 1 asks whether to save step 2, rank 0 step 1"
                ):
                    ckpt.should_save(2)
            else:
                assert not ckpt.should_save(1)


def test_ranks_that_differ_are_refused_or_told(tmp_path: Path) -> None:
    """In their policies, in the step that they ask about; an error of rank 0 ends no other rank's
    wait."""
    make_pool(tmp_path)
    launch(tmp_path, 2, disagree)
