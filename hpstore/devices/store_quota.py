"""What of a configured quota is left on a store: counted by listing, kept up between counts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from hpstore.devices.base import Usage
from hpstore.errors import HpstoreError
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
RECOUNT_SECONDS = 900.0  # others put and delete, too; a count lists everything, 1,000 a request
RETRY_SECONDS = 60.0


class StoreQuota:
    """Usage of one device on a store. Thread-safe.

    `capacity_bytes` 0: it was not given, and nothing is counted. `sizes` lists the stored files'
    sizes; it runs on a thread of its own, and until the first count has ended the space is unknown.
    """

    def __init__(self, url: str, capacity_bytes: int, sizes: Callable[[], Iterator[int]]) -> None:
        self._url, self._capacity, self._sizes = url, capacity_bytes, sizes
        self._lock = threading.Lock()  # guards all below
        self._used: int | None = None
        self._since = 0  # bytes that came and went in this process while a count ran
        self._due = 0.0
        self._counting: tuple[int, threading.Thread] | None = None  # and the process that it is of

    def usage(self) -> Usage:
        """What is known now; starts a count where one is due, and waits for none."""
        if not self._capacity:
            return Usage(total=0, free=0)
        with self._lock:
            self._start_count()
            used = self._used
        if used is None:
            return Usage(total=0, free=0)
        return Usage(total=self._capacity, free=min(self._capacity, max(0, self._capacity - used)))

    def changed(self, nbytes: int) -> None:
        """So many bytes were put (below 0: deleted) by this process."""
        with self._lock:
            self._since += nbytes
            if self._used is not None:
                self._used += nbytes

    def wait(self) -> None:
        """Until the count that runs has ended: for tests."""
        with self._lock:
            counting = self._counting
        if counting is not None and counting[0] == os.getpid():
            counting[1].join()

    def _start_count(self) -> None:
        running = self._counting is not None and self._counting[0] == os.getpid()
        if running or time.monotonic() < self._due:
            return
        thread = threading.Thread(target=self._count, name="hpstore-quota", daemon=True)
        self._counting, self._since = (os.getpid(), thread), 0
        try:
            start_thread(thread)
        except HpstoreError:  # the space stays as it was known
            self._counting, self._due = None, time.monotonic() + RETRY_SECONDS

    def _count(self) -> None:
        try:
            total: int | None = sum(self._sizes())
        except (HpstoreError, OSError) as error:
            _log.warning("what is used on %s was not counted: %s", self._url, error)
            total = None
        with self._lock:
            if total is not None:
                self._used = total + max(0, self._since)  # what came may have been listed: no less
            wait = RETRY_SECONDS if total is None else RECOUNT_SECONDS
            self._due, self._counting = time.monotonic() + wait, None
