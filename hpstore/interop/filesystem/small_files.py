"""Local files on their way into a pool: small ones are put many together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsspec.callbacks import Callback

from hpstore.objects.write.many_writes import SMALL_BYTES
from hpstore.units import MIB

_FILES, _BYTES = 512, 8 * MIB  # held in memory for one call


class Pairs(Callback):  # type: ignore[misc]  # fsspec has no types
    """Takes the (local, remote) pairs that fsspec's put() goes through, so that it puts none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def wrap(self, iterable: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        self.found = list(iterable)
        return []


class SmallFiles:
    """Small files that were read, until there are enough for `put`. One thread."""

    def __init__(self, put: Callable[[Mapping[str, object]], None]) -> None:
        self._put = put
        self._waiting: dict[str, bytes] = {}
        self._bytes = 0

    def takes(self, local: str, remote: str, progress: Any) -> bool:  # Any: fsspec's callback
        """Read a file to be put with others; False for what is not small, or no regular file."""
        if not os.path.isfile(local) or os.path.getsize(local) > SMALL_BYTES:
            return False
        with open(local, "rb") as file:
            data = file.read(SMALL_BYTES + 1)
        if len(data) > SMALL_BYTES:  # it grows
            return False
        if remote in self._waiting:
            self.flush()  # one after the other, as they were given
        self._waiting[remote] = data
        self._bytes += len(data)
        progress.set_size(len(data))
        progress.relative_update(len(data))
        if len(self._waiting) >= _FILES or self._bytes >= _BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Put what waits. Durable on return."""
        waiting, self._waiting, self._bytes = self._waiting, {}, 0
        if waiting:
            self._put(waiting)
