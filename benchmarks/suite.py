"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable

from hpstore.benchmarks.devices import bench_devices
from hpstore.benchmarks.erasure import bench_erasure
from hpstore.benchmarks.measure import Options
from hpstore.units import GIB


def bench_checkpoint(options: Options) -> dict[str, object]:
    """benchmarks/checkpoint.py; torch is imported only when it runs."""
    from hpstore.benchmarks.checkpoint import bench_checkpoint as run

    return run(options)


BENCHMARKS: dict[str, Callable[[Options], dict[str, object]]] = {
    "checkpoint": bench_checkpoint,
    "devices": bench_devices,
    "erasure": bench_erasure,
}
DEFAULT_BYTES = {"checkpoint": 1_622_000_000, "devices": GIB, "erasure": GIB}

__all__ = ["BENCHMARKS", "DEFAULT_BYTES", "Options"]
