"""A Checkpointer belongs to its process: what copies the object that holds it is told so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import hpstore
from hpstore.checkpoint import Checkpointer


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(pool: hpstore.Pool, how: Callable[[Any], Any]) -> None:
    """The error was that of a lock inside it. A callback that is copied may hold one."""
    with Checkpointer(pool, "run") as ckpt:
        with pytest.raises(TypeError, match="a Checkpointer can be neither pickled nor copied"):
            how({"callback": ckpt} if how is not copy.copy else ckpt)
        ckpt.save(1, {"x": 1}).result()
