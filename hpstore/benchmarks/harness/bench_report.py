"""What was measured, where, in words."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from typing import TypeGuard

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
            [
                "git",
                "-C",
                os.path.dirname(os.path.realpath(__file__)),
                "rev-parse",
                "--short",
                "HEAD",
            ],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def describe(results: Mapping[str, object]) -> str:
    """Results as indented lines."""
    return "\n".join(_lines(results, 0)) + "\n"


def _lines(value: Mapping[str, object], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            if not any(isinstance(v, Mapping) or _records(v) for v in inner.values()) and depth:
                yield f"{pad}{name}: {_line(inner)}"
            else:
                yield pad + name
                yield from _lines(inner, depth + 1)
        elif _records(inner):
            yield pad + name
            yield from (f"{pad}  {_line(record)}" for record in inner)
        else:
            yield f"{pad}{name}: {inner}"


def _line(record: Mapping[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in record.items())


def _records(value: object) -> TypeGuard[list[Mapping[str, object]]]:
    """Whether it is a list with nothing but records, one at least."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)
