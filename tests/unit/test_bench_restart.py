"""The bar for a new process on a node that has its data in memory."""

from __future__ import annotations

from typing import Any

from hpstore.benchmarks.loader.loader_bars import restart_verdicts
from hpstore.benchmarks.loader.loader_contenders import kind_of
from hpstore.benchmarks.loader.loader_ours import OursKept, OursNew


def _session(rate: float, read: int = 0) -> Any:
    return {"rate": rate, "cut": False, "stats": {"records_read": read}}


def test_a_new_process_is_held_against_the_loader_before_it() -> None:
    kept = [_session(100.0), _session(50.0), _session(100.0)]
    for rates, met in (([90.0, 45.0, 70.0], True), ([79.0, 39.0, 90.0], False)):
        rows = restart_verdicts(
            {OursKept.name: kept, OursNew.name: [_session(rate) for rate in rates]}
        )
        assert rows["new_process_to_kept_loader"]["met"] is met
        assert rows["records_read_by_a_new_process"]["met"] is True


def test_a_new_process_that_reads_from_devices_misses_its_bar() -> None:
    rows = restart_verdicts({OursKept.name: [_session(1.0)], OursNew.name: [_session(1.0, 5)]})
    assert rows["records_read_by_a_new_process"]["met"] is False


def test_both_are_contenders_of_the_benchmark() -> None:
    assert [kind_of(kind.name) for kind in (OursKept, OursNew)] == [OursKept, OursNew]
