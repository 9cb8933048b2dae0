"""The phases at which tests/fault kills a process are reached: a function that is renamed, or
called another way, would leave one that no run comes to, which only an hour of faults shows."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import hpstore
from hpstore.agent import AgentConfig
from hpstore.checkpoint import Checkpointer
from tests.fault.suite.killed import AGENT_AWAY, AGENT_BACK, PHASES, TRAINER, arm
from tests.unit.tended import Tended


def note(phases: Iterable[str], seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put each phase into `seen` when it is reached."""
    for name in phases:
        module, _, kind = PHASES[name].owner.partition(":")
        owner: object = importlib.import_module(module)
        owner = getattr(owner, kind) if kind else owner
        function = PHASES[name].function
        monkeypatch.setattr(owner, function, getattr(owner, function))  # put back at the end
        arm(name, seen.append)


def test_a_trainer_comes_to_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    note(TRAINER, seen, monkeypatch)
    paths = [tmp_path / f"d{i}" for i in range(4)]
    with (
        hpstore.create(paths, scheme="2+1", config=tmp_path / "pool.toml") as pool,
        Checkpointer(pool, "run", keep_last=2, rng=False) as ckpt,
    ):
        for step in range(6):
            ckpt.save(step, {"w": torch.full((600_000,), float(step))}).result()
        ckpt.wait()
    assert set(seen) == set(TRAINER)


def test_an_agent_comes_to_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tended = Tended(tmp_path, config=AgentConfig(smart_hours=0.0, scrub_days=1.0))
    tended.pool.put_many({f"more/{i}": bytes(300_000) for i in range(8)})
    seen: list[str] = []
    note({**AGENT_AWAY, **AGENT_BACK}, seen, monkeypatch)
    tended.rounds(10)
    tended.harness.lose(["memory://d0"])
    tended.rounds(960, step=20)
    tended.harness.bring_back()
    tended.rounds(200, step=10)
    tended.rounds(2 * 86400, step=7200)
    tended.stop()
    assert set(seen) == {*AGENT_AWAY, *AGENT_BACK}
