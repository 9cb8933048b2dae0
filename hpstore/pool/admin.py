"""What administers an open pool: its condition, repairs, and what agents and trainers need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpstore.agreement.registers import REPAIR, WAITING
from hpstore.errors import (
    ConfigError,
    LockTimeout,
    MembershipError,
    ObjectNotFound,
    RegistersForeign,
    RegistersUnavailable,
    TooFewDevices,
)
from hpstore.format.keys import check_key
from hpstore.format.records import PoolRecord
from hpstore.health.monitor import Monitor
from hpstore.maintenance.rebalance import SPREAD, RebalanceReport, rebalance_all
from hpstore.maintenance.rebuild import ProgressCallback, RebuildReport, WorkPace, rebuild_all
from hpstore.maintenance.repair_object import RepairAction, repair_object
from hpstore.maintenance.repair_runner import Outcome, RepairJob, RepairRunner, RepairsHere
from hpstore.maintenance.scrub import last_scrub_ms, scrub_all
from hpstore.maintenance.scrub_columns import ColumnScrubReport, scrub_columns
from hpstore.maintenance.survey_condition import Condition, as_of_now, survey_condition
from hpstore.maintenance.sweep import sweep_all, sweep_deleted
from hpstore.membership.members import commit_record, with_healed
from hpstore.membership.pool_registers import PoolRegisters
from hpstore.objects.key_listing import live_versions
from hpstore.objects.object_info import version_token
from hpstore.objects.write.conditional_put import bar_puts
from hpstore.objects.write.prewrite_files import prepare_space
from hpstore.pool.host_status import HostStatus, host_statuses, hosts_tolerated
from hpstore.pool.many_objects import remove_versions
from hpstore.pool.pool_devices import PoolDevices
from hpstore.pool.register_report import (
    RegisterReport,
    move_registers_to,
    registers_report,
    reset_registers_at,
)
from hpstore.pool.session import PoolSession
from hpstore.pool.status import PoolStatus, pool_status, state_in_brief
from hpstore.runtime.buffers import Lease
from hpstore.runtime.clock import Clock
from hpstore.runtime.rate_limit import RateLimit

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.2  # between two looks at whether others still wait


class PoolAdmin:
    """`pool.admin`: what agents, tools and trainers need beyond storing and reading. Thread-safe.

    `devices`: take devices in and out, and look at them.
    """

    def __init__(self, session: PoolSession) -> None:
        self._session, self._store = session, session.store
        self.devices = PoolDevices(session)

    @property
    def health(self) -> Monitor:
        """What this process knows of the health of its devices."""
        return self._session.health

    @property
    def registers(self) -> PoolRegisters:
        """The locks and claims of the pool, shared by all processes that use it."""
        return self._session.registers

    def registers_report(self) -> RegisterReport:
        """Where the pool's registers are, and whether they answer. Changes nothing."""
        self._session.require_open()
        return registers_report(self._session)

    def move_registers(self, url: str) -> RegisterReport:
        """Move the registers, while processes use them: to etcd, to a store with conditional
        writes, or back to the devices (docs/registers.md).

        Durable on return. Raises ConfigError, with nothing changed, where the place does not
        enforce conditional writes; RegistersUnavailable where it does not answer; MembershipError.
        """
        self._session.require_writable()
        return move_registers_to(self._session, url)

    def reset_registers(self, url: str = "", *, force: bool = False) -> RegisterReport:
        """Make registers that are lost again, from what the devices know; by default at the same
        URL. Raises MembershipError while the old ones answer, unless forced: what they hold is
        then given up, as after a restore of etcd from a backup.
        """
        self._session.require_writable()
        return reset_registers_at(self._session, url, force=force)

    @property
    def denied(self) -> frozenset[str]:
        """Places of devices on which this user has no rights, or may not write."""
        return self._session.denied

    def refresh(self) -> None:
        """Read the membership again: newest record, devices that came, left or came back.

        A device that hangs costs the open deadline.
        """
        self._session.refresh()

    @property
    def record(self) -> PoolRecord:
        """The membership as this process knows it."""
        return self._store.view.record

    @property
    def clock(self) -> Clock:
        """The pool's time."""
        return self._store.clock

    @property
    def run_directory(self) -> Path:
        """Locks and what is soon old, of this pool on this node."""
        return self._session.config.settings.run_path(self.record.pool_id)

    @property
    def state_directory(self) -> Path:
        """What the agent of this node keeps about this pool."""
        return self._session.config.settings.state_path(self.record.pool_id)

    def scratch(self, nbytes: int, what: str) -> Lease | None:
        """Page-aligned memory of `memory_bytes`, to be released; None when all is in use.

        That is counted as `<what>_without_memory_total`, and logged once.
        """
        return self._store.scratch(nbytes, what)

    @property
    def recycles(self) -> bool:
        """Whether a device keeps files for new columns to overwrite."""
        modes = {device.mode for device in self._store.view.devices.values()}
        return self._session.config.settings.recycle_bytes > 0 and not modes <= {"memory", "remote"}

    def status(self, *, past: bool = False) -> PoolStatus:
        """Devices with their states, objects, what is degraded, space, counters. Walks all keys.

        Parameters
        ----------
        past
            With devices that left long ago, and that nothing depends on.
        """
        self._session.require_open()
        self._session.refresh()
        return pool_status(
            self._store,
            self._session.config.name,
            self._session.problems,
            self._session.health,
            past=past,
        )

    def state_in_brief(self) -> str:
        """Devices that answer now, room, and the losses that the pool still bears, as one line for
        an error. Asks each device; walks no keys."""
        self._session.require_open()
        return state_in_brief(self._store, self._session.config.name)

    def condition(self, silent: Collection[str] = ()) -> Condition:
        """How the objects are, by names, without the devices that are known to be `silent`. Walks
        all keys."""
        self._session.require_open()
        return survey_condition(self._store, silent)

    def hosts(
        self, answering: Collection[str], losses_tolerated: int
    ) -> tuple[tuple[HostStatus, ...], int]:
        """The hosts of the pool, and how many more of them may be lost, with these devices
        answering. Asks no device."""
        found = host_statuses(self._store, answering, losses_tolerated)
        return found, hosts_tolerated(self.record, answering, losses_tolerated)

    def as_of_now(self, found: Condition, silent: Collection[str]) -> Condition:
        """What is certain of an earlier condition(), with these devices `silent` now."""
        return as_of_now(found, self._store.view, silent)

    def versions_under(self, prefix: str) -> dict[str, str]:
        """The version of each key that begins with `prefix`, as stat() has it, by one listing. As
        certain as list(certain=True): raises TooFewDevices where keys may be there unseen."""
        self._session.require_open()
        found = live_versions(self._store, prefix, certain=True)
        return {key: version_token(*version.content) for key, version in found.items()}

    def last_scrub_ms(self) -> int:
        """When a scrub of all objects has ended, of any process; 0 for none, or one that was
        stopped since. Reads a small file of each device."""
        self._session.require_open()
        return last_scrub_ms(self._store)

    def scrub(
        self,
        *,
        prefix: str = "",
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        resume: bool = True,
        pace: WorkPace | None = None,
        gives_way: bool = False,
        repairs: RepairRunner | None = None,
    ) -> RebuildReport:
        """Read and verify every block, repair what is damaged.

        Parameters
        ----------
        prefix
            Only objects whose keys begin with it.
        progress
            Called by this thread with a Progress for each object.
        rate_bytes_per_second
            Spread the work.
        resume
            Go on where a scrub was stopped.
        pace
            In the place of the rate.
        gives_way
            As repairing() has it.
        repairs
            Who does the work, by default this thread: workers on a cluster, as RayRepairs, which
            a `pace` does not slow down.

        Raises
        ------
        LockTimeout
            Another scrub or rebuild of the pool is at work.
        """
        self._session.require_writable()
        with self.repairing("scrub", gives_way=gives_way):
            return scrub_all(
                self._store,
                prefix=prefix,
                progress=progress,
                rate_bytes_per_second=rate_bytes_per_second,
                resume=resume,
                pace=pace,
                repairs=repairs,
            )

    def rebuild(
        self,
        *,
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        include_missing: bool = False,
        everything: bool = False,
        pace: WorkPace | None = None,
        gives_way: bool = False,
        may_sweep: Callable[[], bool] = lambda: True,
        repairs: RepairRunner | None = None,
    ) -> RebuildReport:
        """Make every object whole on the current members, most endangered first; pay debts.

        Killed, it is resumed by running it again.

        Parameters
        ----------
        progress, rate_bytes_per_second, pace, gives_way, repairs
            As scrub() has them.
        include_missing
            Also columns on members that are missing but not evicted, which are waited for while
            parity is left.
        everything
            Also what retention soon drops, which is put off (docs/health.md).
        may_sweep
            Asked at the end: whether tombstones and torn puts past their time go, too.

        Raises
        ------
        LockTimeout
            Another scrub or rebuild of the pool is at work.
        """
        self._session.require_writable()
        self._session.refresh()
        with self.repairing("rebuild", gives_way=gives_way):
            unhealed = self._store.view.record.unhealed_since()
            report = rebuild_all(
                self._store,
                progress=progress,
                rate_bytes_per_second=rate_bytes_per_second,
                include_missing=include_missing,
                everything=everything,
                pace=pace,
                may_sweep=may_sweep,
                repairs=repairs,
            )
        if report.whole and unhealed and not (report.absent or self._store.view.missing):
            self._mark_healed(unhealed)  # not those that were evicted meanwhile
        return report

    def sweep(self, go_on: Callable[[], bool] = lambda: True) -> int:
        """Remove tombstones and torn puts that are past their time, a batch of keys at a time while
        `go_on`; how many files went. Scrubs and rebuilds do so at their ends."""
        self._session.require_writable()
        return sweep_all(self._store, go_on)

    def scrub_columns(
        self,
        devices: Collection[str],
        *,
        since_ms: int | None = None,
        progress: ProgressCallback | None = None,
        pace: WorkPace | None = None,
    ) -> ColumnScrubReport:
        """Verify every column on some devices, with no read of any other device; objects of which a
        column is damaged are repaired over all of them.

        Parameters
        ----------
        devices
            Ids of members; those that are not open are passed over.
        since_ms
            When the pass began that this goes on with; None: from the beginning.
        progress
            Called by this thread with a Progress for each object.
        pace
            How fast, and whether to go on.
        """
        self._session.require_writable()
        return scrub_columns(self._store, devices, since_ms=since_ms, progress=progress, pace=pace)

    def repair_keys(
        self,
        keys: Iterable[str],
        *,
        verify: bool = False,
        include_missing: bool = False,
        rate_bytes_per_second: float | None = None,
    ) -> Iterator[tuple[str, Outcome]]:
        """What one worker does of a rebuild or scrub that another process holds: repair these keys,
        one after another. Idempotent; two that do the same keys do no harm."""
        self._session.require_writable()
        job = RepairJob(domains=lambda _: [], verify=verify, include_missing=include_missing)
        pace = RateLimit(rate_bytes_per_second, self.clock)
        return RepairsHere(self._store, pace)(keys, job)

    def rebalance(
        self,
        *,
        spread: float = SPREAD,
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        pace: WorkPace | None = None,
        gives_way: bool = False,
    ) -> RebalanceReport:
        """Move columns from full devices to empty ones when they differ by more than `spread` of
        their size, until it is half of that. No object has less than its full stripe meanwhile.

        At most one column of each object; stopped or killed, it is resumed by running it again.
        One rebalance, rebuild or scrub of a pool at a time (LockTimeout). A `pace` replaces the
        rate. `gives_way` as for repairing().
        """
        self._session.require_writable()
        if not 0 < spread <= 1:
            raise ConfigError(f"spread {spread} is not a share: it must be above 0 and at most 1")
        self._session.refresh()
        with self.repairing("rebalance", gives_way=gives_way):
            return rebalance_all(
                self._store,
                spread=spread,
                progress=progress,
                rate_bytes_per_second=rate_bytes_per_second,
                pace=pace,
            )

    @contextmanager
    def repairing(self, what: str, *, gives_way: bool) -> Iterator[None]:
        """Hold the pool for one rebuild, rebalance or scrub. Raises LockTimeout, which names the
        holder.

        `gives_way`: it begins when nobody else waits, and asks repair_wanted() as it goes. Others
        leave a word that they wait.
        """
        with ExitStack() as stack:
            if gives_way:
                self._let_others_first(what)
                stack.enter_context(self._session.registers.hold(REPAIR, what))
            else:
                try:
                    stack.enter_context(
                        self._session.registers.hold(REPAIR, what, deadline_seconds=0.0)
                    )
                except LockTimeout:
                    with self._session.registers.hold(WAITING, what):
                        stack.enter_context(self._session.registers.hold(REPAIR, what))
            yield

    def repair_wanted(self) -> bool:
        """Whether somebody waits to rebuild, rebalance or scrub. Waits for no other process."""
        try:
            with self._session.registers.hold(WAITING, "look", deadline_seconds=0.0):
                return False
        except LockTimeout:
            return True
        except (RegistersForeign, RegistersUnavailable):  # nobody can wait either
            return False

    def _let_others_first(self, what: str) -> None:
        until = self.clock.monotonic() + self._session.config.settings.lock_deadline_seconds
        while self.repair_wanted():
            if self.clock.monotonic() >= until:
                raise LockTimeout(
                    f"{what}: another process waits to rebuild, rebalance or scrub, "
                    "and goes first. Nothing was changed."
                )
            self.clock.wait(_WAIT_SECONDS)

    def _mark_healed(self, devices: Mapping[str, int]) -> None:
        """Write down that devices evicted then (ms) have been made up for. Left to the next rebuild
        where the membership cannot be changed now: the report is returned anyway."""
        try:
            with self._session.change():
                record = self._store.view.record
                commit_record(self._store, with_healed(record, devices), {}, force=False)
                self._session.refresh()
        except (LockTimeout, MembershipError, RegistersForeign, RegistersUnavailable) as error:
            self._store.metrics.count("healed_not_marked_total")
            _log.warning(
                "pool %s is rebuilt, and does not say so of evicted devices until the "
                "next rebuild: %s",
                self._session.config.name,
                error,
            )

    def settle(self, key: str) -> None:
        """Bring the newest version to its full stripe before acting on it (PROTOCOL 8).

        Raises TooFewDevices when it cannot be brought there now.
        """
        self._session.require_writable()
        found = repair_object(self._store, check_key(key), include_missing=True)
        if found.action is RepairAction.ABSENT:
            raise ObjectNotFound(f"no object {key!r}", key=key)
        if found.losses_tolerated < self._store.view.record.parity:
            raise TooFewDevices(
                f"object {key!r} cannot be brought to its full stripe now: it survives "
                f"{found.losses_tolerated} losses. It stays readable; add devices.",
                key=key,
            )

    def bar(self, key: str, *, removes: str | None = None) -> bool:
        """End the puts of a key with `if_absent` or `if_version` that others have begun: those of
        which nothing can be read yet raise VersionConflict, however long they were stopped.

        True when no object is there; durable on return. False when one is, perhaps of such a put:
        it stays, and `settle` brings it to its full stripe. Puts that begin later may store it.
        `removes`: an object of this version is deleted, no other one.

        Raises TooManyErasures, TooFewDevices, LockTimeout, RegistersUnavailable, RegistersForeign:
        then nothing is decided.
        """
        self._session.require_writable()
        barred = bar_puts(self._store, self._session.claims, check_key(key), removes=removes)
        sweep_deleted(self._store)
        return barred

    def remove_versions(self, going: Mapping[str, str]) -> None:
        """Delete objects that are still of these versions, as stat() has them; others stay. Durable
        on return. Raises SomeFailed when this is not decided for some."""
        self._session.require_writable()
        remove_versions(self._store, self._session.claims, going)

    def prepare_space(
        self,
        sizes: Sequence[int],
        copies: int = 1,
        *,
        proceed: Callable[[], bool] | None = None,
        rate_bytes_per_second: float | None = None,
    ) -> int:
        """Write files that `copies` puts of objects of these `sizes` will overwrite, if they come.

        Overwriting is faster than writing into new blocks. Costs one more write of those objects'
        k + m columns; what is kept already counts. Returns how many files were written: none beyond
        `recycle_bytes` a device or into its reserve, none where overwriting is no faster. They
        count as free space and go first when a device is full. `proceed` is asked before every few
        MiB a device, may wait, and says False to stop. `rate_bytes_per_second`: of all devices.
        Failing devices are logged and counted. A crash leaves nothing that is not freed by itself.
        """
        self._session.require_writable()
        limit = RateLimit(rate_bytes_per_second, self._store.clock)

        def go_on(count: int) -> bool:
            if self._session.closed or not (proceed is None or proceed()):
                return False
            limit(count)
            return not self._session.closed

        return prepare_space(self._store.pinned(), sizes, copies, go_on)
