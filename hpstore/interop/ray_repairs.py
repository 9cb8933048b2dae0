"""Repairs of a rebuild or scrub as tasks of a Ray cluster, on the hosts that hold the columns.

One process holds the pool for the rebuild and hands out keys; what tasks return is a report. Every
task may run twice or not at all: a rebuild that is run again finds the work list again. Where tasks
land is a wish (soft affinity): with a host dead its tasks run elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hpstore.config import PoolConfig
from hpstore.interop.ray_cluster import RETRIES, WAIT_SECONDS, connect, cpus, lost, open_the_pool
from hpstore.maintenance.repair_runner import Domains, Outcome, RepairJob
from hpstore.pool.pool import Pool
from hpstore.units import bytes_argument, whole_argument

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:  # without the extra ray
    ray = None

RESOURCE = "hpstore-host-"  # and the failure domain: what a node of Ray says where it is
_ADVICE = "What it repaired is repaired; run it again for the rest"
Done = tuple[list[tuple[str, Outcome]], tuple[str, ...]]  # what became of keys, and those left


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Keys for one task. `domain`: near which it had best run; "" for anywhere."""

    domain: str
    keys: tuple[str, ...]


def split_keys(
    keys: Sequence[str], domains: Domains, near: Iterable[str], size: int
) -> list[KeyBatch]:
    """Batches of at most `size` keys, each for the domain of `near` that holds most of its columns;
    among equals the one with the fewest keys so far. Pure."""
    found: dict[str, list[str]] = {name: [] for name in sorted(near)}
    rest: list[str] = []
    for key in keys:
        holders = [name for name in domains(key) if name in found]
        if holders:
            found[min(holders, key=lambda name: (len(found[name]), holders.index(name)))].append(
                key
            )
        else:
            rest.append(key)
    return [
        KeyBatch(name, tuple(part[at : at + size]))
        for name, part in (*found.items(), ("", rest))
        for at in range(0, len(part), size)
    ]


def repair_batch(
    config: PoolConfig,
    keys: tuple[str, ...],
    job: Mapping[str, Any],
    most_bytes: int,
    pool_id: str,
) -> Done:
    """What a task does: keys one after another, until `most_bytes` were looked at.

    Raises ConfigError where another pool lies under the URLs of `config` on this host: to it these
    keys are absent, and an absent one needs no repair.
    """
    done: list[tuple[str, Outcome]] = []
    with open_the_pool(config, pool_id) as pool:
        for key, outcome in pool.admin.repair_keys(keys, **job):
            done.append((key, outcome))
            most_bytes -= 0 if isinstance(outcome, Exception) else outcome.bytes
            if most_bytes <= 0:
                break
    return done, keys[len(done) :]


class RayRepairs:
    """Who repairs: `pool.admin.rebuild(repairs=RayRepairs(pool))`, and `scrub` alike.

    The nodes of the cluster need hpstore, the same devices under the same URLs (`hpd://`, a shared
    mount) and the caller's certificates. A node that was started with
    `--resources '{"hpstore-host-<domain>": 1}'` is preferred for the keys of that failure domain.

    Parameters
    ----------
    pool
        The pool whose rebuild or scrub calls this. Tasks open it by its settings.
    address
        Of the cluster, where this process is not connected yet; None: RAY_ADDRESS, or a new one on
        this machine. A cluster that this object connected to stays connected.
    batch_objects, batch_bytes
        Of a task, whichever comes first. A number or text such as "1GiB".

    Raises
    ------
    ConfigError
        Ray is not installed, or an argument is wrong.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        address: str | None = None,
        batch_objects: int = 64,
        batch_bytes: int | str = "1GiB",
    ) -> None:
        connect(address)
        self._config, self._pool_id = pool.config, pool.admin.record.pool_id
        self._objects = whole_argument("batch_objects", batch_objects, least=1)
        self._bytes = bytes_argument("batch_bytes", batch_bytes, least=1)

    def __call__(self, keys: Iterable[str], job: RepairJob) -> Iterator[tuple[str, Outcome]]:
        """As RepairRunner has it. Ends tasks that are under way when it is closed early."""
        tasks = _Tasks(self._config, self._pool_id, job, self._bytes)
        source, waiting = iter(keys), deque[str]()
        outcomes: dict[str, Outcome] = {}
        window = 2 * tasks.width
        try:
            while True:
                if tasks.flying < window:
                    group = list(islice(source, window * self._objects))
                    size = max(1, min(self._objects, -(-len(group) // window)))
                    waiting.extend(group)
                    for batch in split_keys(group, job.domains, tasks.nodes, size):
                        tasks.submit(batch)
                if not waiting:
                    return
                outcomes.update(tasks.finished())
                while waiting and waiting[0] in outcomes:
                    key = waiting.popleft()
                    yield key, outcomes.pop(key)
        finally:
            tasks.cancel()


class _Tasks:
    """Tasks under way. For one thread."""

    def __init__(self, config: PoolConfig, pool_id: str, job: RepairJob, most_bytes: int) -> None:
        self.width = cpus()
        rate = job.rate_bytes_per_second
        self._arguments = {
            "verify": job.verify,
            "include_missing": job.include_missing,
            "rate_bytes_per_second": rate / self.width if rate else None,
        }
        self._config, self._pool_id, self._most_bytes = ray.put(config), pool_id, most_bytes
        self._task = ray.remote(repair_batch)
        self._flying: dict[Any, KeyBatch] = {}  # by Ray's reference
        self.nodes = _nodes_by_domain()

    @property
    def flying(self) -> int:
        return len(self._flying)

    def submit(self, batch: KeyBatch) -> None:
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": RETRIES}
        node = self.nodes.get(batch.domain)
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        arguments = (
            self._config,
            batch.keys,
            self._arguments,
            self._most_bytes,
            self._pool_id,
        )
        self._flying[self._task.options(**options).remote(*arguments)] = batch

    def finished(self) -> dict[str, Outcome]:
        """Wait for a task; what became of its keys. Those it did not get to go into another."""
        ready, _ = ray.wait(list(self._flying), num_returns=1, timeout=WAIT_SECONDS)
        found: dict[str, Outcome] = {}
        for reference in ready:
            batch = self._flying.pop(reference)
            try:
                done, rest = ray.get(reference)
            except ray.exceptions.RayError as error:
                found |= dict.fromkeys(batch.keys, lost(error, _ADVICE))
                continue
            found |= dict(done)
            if rest:
                self.submit(KeyBatch(batch.domain, tuple(rest)))
        return found

    def cancel(self) -> None:
        for reference in self._flying:
            ray.cancel(reference)
        self._flying.clear()


def _nodes_by_domain() -> dict[str, str]:
    """The live node of each failure domain that says so."""
    return {
        name.removeprefix(RESOURCE): node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        for name in node["Resources"]
        if name.startswith(RESOURCE)
    }
