"""Code of a state's objects that raises: the error is theirs, with a note of where it was met."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer


class Loader:
    """Raises when it is told to."""

    def __init__(self, *, raises: bool = False) -> None:
        self.raises = raises

    def state_dict(self) -> dict[str, int]:
        if self.raises:
            raise KeyError("position")
        return {"position": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if self.raises:
            raise ValueError("no thanks")


def test_an_error_of_an_object_says_which_and_what_became_of_the_rest(pool: hpstore.Pool) -> None:
    """It was a KeyError alone, among a hundred objects."""
    state: dict[str, Any] = {"m": torch.nn.Linear(2, 2), "data": [Loader(), Loader()]}
    with Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, state).result()
        state["data"][1].raises = True
        with pytest.raises(KeyError, match="position") as saved:
            ckpt.save(2, state)
        assert saved.value.__notes__ == [
            "raised by state_dict() of 'data/1' in save(). Nothing was written"
        ]
        with pytest.raises(ValueError, match="no thanks") as loaded:
            ckpt.restore(state)
        (note,) = loaded.value.__notes__
        assert "load_state_dict() of 'data/1' in restore(): other parts of the state" in note
        state["data"][1].raises = False
        assert ckpt.restore(state) == 1
