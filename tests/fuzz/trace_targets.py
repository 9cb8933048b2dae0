"""Readers of recorded traces of requests."""

from __future__ import annotations

import contextlib
import gzip

import numpy as np

from hpstore.loaders.traces.trace_files import read_trace
from tests.fuzz.engine import Target
from tests.fuzz.pool_targets import scratch

_KINDS = {b"o": "t.oracle", b"z": "t.oracle.zst", b"g": "t.csv.gz", b"m": "t.msr", b"c": "t.csv"}


def take_trace(data: bytes) -> None:
    name = _KINDS.get(data[:1], "t.csv")
    kind = "msr" if name == "t.msr" else "auto"
    read_trace(str(scratch(name, data[1:])), format=kind, limit=100_000)


def trace_seeds() -> list[bytes]:
    records = np.zeros(8, np.dtype([("t", "<u4"), ("i", "<u8"), ("s", "<u4"), ("n", "<i8")]))
    records["i"], records["n"] = [1, 2, 3, 1, 2, 3, 2**64 - 1, 5], -1
    oracle = records.tobytes()
    text = b"time,obj_id,size\n1,a,5\n2,7,5\n"
    msr = b"128166372003061629,hm,1,Read,4096,8192,113736\n128166372003061630,hm,1,Write,0,512,1\n"
    squeezed = []
    with contextlib.suppress(ImportError):  # optional: without it nothing is read either
        import zstandard

        squeezed = [b"z" + zstandard.compress(oracle)]
    return [
        *squeezed,
        b"o" + oracle,
        b"g" + gzip.compress(text, mtime=0),
        b"m" + msr,
        b"c" + text,
        b"c" + msr,
    ]


TRACE_TARGETS = [Target(name="cache-trace", run=take_trace, seeds=trace_seeds)]
