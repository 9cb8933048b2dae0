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
from hpstore.loaders.policy.directories import MARGIN, PHASE, RULES, installed
from hpstore.loaders.policy.epoch_bits import JOBS, EpochBits
from hpstore.loaders.policy.expert_choice import APART, ExpertChoice, usable
from hpstore.loaders.policy.frequency import Learner, usable_keys
from hpstore.loaders.policy.known_order import NEVER, Future
from hpstore.loaders.policy.resident_set import EXACT
from hpstore.loaders.policy.sampler_lookahead import Drawn
from hpstore.loaders.policy.unique_blocks import Distinct

Arrays = dict[str, npt.NDArray[np.generic]]
Learned = Callable[[Bools | None], Floats]
"""What was learned of some blocks, or of all of them: asked for only where it counts."""

_WORTH = 32  # fewer draws than one to so many residents would protect next to nothing
_BATCHES = 16  # at least so many batches decide how fast jobs go
_LEAST_REQUESTS = 1e-150  # fewer, of jobs that have ended long ago, are none
_MOST_REQUESTS = float(1 << 62)
_PART = 1 / 32  # of an epoch, if that is more
_SOFT = 3.0  # ln of requests: where blocks also differ by what a request costs
_NO_ROOM = np.float32(1e30)  # a newcomer that never displaces anything; still takes free room


class ObservedUses(NamedTuple):
    """Of the blocks that a batch asks for: which are `resident`, their keys before it and after,
    float32[n].
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
        self, blocks: int, jobs: int, *, table: Table, capacity_share: float, seed: int, soft: bool
    ) -> None:
        """`soft`: what a block costs counts beside what rules say of it."""
        self.blocks, self.jobs = blocks, jobs
        self._seed, self._apart = seed, _SOFT if soft else APART
        self._room = capacity_share * blocks
        self._table = table
        self.learner = Learner(table)
        self.phases = EpochBits(table)
        self._saved: Arrays = {}
        self._choice: ExpertChoice | None = None  # until a request of unknown order
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
        followed = self._choice.nbytes if self._choice else 0
        return followed + sum(future.nbytes for future in self.futures)

    @property
    def switches(self) -> int:
        """How often another expert took over."""
        return self._choice.switches if self._choice else 0

    @property
    def expert(self) -> str:
        """Who judges blocks of unknown order now."""
        return self._choice.name if self._choice else "counts"

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
        self.phases.touch(job, once.blocks, requests)
        self._table.put(once.blocks, rows)
        if self._choice is not None and not self._known(job):
            jobs = self._phased()
            told = self.phases.by_pattern(jobs, self._shares) if jobs else None
            self._choice.request(asked, told)
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
            chosen = blocks if some is None else blocks[some]
            old, new = observed.before[missed], observed.after[missed]
            return self._learned_new(
                chosen, *((old, new) if some is None else (old[some], new[some]))
            )

        return self._merged(blocks, learned, newcomers=True)

    def leavers(self, count: int) -> Int32s:
        """Some residents that go first, whoever else is drawn; each once."""
        if self._choice is None or self._choice.by_counts:
            return np.empty(0, np.int32)
        return self._choice.leavers(count)

    def state(self) -> Arrays:
        """Arrays by name, not copied."""
        found: Arrays = {f"learner_{k}": v for k, v in self.learner.state().items()}
        found |= {f"phases_{k}": v for k, v in self.phases.state().items()}
        found |= {
            "rates": np.array(self._rates),
            "made": np.array(self._made),
            "period": np.array(self._period),
        }
        if self._choice is not None:
            found |= {f"choice_{k}": v for k, v in self._choice.state().items()}
        return found

    def check(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Raises ConfigError for arrays that load() could not work with."""
        rules, jobs, blocks = len(RULES), (self.jobs,), (self.blocks,)
        needed: dict[str, tuple[int, ...]] = {
            "learner_keys": blocks,
            "learner_clock": (2,),
            "phases_seen": blocks,
            "phases_made": (JOBS,),
            "phases_length": (JOBS,),
            "rates": jobs,
            "made": jobs,
            "period": jobs,
        }
        chosen = any(name.startswith("choice_") for name in arrays)
        if chosen:
            needed |= {
                "choice_scores": (rules,),
                "choice_spread": (rules, rules),
                "choice_numbers": (2,),
            }
        for name, shape in needed.items():
            if name not in arrays or arrays[name].shape != shape:
                found = arrays[name].shape if name in arrays else "nothing"
                raise ConfigError(
                    f"{name} of a saved cache policy is {found}, not {shape}: start without it"
                )
        if chosen and not usable(arrays["choice_numbers"]):
            raise ConfigError("the leader of a saved cache policy cannot be: start without it")

        if not usable_keys(arrays["learner_keys"], arrays["learner_clock"]):
            raise ConfigError("the counts of a saved cache policy cannot be: start without it")
        least = {"rates": 0, "made": 0, "phases_made": 0, "phases_length": 0, "period": 1}
        for name, low in least.items():
            values = arrays[name].astype(np.float64)
            if not ((low <= values) & (values <= _MOST_REQUESTS)).all():  # nor for NaN
                raise ConfigError(f"{name} of a saved cache policy cannot be: start without it")

    def load(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """The opposite of state(); names and shapes have been checked. Futures are empty."""
        parts = {
            part: {k.removeprefix(part): v for k, v in arrays.items() if k.startswith(part)}
            for part in ("learner_", "phases_", "choice_")
        }
        self.learner.load(parts["learner_"])
        self.phases.load(parts["phases_"])
        self._rates, self._made, self._period = (
            arrays[name].astype(np.float64).tolist() for name in ("rates", "made", "period")
        )
        self._share_out()
        self._choice, self._saved = None, parts["choice_"]
        for future in self.futures:
            future.forget()
            future.mismatched = False
        self._list_told()

    def begin_with(self) -> None:
        """After load(), once the table has the residents' places."""
        if self._saved and (choice := self._begin_choice()) is not None:
            choice.load(self._saved)
        self._saved = {}

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
        self._begin_choice()

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

    def _begin_choice(self) -> ExpertChoice | None:
        if self._choice is None and installed() is not None:
            self._choice = ExpertChoice(
                self._table, self.blocks, self._room, seed=self._seed, apart=self._apart
            )
        return self._choice

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

    def _offset(self) -> np.float32:
        facts = (self.learner.epochs, self._per_epoch)
        if facts != self._offset_of:  # asked for several times a batch
            self._offset_of = facts
            self._offset_is = np.float32(self.learner.offset(self._per_epoch))
        return self._offset_is

    def _learned(self, blocks: Int64s | Int32s) -> Floats:
        choice = self._choice
        if choice is None or choice.by_counts:
            jobs = self._phased() if choice is not None and choice.leader == PHASE else ()
            if jobs:
                return self.phases.waits(blocks, jobs, self._shares)
            return self._offset() - self.learner.keys[blocks]
        found = choice.distance(blocks, strictly=bool(self._told))
        found += self._offset()
        found -= self.learner.keys[blocks]
        return found

    def _learned_new(self, blocks: Int64s, before: Floats, after: Floats) -> Floats:
        """Of blocks that are missed, with their keys before this request and after it."""
        choice = self._choice
        if choice is not None and not choice.by_counts:
            return choice.distance(blocks, strictly=bool(self._told)) + (self._offset() - after)
        rule = self.expert
        if rule == "static":
            return np.full(len(blocks), _NO_ROOM)
        if rule == "fresh count":
            return self._offset() - after
        if rule == RULES[PHASE] and self._phased():
            return self._learned(blocks) + np.float32(MARGIN)
        return self._offset() - before + np.float32(MARGIN)

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
