"""The back ends of the erasure code: ISA-L by address, pyeclib's own API, numpy.

A back end turns k equally long source rows into target rows. It works on the caller's memory and
keeps no reference to it after the call.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hpstore.codec.galois import Bytes, cauchy_matrix, product_table, recovery_matrix

Columns = tuple[int, ...]
_MAX_CALL_BYTES = 1 << 30  # ISA-L takes the length as a C int


class Backend(Protocol):
    """Makes columns `want` of a k + m code from the k columns `have`."""

    name: str

    def reconstruct(
        self,
        data: int,
        parity: int,
        have: Columns,
        want: Columns,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
    ) -> None:
        """Fill `targets` (one row for each of `want`) from `sources` (one for each of `have`).

        All rows are contiguous uint8 of one length. Encoding is the case have = 0..k-1,
        want = k..k+m-1.
        """


class NumpyBackend:
    """Pure numpy: slow and obvious; the oracle of the tests and the last resort."""

    name = "numpy"

    def reconstruct(
        self,
        data: int,
        parity: int,
        have: Columns,
        want: Columns,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
    ) -> None:
        products = product_table()
        matrix = recovery_matrix(data, parity, have, want)
        for row, target in zip(matrix, targets, strict=True):
            target[:] = 0
            for factor, source in zip(row, sources, strict=True):
                if factor:
                    target ^= products[factor][source]


class IsalBackend:
    """ISA-L's `ec_init_tables` and `ec_encode_data` on addresses: no copies, GIL released."""

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        library = ctypes.CDLL(path)
        self._init_tables = library.ec_init_tables
        self._init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._init_tables.restype = None
        self._encode = library.ec_encode_data
        self._encode.argtypes = [
            ctypes.c_int, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._encode.restype = None
        # 1024 recovery patterns of at most 32 * 32 * 8 bytes: 8 MiB at the very most
        self._tables = lru_cache(maxsize=1024)(self._make_tables)

    # Any: ctypes array types are made at run time
    def _make_tables(self, data: int, parity: int, have: Columns, want: Columns) -> Any:
        rows = np.ascontiguousarray(recovery_matrix(data, parity, have, want))
        tables = ctypes.create_string_buffer(32 * data * len(want))
        self._init_tables(data, len(want), rows.ctypes.data, tables)
        return tables

    def reconstruct(
        self,
        data: int,
        parity: int,
        have: Columns,
        want: Columns,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
    ) -> None:
        tables = self._tables(data, parity, have, want)
        length = len(sources[0])
        source_at = [row.ctypes.data for row in sources]
        target_at = [row.ctypes.data for row in targets]
        for at in range(0, length, _MAX_CALL_BYTES):
            count = min(_MAX_CALL_BYTES, length - at)
            pointers = (ctypes.c_void_p * data)(*(a + at for a in source_at))
            outputs = (ctypes.c_void_p * len(want))(*(a + at for a in target_at))
            self._encode(count, data, len(want), tables, pointers, outputs)


class PyeclibBackend:
    """pyeclib's own API (`isa_l_rs_cauchy`): allocates and copies; used when no library loads.

    pyeclib works on fragments with an 80-byte header. Headers come from encoding zeros of the
    same length; payloads are put behind them.
    """

    name = "pyeclib"

    def __init__(self) -> None:
        from pyeclib.ec_iface import ECDriver  # optional path: only loaded when it is needed

        self._driver = lru_cache(maxsize=64)(
            lambda data, parity: ECDriver(k=data, m=parity, ec_type="isa_l_rs_cauchy")
        )

    def reconstruct(
        self,
        data: int,
        parity: int,
        have: Columns,
        want: Columns,
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
    ) -> None:
        length = len(sources[0])
        if not length:
            return
        if length % 16:  # liberasurecode pads fragments to 16 bytes
            padded = length + 16 - length % 16
            wide = [np.zeros(padded, np.uint8) for _ in sources]
            for row, source in zip(wide, sources, strict=True):
                row[:length] = source
            outputs = [np.empty(padded, np.uint8) for _ in targets]
            self.reconstruct(data, parity, have, want, wide, outputs)
            for target, output in zip(targets, outputs, strict=True):
                target[:] = output[:length]
            return
        driver = self._driver(data, parity)
        if have == tuple(range(data)) and want == tuple(range(data, data + parity)):
            rows = driver.encode(b"".join(row.tobytes() for row in sources))[data:]
        else:
            blank = driver.encode(bytes(data * length))
            header = len(blank[0]) - length
            fragments = [
                blank[i][:header] + row.tobytes() for i, row in zip(have, sources, strict=True)
            ]
            rows = driver.reconstruct(fragments, list(want))
        for target, made in zip(targets, rows, strict=True):
            target[:] = np.frombuffer(made, np.uint8)[len(made) - length :]


def bundled_isal() -> str | None:
    """Path of the ISA-L inside pyeclib's wheel, or None."""
    spec = importlib.util.find_spec("pyeclib")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent.parent / "pyeclib.libs"
    found = sorted(folder.glob("libisal*"))
    return str(found[0]) if found else None


def open_backend(name: str) -> Backend:
    """One back end by name: isal-pyeclib, isal-system, pyeclib, numpy.

    Raises OSError or ImportError when it is not on this machine, RuntimeError when its answers
    differ from the numpy reference.
    """
    backend: Backend
    if name == "isal-pyeclib":
        path = bundled_isal()
        if path is None:
            raise OSError("pyeclib's wheel holds no ISA-L")
        backend = IsalBackend(path, name)
    elif name == "isal-system":
        backend = IsalBackend(ctypes.util.find_library("isal") or "libisal.so.2", name)
    elif name == "pyeclib":
        backend = PyeclibBackend()
    elif name == "numpy":
        return NumpyBackend()
    else:
        raise ValueError(f"no erasure back end is called {name!r}; there are {BACKENDS}")
    self_test(backend)
    return backend


def self_test(backend: Backend) -> None:
    """Raise RuntimeError unless a back end agrees with the reference on 4 + 2 with 2 lost."""
    data, parity = 4, 2
    rows = [np.arange(i, i + 256, dtype=np.uint16).astype(np.uint8) * 7 for i in range(data)]
    generator = cauchy_matrix(data, parity)
    products = product_table()
    want = [np.bitwise_xor.reduce([products[f][r] for f, r in zip(line, rows, strict=True)])
            for line in generator[data:]]  # fmt: skip
    made = [np.empty(256, np.uint8) for _ in range(parity)]
    backend.reconstruct(data, parity, (0, 1, 2, 3), (4, 5), rows, made)
    back = [np.empty(256, np.uint8) for _ in range(2)]
    backend.reconstruct(data, parity, (1, 3, 4, 5), (0, 2), [rows[1], rows[3], *made], back)
    expected = [*want, rows[0], rows[2]]
    if not all(np.array_equal(a, b) for a, b in zip([*made, *back], expected, strict=True)):
        raise RuntimeError(f"erasure back end {backend.name} disagrees with the reference")


BACKENDS = ("isal-pyeclib", "isal-system", "pyeclib", "numpy")

__all__ = ["BACKENDS", "Backend", "IsalBackend", "NumpyBackend", "PyeclibBackend", "bundled_isal",
           "open_backend", "self_test"]  # fmt: skip
