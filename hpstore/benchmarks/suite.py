"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Callable

from hpstore.benchmarks.erasure_bench import bench_erasure
from hpstore.benchmarks.harness.measure import Options
from hpstore.benchmarks.harness.raw_devices import bench_devices
from hpstore.units import GIB, KIB, MIB, parse_bytes


def bench_cache(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/cache/cache_bench.py; the policy is imported only when it runs."""
    from hpstore.benchmarks.cache.cache_bench import bench_cache as run

    return run(options)


def bench_checkpoint(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/checkpoint/checkpoint_bench.py; torch is imported only when it runs."""
    from hpstore.benchmarks.checkpoint.checkpoint_bench import bench_checkpoint as run

    return run(options)


def bench_loader(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/loader/loader_bench.py; torch is imported only when it runs."""
    from hpstore.benchmarks.loader.loader_bench import bench_loader as run

    return run(options)


def bench_pipeline(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/pipeline/pipeline_bench.py; torch is imported only when it runs."""
    from hpstore.benchmarks.pipeline.pipeline_bench import bench_pipeline as run

    return run(options)


def bench_train(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/train_bench.py; runs jobs of its own."""
    from hpstore.benchmarks.train_bench import bench_train as run

    return run(options)


def bench_remote(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/remote_bench.py; needs an S3 server, named by the environment."""
    from hpstore.benchmarks.remote_bench import bench_remote as run

    return run(options)


def bench_health(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/health/health_bench.py; makes devices of its own."""
    from hpstore.benchmarks.health.health_bench import bench_health as run

    return run(options)


def bench_hosts(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/hosts_bench.py; its parser is imported only when it runs."""
    from hpstore.benchmarks.hosts_bench import bench_hosts as run

    return run(options)


def bench_ingest(options: Options) -> dict[str, object]:
    """hpstore/benchmarks/ingest_bench.py; torch is imported only when it runs."""
    from hpstore.benchmarks.ingest_bench import bench_ingest as run

    return run(options)


BENCHMARKS: dict[str, Callable[[Options], dict[str, object]]] = {
    "cache": bench_cache,
    "checkpoint": bench_checkpoint,
    "devices": bench_devices,
    "erasure": bench_erasure,
    "health": bench_health,
    "hosts": bench_hosts,
    "ingest": bench_ingest,
    "loader": bench_loader,
    "pipeline": bench_pipeline,
    "remote": bench_remote,
    "train": bench_train,
}
DEFAULT_BYTES = {
    "cache": 0,  # no data are written
    "checkpoint": 1_622_000_000,
    "devices": GIB,
    "erasure": GIB,
    "health": 0,
    "hosts": GIB,
    "ingest": 128 * MIB,
    "loader": 200_000 * 12 * KIB,
    "pipeline": 0,
    "remote": 64 * MIB,
    "train": 0,
}
SMALL_BYTES = 24 * MIB


def size_named(size: str, benchmark: str) -> int:
    """Bytes: a number with its unit, "full" or nothing for the usual ones, "small" for a try."""
    if size in ("", "full"):
        return DEFAULT_BYTES[benchmark]
    return SMALL_BYTES if size == "small" else parse_bytes(size)
