"""What tasks of a Ray cluster have in common: connection, the pool that they open, their end."""

from __future__ import annotations

import logging
import socket

from hpstore.config import PoolConfig
from hpstore.errors import ConfigError, HpstoreError
from hpstore.pool.pool import Pool

try:
    import ray
except ImportError:  # without the extra ray
    ray = None

_log = logging.getLogger(__name__)
RETRIES = 3  # of a task whose worker died
WAIT_SECONDS = 1.0  # between two looks for Ctrl-C


def connect(address: str | None) -> None:
    """To the cluster, unless this process is connected. Raises ConfigError without Ray."""
    if ray is None:
        raise ConfigError("Ray is not installed: pip install 'hpstore[ray]'")
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)


def cpus() -> int:
    """Those of the cluster: so many tasks run at once."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def open_the_pool(config: PoolConfig, pool_id: str) -> Pool:
    """The pool of these settings, in a task. The caller closes it.

    Raises ConfigError where another pool lies under the URLs of `config` on this host.
    """
    pool = Pool(config)
    found = pool.admin.record.pool_id
    if found == pool_id:
        return pool
    pool.close()
    raise ConfigError(
        f"on host {socket.gethostname()} the devices of {config.path} are of pool "
        f"{found[:8]}, not {pool_id[:8]}: give every node the same devices under the same "
        "URLs. Nothing was changed there."
    )


def lost(error: Exception, advice: str) -> HpstoreError:
    """The error of a task that ended without a report."""
    cause = getattr(error, "cause", None) or error
    text = f"a task of Ray ended without a report: {type(cause).__name__}: {cause}".splitlines()[0]
    _log.warning("%s", text)
    return HpstoreError(f"{text}. {advice}")
