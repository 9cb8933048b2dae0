"""Which devices of a pool are on this host: local paths, and disks that its own service serves."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

from hpstore.format.records import PoolRecord
from hpstore.membership.host_names import host_of

_log = logging.getLogger(__name__)
_LOCAL = ("file", "memory")


class OwnDevices:
    """Of one agent; one thread. `host`: the host's name in the pool, "" to go by addresses.

    An address is this host's where a socket can be bound to it, which is asked until the resolver
    answers.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._here: dict[str, bool] = {}  # by host
        self._warned = False

    def among(self, places: Mapping[str, str], record: PoolRecord) -> frozenset[str]:
        """Those of the devices that are open at `places` (id -> URL)."""
        domains = {m.device_id: m.domain for m in record.members}
        own = frozenset(d for d, url in places.items() if self._is_own(url, domains.get(d, "")))
        if self._host and places and not own and not self._warned:
            self._warned = True
            _log.warning(
                "[agent] host = %r: no device of the pool has this host or failure domain, so this "
                "agent scrubs none. Hosts and domains are in `hpstore status`",
                self._host,
            )
        return own

    def stores(self, places: Mapping[str, str]) -> frozenset[str]:
        """Those that are on no host: object stores, which the keeper looks after."""
        return frozenset(
            d for d, url in places.items() if not host_of(url) and _scheme(url) not in _LOCAL
        )

    def _is_own(self, url: str, domain: str) -> bool:
        host = host_of(url)
        if self._host and host != self._host:
            return domain in (self._host, f"host-{self._host}")
        if self._host:
            return True
        if not host:
            return _scheme(url) in _LOCAL
        if host not in self._here:
            try:
                self._here[host] = is_own_address(host)
            except OSError:
                return False  # until the resolver knows it
        return self._here[host]


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


def is_own_address(host: str) -> bool:
    """Whether a name or address is this machine's. Raises OSError where no resolver says."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    return any(_binds(family, address) for family, _, _, _, address in found)


def _binds(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:  # a family that this host may lack
            sock.bind(address)
    except OSError:
        return False
    return True
