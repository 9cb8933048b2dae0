"""Records that the service of one host keeps (hosts/record_file.py): registers without etcd.

One request of its own protocol each. All of it is where that host is: while it is away there are no
registers, and nothing else waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpstore.agreement.register_url import HostUrl
from hpstore.agreement.swap_store import StoredRecord, Swap
from hpstore.devices.host_links import HostLinks, Secure
from hpstore.errors import (
    DeviceDenied,
    HpstoreError,
    IntegrityError,
    RegistersForeign,
    RegistersUnavailable,
)
from hpstore.format.record_calls import (
    MOST_RECORDS_AT_ONCE,
    RecordSwap,
    decode_records,
    decode_swapped,
    encode_names,
    encode_swaps,
)


class HostRecords:
    """A SwapStore. Thread-safe; a forked child has connections of its own.

    `secure`: as HostLinks has it.
    """

    batch = MOST_RECORDS_AT_ONCE
    at_once = 2  # the other side makes one change after the other

    def __init__(self, url: HostUrl, prefix: str, *, seconds: float, secure: Secure | None) -> None:
        self._url, self._prefix = url, prefix
        self._links = HostLinks(str(url), (url.host, url.port, 0), seconds, secure)

    def read(self, name: str, limit_seconds: float) -> StoredRecord:
        return self.read_many([name], limit_seconds)[0]

    def swap(self, name: str, data: bytes, revision: str, limit_seconds: float) -> bool:
        return self.swap_many([Swap(name=name, data=data, revision=revision)], limit_seconds)

    def read_many(self, names: Sequence[str], limit_seconds: float) -> list[StoredRecord]:
        body = encode_names([self._name(name) for name in names])
        data = self._ask("records_read", body, limit_seconds, again=True)
        try:
            found = decode_records(data, len(names))
        except IntegrityError as error:
            raise self._unavailable(error) from error
        return [StoredRecord(data=one.data, revision=str(one.revision or "")) for one in found]

    def swap_many(self, swaps: Sequence[Swap], limit_seconds: float) -> bool:
        rows = [
            RecordSwap(name=self._name(one.name), revision=int(one.revision or 0), data=one.data)
            for one in swaps
        ]
        data = self._ask("records_swap", encode_swaps(rows), limit_seconds, again=False)
        try:
            return decode_swapped(data)
        except IntegrityError as error:
            raise self._unavailable(error) from error

    def remove(self, name: str, limit_seconds: float) -> None:
        body = encode_names([self._name(name)])
        self._ask("records_remove", body, limit_seconds, again=True)

    def reachable(self, limit_seconds: float) -> dict[str, str]:
        try:
            self.read("probe", limit_seconds)
        except (RegistersUnavailable, RegistersForeign) as error:
            return {str(self._url): str(error)}
        return {str(self._url): ""}

    def close(self) -> None:
        self._links.close()

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _ask(self, operation: str, body: bytes, limit_seconds: float, *, again: bool) -> bytes:
        try:
            return self._links.call(operation, bodies=[body], again=again, seconds=limit_seconds)
        except DeviceDenied as error:
            raise RegistersForeign(
                f"this process may not use the registers at {self._url}: {error}. Nothing was "
                "changed; reading goes on."
            ) from error
        except HpstoreError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: HpstoreError) -> RegistersUnavailable:
        return RegistersUnavailable(f"{self._url} does not answer ({error}).")
