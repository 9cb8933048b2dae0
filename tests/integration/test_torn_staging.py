"""Another thread changes what save() copies at once: the save fails, no torn step is kept."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.save import staging_memory
from hpstore.checkpoint.save.host_copy import Copier
from hpstore.checkpoint.save.staging_memory import MOST_SMALL
from hpstore.errors import CheckpointError
from hpstore.testing.fake_accelerator import FakeAccelerator

LARGE, SMALL = 300_000, 100


class Meddler:
    """A thread that changes a tensor whenever copies were made, before save() has returned."""

    def __init__(self, patch: pytest.MonkeyPatch, victim: torch.Tensor) -> None:
        self.victim, self.turns = victim, 1
        run, together = Copier.run, torch._foreach_copy_

        def copies(copier: Copier, pairs: Any) -> None:
            run(copier, pairs)
            self.meddle()

        def copies_together(*args: Any) -> None:
            together(*args)
            self.meddle()

        patch.setattr(Copier, "run", copies)
        patch.setattr(torch, "_foreach_copy_", copies_together)

    def meddle(self) -> None:
        """Once."""
        if self.turns:
            self.turns -= 1
            thread = threading.Thread(target=lambda: self.victim.add_(1))
            thread.start()
            thread.join()


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_a_torn_save_is_given_up_and_the_next_one_is_whole(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """It held the tensor of one step and its neighbour of another, and nothing said so."""
    state = {"weights": {"a": torch.ones(size), "b": torch.ones(size)}}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        Meddler(monkeypatch, state["weights"]["b"])
        with pytest.raises(CheckpointError, match=r"'weights/b' was changed by another thread"):
            ckpt.save(2, state).result()
        assert ckpt.steps() == [1]
        ckpt.save(2, state).result()
        assert torch.equal(ckpt.load(2)["weights/b"], torch.full((size,), 2.0))


def test_training_goes_on_where_failures_are_warnings(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that cannot stop its other threads chooses so."""
    state = {"a": torch.ones(LARGE)}
    options = SaveOptions(on_failure="warn")
    with Checkpointer(pool, "run", rng=False, save=options) as ckpt:
        Meddler(monkeypatch, state["a"])
        handle = ckpt.save(1, state)
        with pytest.raises(CheckpointError, match="parts of two states"):
            handle.result()
        ckpt.save(2, state).result()
        assert ckpt.steps() == [2]


def test_a_tensor_on_a_device_is_watched_too(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = FakeAccelerator()
    state = {"a": torch.ones(LARGE)}
    accelerator.take(state.values())
    options = SaveOptions(accelerator=accelerator)
    with Checkpointer(pool, "run", rng=False, save=options) as ckpt:
        copy = accelerator.copy

        def meddled(pairs: Any) -> Any:
            arrival = copy(pairs)
            state["a"].add_(1)
            return arrival

        monkeypatch.setattr(accelerator, "copy", meddled)
        with pytest.raises(CheckpointError, match="'a' was changed by another thread"):
            ckpt.save(1, state).result()


def test_many_small_tensors_are_watched_by_a_part(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that another thread makes changes all of them; the look costs what a thousand do."""
    state = {"x": [torch.ones(1) for _ in range(MOST_SMALL + 5)]}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        Meddler(monkeypatch, state["x"][MOST_SMALL])
        ckpt.save(1, state).result()
        assert ckpt.steps() == [1]
        Meddler(monkeypatch, state["x"][MOST_SMALL - 1])
        with pytest.raises(CheckpointError, match=f"'x/{MOST_SMALL - 1}' was changed"):
            ckpt.save(2, state).result()


def test_many_small_tensors_on_a_device_are_watched_by_a_part(
    pool: hpstore.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them were looked at there, which 100,000 make slow."""
    accelerator = FakeAccelerator()
    state = {"x": [torch.ones(1) for _ in range(MOST_SMALL + 5)]}
    accelerator.take(state["x"])
    looks = []
    look = staging_memory._version

    def look_at(tensor: torch.Tensor) -> int:
        looks.append(tensor)
        return look(tensor)

    monkeypatch.setattr(staging_memory, "_version", look_at)
    options = SaveOptions(accelerator=accelerator)
    with Checkpointer(pool, "run", rng=False, save=options) as ckpt:
        ckpt.save(1, state).result()
    assert len(looks) == 2 * MOST_SMALL


def test_a_tensor_of_inference_mode_has_no_counter(pool: hpstore.Pool) -> None:
    """It is saved as before."""
    with torch.inference_mode():
        state = {"a": torch.ones(LARGE)}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        assert ckpt.load(1)["a"].sum() == LARGE
