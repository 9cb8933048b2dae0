"""Every fault of docs/faults.md on real devices, while a trainer loads and saves.

All of it runs by `make test-fault`, with examples/train.py; each row is written to build/faults.md
as soon as it is done, and the table is printed at the end. Otherwise one row runs, with a loop that
loads and saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hpstore
from hpstore.testing.faultfs import fuse_problem
from hpstore.testing.loopfs import loop_mounts_problem
from hpstore.units import MIB
from tests.fault.suite.faults import FAULTS, Fault
from tests.fault.suite.replay import replay
from tests.fault.suite.restarts import RESTARTS, Restart
from tests.fault.suite.rig import Rig
from tests.fault.suite.runner import Pace, References, StartTrainer, run_fault
from tests.fault.suite.table import Row, Table, markdown
from tests.fault.suite.workload import ROOT, Plan, example_trainer, fill, loop_trainer
from tests.thorough import LONG

ROW_SECONDS = 280  # for each row; one that takes longer has failed, and the next one begins
pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(ROW_SECONDS)]
TABLE = ROOT / "build" / "faults.md"
START: StartTrainer = example_trainer if LONG else loop_trainer
PACE = (
    Pace(plan=Plan(steps=44, every=4), start=6, steps=4, reads=200)
    if LONG
    else Pace(plan=Plan(steps=30, every=5), start=8, steps=8, reads=20)
)
DISK_BYTES = 256 * MIB if LONG else 96 * MIB
SHORT_FAULTS = ("shutdown",)
CUTS = 40
only_long = pytest.mark.skipif(not LONG, reason="long: make test-fault runs it")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory, loop_mounts: None) -> References:
    """What runs give without a fault."""

    def create(root: Path) -> Path:
        paths = [root / f"d{number}" for number in range(3)]
        with hpstore.create(paths, data=2, parity=1, config=root / "pool.toml") as pool:
            fill(pool)
        return root / "pool.toml"

    return References(tmp_path_factory.mktemp("healthy"), START, create)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """The table, printed when the last row is in."""
    found = Table(TABLE if LONG else None)
    yield found
    if LONG and found.rows:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        assert capture is not None
        with capture.global_and_fixture_disabled():
            print(f"\n{markdown(found.rows)}\n{TABLE}")


def require(problem: str | None, table: Table, name: str, method: str) -> None:
    """Skip what this machine cannot do; the table says so."""
    if problem is not None:
        table.add(Row(fault=name, method=method, skipped=problem))
        pytest.skip(problem)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_training_goes_on_and_nothing_is_lost(
    fault: Fault, table: Table, references: References, tmp_path: Path
) -> None:
    """Same losses, same checkpoints, no wrong or failed read; then full redundancy again."""
    if not LONG and fault.name not in SHORT_FAULTS:
        pytest.skip("long: make test-fault runs it")
    require(fault.problem(), table, fault.name, fault.method)
    with (
        table.row(fault.name, fault.method) as row,
        Rig(
            tmp_path, size_bytes=DISK_BYTES, kind=fault.kind, fuse=fault.fuse, hangs=fault.hangs
        ) as rig,
    ):
        run_fault(fault, rig, PACE, START, references(PACE.plan), row)
    assert not row.failures, "\n".join(row.failures)


@only_long
@pytest.mark.parametrize("restart", RESTARTS, ids=lambda restart: restart.name)
def test_what_a_killed_process_leaves_is_taken_up_by_the_next(
    restart: Restart, table: Table, references: References, tmp_path: Path
) -> None:
    """Killed at named phases, which must be reached, and at random; judged as every other fault."""
    problem = fuse_problem() if restart.fuse else None
    require(problem, table, restart.name, restart.method)
    with (
        table.row(restart.name, restart.method) as row,
        Rig(tmp_path, size_bytes=DISK_BYTES, fuse=restart.fuse) as rig,
    ):
        restart.run(rig, PACE, START, references, row)
    assert not row.failures, "\n".join(row.failures)


@only_long
def test_every_prefix_of_the_writes_of_a_commit_is_old_or_new(table: Table, tmp_path: Path) -> None:
    """With and without writes in flight; what was acknowledged is there."""
    name, method = "crash in a commit", "each prefix of its block writes, mounted"
    require(loop_mounts_problem() or fuse_problem(), table, name, method)
    with table.row(name, method) as row:
        replay(tmp_path, CUTS, row)
    assert not row.failures, "\n".join(row.failures)
