"""Peers in a process of their own: started, read line by line, never imported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpstore.benchmarks.cache.cache_traces import CacheTrace
from hpstore.errors import ConfigError

PACKAGES = ("libcachesim", "theine")
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "foreign_caches.py"
_SECONDS = 600.0  # for one trace; a peer that is slower is cut


def packages_named(names: str) -> list[str]:
    """Packages of a comma-separated list; all without one, none for "none". Raises ConfigError."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["none"]:
        return []
    for name in wanted:
        if name not in PACKAGES:
            raise ConfigError(f"no peer is called {name!r}; there are {', '.join(PACKAGES)}")
    return wanted or list(PACKAGES)


def missing(packages: Sequence[str]) -> dict[str, str]:
    """Packages that are not installed here, and what to do about it."""
    return {
        name: f"not installed here: pip install {name} (extra bench)"
        for name in packages
        if importlib.util.find_spec(name) is None
    }


class PeerRun:
    """All policies of some packages on one trace, in the background. collect() waits for them."""

    def __init__(
        self, trace: CacheTrace, capacities: Sequence[int], packages: Sequence[str]
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hpstore-bench-")
        path = Path(self._directory.name) / "trace.npz"
        facts: dict[str, Any] = {} if trace.sizes is None else {"sizes": trace.sizes}
        np.savez(
            path, requests=trace.requests, counted=trace.counted, capacities=capacities, **facts
        )
        # files, not pipes: nothing waits for a reader
        self._out, self._err = Path(self._directory.name, "out"), Path(self._directory.name, "err")
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(path), *packages], stdout=out, stderr=err
            )

    def collect(self) -> tuple[dict[int, dict[str, dict[str, float]]], dict[str, str]]:
        """Ratios by capacity and policy, and what failed with its reason."""
        failed: dict[str, str] = {}
        try:
            if self._process.wait(_SECONDS):
                failed["peers"] = self._err.read_text()[-500:] or f"exit {self._process.returncode}"
        except subprocess.TimeoutExpired:
            failed["peers"] = f"cut after {_SECONDS:.0f} s"
        found: defaultdict[int, dict[str, dict[str, float]]] = defaultdict(dict)
        for line in self._out.read_text().splitlines():
            if not line.startswith("{"):
                continue  # a library's own message
            row = json.loads(line)
            if "failed" in row:
                failed[row["failed"]] = row["reason"]
            else:
                ratios = {name: row[name] for name in row if name.endswith("_ratio")}
                found[row["capacity"]][row["policy"]] = ratios
        self.close()
        return dict(found), failed

    def close(self) -> None:
        """End it, whether it is done or not. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._directory.cleanup()
