"""Does a store enforce conditions of writes? Some take If-None-Match and If-Match, and ignore them.

So it is tried: a name that is there must not be made again, an etag that is over must not match,
and of several that make one name at once one must succeed.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress

from hpstore.devices.store_client import StoreChanged, StoreClient
from hpstore.errors import DeviceError
from hpstore.runtime.threads import WorkerThreads

_log = logging.getLogger(__name__)
_RACERS, _ROUNDS = 8, 8  # a store that looks and then writes lets two win in some rounds alone


class ConditionalWrites:
    """What a store does with conditions, found out at the first question. Thread-safe.

    `directory`: where names for the trial can be made.
    """

    def __init__(self, client: StoreClient, directory: str) -> None:
        self._client, self._directory = client, directory
        self._lock = threading.Lock()  # held while it is tried
        self._enforced: bool | None = None

    def enforced(self) -> bool:
        """Whether both conditions hold here. Raises DeviceErrors, and asks again the next time."""
        if self._enforced is None:
            with self._lock:
                if self._enforced is None:
                    self._enforced = enforces_conditions(self._client, self._directory)
                    if not self._enforced:
                        _log.warning(
                            "device %s: its store ignores conditions of writes; two processes that "
                            "raise a counter at once may leave the lower one",
                            self._client.url,
                        )
        return self._enforced


def enforces_conditions(client: StoreClient, directory: str) -> bool:
    """Try it on names of its own, which are removed. Raises DeviceErrors."""
    path = f"{directory}/conditions-{secrets.token_hex(8)}"
    races = [f"{path}-race-{number}" for number in range(_ROUNDS)]
    try:
        first = client.put(path, b"1", only="")
        if not first or _takes(client, path, ""):
            return False
        second = client.put(path, b"2", only=first)
        if second == first or _takes(client, path, first):
            return False
        with WorkerThreads(_RACERS, "hpstore-conditions") as threads:
            return all(_winners(client, threads, race) == 1 for race in races)
    except StoreChanged:  # a condition that holds was refused
        return False
    finally:
        for name in (path, *races):
            with suppress(DeviceError):
                client.delete(name)


def _winners(client: StoreClient, threads: WorkerThreads, path: str) -> int:
    """How many of those that make one name at once succeed."""
    return sum(threads.map(lambda _: _takes(client, path, ""), range(_RACERS)))


def _takes(client: StoreClient, path: str, only: str) -> bool:
    try:
        client.put(path, secrets.token_bytes(16), only=only)
    except StoreChanged:
        return False
    return True
