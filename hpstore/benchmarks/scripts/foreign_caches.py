"""Foreign cache policies on a trace: a script, run by itself, never imported.

libcachesim is under the GPL and theine under its own licence: neither is needed by hpstore,
nor part of it. Usage: python cache_peers.py TRACE.npz PEER... ; a line of JSON on standard output
for every policy and capacity as soon as it is known, or one with "failed".
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

LIBCACHESIM = {
    "LRU": "LRU",
    "LFU": "LFU",
    "ARC": "ARC",
    "S3-FIFO": "S3FIFO",
    "SIEVE": "Sieve",
    "W-TinyLFU": "WTinyLFU",
}
THEINE = "theine W-TinyLFU"

# Any: other libraries' caches
Hits = npt.NDArray[np.bool_]


def by_libcachesim(
    library: Any, name: str, blocks: list[int], sizes: list[int] | None, capacity: int
) -> Hits:
    """One request after another; sizes in bytes where there are any."""
    cache = getattr(library, LIBCACHESIM[name])(cache_size=capacity)
    request = library.Request()
    request.obj_size = 1
    get = cache.get
    hits = np.zeros(len(blocks), np.bool_)
    for at, block in enumerate(blocks):
        request.obj_id = block
        request.clock_time = at
        if sizes is not None:
            request.obj_size = sizes[block]
        if get(request):
            hits[at] = True
    return hits


def by_theine(library: Any, blocks: list[int], capacity: int) -> Hits:
    """get(), and set() after a miss. It counts entries, not bytes."""
    cache = library.Cache(capacity, nolock=True)
    get, put = cache.get, cache.set
    hits = np.zeros(len(blocks), np.bool_)
    for at, block in enumerate(blocks):
        if get(block)[1]:
            hits[at] = True
        else:
            put(block, True)
    cache.close()
    return hits


def _say(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def _play(path: str, peers: list[str]) -> None:
    with np.load(path) as file:
        requests, counted = file["requests"], int(file["counted"])
        capacities = file["capacities"].tolist()
        sizes = file.get("sizes")
    blocks, plain = requests.tolist(), None if sizes is None else sizes.tolist()
    for package in peers:
        try:
            library = importlib.import_module(package)
        except ImportError as error:
            _say({"failed": package, "reason": str(error)})
            continue
        for capacity in capacities:
            for name, run in _runs(package, library, blocks, plain, capacity):
                try:
                    hits = run()[counted:]
                except Exception as error:  # noqa: BLE001 (any failure of theirs is a line)
                    _say({"failed": name, "reason": repr(error)})
                    continue
                found = {"policy": name, "capacity": capacity, "hit_ratio": float(hits.mean())}
                if sizes is not None:
                    weights = sizes[requests[counted:]]
                    found["byte_hit_ratio"] = float(weights @ hits / weights.sum())
                _say(found)


def _runs(
    package: str, library: Any, blocks: list[int], sizes: list[int] | None, capacity: int
) -> list[tuple[str, Callable[[], Hits]]]:
    if package == "theine":
        return [(THEINE, partial(by_theine, library, blocks, capacity))] if sizes is None else []
    return [
        (name, partial(by_libcachesim, library, name, blocks, sizes, capacity))
        for name in LIBCACHESIM
    ]


if __name__ == "__main__":
    _play(sys.argv[1], sys.argv[2:])
