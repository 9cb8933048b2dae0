"""Parts of an ingest as tasks of a Ray cluster.

One process makes the list of parts and publishes them; every task may run twice or not at all, for
a part is there whole or not at all. What tasks return is a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from hpstore.config import PoolConfig
from hpstore.errors import HpstoreError
from hpstore.interop.ray_cluster import RETRIES, WAIT_SECONDS, connect, cpus, lost, open_the_pool
from hpstore.loaders.ingestion.ingest_parts import Outcome
from hpstore.loaders.ingestion.write_part import PartJob, write_part
from hpstore.pool.pool import Pool

try:
    import ray
except ImportError:  # without the extra ray
    ray = None


def part_task(config: PoolConfig, pool_id: str, job: PartJob) -> Outcome:
    """What a task does. Errors of hpstore are returned; raises ConfigError for another pool."""
    with open_the_pool(config, pool_id) as pool:
        try:
            return write_part(pool, job)
        except (HpstoreError, OSError) as error:
            return HpstoreError(str(error))  # its class may not survive a pickle


class RayParts:
    """Who does the parts: `ingest_parts(pool, "train", files, runner=RayParts(pool))`.

    The nodes of the cluster need hpstore, the same files under the same paths or URLs, the same
    devices under the same URLs (`hpd://`, a shared mount) and the caller's certificates. Tasks are
    spread over the nodes; each takes one CPU and the memory of a DatasetWriter.

    Parameters
    ----------
    pool
        The pool that is written to. Tasks open it by its settings.
    address
        Of the cluster, where this process is not connected yet; None: RAY_ADDRESS, or a new one on
        this machine. A cluster that this object connected to stays connected.

    Raises
    ------
    ConfigError
        Ray is not installed.
    """

    def __init__(self, pool: Pool, *, address: str | None = None) -> None:
        connect(address)
        self._config, self._pool_id = pool.config, pool.admin.record.pool_id

    def __call__(self, jobs: Iterable[PartJob]) -> Iterator[tuple[PartJob, Outcome]]:
        """As PartRunner has it. Ends tasks that are under way when it is closed early."""
        config, width, left = ray.put(self._config), cpus(), iter(jobs)
        task = ray.remote(part_task).options(
            num_cpus=1, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        flying = dict[Any, PartJob]()  # by Ray's reference
        try:
            while True:
                for job in islice(left, max(0, width - len(flying))):
                    flying[task.remote(config, self._pool_id, job)] = job
                if not flying:
                    return
                ready, _ = ray.wait(list(flying), num_returns=1, timeout=WAIT_SECONDS)
                for reference in ready:
                    yield flying.pop(reference), _outcome(reference)
        finally:
            for reference in flying:
                ray.cancel(reference)


def _outcome(reference: Any) -> Outcome:
    try:
        found: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        return lost(error, "Its part is there whole or not at all")
    return found
