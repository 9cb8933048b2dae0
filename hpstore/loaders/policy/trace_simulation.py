"""A recorded trace played to the policy that serves in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.loaders.policy.cache_plan import Bools, Int64s
from hpstore.loaders.policy.cache_policy import CachePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """What a cache would have done. Nothing was fetched ahead of its request.

    `hits`: requests of blocks that were resident, or that an earlier request of the same batch had
    just brought in; `hit` bool[requests] tells which. `repeats`: requests whose block an earlier
    one of the batch had fetched, but which was not kept: no second fetch, but no hit either.
    """

    hits: int
    requests: int
    hit_ratio: float
    hit: Bools
    repeats: int
    byte_hit_ratio: float
    admissions: int
    evictions: int
    bypasses: int
    mismatches: int
    switches: int
    expert: str
    capacity_bytes: int
    index_bytes: int


def simulate(
    requests: npt.ArrayLike,
    capacity_blocks: int = 1000,
    batch: int = 64,
    known_order: bool = False,
    horizon_epochs: int = 2,
    epoch_starts: Sequence[int] | Sequence[Sequence[int]] | None = None,
    jobs: npt.ArrayLike | None = None,
    seed: int = 0,
    *,
    blocks: int | None = None,
    sizes: Int64s | None = None,
    capacity_bytes: int | None = None,
    request_cost_bytes: int = 0,
    drawn_batches: int = 0,
) -> CacheReport:
    """Play a trace to CachePolicy.

    `requests` int[n]: block ids; `jobs` int[n]: the job of each, one job without. `batch` requests
    in a row are decided on together, each job's by themselves. `epoch_starts`: indices into
    `requests` where a job's epochs begin, a list per job when there are several; without them
    there are no phase bits. `known_order` needs them: every job's order is told up to the end of
    its epoch and `horizon_epochs` whole epochs beyond. `drawn_batches`: of an order otherwise
    unknown so many batches behind the one that is asked for are told as drawn, up to the end of
    the epoch. `blocks`: how many there are, the largest id + 1 unless given. With `sizes`
    int64[blocks] the capacity is `capacity_bytes`. Raises ConfigError.
    """
    asked = np.ascontiguousarray(requests, np.int64).reshape(-1)
    owner = np.zeros(len(asked), np.int64) if jobs is None else np.asarray(jobs, np.int64)
    if owner.shape != asked.shape:
        raise ConfigError(f"{len(asked)} requests, but {owner.size} jobs: one for each is needed")
    _check_order(known_order, epoch_starts is not None, batch, horizon_epochs, drawn_batches)
    count = max(int(asked.max(initial=0)) + 1, blocks or 1)
    number = int(owner.max(initial=0)) + 1
    room = capacity_blocks if capacity_bytes is None else capacity_bytes
    policy = CachePolicy(
        1 if sizes is None else sizes,
        count,
        room,
        jobs=number,
        seed=seed,
        request_cost_bytes=request_cost_bytes,
    )
    courses = [
        _Course(
            policy,
            job,
            asked[owner == job],
            _starts(epoch_starts, job, number, owner),
            horizon_epochs if known_order else None,
            drawn_batches * batch // number,
        )
        for job in range(number)
    ]
    hit = _play(courses, asked, owner, batch)
    return _report(policy, asked, hit, sizes)


def _play(courses: Sequence[_Course], asked: Int64s, owner: Int64s, batch: int) -> Bools:
    """Which requests hit. All jobs' requests of a batch are made before the next one's."""
    number = len(courses)
    hit = np.empty(len(asked), np.bool_)
    for start in range(0, len(asked), batch):
        stop = min(start + batch, len(asked))
        for job in range(number):
            if number == 1:
                hit[start:stop] = courses[0].play(asked[start:stop])
            else:
                at = start + np.flatnonzero(owner[start:stop] == job)
                hit[at] = courses[job].play(asked[at])
    return hit


def _check_order(
    known_order: bool, has_starts: bool, batch: int, horizon_epochs: int, drawn_batches: int
) -> None:
    """Raise ConfigError for orders and batches that cannot be played."""
    if known_order and not has_starts:
        raise ConfigError("known_order needs epoch_starts: where orders begin")
    if known_order and drawn_batches:
        raise ConfigError("known_order tells all: drawn_batches are of orders not known")
    if batch < 1 or horizon_epochs < 0 or drawn_batches < 0:
        raise ConfigError(
            f"batch {batch}, horizon_epochs {horizon_epochs}, drawn_batches {drawn_batches}: at "
            "least 1, 0 and 0"
        )


class _Course:
    """One job's requests, epoch by epoch."""

    def __init__(
        self,
        policy: CachePolicy,
        job: int,
        asked: Int64s,
        starts: list[int] | None,
        horizon: int | None,
        drawn: int,
    ) -> None:
        """`asked`: of this job alone; `starts`: positions in it; `horizon`: None: order unknown.

        `drawn`: so many requests behind a batch are told then.
        """
        self._policy, self._job, self._asked = policy, job, asked
        self._edges = [] if starts is None else [*starts, len(asked)]
        self._horizon, self._drawn = horizon, drawn
        self._made = self._told = self._epoch = 0

    def play(self, blocks: Int64s) -> Bools:
        """Which requests of a batch hit; an epoch's end divides it."""
        hits = []
        while len(blocks):
            left = len(blocks)
            if self._edges:
                while self._epoch < len(self._edges) - 1 and (
                    self._edges[self._epoch] <= self._made
                ):
                    self._begin()
                left = min(left, self._edges[self._epoch] - self._made)
            if self._drawn:
                self._draw(left)
            hits.append(self._serve(blocks[:left]))
            blocks = blocks[left:]
        return np.concatenate(hits) if hits else np.empty(0, np.bool_)

    def _begin(self) -> None:
        edges, epoch = self._edges, self._epoch
        # the last epoch may have been cut; nobody knows its length beforehand but the job
        self._policy.begin_epoch(self._job, edges[epoch + 1] - edges[epoch] or None)
        self._epoch += 1
        if self._horizon is not None:
            told = edges[min(epoch + 1 + self._horizon, len(edges) - 1)]
            self._policy.expect(self._job, self._asked[self._told : told])
            self._told = told

    def _draw(self, batch: int) -> None:
        """A sampler is this far when a batch is made: never past the end of its epoch."""
        end = self._edges[self._epoch] if self._edges else len(self._asked)
        told = min(self._made + batch + self._drawn, end)
        if told > self._told:
            self._policy.expect(self._job, self._asked[self._told : told], drawn=True)
            self._told = told

    def _serve(self, blocks: Int64s) -> Bools:
        plan = self._policy.access(self._job, blocks)
        self._made += len(blocks)
        if not plan.again.any():
            return plan.hit
        return plan.hit | plan.again & np.isin(blocks, plan.admit)


def _starts(
    given: Sequence[int] | Sequence[Sequence[int]] | None, job: int, jobs: int, owner: Int64s
) -> list[int] | None:
    """Where a job's epochs begin, counted in its own requests."""
    if given is None:
        return None
    nested = len(given) > 0 and np.ndim(given[0]) == 1
    if jobs > 1 and (not nested or len(given) < jobs):
        raise ConfigError(f"epoch_starts of {jobs} jobs: a list for each of them is needed")
    mine = np.asarray(given[job] if nested else given, np.int64)
    own = np.concatenate(([0], np.cumsum(owner == job)))
    if len(mine) and not 0 <= int(mine.min()) <= int(mine.max()) <= len(owner):
        raise ConfigError(f"epoch_starts outside the {len(owner)} requests")
    return sorted({0, *own[mine].tolist()} - {int(own[-1])} or {0})


def _report(policy: CachePolicy, asked: Int64s, hit: Bools, sizes: Int64s | None) -> CacheReport:
    counters = policy.counters
    weights = np.ones(len(asked)) if sizes is None else sizes[asked].astype(np.float64)
    return CacheReport(
        hits=int(hit.sum()),
        requests=len(asked),
        hit=hit,
        hit_ratio=float(hit.mean()) if len(asked) else 0.0,
        byte_hit_ratio=float(weights @ hit / max(weights.sum(), 1.0)),
        repeats=len(asked) - int(hit.sum()) - counters["admissions"] - counters["bypasses"],
        admissions=counters["admissions"],
        evictions=counters["evictions"],
        bypasses=counters["bypasses"],
        mismatches=counters["mismatches"],
        switches=counters["switches"],
        expert=policy.expert,
        capacity_bytes=policy.capacity_bytes,
        index_bytes=policy.index_bytes,
    )
