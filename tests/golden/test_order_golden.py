"""Samples of released orders: a saved position means the same ones in every later hpstore.

Added to, never regenerated: an order that changes needs another DRAWS_VERSION, and old states
must be refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypedDict

import numpy as np
import pytest

from hpstore.loaders.sampling.mixture_order import MixtureOrder
from hpstore.loaders.sampling.order import GlobalOrder, Order, SubsetOrder, digest
from hpstore.loaders.sampling.random_draws import derive_seed
from hpstore.loaders.sampling.weighted import WeightedOrder
from hpstore.loaders.sampling.window_shuffle import WindowOrder

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
        "order": name,
        "epoch": epoch,
        "start": start,
        "first": found[:6].tolist(),
        "digest": digest(found),
    }


def test_the_vectors_cover_every_order() -> None:
    """Two epochs of each."""
    for name in ORDERS:
        assert {v["epoch"] for v in VECTORS if v["order"] == name} == {0, 2**33}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['order']}-{v['epoch']}")
def test_every_order_gives_the_golden_samples(vector: Vector) -> None:
    """To the last of 100,000."""
    assert take(vector["order"], vector["epoch"], vector["start"]) == vector


def test_a_process_without_simd_gives_the_same_samples() -> None:
    """Another hash seed and none of numpy's vectorised code: other sorts, another search."""
    core = import_module("numpy._core._multiarray_umath")
    wanted = [v for v in VECTORS if v["order"] != "global-2000000"]  # its sort would take seconds
    code = (
        "import json, runpy, sys; from numpy._core._multiarray_umath import __cpu_features__ as on;"
        "take = runpy.run_path(sys.argv[1])['take']; wanted = json.loads(sys.argv[3]);"
        "print(json.dumps([[n for n in sys.argv[2].split() if on[n]], [take(*w) for w in wanted]]))"
    )
    dispatched = " ".join(core.__cpu_dispatch__)
    asked = json.dumps([(v["order"], v["epoch"], v["start"]) for v in wanted])
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "PYTHONHASHSEED": "77",
        "NPY_DISABLE_CPU_FEATURES": dispatched,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, __file__, dispatched, asked],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == [[], wanted]
