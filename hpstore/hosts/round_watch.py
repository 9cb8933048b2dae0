"""Calls that the thread of a connection makes in turn, watched by a thread that leaves them.

To hand two short calls to a worker and wait for it takes as long as the calls. So the thread of the
connection makes them itself. Where one stands still, another thread takes its place.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from hpstore.errors import ThreadsExhausted
from hpstore.runtime.call_tours import Tour
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
STILL_SECONDS = 0.04  # after which a round is left
_STEP_SECONDS = 0.02
_IDLE_STEPS = 50  # without a round, until the next one has to wake the watcher
Leave = Callable[[Tour, float], None]  # a round, and when it began by the monotonic clock


class RoundWatch:
    """Watches rounds of calls. Thread-safe; its thread runs until close()."""

    def __init__(self) -> None:
        self._under_way: dict[Tour, tuple[float, Leave]] = {}
        self._left: dict[Tour, threading.Event] = {}  # set when its place was taken to the end
        self._asleep = self._closed = False
        self._lock = threading.Lock()  # guards all of the above
        self._wake = threading.Event()
        self._thread = start_thread(
            threading.Thread(target=self._watch, name="hpstore-look-watch", daemon=True)
        )

    def run(self, tour: Tour, leave: Leave) -> bool:
        """Make the calls of a round on this thread. False where it stood still: `leave` was called
        by another thread then, and has returned."""
        with self._lock:
            self._under_way[tour] = time.monotonic(), leave
            asleep, self._asleep = self._asleep, False
        if asleep:
            self._wake.set()
        tour.run()
        with self._lock:
            if self._under_way.pop(tour, None) is not None:
                return True
            over = self._left.pop(tour)
        over.wait()
        return False

    def _watch(self) -> None:
        idle = 0
        while True:
            now = time.monotonic()
            with self._lock:
                if self._closed:
                    return
                idle = 0 if self._under_way else idle + 1
                self._asleep = idle > _IDLE_STEPS
                still = [
                    (tour, *self._under_way.pop(tour))
                    for tour, (began, _) in list(self._under_way.items())
                    if now - began > STILL_SECONDS
                ]
                self._left |= {tour: threading.Event() for tour, *_ in still}
                overs = [self._left[tour] for tour, *_ in still]
            for (tour, began, leave), over in zip(still, overs, strict=True):
                _take_place(tour, began, leave, over)
            self._wake.wait(None if self._asleep else _STEP_SECONDS)
            self._wake.clear()

    def close(self) -> None:
        """Idempotent. Rounds that are under way are watched no more."""
        with self._lock:
            self._closed = True
        self._wake.set()
        self._thread.join()


def _take_place(tour: Tour, began: float, leave: Leave, over: threading.Event) -> None:
    """On a thread of its own; on this one where there are no more of them."""

    def run() -> None:
        try:
            leave(tour, began)
        except OSError as error:  # who asked has gone
            _log.debug("a look that stood still was not answered: %s", error)
        except Exception:  # noqa: BLE001 (logged; the connection has ended)
            _log.exception("a look that stood still was not answered")
        finally:
            over.set()

    thread = threading.Thread(target=run, name="hpstore-look-left", daemon=True)
    with contextlib.suppress(ThreadsExhausted):
        start_thread(thread)
        return
    run()
