"""Encode and decode against ISA-L called raw, on the same rows, one thread."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from hpstore.benchmarks.harness.measure import Options, interleave, rates, ratio
from hpstore.codec import ErasureCode, address_of, choose_backend
from hpstore.codec.backends import bundled_isal
from hpstore.codec.galois import Bytes, recovery_matrix
from hpstore.runtime.buffers import aligned_array
from hpstore.units import KIB, MIB

GEOMETRIES = ((4, 2), (8, 3))
UNITS = (256 * KIB, MIB, 4 * MIB)
_BYTES_A_SAMPLE = 512 * MIB
_STRIPE_BYTES = 64 * MIB


def raw_isal(
    data: int,
    parity: int,
    have: tuple[int, ...],
    want: tuple[int, ...],
    sources: list[Bytes],
    targets: list[Bytes],
) -> Callable[[], None]:
    """ISA-L with tables and pointers made beforehand: the least that a call can cost."""
    path = bundled_isal()
    assert path is not None
    library = ctypes.CDLL(path)
    tables = ctypes.create_string_buffer(32 * data * len(want))
    rows = np.ascontiguousarray(recovery_matrix(data, parity, have, want))
    library.ec_init_tables(data, len(want), ctypes.c_void_p(rows.ctypes.data), tables)
    pointers = (ctypes.c_void_p * data)(*(row.ctypes.data for row in sources))
    outputs = (ctypes.c_void_p * len(want))(*(row.ctypes.data for row in targets))
    length = len(sources[0])
    call = library.ec_encode_data
    return lambda: call(length, data, len(want), tables, pointers, outputs)


def by_address(
    code: ErasureCode,
    data: int,
    parity: int,
    have: tuple[int, ...],
    want: tuple[int, ...],
    sources: list[Bytes],
    targets: list[Bytes],
) -> Callable[[], None]:
    """What the write pipeline does for each stripe: look the coder up, address the rows, code."""
    source_at = [address_of(row) for row in sources]
    target_at = [address_of(row) for row in targets]
    unit = len(sources[0])

    def run() -> None:
        coder = code.backend.coder(data, parity, have, want)
        coder([at + 0 for at in source_at], [at + 0 for at in target_at], unit)

    return run


def timed(actions: list[Callable[[], None]], rounds: int) -> Callable[[], float]:
    """Seconds of all actions in turn, several rounds."""

    def run() -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            for action in actions:
                action()
        return time.perf_counter() - began

    return run


def bench_erasure(options: Options) -> dict[str, object]:
    """Rates in GB/s of object data, and ratios to raw ISA-L.

    Both go through the same 64 MiB of stripes in turn, as a put does; one stripe that stays in the
    processor's cache would flatter both.
    """
    backend = choose_backend()
    results: dict[str, object] = {"backend": backend.name}
    if bundled_isal() is None:
        results["skipped"] = "no ISA-L in pyeclib's wheel on this machine to compare with"
        return results
    code = ErasureCode(backend)
    for data, parity in GEOMETRIES:
        for unit in UNITS:
            encode = tuple(range(data)), tuple(range(data, data + parity))
            decode = tuple(range(parity, data + parity)), tuple(range(parity))
            for what, (have, want) in (("encode", encode), ("decode", decode)):
                name = f"{what} {data}+{parity} unit {unit // KIB} KiB"
                results[name] = _compare(code, data, parity, have, want, unit, options)
    return results


def _compare(
    code: ErasureCode,
    data: int,
    parity: int,
    have: tuple[int, ...],
    want: tuple[int, ...],
    unit: int,
    options: Options,
) -> dict[str, object]:
    rng = np.random.default_rng(0)
    ours, raw, kept = [], [], []
    for _ in range(max(1, _STRIPE_BYTES // (data * unit))):
        rows = aligned_array((data + parity) * unit, populate=True).reshape(data + parity, unit)
        kept.append(rows)  # both contenders hold bare addresses
        rows[:data] = rng.integers(0, 256, (data, unit), np.uint8)
        sources, targets = [rows[i] for i in have], [rows[i] for i in want]
        ours.append(by_address(code, data, parity, have, want, sources, targets))
        raw.append(raw_isal(data, parity, have, want, sources, targets))
    rounds = max(1, _BYTES_A_SAMPLE // (data * unit * len(ours)))
    times = interleave({"hpstore": timed(ours, rounds), "raw": timed(raw, rounds)}, options.repeats)
    nbytes = dict.fromkeys(times, rounds * len(ours) * data * unit)
    return {
        "rates": rates(times, nbytes),
        "ratio_to_raw": ratio(times["hpstore"], times["raw"]),
    }
