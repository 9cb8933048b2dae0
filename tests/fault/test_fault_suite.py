"""Every fault of docs/faults.md on real devices, while a trainer loads and saves.

All of it runs by `make test-fault`, with examples/train.py; the table is printed and written to
build/faults.md. Otherwise one row runs, with a loop that loads and saves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpstore
from hpstore.testing.faultfs import fuse_problem
from hpstore.testing.loopfs import loop_mounts_problem
from hpstore.units import MIB
from tests.fault.suite.faults import FAULTS, Fault
from tests.fault.suite.replay import replay
from tests.fault.suite.restarts import (
    JOBS,
    Job,
    kill_job,
    kill_trainer_at_phases,
    kill_trainer_at_random,
)
from tests.fault.suite.rig import Rig
from tests.fault.suite.runner import Pace, Reference, StartTrainer, reference, run_fault
from tests.fault.suite.table import Row, markdown, write
from tests.fault.suite.workload import (
    ROOT,
    Plan,
    example_trainer,
    fill,
    loop_trainer,
)

pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(280)]
LONG = bool(os.environ.get("HPSTORE_LONG_TESTS"))
TABLE = ROOT / "build" / "faults.md"
START: StartTrainer = example_trainer if LONG else loop_trainer
PACE = (
    Pace(plan=Plan(steps=20, every=4), start=5, steps=7, reads=60) if LONG else
    Pace(plan=Plan(steps=30, every=5), start=8, steps=12, reads=20)
)  # fmt: skip
DISK_BYTES = 256 * MIB if LONG else 96 * MIB
SHORT_FAULTS = ("shutdown",)
KILLED_AT = (1, 5)  # the n-th operation of a kind
CUTS = 40
only_long = pytest.mark.skipif(not LONG, reason="long: make test-fault runs it")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, loop_mounts: None) -> Reference:
    """What the run gives without a fault."""

    def create(root: Path) -> Path:
        paths = [root / f"d{number}" for number in range(3)]
        with hpstore.create(paths, data=2, parity=1, config=root / "pool.toml") as pool:
            fill(pool)
        return root / "pool.toml"

    return reference(tmp_path_factory.mktemp("healthy"), PACE.plan, START, create)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """The table; written and printed when the last row is in."""
    found: list[Row] = []
    yield found
    if LONG and found:
        write(found, TABLE)
        sys.__stdout__.write(f"\n{markdown(found)}\n{TABLE}\n")  # type: ignore[union-attr]


def finish(rows: list[Row], row: Row) -> None:
    """Add a row; the test fails with what was wrong in it."""
    rows.append(row)
    assert not row.failures, "\n".join(row.failures)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_training_goes_on_and_nothing_is_lost(
    fault: Fault, rows: list[Row], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Same losses, same checkpoints, no wrong or failed read; then full redundancy again."""
    if not LONG and fault.name not in SHORT_FAULTS:
        pytest.skip("long: make test-fault runs it")
    problem = fault.problem()
    if problem is not None:
        rows.append(Row(fault=fault.name, method=fault.method, skipped=problem))
        pytest.skip(problem)
    healthy: Reference = request.getfixturevalue("healthy")
    with Rig(
        tmp_path, size_bytes=DISK_BYTES, kind=fault.kind, fuse=fault.fuse, hangs=fault.hangs
    ) as rig:
        finish(rows, run_fault(fault, rig, PACE, START, healthy))


@only_long
def test_trainer_killed_at_random_goes_on_where_it_was(
    rows: list[Row], tmp_path: Path, healthy: Reference
) -> None:
    """Three kills; the losses of all lives together are those of one run."""
    with Rig(tmp_path, size_bytes=DISK_BYTES) as rig:
        finish(rows, kill_trainer_at_random(rig, PACE.plan, healthy))


@only_long
def test_trainer_killed_at_every_phase_of_a_save_goes_on_where_it_was(
    rows: list[Row], tmp_path: Path, healthy: Reference
) -> None:
    """One life for each phase; a phase that is never reached fails, too."""
    with Rig(tmp_path, size_bytes=DISK_BYTES) as rig:
        finish(rows, kill_trainer_at_phases(rig, PACE.plan, healthy))


@only_long
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_job_killed_at_every_operation_is_finished_by_the_next(
    job: Job, rows: list[Row], tmp_path: Path, loop_mounts: None
) -> None:
    """Rebuild, scrub and ingest: what was there reads in between; another run ends it."""
    with Rig(tmp_path, size_bytes=96 * MIB) as rig:
        finish(rows, kill_job(rig, job, KILLED_AT))


@only_long
def test_every_prefix_of_the_writes_of_a_commit_is_old_or_new(
    rows: list[Row], tmp_path: Path
) -> None:
    """With and without writes in flight; what was acknowledged is there."""
    problem = loop_mounts_problem() or fuse_problem()
    if problem is not None:
        pytest.skip(problem)
    finish(rows, replay(tmp_path, CUTS))
