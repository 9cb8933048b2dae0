"""When blocks are needed next: foretold where an order is known, learned where it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hpstore.errors import ConfigError
from hpstore.loaders.policy.block_stats import Table
from hpstore.loaders.policy.cache_plan import Bools, Floats, Int32s, Int64s
from hpstore.loaders.policy.epoch_bits import JOBS, EpochBits
from hpstore.loaders.policy.experts import BEYOND, EXPERTS, Expert, Shadows, sample_of
from hpstore.loaders.policy.frequency import HALF_LIVES, Learner
from hpstore.loaders.policy.known_order import NEVER, Future
from hpstore.loaders.policy.resident_set import EXACT
from hpstore.loaders.policy.sampler_lookahead import Drawn
from hpstore.loaders.policy.unique_blocks import Distinct

Arrays = dict[str, npt.NDArray[np.generic]]
Learned = Callable[[Bools | None], Floats]
"""What an expert says of some blocks, or of all of them: asked for only where it counts."""

_WORTH = 32  # fewer draws than one to so many residents would protect next to nothing
_BATCHES = 16  # at least so many batches decide how fast jobs go
_LEAST_REQUESTS = 1e-150  # fewer, of jobs that have ended long ago, are none
_MOST_REQUESTS = float(1 << 62)
_PART = 1 / 32  # of an epoch, if that is more


class ObservedUses(NamedTuple):
    """Of the blocks that a batch asks for: which are `resident`, their keys before it and after,
    float32[columns, n].
    """

    resident: Bools
    before: Floats
    after: Floats


class Outlook:
    """Expected next use of blocks, as ln of requests of all jobs from now. inf: never.

    Jobs go at different speeds, measured in requests: the use that job j makes after d of its own
    requests comes after d / share_j of all. A block is needed when the first job needs it.
    """

    def __init__(
        self, blocks: int, jobs: int, *, table: Table, capacity_share: float, seed: int
    ) -> None:
        self.blocks, self.jobs = blocks, jobs
        self._share, self._seed = capacity_share, seed
        self._room = capacity_share * blocks
        self._table = table
        self.learner = Learner(table)
        self.phases = EpochBits(table)
        self._shadows: Shadows | None = None  # until a request of unknown order
        self._past = np.empty((0, 0), np.float32)  # keys of the sample at the last step
        self._stepped = 0.0
        self.futures: list[Future | Drawn] = [Future(blocks) for _ in range(jobs)]
        # of every job: faded count of requests, requests of this epoch, requests of an epoch
        self._rates, self._made = [0.0] * jobs, [0.0] * jobs
        self._period = [float(blocks)] * jobs
        self._shares = [1 / jobs] * jobs
        self._per_epoch = float(blocks)  # requests of all jobs
        self.mismatches = 0
        self._told: list[int] = []  # jobs of which enough is foretold
        self._others = False  # whether other jobs have asked for anything
        self._offset_of: tuple[object, ...] = ()
        self._offset_is = np.float32(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that grow with the number of blocks, but the table."""
        return sum(future.nbytes for future in self.futures)

    @property
    def switches(self) -> int:
        """How often another expert took over."""
        return self._shadows.switches if self._shadows else 0

    @property
    def expert(self) -> Expert:
        """Who judges blocks of unknown order now."""
        return EXPERTS[self._shadows.active] if self._shadows else BEYOND

    def begin_epoch(self, job: int, requests: int | None) -> None:
        """As CachePolicy.begin_epoch."""
        self._period[job] = requests or self._made[job] or self.blocks
        self._made[job] = 0
        self.phases.begin(job, requests)

    def expect(self, job: int, blocks: Int64s | None, *, drawn: bool) -> None:
        """As CachePolicy.expect; blocks have been checked."""
        future = self.futures[job]
        if blocks is None:
            future.forget()
            future.mismatched = False
        elif not future.mismatched:
            if future.near is not drawn and not future.queued:
                future = self.futures[job] = Drawn() if drawn else Future(self.blocks)
            future.append(blocks)
        self._list_told()

    def observe(self, job: int, asked: Int64s, once: Distinct) -> ObservedUses:
        """A batch of requests, and what it asks for."""
        requests = len(asked)
        self._follow(job, asked)
        window = max(self._period[job] * _PART, _BATCHES * requests)
        fade = math.exp(-requests / window)
        self._rates = [rate * fade for rate in self._rates]
        self._rates[job] += requests
        self._others = self._others or job not in self._told
        self._share_out()
        self._made[job] += requests
        self.learner.pass_time(requests / self._period[job])
        rows = self._table.take(once.blocks)
        before = rows.keys
        rows.keys = self.learner.touch(before, once.counts)
        self.phases.touch(job, once.blocks, rows, requests)
        self._table.put(once.blocks, rows)
        if self._shadows is not None and np.count_nonzero(rows.marks):
            sampled = asked[self._table.marks[asked]]
            if self._shadows.record(sampled):
                self._step(self._shadows)
        return ObservedUses(rows.places >= 0, before, rows.keys)

    def waits(self, blocks: Int64s | Int32s, job: int | None = None) -> Floats:
        """float32[n]: of blocks that are not being asked for right now.

        `job`: what is foretold of this one counts in any case, be it ever so little.
        """

        def learned(some: Bools | None) -> Floats:
            return self._learned(blocks if some is None else blocks[some])

        found = self._merged(blocks, learned, newcomers=False)
        if job is None or job in self._told or not self.futures[job].queued:
            return found
        return np.minimum(found, self._foretold(job, blocks, found))

    def newcomers(self, blocks: Int64s, missed: Bools, observed: ObservedUses) -> Floats:
        """float32[n]: of blocks that are missed, with the margin; `missed`: which of the batch."""

        def learned(some: Bools | None) -> Floats:
            expert = self.expert
            if expert.column is None:
                found = self._learned(blocks if some is None else blocks[some])
            else:
                keys = observed.after if expert.fresh else observed.before
                key = keys[expert.column][missed]
                found = self._offset(expert.column) - (key if some is None else key[some])
            return found + np.float32(expert.margin)

        return self._merged(blocks, learned, newcomers=True)

    def state(self) -> Arrays:
        """Arrays by name, not copied."""
        found: Arrays = {f"learner_{k}": v for k, v in self.learner.state().items()}
        found |= {f"phases_{k}": v for k, v in self.phases.state().items()}
        found |= {
            "rates": np.array(self._rates),
            "made": np.array(self._made),
            "period": np.array(self._period),
        }
        if self._shadows is not None:
            found |= {f"shadows_{k}": v for k, v in self._shadows.state().items()}
            found |= {"past": self._past, "stepped": np.array([self._stepped])}
        return found

    def check(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Raises ConfigError for arrays that load() could not work with."""
        columns, experts, sample = len(HALF_LIVES), len(EXPERTS), sample_of(self.blocks)
        jobs, wide = (self.jobs,), (self.blocks, columns)
        allowed: dict[str, tuple[tuple[int, ...], ...]] = {
            "learner_keys": (wide, (self.blocks, 1)),
            "learner_clock": ((columns + 1,),),
            "phases_seen": ((self.blocks,), (0,)),
            "phases_made": ((JOBS,),),
            "phases_length": ((JOBS,),),
            "rates": (jobs,),
            "made": (jobs,),
            "period": (jobs,),
        }
        if "shadows_resident" in arrays:
            allowed["learner_keys"] = (wide,)
            allowed |= {
                "shadows_resident": ((experts, sample),),
                "shadows_scores": ((experts,),),
                "shadows_spread": ((experts, experts),),
                "shadows_came": ((experts,),),
                "shadows_numbers": ((2,),),
                "past": ((sample, columns),),
                "stepped": ((1,),),
            }
        for name, shapes in allowed.items():
            if name not in arrays or arrays[name].shape not in shapes:
                found = arrays[name].shape if name in arrays else "nothing"
                raise ConfigError(
                    f"{name} of a saved cache policy is {found}, not {shapes[0]}: start without it"
                )

        least = {"rates": 0, "made": 0, "phases_made": 0, "phases_length": 0, "period": 1}
        for name, low in least.items():
            values = arrays[name].astype(np.float64)
            if not ((low <= values) & (values <= _MOST_REQUESTS)).all():  # nor for NaN
                raise ConfigError(f"{name} of a saved cache policy cannot be: start without it")

    def load(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """The opposite of state(); names and shapes have been checked. Futures are empty."""
        parts = {
            part: {k.removeprefix(part): v for k, v in arrays.items() if k.startswith(part)}
            for part in ("learner_", "phases_", "shadows_")
        }
        self.learner.load(parts["learner_"])
        self.phases.load(parts["phases_"])
        self._rates, self._made, self._period = (
            arrays[name].astype(np.float64).tolist() for name in ("rates", "made", "period")
        )
        self._share_out()
        self._shadows = None
        if parts["shadows_"]:
            self._begin_shadows().load(parts["shadows_"])
            self._past = arrays["past"].astype(np.float32)
            self._stepped = float(arrays["stepped"].astype(np.float64)[0])
        for future in self.futures:
            future.forget()
            future.mismatched = False
        self._list_told()

    def _follow(self, job: int, asked: Int64s) -> None:
        """Checks what was foretold; where not all is known, learning begins."""
        future = self.futures[job]
        if future.queued:
            if not future.advance(asked):
                future.forget()
                future.mismatched = True
                self.mismatches += 1
            elif future.queued and not future.near:
                return
            self._list_told()
        if not future.queued and future.head:
            future.forget()
        if self._shadows is None:
            self.learner.widen()
            self._begin_shadows()

    def _list_told(self) -> None:
        least = self._room / _WORTH if self._room > EXACT else 1
        self._told = [
            job
            for job, future in enumerate(self.futures)
            if future.queued >= (least if future.near else 1)
        ]
        self._others = any(
            rate > 0 and job not in self._told for job, rate in enumerate(self._rates)
        )

    def _begin_shadows(self) -> Shadows:
        self._shadows = Shadows(self.blocks, self._share, self._seed)
        self._table.marks[self._shadows.sample] = True
        self._past = self.learner.keys[self._shadows.sample]
        self._stepped = self.learner.epochs
        return self._shadows

    def _step(self, shadows: Shadows) -> None:
        """All experts' judgement of the sample, for their shadow caches to be played on."""
        keys = self.learner.keys[shadows.sample]
        offsets = self.learner.offsets(self._per_epoch)
        jobs = self._phased()
        waits = np.empty((len(EXPERTS), len(shadows.sample)), np.float32)
        newcomers = np.empty_like(waits)
        for row, expert in enumerate(EXPERTS):
            if expert.column is None:
                waits[row] = self.phases.waits(shadows.sample, jobs, self._shares) if jobs else 0
                newcomers[row] = waits[row] + expert.margin
            else:
                waits[row] = offsets[expert.column] - keys[:, expert.column]
                known = keys if expert.fresh else self._past
                newcomers[row] = offsets[expert.column] - known[:, expert.column] + expert.margin
        shadows.step(waits, newcomers, self.learner.epochs - self._stepped, phases=bool(jobs))
        self._past, self._stepped = keys, self.learner.epochs

    def _phased(self) -> tuple[int, ...]:
        """Jobs of unknown order that have begun epochs."""
        return tuple(
            job
            for job in range(min(self.jobs, JOBS))
            if self.phases.length[job] and self._rates[job] > 0 and not self._known(job)
        )

    def _known(self, job: int) -> bool:
        """Whether all that a job will ask for is foretold, for some time."""
        future = self.futures[job]
        return future.queued > 0 and not future.near

    def _share_out(self) -> None:
        """Of all requests, by job. A job that has asked for nothing yet counts as an even one."""
        total = sum(self._rates)
        total = total if total > _LEAST_REQUESTS else 0.0  # else the quotients below are none
        if self.jobs == 1 and total:
            self._per_epoch = total / (total / self._period[0])
            return
        self._shares = [
            max(rate / total, 1e-9) if rate > 0 and total else 1 / self.jobs for rate in self._rates
        ]

        if total:
            pace = sum(rate / one for rate, one in zip(self._rates, self._period, strict=True))
            self._per_epoch = total / pace

    def _offset(self, column: int) -> np.float32:
        facts = (column, self.learner.epochs, self._per_epoch)
        if facts != self._offset_of:  # asked for several times a batch
            self._offset_of = facts
            self._offset_is = np.float32(self.learner.offset(column, self._per_epoch))
        return self._offset_is

    def _learned(self, blocks: Int64s | Int32s) -> Floats:
        column = self.expert.column
        if column is None:
            jobs = self._phased()
            if jobs:
                return self.phases.waits(blocks.astype(np.int64, copy=False), jobs, self._shares)
            column = BEYOND.column
        assert column is not None
        return self._offset(column) - self.learner.column(blocks, column)

    def _merged(self, blocks: Int64s | Int32s, learned: Learned, *, newcomers: bool) -> Floats:
        """The soonest of what is foretold by each job, and of what was learned of the others."""
        known = self._told
        if not known:
            return learned(None)
        best: Floats | None = None
        if self._others:
            best = learned(None)
        for job in known:
            behind = learned if newcomers or best is None else best
            found = self._foretold(job, blocks, behind)
            best = found if best is None else np.minimum(best, found)
        assert best is not None
        return best

    def _foretold(self, job: int, blocks: Int64s | Int32s, behind: Learned | Floats) -> Floats:
        """When a job asks next; not within its horizon: when that ends, then what is `behind`."""
        future, share = self.futures[job], self._shares[job]
        use = future.next_use(blocks)
        gap = (use - np.int32(future.head)).astype(np.float32)
        gap += 1.0  # the very next request comes one from now
        found: Floats = np.log(gap, out=gap)
        if share < 1:
            found -= np.float32(math.log(share))
        beyond = use == NEVER
        if np.count_nonzero(beyond):
            horizon = np.float32(math.log(future.queued / share))
            after = behind[beyond] if isinstance(behind, np.ndarray) else behind(beyond)
            found[beyond] = np.logaddexp(horizon, after)
        return found
