"""What the tests of rollbacks share: a run of four steps, clocks, other processes that act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog import rollback
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.pool.pool import Pool

RUN = "run"
WEEK_MS = 7 * 24 * 3600 * 1000
SIZE = 30_000  # floats: large enough to be referenced
TIER_SECONDS = 60.0  # at most, until tiers have their copies


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


EVERY = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}


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


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Pool]:
    """The second pool, 2+2 on five devices."""
    devices = [tmp_path / f"cold{number}" for number in range(5)]
    with hpstore.create(devices, data=2, parity=2, config=tmp_path / "cold.toml") as pool:
        yield pool


def save_all(ckpt: Checkpointer, *steps: int, shift: float = 0.0) -> None:
    """Each is copied before the next is saved."""
    for step in steps:
        save(ckpt, step, shift=shift)
        assert ckpt.tiers.wait(TIER_SECONDS)


def steps_in(pool: Pool) -> list[int]:
    return StepCatalog(pool, RUN).all()
