"""The four parts that are compiled; everything else about the package stands in pyproject.toml."""

from setuptools import Extension, setup

# called by address, from hpstore/loaders/batching/streaming_copy.py, policy/directories.py,
# dataset/many_ranges.py, ingestion/tar_runs.py and checkpoint/state/plain_values.py; without a C
# compiler the installation goes on
NONTEMPORAL = Extension(
    "hpstore._nontemporal",
    ["hpstore/loaders/batching/streaming_copy.c"],
    extra_compile_args=["-O3"],
    optional=True,
)

_POLICY = "hpstore/loaders/policy"
DIRECTORIES = Extension(
    "hpstore._directories",
    [
        f"{_POLICY}/{name}.c"
        for name in ("directories", "queue_rules", "adaptive_rules", "counted_rules")
    ],
    depends=[f"{_POLICY}/directories.h"],
    extra_compile_args=["-O3"],
    optional=True,
)

RANGES = Extension(
    "hpstore._ranges",
    ["hpstore/loaders/dataset/many_ranges.c", "hpstore/loaders/ingestion/tar_scan.c"],
    extra_compile_args=["-O3"],
    optional=True,
)

VALUES = Extension(
    "hpstore._values",
    ["hpstore/checkpoint/state/plain_values.c"],
    extra_compile_args=["-O3"],
    optional=True,
)

setup(ext_modules=[NONTEMPORAL, DIRECTORIES, RANGES, VALUES])
