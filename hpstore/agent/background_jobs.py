"""Work that takes long or changes the pool: one thing at a time, the most urgent first.

Rebuilds and scrubs stop between two objects when something more urgent comes, and are taken up
again after it. All of it can be killed at any moment: what is done is found done.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from hpstore.agent.background_rate import SharedPace
from hpstore.agent.rebuild_speeds import note_rebuild
from hpstore.errors import HpstoreError, MembershipError
from hpstore.format.records import DeviceState, Member
from hpstore.maintenance.rebalance import RebalanceReport
from hpstore.maintenance.rebuild import Progress, RebuildReport
from hpstore.maintenance.scrub_columns import ColumnScrubReport
from hpstore.membership.host_names import DOMAIN
from hpstore.pool.pool import Pool
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)
_QUEUED = 256
_EVENTS = 100
_LOOK_SECONDS = 2.0  # between two looks at whether another process waits


class JobKind(StrEnum):
    """What there is to do. The first four change the membership, and are short but for READMIT."""

    READMIT = "readmit"
    DRAIN = "drain"
    EVICT = "evict"
    HEAL = "heal"
    REBUILD = "rebuild"
    REBALANCE = "rebalance"
    SCRUB = "scrub"
    SWEEP = "sweep"
    REOPEN = "reopen"  # what an eviction has closed that was cut short


_RANK = {JobKind.REBUILD: 1, JobKind.REBALANCE: 2, JobKind.SWEEP: 2, JobKind.SCRUB: 3}
Report = RebuildReport | RebalanceReport | ColumnScrubReport


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundJob:
    """One of them. `device` is an id, "" for the pool."""

    kind: JobKind
    device: str = ""
    reason: str = ""
    include_missing: bool = False  # a rebuild that waits for nobody
    domain: str = ""  # of HEAL: all devices of this failure domain, which are one host's

    @property
    def rank(self) -> int:
        """Smaller is more urgent."""
        return _RANK.get(self.kind, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSight:
    """The job under way, or the last one."""

    kind: str
    device: str
    reason: str
    done: int
    total: int
    bytes: int
    seconds: float
    bytes_per_second: float  # as it was, pauses and all
    bytes_per_second_alone: float  # while it worked

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """What became of a job, in words."""

    at_ms: int
    text: str
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard jobs may work, asked before each of them, `share` at every step; who answers; and
    what an agent may do beside those of other hosts.

    `own`: devices of this host, None where a scrub is one of the whole pool. `decides` and
    `repairs`: as PoolKeeper has them. `confirm()` before a decision, which raises MembershipError.
    """

    share: Callable[[], float]
    heal_bytes_per_second: Callable[[], float | None]
    scrub_bytes_per_second: Callable[[], float]
    answers: Callable[[str], bool]
    returned: Callable[[str], bool]  # whether a device that was away answers again
    spread: float  # of fullness, that a rebalance lets be
    own: Callable[[], frozenset[str] | None] = lambda: None
    scrub_began_ms: Callable[[], int] = lambda: 0  # of the pass that is due or under way
    decides: Callable[[], bool] = lambda: True
    repairs: Callable[[], bool] = lambda: True
    confirm: Callable[[], None] = lambda: None
    closing: Callable[[Member, bool], AbstractContextManager[None]] = lambda *_: nullcontext()
    reopen: Callable[[], None] = lambda: None


class Jobs:
    """A queue and the one thread that works it off; with `threads=False` `run_all` does.

    On the working thread `started(job)` is called before each job, `finished(job, report)` after
    one that ran to its end; `report` is that of a rebuild, rebalance or scrub, None when it failed.
    """

    def __init__(
        self,
        pool: Pool,
        effort: Effort,
        *,
        started: Callable[[BackgroundJob], None],
        finished: Callable[[BackgroundJob, Report | None], None],
    ) -> None:
        self._pool, self._effort = pool, effort
        self._admin = pool.admin
        self._started, self._finished = started, finished
        self._queue: list[BackgroundJob] = []
        self._running: BackgroundJob | None = None
        self._closed = self._interrupted = False
        self._change = threading.Condition()  # guards all of the above and below
        self._progress = Progress(done=0, total=0, bytes=0, key="")
        self._looked_seconds = 0.0  # at whether others wait; of the working thread
        self._began, self._pace = 0.0, self._fresh_pace(None)
        self._events: deque[JobEvent] = deque(maxlen=_EVENTS)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Work in the background from now on."""
        self._thread = threading.Thread(target=self._work, name="hpstore-agent-jobs", daemon=True)
        start_thread(self._thread)

    def submit(self, job: BackgroundJob) -> bool:
        """Queue a job, unless one like it waits already; interrupts what is less urgent."""
        with self._change:
            like = [j for j in self._queue if (j.kind, j.device) == (job.kind, job.device)]
            if like and (like[0].include_missing or not job.include_missing):
                return False
            if len(self._queue) >= _QUEUED or self._closed:
                return False
            self._queue = [j for j in self._queue if j not in like] + [job]
            if self._running is not None and job.rank < self._running.rank:
                self._interrupted = True
            self._change.notify_all()
            return True

    def withdraw(self) -> None:
        """Drop what is queued for the whole pool: another agent decides now."""
        with self._change:
            self._queue = [job for job in self._queue if job.kind is JobKind.SCRUB]

    @property
    def running(self) -> BackgroundJob | None:
        """What is under way."""
        return self._running

    def waiting(self) -> list[BackgroundJob]:
        """What is queued, the most urgent first."""
        with self._change:
            return sorted(self._queue, key=lambda job: job.rank)

    def busy(self) -> str:
        """Return the urgent job that runs now or next, in words; "" if there is none.

        Jobs that can wait for a rebuild do not count.
        """
        with self._change:
            jobs = [self._running, *self._queue] if self._running else list(self._queue)
            most = _RANK[JobKind.REBUILD]
            return next((f"a {j.kind}" for j in jobs if j and j.rank <= most), "")

    def events(self) -> list[JobEvent]:
        """The last ones, oldest first."""
        with self._change:
            return list(self._events)

    def sight(self) -> JobSight | None:
        """The job under way; None when nothing is."""
        with self._change:
            job, step, pace = self._running, self._progress, self._pace
            if job is None:
                return None
            seconds = self._admin.clock.monotonic() - self._began
        whole, alone = pace.rates()
        return JobSight(
            kind=job.kind,
            device=job.device,
            reason=job.reason,
            done=step.done,
            total=step.total,
            bytes=step.bytes,
            seconds=seconds,
            bytes_per_second=whole,
            bytes_per_second_alone=alone,
        )

    def note(self, text: str, *, ok: bool = True) -> None:
        """Report a line in the log and the status."""
        (_log.info if ok else _log.warning)("%s", text)
        with self._change:
            self._events.append(JobEvent(at_ms=self._admin.clock.wall_ms(), text=text, ok=ok))

    def run_all(self, limit: int = 64) -> None:
        """Work off the queue on this thread; jobs that come meanwhile, too, up to a limit."""
        for _ in range(limit):
            job = self._take(wait=False)
            if job is None:
                return
            self._run(job)

    def close(self, limit_seconds: float = 30.0) -> None:
        """Stop after the object under way. What is left is found again at the next start."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(limit_seconds)
            if self._thread.is_alive():
                _log.warning("a job is still in its last object: %s", self._running)

    # -- the working thread

    def _work(self) -> None:
        while (job := self._take(wait=True)) is not None:
            self._run(job)

    def _take(self, *, wait: bool) -> BackgroundJob | None:
        with self._change:
            while not self._queue and wait and not self._closed:
                self._change.wait()
            if not self._queue or self._closed:
                return None
            job = min(self._queue, key=lambda job: job.rank)
            self._queue.remove(job)
            self._running, self._interrupted = job, False
            self._progress = Progress(done=0, total=0, bytes=0, key="")
            self._began = self._admin.clock.monotonic()
            return job

    def _run(self, job: BackgroundJob) -> None:
        self._started(job)
        try:
            self._require_may(job)
            report = self._do(job)
        except (HpstoreError, OSError) as error:
            self.note(f"{self._named(job)} was not done: {error}", ok=False)
            report = None
        except Exception:  # noqa: BLE001 (one job that crashes must not end healing for good)
            _log.exception("%s crashed", job)
            self._pool.metrics.count("agent_job_crash_total")
            self.note(f"{self._named(job)} crashed; the log has the traceback", ok=False)
            report = None
        with self._change:
            self._running = None
            closed = self._closed
        if report is not None and report.stopped:
            if not closed:
                self.submit(job)
            return
        self._finished(job, report)

    def _require_may(self, job: BackgroundJob) -> None:
        """Raise MembershipError for what another agent decides. Each scrubs the disks of its host,
        and repairs go on while no agent can know which one decides."""
        own = job.kind is JobKind.SCRUB and self._effort.own() is not None
        if not own and not (job.kind is JobKind.REBUILD and self._effort.repairs()):
            self._effort.confirm()

    def _do(self, job: BackgroundJob) -> Report | None:
        if job.kind is JobKind.REBUILD:
            return self._rebuild(job)
        if job.kind is JobKind.REBALANCE:
            return self._rebalance()
        if job.kind is JobKind.SCRUB:
            own = self._effort.own()
            return self._scrub() if own is None else self._scrub_columns(own)
        if job.kind is JobKind.SWEEP:
            if swept := self._admin.sweep(self._effort.decides):
                self.note(f"sweep: {swept} files of deleted objects and torn puts removed")
            return None
        if job.kind is JobKind.REOPEN:
            self._effort.reopen()
            return None
        member = self._admin.record.member(job.device)
        if job.kind is JobKind.READMIT:
            found = self._pool.readmit(job.device, reason=job.reason)
            judged = (
                ""
                if found is None
                else (
                    f": {found.kept} files kept, {found.removed} removed, {found.quarantined} in "
                    "quarantine"
                )
            )
            self.note(f"{self._named(job)} is done{judged}")
        elif member is None and job.kind is not JobKind.HEAL:
            return None  # it has left meanwhile
        elif job.kind is JobKind.DRAIN:
            self._admin.devices.begin_drain(job.device)
            self.note(f"{self._named(job)} has begun")
        elif job.kind is JobKind.EVICT:
            self._evict_drained(job)
        rush = job.kind is JobKind.HEAL and member is not None and not self._let_go(job, member)
        self.submit(
            BackgroundJob(kind=JobKind.REBUILD, reason=self._named(job), include_missing=rush)
        )
        return None

    def _let_go(self, job: BackgroundJob, member: Member) -> bool:
        """Evict a device, or drain one that can still be read: it is a source until a rebuild has
        completed every object without it.

        Return False if an object cannot do without the device: then it is not evicted, what can be
        rebuilt is rebuilt, and the eviction is tried again. A device that is back by now is kept.
        """
        record = self._admin.record
        host = [m for m in record.members if job.domain and m.domain == job.domain]
        whole = bool(host) and not any(self._effort.answers(m.device_id) for m in host)
        try:
            if self._effort.returned(job.device):
                self.note(f"{self._named(job)}: called off, the device is back")
            elif not self._effort.answers(job.device):
                name = f"{DOMAIN}{job.domain}" if whole else job.device
                leaving = [m.device_id for m in host] if whole else [job.device]
                with self._effort.closing(member, whole):
                    self._admin.devices.evict(name, confirm=partial(self._confirm_away, leaving))
                self.note(f"{self._named(job)}: evicted, to be made up for")
            elif member.state is DeviceState.ONLINE:
                self._admin.devices.begin_drain(job.device)
                self.note(f"{self._named(job)}: what can be read of it is moved off")
        except MembershipError as error:
            self.note(f"{self._named(job)}: not evicted yet: {error}", ok=False)
            return self._effort.answers(job.device)
        return True

    def _confirm_away(self, leaving: Sequence[str]) -> None:
        """Before each membership of an eviction, for which a lock was waited for: raise
        MembershipError where another agent decides, or a device is back."""
        self._effort.confirm()
        if any(map(self._effort.answers, leaving)):
            raise MembershipError("it answers again. Nothing was changed.")

    def _evict_drained(self, job: BackgroundJob) -> None:
        done = self._admin.devices.end_drain(
            job.device,
            rate_bytes_per_second=self._effort.heal_bytes_per_second(),
            confirm=self._effort.confirm,
        )
        self.note(f"{self._named(job)} {'is done' if done else 'is called off'}")

    def _rebuild(self, job: BackgroundJob) -> RebuildReport:
        pace = self._fresh_pace(
            self._effort.heal_bytes_per_second(), gives_way=True, may=self._effort.repairs
        )
        report = self._admin.rebuild(
            progress=self._step,
            include_missing=job.include_missing,
            pace=pace,
            gives_way=True,
            may_sweep=self._effort.decides,
        )
        self._note_speed(report)
        if report.columns_written or report.unreadable or report.failed or report.stuck:
            self.note(
                f"rebuild{' (interrupted)' if report.stopped else ''}: {report.rebuilt} objects "
                f"rebuilt, {report.relaid} restriped, {report.waiting} waiting, {report.stuck} "
                f"stuck, {len(report.unreadable)} unreadable, {len(report.failed)} failed",
                ok=not (report.unreadable or report.failed or report.stuck),
            )
        for why, count in report.put_off.items():
            self.note(f"{count} objects are put off: {why}")
        if report.whole:
            for member in self._admin.record.members:
                if member.state is DeviceState.DRAINING:
                    self.submit(
                        BackgroundJob(
                            kind=JobKind.EVICT, device=member.device_id, reason="it is drained"
                        )
                    )
        return report

    def _note_speed(self, report: RebuildReport) -> None:
        """Keep how fast it was, for `hpstore durability --pool`."""
        if not report.columns_written:
            return
        directory, now_ms = self._admin.state_directory, self._admin.clock.wall_ms()
        try:
            note_rebuild(directory, at_ms=now_ms, nbytes=report.bytes, seconds=report.seconds)
        except OSError as error:
            _log.warning("the speed of a rebuild is not kept: %s", error)

    def _rebalance(self) -> RebalanceReport:
        pace = self._fresh_pace(
            self._effort.heal_bytes_per_second(), gives_way=True, may=self._effort.decides
        )
        report = self._admin.rebalance(
            spread=self._effort.spread, progress=self._step, pace=pace, gives_way=True
        )
        if report.columns_moved or report.failed:
            self.note(
                f"rebalance{' (interrupted)' if report.stopped else ''}: {report.columns_moved} "
                f"columns moved, {len(report.failed)} failed; devices differed by "
                f"{report.spread_before:.0%} of their size, now by {report.spread_after:.0%}",
                ok=not report.failed,
            )
        return report

    def _scrub(self) -> RebuildReport:
        pace = self._fresh_pace(self._effort.scrub_bytes_per_second(), gives_way=True)
        report = self._admin.scrub(progress=self._step, pace=pace, gives_way=True)
        if report.damaged_columns or report.unreadable or report.failed or report.set_aside:
            self.note(
                f"scrub: {report.damaged_columns} damaged columns found, {report.columns_written} "
                f"written, {len(report.unreadable)} objects unreadable, {len(report.failed)} "
                f"failed, {report.set_aside} files that are none of this pool's set aside",
                ok=not (report.unreadable or report.failed),
            )
        return report

    def _scrub_columns(self, own: frozenset[str]) -> ColumnScrubReport:
        pace = self._fresh_pace(self._effort.scrub_bytes_per_second())
        began_ms = self._effort.scrub_began_ms()
        report = self._admin.scrub_columns(own, since_ms=began_ms, progress=self._step, pace=pace)
        if not report.clean and not report.stopped:
            self.note(
                f"scrub of {len(own)} devices of this host: {report.damaged_columns} damaged "
                f"columns found, {report.repaired} objects repaired, {len(report.failed)} failed",
                ok=not report.failed,
            )
        return report

    def _fresh_pace(
        self,
        bytes_per_second: float | None,
        *,
        gives_way: bool = False,
        may: Callable[[], bool] = lambda: True,
    ) -> SharedPace:
        """`gives_way`: the work stops while another process waits for its turn. `may`: whether it
        still is this agent's."""

        def stop() -> bool:
            ended = self._closed or self._interrupted or not may()
            return ended or (gives_way and self._wanted())

        pace = SharedPace(
            self._admin.clock, self._effort.share, stop=stop, bytes_per_second=bytes_per_second
        )
        with self._change:
            self._pace = pace
        return pace

    def _wanted(self) -> bool:
        """Whether another process waits to rebuild, rebalance or scrub; looked at now and then."""
        now = self._admin.clock.monotonic()
        if now - self._looked_seconds >= _LOOK_SECONDS:
            self._looked_seconds = now
            if self._admin.repair_wanted():
                self._interrupted = True
                self.note("another process waits to rebuild, rebalance or scrub: it goes first")
        return self._interrupted

    def _step(self, step: Progress) -> None:
        with self._change:
            self._progress = step

    def _named(self, job: BackgroundJob) -> str:
        if not job.device:
            return job.kind
        record = self._admin.record
        known = {m.device_id: m.url for m in (*record.members, *record.evicted)}
        reason = f" ({job.reason})" if job.reason else ""
        what = f"{DOMAIN}{job.domain}" if job.domain else known.get(job.device, job.device)
        return f"{job.kind} of {what}{reason}"
