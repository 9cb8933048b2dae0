"""A pool that its own puts have filled: nothing is lost, and what is deleted makes room again."""

from __future__ import annotations

import itertools

import pytest

from hpstore.units import KIB, MIB
from tests.fault.common import Bench, MakeDisks, attempt, payload

pytestmark = [pytest.mark.fault, pytest.mark.root]
SIZES = (8 * MIB, 1 * MIB, 256 * KIB)


def test_a_pool_that_has_filled_itself_can_delete(bench: Bench, make_disks: MakeDisks) -> None:
    """PROTOCOL 3, 12: a put may leave less than the reserve; what is left is for tombstones."""
    disks = make_disks(3, 32 * MIB)
    with bench.create(disks, data=2, parity=1) as pool:
        for size in SIZES:
            for number in itertools.count():
                key = f"x/{size}/{number}"
                if not attempt(lambda key=key, size=size: pool.put(key, payload(key, size))):  # type: ignore[misc]
                    break
        assert not attempt(lambda: pool.put("y", b"small"))  # by now below the reserve
        keys = list(pool.list("x/"))
        assert all(pool.get(key) == payload(key, int(key.split("/")[1])) for key in keys)
        for key in keys:
            pool.delete(key)
        pool.put("y", payload("y", 8 * MIB))
        assert pool.get("y") == payload("y", 8 * MIB)
