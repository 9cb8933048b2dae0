"""A clock that is set to before 1970."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.config import Settings


def test_what_is_stored_before_1970_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """t18: a container's clock stood before 1970. A put and a save were acknowledged, and readers
    took the negative time in their headers for damage."""
    settings = Settings(run_directory=str(tmp_path / "run"))
    places = [str(tmp_path / f"d{i}") for i in range(3)]
    config = tmp_path / "pool.toml"
    with monkeypatch.context() as patch:
        patch.setattr("time.time_ns", lambda: -86_400 * 10**9)
        with hpstore.create(places, data=1, parity=1, config=config, settings=settings) as pool:
            pool.put("k", b"x" * 300_000)
            with Checkpointer(pool, "run") as ckpt:
                ckpt.save(1, {"x": torch.ones(3)}).result()
    with hpstore.open(config) as pool, Checkpointer(pool, "run") as ckpt:
        assert pool.get("k") == b"x" * 300_000
        state = {"x": torch.zeros(3)}
        assert ckpt.restore(state) == 1
        assert state["x"].tolist() == [1.0] * 3
        pool.put("k", b"y")
        assert pool.get("k") == b"y"
