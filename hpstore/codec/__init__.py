"""Reed-Solomon over GF(2^8) on caller-owned memory: no copies, no fragment headers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hpstore.codec.backends import BACKENDS, Backend, open_backend
from hpstore.codec.galois import Bytes
from hpstore.geometry import Code

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
        """Fill columns `want` from the same byte range of k columns `have`."""
        if not want or not len(sources[0]):
            return
        if code is Code.COPIES:
            for target in targets:
                target[:] = sources[0]
            return
        self.backend.reconstruct(data, parity, have, want, sources, targets)


__all__ = ["BACKENDS", "Backend", "ErasureCode", "choose_backend", "open_backend"]
