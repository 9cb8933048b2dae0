"""A scrub and a disk that dies under it."""

from __future__ import annotations

import pytest

from hpstore.maintenance.rebuild import Progress
from hpstore.units import MIB
from tests.fault.common import Bench, MakeDisks, payload

pytestmark = [pytest.mark.fault, pytest.mark.root]


def test_what_a_scrub_cannot_read_of_a_dead_disk_is_neither_damaged_nor_written_anew(
    bench: Bench, make_disks: MakeDisks
) -> None:
    """scrub_counts_dead_device: PROTOCOL 17, its return is waited for while parity is left."""
    disks = make_disks(6)
    with bench.create(disks, data=2, parity=2) as pool:
        for number in range(6):
            pool.put(f"k/{number}", payload(str(number), 2 * MIB))

        def dies(at: Progress) -> None:
            if at.done == 1:
                disks[0].shutdown()

        report = pool.scrub(resume=False, progress=dies)
        assert (report.damaged_columns, report.columns_written, report.rebuilt) == (0, 0, 0)
        assert report.waiting
        assert not report.unreadable
