"""The back ends of the erasure code: ISA-L by address, pyeclib's own API, numpy.

A back end turns k equally long source rows into target rows. It works on the caller's memory and
keeps no reference to it after the call.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from hpstore.codec.galois import Bytes, cauchy_matrix, product_table, recovery_matrix

Columns = tuple[int, ...]
_MAX_CALL_BYTES = 1 << 30  # ISA-L takes the length as a C int
_KEPT_CODERS = 1024  # recovery patterns, at most 8 KiB of tables each


class Coder(Protocol):
    """Makes some columns of one code from k others. Thread-safe."""

    def __call__(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Fill the rows at addresses `targets` from those at `sources`, `length` bytes each.

        The caller keeps all rows alive and unchanged until the return. Nothing is checked here:
        `ErasureCode.reconstruct` is the safe way in.
        """


class Backend(Protocol):
    """A way to compute the code on this machine."""

    name: str

    def coder(self, data: int, parity: int, have: Columns, want: Columns) -> Coder:
        """What makes columns `want` of a k + m code from the k columns `have`.

        Encoding is the case have = 0..k-1, want = k..k+m-1. Coders are kept and reused.
        """


def row_at(address: int, length: int) -> Bytes:
    """The memory at an address as a (length,) uint8 array; it does not keep the memory alive."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(address)), np.uint8)


class NumpyBackend:
    """Pure numpy: slow and obvious; the oracle of the tests and the last resort."""

    name = "numpy"

    def __init__(self) -> None:
        self.coder = lru_cache(maxsize=_KEPT_CODERS)(self._coder)

    @staticmethod
    def _coder(data: int, parity: int, have: Columns, want: Columns) -> Coder:
        matrix, products = recovery_matrix(data, parity, have, want), product_table()

        def run(sources: Sequence[int], targets: Sequence[int], length: int) -> None:
            if not length:
                return
            rows = [row_at(address, length) for address in sources]
            for factors, address in zip(matrix, targets, strict=True):
                target = row_at(address, length)
                target[:] = 0
                for factor, source in zip(factors, rows, strict=True):
                    if factor:
                        target ^= products[factor][source]

        return run


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
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
        self._encode.restype = None
        self.coder = lru_cache(maxsize=_KEPT_CODERS)(self._coder)

    def _coder(self, data: int, parity: int, have: Columns, want: Columns) -> Coder:
        rows = np.ascontiguousarray(recovery_matrix(data, parity, have, want))
        tables = ctypes.create_string_buffer(32 * data * len(want))
        self._init_tables(data, len(want), rows.ctypes.data, tables)
        encode, count, tables_at = self._encode, len(want), ctypes.addressof(tables)
        keep = tables  # the closure keeps them alive for tables_at
        # pointers as packed bytes: a tenth of the cost of a ctypes array
        pack_sources, pack_targets = struct.Struct(f"{data}P").pack, struct.Struct(f"{count}P").pack

        def run(sources: Sequence[int], targets: Sequence[int], length: int) -> None:
            if length <= _MAX_CALL_BYTES:
                pointers, outputs = pack_sources(*sources), pack_targets(*targets)
                encode(length, data, count, tables_at, pointers, outputs)
                return
            assert keep is tables
            for at in range(0, length, _MAX_CALL_BYTES):
                run(
                    [address + at for address in sources],
                    [address + at for address in targets],
                    min(_MAX_CALL_BYTES, length - at),
                )

        return run


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

    def coder(self, data: int, parity: int, have: Columns, want: Columns) -> Coder:
        encoding = have == tuple(range(data)) and want == tuple(range(data, data + parity))

        def run(sources: Sequence[int], targets: Sequence[int], length: int) -> None:
            if not length:
                return
            wide = length + -length % 16  # liberasurecode pads fragments to 16 bytes
            rows = [row_at(a, length).tobytes().ljust(wide, b"\0") for a in sources]
            driver = self._driver(data, parity)
            if encoding:
                made = driver.encode(b"".join(rows))[data:]
            else:
                blank = driver.encode(bytes(data * wide))
                header = len(blank[0]) - wide
                fragments = [blank[i][:header] + row for i, row in zip(have, rows, strict=True)]
                whole = driver.decode(fragments)
                columns = [whole[i * wide : (i + 1) * wide] for i in range(data)]
                columns += driver.encode(whole)[data:] if max(want) >= data else []
                made = [columns[i] for i in want]
            for address, fragment in zip(targets, made, strict=True):
                payload = fragment[len(fragment) - wide :]
                row_at(address, length)[:] = np.frombuffer(payload, np.uint8)[:length]

        return run


def bundled_isal() -> str | None:
    """Path of the ISA-L inside pyeclib's wheel, or None."""
    spec = importlib.util.find_spec("pyeclib")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent.parent / "pyeclib.libs"
    found = sorted(folder.glob("libisal*"))
    return str(found[0]) if found else None


@lru_cache
def open_backend(name: str) -> Backend:
    """One back end by name: isal-pyeclib, isal-system, pyeclib, numpy. Tested and made once.

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
    want = [
        np.bitwise_xor.reduce([products[f][r] for f, r in zip(line, rows, strict=True)])
        for line in generator[data:]
    ]
    made = [np.empty(256, np.uint8) for _ in range(parity)]
    back = [np.empty(256, np.uint8) for _ in range(2)]
    at = [row.ctypes.data for row in (*rows, *made, *back)]
    backend.coder(data, parity, (0, 1, 2, 3), (4, 5))(at[:4], at[4:6], 256)
    backend.coder(data, parity, (1, 3, 4, 5), (0, 2))([at[1], at[3], at[4], at[5]], at[6:], 256)
    expected = [*want, rows[0], rows[2]]
    if not all(np.array_equal(a, b) for a, b in zip([*made, *back], expected, strict=True)):
        raise RuntimeError(f"erasure back end {backend.name} disagrees with the reference")


BACKENDS = ("isal-pyeclib", "isal-system", "pyeclib", "numpy")
