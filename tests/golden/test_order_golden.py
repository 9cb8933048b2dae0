"""Samples of released orders: a saved position means the same ones in every later hpstore.

Added to, never regenerated: an order that changes needs another DRAWS_VERSION, and old states
must be refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from hpstore.loaders.draws import derive_seed
from hpstore.loaders.mixing import MixtureOrder
from hpstore.loaders.order import GlobalOrder, Order, SubsetOrder, digest
from hpstore.loaders.weighted import WeightedOrder
from hpstore.loaders.windows import WindowOrder

PATH = Path(__file__).parent / "order_v1.json"
STRIPES = np.arange(0, 100_001, 100)
WEIGHTS = (np.arange(50_000) * 7919 % 1000 + 1) / 8.0  # exact in binary

ORDERS: dict[str, Callable[[], Order]] = {
    "global-1": lambda: GlobalOrder(1, 0),
    "global-1000": lambda: GlobalOrder(1000, 0),
    "global-2000000": lambda: GlobalOrder(2_000_000, 2**64 - 1),
    "global-2000003": lambda: GlobalOrder(2_000_003, 1),
    "global-1e9": lambda: GlobalOrder(10**9, 2**40),
    "global-1e12": lambda: GlobalOrder(10**12, 3),
    "window": lambda: WindowOrder(STRIPES, 4, window_stripes=32),
    "weighted": lambda: WeightedOrder(WEIGHTS, 100_000, 5),
    "weighted-unique": lambda: WeightedOrder(WEIGHTS, 50_000, 5, replacement=False),
    "mixture": lambda: MixtureOrder(
        [GlobalOrder(10**9, derive_seed(6, 0)), GlobalOrder(3000, derive_seed(6, 1))], [0.7, 0.3], 6
    ),
    "subset": lambda: SubsetOrder(GlobalOrder(5000, 7), np.arange(5000) * 3, samples=15_000),
}


class Vector(TypedDict):
    """Samples at the beginning of a range, and a digest of all of it."""

    order: str
    epoch: int
    start: int
    first: list[int]
    digest: str


VECTORS: list[Vector] = json.loads(PATH.read_text())["vectors"]


def take(name: str, epoch: int, start: int) -> Vector:
    """Up to 100,000 samples from `start`."""
    order = ORDERS[name]()
    found = order.indices(epoch, start, min(order.length, start + 100_000))
    return {
        "order": name, "epoch": epoch, "start": start, "first": found[:6].tolist(),
        "digest": digest(found),
    }  # fmt: skip


def test_the_vectors_cover_every_order() -> None:
    """Two epochs of each."""
    for name in ORDERS:
        assert {v["epoch"] for v in VECTORS if v["order"] == name} == {0, 2**33}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['order']}-{v['epoch']}")
def test_every_order_gives_the_golden_samples(vector: Vector) -> None:
    """To the last of 100,000."""
    assert take(vector["order"], vector["epoch"], vector["start"]) == vector


def test_another_process_gives_the_same_samples() -> None:
    """Other hash seed, no numpy dispatch beyond the baseline: another sort, another search."""
    code = (
        "import json; from hpstore.loaders.order import GlobalOrder, digest;"
        "from hpstore.loaders.windows import WindowOrder; import numpy as np;"
        "orders = {'global-1000': GlobalOrder(1000, 0), 'global-2000003': GlobalOrder(2000003, 1),"
        "'window': WindowOrder(np.arange(0, 100_001, 100), 4, window_stripes=32)};"
        "print(json.dumps({n: digest(o.indices(0, 0, min(o.length, 100_000)))"
        " for n, o in orders.items()}))"
    )
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "77",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 AVX512F AVX512_SKX AVX512_ICL",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    golden = {v["order"]: v["digest"] for v in VECTORS if v["epoch"] == 0}
    for name, found in json.loads(done.stdout).items():
        assert found == golden[name]
