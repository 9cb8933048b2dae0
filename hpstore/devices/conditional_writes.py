"""Does a store enforce conditions of writes? Some take If-None-Match and If-Match, and ignore them.

So it is tried, as it is for registers (runtime/swap_probe.py), but beside the work: a write under a
condition that is ignored is as good as one without.
"""

from __future__ import annotations

import logging
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hpstore.devices.store_client import StoreChanged, StoreClient
from hpstore.errors import DeviceError, HpstoreError, ThreadsExhausted
from hpstore.runtime.swap_probe import find_lapse
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
_lock = threading.Lock()  # guards _of_buckets
_of_buckets: dict[tuple[str, str], ConditionalWrites] = {}
_one_at_a_time = threading.Lock()  # trials: those of several buckets may be one server's
_TRIAL_BYTES = 64


class ConditionalWrites:
    """What the server of a bucket does with conditions. Thread-safe.

    `directory`: where names for the trial can be made. `seconds`: so long after the first question
    they are tried, by a thread of their own. Some servers let those who lose a race wait for
    seconds, so that a trial takes half a minute: no put waits for that.
    """

    def __init__(self, client: StoreClient, directory: str, *, seconds: float = 30.0) -> None:
        self._client, self._directory, self._seconds = client, directory, seconds
        self._lock = threading.Lock()  # held while it is tried
        self._enforced: bool | None = None
        self._begun = False

    @classmethod
    def of(cls, client: StoreClient, directory: str) -> ConditionalWrites:
        """That of the client's bucket: devices in one bucket ask it once in a process."""
        if client.bucket is None:
            return cls(client, directory)
        with _lock:
            return _of_buckets.setdefault(client.bucket, cls(client, directory))

    def expected(self) -> bool:
        """Whether to write under conditions: unless they are known to be ignored. Returns at once,
        and sees to it that they are tried."""
        if not self._begun:
            self._begun = True  # twice does no harm
            trial = threading.Timer(self._seconds, self._try)
            trial.daemon = True
            with suppress(ThreadsExhausted):
                start_thread(trial)
        return self._enforced is not False

    def _try(self) -> None:
        try:
            with _one_at_a_time:
                self.enforced()
        except (HpstoreError, OSError, RuntimeError) as error:  # at exit no more threads start
            _log.info("conditions of writes were not tried on %s: %s", self._client.url, error)
            self._begun = False

    def enforced(self) -> bool:
        """Whether both conditions hold here, tried now if they never were. Raises DeviceErrors, and
        asks again the next time."""
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
