"""`hpstore status` of disks that break in ways that a stat and a listing do not see."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from hpstore.testing.loopfs import HANGING
from hpstore.testing.scratch import throttle_problem
from hpstore.units import MIB
from tests.fault.agents import COMMAND_LINE
from tests.fault.common import Bench, MakeDisks, payload

pytestmark = [pytest.mark.fault, pytest.mark.root]


@pytest.mark.parametrize(
    ("fault", "state"),
    [("read_only", "read-only"), ("fill", "full"), ("hang", "missing"), ("yank", "missing")],
)
def test_a_command_that_may_not_write_sees_broken_disks(
    bench: Bench, make_disks: MakeDisks, fault: str, state: str
) -> None:
    """status_read_only_open: all four were "online"; and the command ends while the disk hangs."""
    if fault == "hang" and (problem := throttle_problem()):
        pytest.skip(problem)
    disks = make_disks(4)
    with bench.create(disks, data=2, parity=1) as pool:
        for number in range(4):
            pool.put(f"k/{number}", payload(str(number), 2 * MIB))
    if fault == "hang":
        disks[0].throttle(HANGING)
    else:
        getattr(disks[0], fault)()
    began = time.monotonic()
    try:
        ran = subprocess.run(
            [sys.executable, *COMMAND_LINE, "status", str(bench.toml), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        if fault == "hang":
            disks[0].throttle(0)
    found = json.loads(ran.stdout)
    (row,) = (d for d in found["devices"] if d["url"] == disks[0].path)
    assert row["state"] == state
    assert found["losses_tolerated"] == (0 if state == "missing" else 1)
    assert time.monotonic() - began < 45
