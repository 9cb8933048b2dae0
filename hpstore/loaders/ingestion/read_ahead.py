"""Reading ahead: a thread that reads while what was read before is written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from hpstore.errors import ThreadsExhausted
from hpstore.runtime.threads import start_thread
from hpstore.units import MIB

T = TypeVar("T")
AHEAD_BYTES = 64 * MIB


def read_ahead(
    source: Generator[T, None, None],
    bytes_of: Callable[[T], int],
    *,
    most_bytes: int = AHEAD_BYTES,
) -> Generator[T, None, None]:
    """What `source` yields, in its order, up to `most_bytes` of it before it is asked for.

    Its error comes where it would have come. Closing this closes `source`, once what it is reading
    is there. Without another thread it is read as it is asked for.
    """
    reader = _Reader(source, bytes_of, most_bytes)
    try:
        thread = start_thread(threading.Thread(target=reader.run, name="hpstore-ingest-ahead"))
    except ThreadsExhausted:
        yield from source
        return
    try:
        yield from reader.taken()
    finally:
        reader.stop()
        thread.join()


class _Reader(Generic[T]):
    """What lies between the thread that reads and the one that takes."""

    def __init__(
        self, source: Generator[T, None, None], bytes_of: Callable[[T], int], most_bytes: int
    ) -> None:
        self._source, self._bytes_of, self._most = source, bytes_of, most_bytes
        self._changed = threading.Condition()  # guards all below
        self._ready: deque[tuple[T, int]] = deque()
        self._held = 0
        self._stopped = self._ended = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Read until the end, an error, or stop()."""
        try:
            for read in self._source:
                nbytes = self._bytes_of(read)
                with self._changed:
                    self._ready.append((read, nbytes))
                    self._held += nbytes
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped or self._held < self._most)
                    if self._stopped:
                        return
        except BaseException as error:  # noqa: BLE001 (raised where it is taken)
            self._error = error
        finally:
            self._source.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def taken(self) -> Generator[T, None, None]:
        """What was read, as it comes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                read, nbytes = self._ready.popleft()
                self._held -= nbytes
                self._changed.notify_all()
            yield read
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Read no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
