"""Pipelines of real processes that die and go on: same losses, no sample lost or read twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpstore
from hpstore.loaders import Dataset
from hpstore.loaders.order import GlobalOrder
from hpstore.trainers.pipelining.ledger import Ledger, Span
from tests.integration.ranks import launch, make_pool, open_pool
from tests.trainers.pipelines import LAYERS, ROWS, SAMPLES, rows_of, train, write_samples

STEPS, MICROBATCHES = 7, 4
LONG = pytest.mark.skipif(
    not os.environ.get("HPSTORE_LONG_TESTS"), reason="the whole matrix: HPSTORE_LONG_TESTS=1"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with the data set in it, and a run of two stages that nobody stops."""
    path = tmp_path_factory.mktemp("pipelines")
    make_pool(path)
    with open_pool(path) as pool:
        write_samples(pool)
    launch(path, 2, train, "whole", "1f1b", STEPS)
    return path


def expected_ids(steps: int) -> list[int]:
    """What so many steps read: the order of the epochs, position by position."""
    order = GlobalOrder(SAMPLES, 0)
    epochs = [order.indices(epoch, 0, SAMPLES) for epoch in range(3)]
    found: list[int] = np.concatenate(epochs)[: steps * MICROBATCHES * ROWS].tolist()
    return found


def assert_same_run(found: dict[int, Any], wanted: dict[int, Any], *, exact_to: float) -> None:
    """Every step there once, with the losses and the samples of the run that was not stopped."""
    assert list(found) == list(wanted) == list(range(STEPS))
    for step in wanted:
        assert abs(found[step]["loss"] - wanted[step]["loss"]) <= exact_to, step
        assert found[step]["ledger"] == wanted[step]["ledger"], step
    ids = [sample for row in found.values() for sample in row["ids"]]
    assert ids == expected_ids(STEPS)


@pytest.mark.parametrize(
    "death",
    [
        pytest.param("4 0 F 2", id="first stage, forward"),
        pytest.param("4 1 B 1", id="last stage, backward", marks=LONG),
    ],
)
def test_a_killed_pipeline_goes_on_where_it_was_committed(prepared: Path, death: str) -> None:
    """SIGKILL of a stage in the middle of step 4: the next job resumes at 4 with as many stages,
    bit by bit as if nothing had happened; samples lost = repeated = 0."""
    victim = int(death.split()[1])
    run = f"cut-{victim}"
    launch(prepared, 2, train, run, "1f1b", STEPS, death, killed=(victim,))
    assert list(rows_of(prepared, run, [0, 1])) == [0, 1, 2, 3]
    launch(prepared, 2, train, run, "1f1b", STEPS)
    wanted = rows_of(prepared, "whole", [0, 1])
    assert_same_run(rows_of(prepared, run, [0, 1]), wanted, exact_to=0.0)
    last = wanted[STEPS - 1]["ledger"]
    read = Span(epoch=0, start=0, stop=STEPS * MICROBATCHES * ROWS)
    assert Ledger().after([read], GlobalOrder(SAMPLES, 0)).to_dict() == last


def test_three_stages_go_on_as_one_and_as_four(prepared: Path) -> None:
    """Committed by three stages, of which one gets no data, resumed by one, then by four on two
    ranks: the names of all stages are those of the whole model, so nothing is converted."""
    launch(prepared, 3, train, "moved", "gpipe", 2)
    launch(prepared, 1, train, "moved", "gpipe", 4)
    launch(prepared, 2, train, "moved", "zbv", STEPS)
    wanted = rows_of(prepared, "whole", [0, 1])
    assert_same_run(rows_of(prepared, "moved", [0, 1, 2]), wanted, exact_to=1e-6)
    with open_pool(prepared) as pool:
        names = {
            f"layers.{n}.{part}" for n in range(LAYERS) for part in ("weight", "bias")
        }  # of the model that was never split
        for step in (2, 4, 6):
            assert set(saved(pool, step)["model"]) == names
            assert set(saved(pool, step)["optimizer"]["state"]) == names


def saved(pool: hpstore.Pool, step: int) -> Any:
    """A committed step of the run "moved" as plain values."""
    from hpstore.checkpoint import Checkpointer

    assert len(Dataset(pool, "samples")) == SAMPLES
    with Checkpointer(pool, "moved", alone=True) as checkpointer:
        return checkpointer.load_state(step)


@LONG
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("snapshot", ["free", "bubbles", "inline"])
def test_death_anywhere_in_a_step_loses_nothing(prepared: Path, name: str, snapshot: str) -> None:
    """Every schedule x every way to copy: SIGKILL of either end behind the first, a middle and the
    last micro-batch, again and again in one run."""
    options = f'{{"snapshot": "{snapshot}", "lazy": true}}'
    whole, cut = f"whole-{name}-{snapshot}", f"cut-{name}-{snapshot}"
    launch(prepared, 2, train, whole, name, STEPS, "", options)
    deaths = [("2 0 F 0", 0), ("4 0 F 3", 0), ("6 0 F 1", 0)]
    for death, victim in deaths:
        launch(prepared, 2, train, cut, name, STEPS, death, options, killed=(victim,))
    launch(prepared, 2, train, cut, name, STEPS, "", options)
    wanted = rows_of(prepared, whole, [0, 1])
    assert_same_run(rows_of(prepared, cut, [0, 1]), wanted, exact_to=0.0)
