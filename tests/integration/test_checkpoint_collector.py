"""Python's collector does not run while tensors are staged or loaded, and does afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.save import saver
from hpstore.checkpoint.save.save_options import SaveOptions
from hpstore.errors import CheckpointMismatch
from hpstore.testing.memory_pool import Harness


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[Checkpointer]:
    """With one step, of two tensors."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    with harness.open() as pool, Checkpointer(pool, "run") as made:
        made.save(1, {"a": torch.ones(9), "b": torch.ones(70_000)}).result()
        yield made


@pytest.fixture
def collections() -> Iterator[Callable[[], int]]:
    """How many collections of this thread there were so far; each new container calls for one.

    Those of the pool's own threads may come between a load's end and the next look at this.
    """
    seen: list[str] = []
    mine = threading.get_ident()

    def note(phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == mine:
            seen.append(phase)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    gc.callbacks.append(note)
    yield lambda: len(seen)
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


@pytest.mark.parametrize("load", ["restore", "load", "tree"])
def test_nothing_is_collected_in_a_load(
    ckpt: Checkpointer, collections: Callable[[], int], load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last thing that a load does see the same count."""
    state = {"a": torch.zeros(9), "b": torch.zeros(70_000)}
    seen: list[int] = []
    usable, catalog_of = ckpt._usable, ckpt.steps.catalog_of

    def begun(*args: Any) -> Any:
        seen.append(collections())
        return catalog_of(*args) if args else usable()

    if load == "restore":
        monkeypatch.setattr(ckpt, "_usable", begun)
        assert ckpt.restore(state) == 1
    else:
        monkeypatch.setattr(ckpt.steps, "catalog_of", begun)
        ckpt.load(1) if load == "load" else ckpt.read(1).tree()
    after = collections()
    calls = 2 if load == "tree" else 1
    assert after - seen[0] < 10 * calls  # those that returns call for, with starts and ends
    assert gc.isenabled()


def test_an_error_lets_it_run_again(ckpt: Checkpointer) -> None:
    with pytest.raises(CheckpointMismatch):
        ckpt.restore({"a": torch.zeros(9), "c": torch.zeros(3)})
    assert gc.isenabled()


def test_who_has_switched_it_off_has_it_off(ckpt: Checkpointer) -> None:
    gc.disable()
    try:
        ckpt.load(1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_collected_in_a_stall(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no thread, from when the state is looked at until the trainer goes on."""
    seen: list[int] = []
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    prepare = ckpt.saver._planner.prepare

    def prepared(*args: Any) -> Any:
        seen.append(len(phases))
        return prepare(*args)

    def ended(*_: Any) -> None:
        seen.append(len(phases))

    monkeypatch.setattr(ckpt.saver._planner, "prepare", prepared)
    monkeypatch.setattr(saver, "warn_of_stall", ended)
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1, 1, 1)
    try:
        handle = ckpt.save(2, {"a": torch.ones(9), "b": torch.ones(70_000)})
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    handle.result()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert phases  # there was something to collect, before or after
    assert gc.isenabled()


def test_it_may_run_while_the_trainer_waits_for_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that exceeds the memory for staging is written while save() waits: minutes."""
    harness = Harness(tmp_path, data=2, parity=1, devices=3)
    seen: list[bool] = []
    with (
        harness.open() as pool,
        Checkpointer(pool, "run", save=SaveOptions(memory="1MiB")) as made,
    ):
        write_part = made.saver._write_part

        def written(*args: Any) -> None:
            seen.append(gc.isenabled())
            write_part(*args)

        monkeypatch.setattr(made.saver, "_write_part", written)
        made.save(1, {str(i): torch.ones(1 << 17) for i in range(4)}).result()
    assert seen
    assert all(seen)
    assert gc.isenabled()
