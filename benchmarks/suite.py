"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable

from hpstore.benchmarks.devices import bench_devices
from hpstore.benchmarks.erasure import bench_erasure
from hpstore.benchmarks.measure import Options

BENCHMARKS: dict[str, Callable[[Options], dict[str, object]]] = {
    "devices": bench_devices,
    "erasure": bench_erasure,
}

__all__ = ["BENCHMARKS", "Options"]
