"""What was measured, where, in words."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping

import numpy

import hpstore


def machine() -> dict[str, object]:
    """The facts that a figure means nothing without."""
    return {
        "hpstore": hpstore.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "-C", os.path.dirname(os.path.realpath(__file__)), "rev-parse", "--short",
             "HEAD"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip()


def describe(results: Mapping[str, object]) -> str:
    """Results as indented lines."""
    return "\n".join(_lines(results, 0)) + "\n"


def _lines(value: Mapping[str, object], depth: int) -> Iterator[str]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            if all(not isinstance(v, Mapping) for v in inner.values()) and depth:
                yield "  " * depth + f"{name}: " + ", ".join(f"{k} {v}" for k, v in inner.items())
            else:
                yield "  " * depth + name
                yield from _lines(inner, depth + 1)
        else:
            yield "  " * depth + f"{name}: {inner}"


__all__ = ["describe", "machine"]
