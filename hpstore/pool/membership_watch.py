"""A process follows what others make of the membership, so that it lets go what has left."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from hpstore.devices.base import Device
from hpstore.devices.opener import is_released
from hpstore.errors import HpstoreError, ThreadsExhausted
from hpstore.health.snapshot import Round
from hpstore.objects.context import PoolContext
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
EVERY_SECONDS = 5.0  # between two looks
_STORES_EVERY = 12  # looks of which one asks stores, too: there it is a request
_CLOSE_SECONDS = 5.0


class Follower:
    """Looks at the record's stamp on open devices now and then, after a tick of the monitor; reads
    the membership anew, on a thread of its own, when one of them knows a newer one.

    A process that reads and writes nothing would keep an evicted disk open for good, and it could
    not be unmounted. Called by the monitor's thread; it waits for no device.
    """

    def __init__(self, store: PoolContext, refresh: Callable[[], None]) -> None:
        self._store, self._refresh = store, refresh
        self._asked: dict[str, Future[int]] = {}
        self._asked_seconds, self._looks = store.clock.monotonic(), 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def after_fork(self) -> None:
        """In the child: what was asked is the parent's."""
        self._asked, self._thread = {}, None

    def look(self, found: Round) -> None:
        """After a tick."""
        view, done = self._store.view, {d: f for d, f in self._asked.items() if f.done()}
        for ended in done.keys() | (self._asked.keys() - view.devices.keys()):
            del self._asked[ended]
        newest = max((f.result() for f in done.values() if f.exception() is None), default=0)
        if newest > view.record.generation:
            self._follow()
        if found.now_seconds - self._asked_seconds < EVERY_SECONDS or self._closed:
            return
        self._asked_seconds, self._looks = found.now_seconds, self._looks + 1
        for device_id, device in view.devices.items():
            if device.mode == "remote" and self._looks % _STORES_EVERY:
                continue
            if device_id not in self._asked:
                ask = partial(self._generation, device_id, device)
                self._asked[device_id] = self._store.scheduler.submit(device_id, ask, bulk=True)

    def _generation(self, device_id: str, device: Device) -> int:
        """The generation that a device has stored; sys.maxsize for one that must be closed."""
        found = self._store.generation_on(device_id, device)
        return sys.maxsize if is_released(device) else found

    def _follow(self) -> None:
        if self._closed or (self._thread is not None and self._thread.is_alive()):
            return
        with suppress(ThreadsExhausted):  # the next look tries again
            self._thread = start_thread(
                threading.Thread(target=self._read_anew, name="hpstore-follow", daemon=True)
            )

    def _read_anew(self) -> None:
        try:
            self._refresh()
            self._store.metrics.count("membership_followed_total")
        except (HpstoreError, OSError) as error:
            if not self._closed:
                _log.info("the membership has changed and cannot be read now: %s", error)

    def close(self) -> None:
        """Begin nothing more; wait for what is under way, not for long."""
        self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
