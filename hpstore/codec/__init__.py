"""Reed-Solomon over GF(2^8) on caller-owned memory: no copies, no fragment headers."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

from hpstore.codec.backends import BACKENDS, Backend, Coder, open_backend
from hpstore.codec.galois import Bytes
from hpstore.format.geometry import Code

_log = logging.getLogger(__name__)


def choose_backend(name: str | None = None) -> Backend:
    """The fastest erasure back end that works here, or the one called `name`.

    A back end that is missing or fails its self-test is passed over with a log line; which one is
    in use stands in `pool.status()`.
    """
    if name is not None:
        return open_backend(name)
    for candidate in BACKENDS:
        try:
            return open_backend(candidate)
        except (OSError, ImportError, RuntimeError, AttributeError) as error:
            _log.warning("erasure back end %s is not usable: %s", candidate, error)
    raise AssertionError("the numpy back end always works")


class ErasureCode:
    """Encode and reconstruct columns of one backend. Thread-safe; holds no memory of the caller."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def encode(
        self, code: Code, parity: int, sources: Sequence[Bytes], targets: Sequence[Bytes]
    ) -> None:
        """Fill the parity rows `targets` from the data rows `sources`, all of one length."""
        data = len(sources)
        wanted = tuple(range(data, data + parity))
        self.reconstruct(code, data, parity, tuple(range(data)), wanted, sources, targets)

    def encoder(self, data: int, parity: int) -> Coder:
        """The Reed-Solomon encoder by address, for the write pipeline."""
        have, want = tuple(range(data)), tuple(range(data, data + parity))
        return self.backend.coder(data, parity, have, want)

    def reconstruct(
        self,
        code: Code,
        data: int,
        parity: int,
        have: tuple[int, ...],
        want: tuple[int, ...],
        sources: Sequence[Bytes],
        targets: Sequence[Bytes],
    ) -> None:
        """Fill columns `want` from the same byte range of k columns `have`.

        Rows are contiguous uint8 of one length; targets do not overlap sources. They belong to
        this call until it returns.
        """
        if len(sources) != data or len(have) != data or len(targets) != len(want):
            raise ValueError(
                f"{len(sources)} rows for columns {have} and {len(targets)} for {want} were given; "
                f"{data} needed and {len(want)} wanted"
            )
        if not want or not len(sources[0]):
            return
        if code is Code.COPIES:
            for target in targets:
                target[:] = sources[0]
            return
        length = len(sources[0])
        if any(len(row) != length or not row.flags.c_contiguous for row in (*sources, *targets)):
            raise ValueError("rows of a stripe must be contiguous and of one length")
        coder = self.backend.coder(data, parity, have, want)
        coder([address_of(row) for row in sources], [address_of(row) for row in targets], length)


def address_of(row: Bytes) -> int:
    """Where a row begins. from_buffer costs a quarter of `row.ctypes.data`; it must be writable."""
    if row.flags.writeable:
        return ctypes.addressof(ctypes.c_char.from_buffer(row.data))
    return int(row.ctypes.data)


__all__ = [
    "BACKENDS",
    "Backend",
    "Coder",
    "ErasureCode",
    "address_of",
    "choose_backend",
    "open_backend",
]
