"""What devices on stores have in common: files are put whole, and there are no locks."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

from hpstore.devices.base import TMP, DirectoryEntry, Hold, Usage
from hpstore.devices.store_quota import StoreQuota
from hpstore.errors import DeviceError

_PROBE_BYTES = 64
_PROBE_MOST = 4096


class StoreDevice(ABC):
    """A Device but for how files are written, read, listed and deleted."""

    url: str
    quota: StoreQuota
    mode = "remote"
    folds_names = False
    memory_alignment = 1

    @abstractmethod
    def read_small(self, path: str, max_bytes: int) -> bytes: ...

    @abstractmethod
    def write_small(self, path: str, data: bytes) -> None: ...

    @abstractmethod
    def entries(self, path: str) -> list[DirectoryEntry]: ...

    @abstractmethod
    def delete(self, path: str) -> None: ...

    def takes_records(self) -> bool:
        """Taken for granted: a store does not say what it has left."""
        return True

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        return [self.entries(paths[0])]

    def create_spare(self, size_bytes: int) -> None:  # noqa: B027 (nothing to do)
        """Nothing is overwritten in a store."""

    def retire(self, path: str) -> None:
        self.delete(path)

    def sync_directory(self, path: str) -> None:  # noqa: B027 (nothing to do)
        """Nothing to do: a PUT that was answered is durable."""

    def sync_removals(self) -> None:  # noqa: B027 (nothing to do)
        """Nothing to do: a removal that was answered is durable."""

    def usage(self) -> Usage:
        return self.quota.usage()

    def hold(self, offset: int, nbytes: int) -> Hold:
        raise DeviceError(f"device {self.url} is a store: it has no locks", device=self.url)

    def probe(self, *, write: bool) -> None:
        if not write:
            self.entries("objects")
            return
        data, path = secrets.token_bytes(_PROBE_BYTES), f"{TMP}/probe-{secrets.token_hex(6)}"
        self.write_small(path, data)
        if self.read_small(path, _PROBE_MOST) != data:
            raise DeviceError(
                f"device {self.url} returns other bytes than were written", device=self.url
            )
        self.delete(path)
