"""Does a store enforce conditions of writes? Some take If-None-Match and If-Match, and ignore them.

So it is tried, as it is for registers (runtime/swap_probe.py).
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hpstore.devices.store_client import StoreChanged, StoreClient
from hpstore.errors import DeviceError
from hpstore.runtime.swap_probe import find_lapse

_log = logging.getLogger(__name__)
_TRIAL_BYTES = 64


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
                    name = f"{self._directory}/conditions-{secrets.token_hex(8)}"
                    lapse = find_lapse(_Trial(self._client), name)
                    self._enforced = not lapse
                    if lapse:
                        _log.warning(
                            "device %s: its store ignores conditions of writes (%s); two processes "
                            "that raise a counter at once may leave the lower one",
                            self._client.url,
                            lapse,
                        )
        return self._enforced


@dataclass(frozen=True, slots=True)
class _Trial:
    """A SwapTrial: etags are revisions."""

    client: StoreClient

    def read(self, name: str) -> tuple[bytes | None, str]:
        target = np.empty(_TRIAL_BYTES, np.uint8)
        try:
            found, count = self.client.read_into(name, 0, target, short=True)
        except FileNotFoundError:
            return None, ""
        return target[:count].tobytes(), found.etag

    def swap(self, name: str, data: bytes, revision: str) -> bool:
        try:
            self.client.put(name, data, only=revision)
        except StoreChanged:
            return False
        return True

    def remove(self, name: str) -> None:
        with suppress(DeviceError):  # what is left is never read
            self.client.delete(name)
