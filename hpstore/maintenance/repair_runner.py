"""Who repairs the keys of a rebuild or scrub: this process, or workers elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from hpstore.errors import HpstoreError
from hpstore.maintenance.repair_object import Repair, no_throttle, repair_object
from hpstore.objects.context import PoolContext
from hpstore.objects.write.stripe_writer import Throttle

Outcome = Repair | HpstoreError | OSError
Domains = Callable[[str], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairJob:
    """How keys are repaired. `rate_bytes_per_second`: of all workers together; None for no limit.
    `domains`: the failure domains that hold a key's columns, those with the most first."""

    domains: Domains
    verify: bool = False
    include_missing: bool = False
    rate_bytes_per_second: float | None = None


class RepairRunner(Protocol):
    """Repairs keys and says how it went, in the order of the keys.

    Called by the process that holds the pool for its rebuild or scrub, with keys that it takes as
    it needs them. What it yields is a report and nothing depends on it: a key may be repaired
    twice, or by another process meanwhile. A key that no worker got to is an HpstoreError.
    """

    def __call__(self, keys: Iterable[str], job: RepairJob) -> Iterator[tuple[str, Outcome]]: ...


class RepairsHere:
    """The keys one after another, in this process and thread."""

    def __init__(self, store: PoolContext, throttle: Throttle = no_throttle) -> None:
        self._store, self._throttle = store, throttle

    def __call__(self, keys: Iterable[str], job: RepairJob) -> Iterator[tuple[str, Outcome]]:
        for key in keys:
            yield key, self.one(key, job)

    def one(self, key: str, job: RepairJob) -> Outcome:
        """What became of one key; an error is returned."""
        try:
            return repair_object(
                self._store,
                key,
                verify=job.verify,
                throttle=self._throttle,
                include_missing=job.include_missing,
            )
        except (HpstoreError, OSError) as error:
            return error
