"""What an agent asks of an open pool beyond what users do: who answers, who is back, how it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpstore.agreement.registers import REPAIR, WAITING
from hpstore.devices.base import RELEASED, Device, Usage
from hpstore.devices.opener import identify, same_form
from hpstore.errors import (
    ConfigError,
    DeviceError,
    DeviceMissing,
    LockTimeout,
    MembershipError,
    RegistersForeign,
    RegistersUnavailable,
)
from hpstore.format.records import (
    IDENTITY_FILE,
    MAX_RECORD_BYTES,
    DeviceState,
    Identity,
    Member,
    PoolRecord,
)
from hpstore.maintenance.dependents import require_room_to_drain
from hpstore.maintenance.rebalance import SPREAD, RebalanceReport, rebalance_all
from hpstore.maintenance.rebuild import ProgressCallback, RateLimit, WorkPace
from hpstore.maintenance.repair_object import Throttle
from hpstore.maintenance.scrub import last_scrub_ms
from hpstore.maintenance.survey_condition import Condition, as_of_now, survey_condition
from hpstore.membership import changes
from hpstore.membership.device_places import filesystem_of, require_mounted
from hpstore.membership.members import commit_record, with_healed
from hpstore.membership.open_members import belongs, trusted
from hpstore.objects.context import PATIENCE
from hpstore.pool.session import PoolHandle
from hpstore.runtime.clock import Clock

_log = logging.getLogger(__name__)
_WAIT_SECONDS = 0.2  # between two looks at whether others still wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Of a device that was probed: its space, and how long writing, syncing and reading took.

    `refused`: why it takes no writes though it can be read.
    """

    usage: Usage
    seconds: float
    refused: DeviceError | None


class TendedPool(PoolHandle):
    """The part of a Pool that an agent works with."""

    def sit_out(self, device: str) -> None:
        """Keep this process' ordinary reads and new columns off a device, until readmit."""
        self._usable()
        self._spare(self._member(device).device_id)

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
        return self.config.settings.run_path(self.record.pool_id)

    @property
    def state_directory(self) -> Path:
        """What the agent of this node keeps about this pool."""
        return self.config.settings.state_path(self.record.pool_id)

    @property
    def places(self) -> Mapping[str, str]:
        """Where the members that are open are, by device id."""
        return {d: device.url for d, device in self._store.view.devices.items()}

    def probe_devices(self, devices: set[str]) -> dict[str, Future[ProbeAnswer]]:
        """Ask open devices for a real answer: write, sync, read back (read only: reads).

        One call on each device's lane, of which more are refused while it hangs; nothing is waited
        for. A future holds the answer, or the DeviceError.
        """
        store = self._store

        def probe(device_id: str, device: Device) -> Callable[[], ProbeAnswer]:
            def call() -> ProbeAnswer:
                began = store.clock.monotonic()
                store.generation_on(device_id, device)
                refused = store.probe(device_id, device)
                seconds = store.clock.monotonic() - began
                return ProbeAnswer(usage=device.usage(), seconds=seconds, refused=refused)

            return call

        found = {d: device for d, device in store.view.devices.items() if d in devices}
        return {d: store.scheduler.submit(d, probe(d, device)) for d, device in found.items()}

    def ask_generations(self, devices: set[str]) -> dict[str, Future[int]]:
        """Ask open devices which membership they know; nothing is waited for.

        A look at a small file on each: others change the membership, and it tells of that.
        """
        store, found = self._store, self._store.view.devices
        return {
            d: store.scheduler.submit(d, partial(store.generation_on, d, found[d]))
            for d in devices & found.keys()
        }

    def away(self, silent: Collection[str]) -> list[str]:
        """Places where no open device answers, but a member or an evicted device may be.

        `silent`: open ones that do not; what lies at their places now may have to be opened anew.
        """
        record = self.record
        here = {same_form(url) for d, url in self.places.items() if d not in silent}
        known = [m.url for m in (*record.members, *record.evicted) if trusted(self.config, m.url)]
        urls = [*self.config.devices, *known]
        return [url for url in dict.fromkeys(map(same_form, urls)) if url not in here]

    def look_at(self, urls: set[str]) -> dict[str, Future[str]]:
        """Ask places which device of this pool is there; nothing is waited for, nothing written.

        A future holds a device id, or the error. A place that hangs keeps its lane: it is not asked
        again before it answers.
        """
        pool_id = self.record.pool_id

        def look(url: str) -> Callable[[], str]:
            def call() -> str:
                found = identify(url, self._opener, self.config.key)
                found.device.close()
                if not belongs(found, pool_id):
                    raise DeviceMissing(f"{url} holds no device of this pool", device=url)
                return found.identity.device_id

            return call

        return {url: self._store.scheduler.submit(f"away {url}", look(url)) for url in urls}

    def find(self, device: str, *, returning: bool = False) -> Member:
        """A member or evicted device by URL, path or beginning of its id. `returning`: those that
        have left come first. MembershipError where none or several are meant."""
        return self._member(device, returning=returning)

    def condition(self, silent: Collection[str] = ()) -> Condition:
        """How the objects are, by names, without the devices that are known to be `silent`. Walks
        all keys."""
        self._usable()
        return survey_condition(self._store, silent)

    def last_scrub_ms(self) -> int:
        """When a scrub of all objects has ended, of any process; 0 for none, or one that was
        stopped since. Reads a small file of each device."""
        self._usable()
        return last_scrub_ms(self._store)

    def as_of_now(self, found: Condition, silent: Collection[str]) -> Condition:
        """What is certain of an earlier condition(), with these devices `silent` now."""
        return as_of_now(found, self._store.view, silent)

    def rebalance(
        self, *, spread: float = SPREAD, progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None, pace: WorkPace | None = None,
        gives_way: bool = False,
    ) -> RebalanceReport:  # fmt: skip
        """Move columns from full devices to empty ones when they differ by more than `spread` of
        their size, until it is half of that. No object has less than its full stripe meanwhile.

        At most one column of each object; stopped or killed, it is resumed by running it again.
        One rebalance, rebuild or scrub of a pool at a time (LockTimeout). A `pace` replaces the
        rate. `gives_way` as for repairing().
        """
        self._writable()
        if not 0 < spread <= 1:
            raise ConfigError(f"a spread of {spread} is no share: above 0, at most 1")
        self.refresh()
        with self.repairing("rebalance", gives_way=gives_way):
            return rebalance_all(
                self._store, spread=spread, progress=progress,
                rate_bytes_per_second=rate_bytes_per_second, pace=pace,
            )  # fmt: skip

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
                stack.enter_context(self.registers.hold(REPAIR, what))
            else:
                try:
                    stack.enter_context(self.registers.hold(REPAIR, what, deadline_seconds=0.0))
                except LockTimeout:
                    with self.registers.hold(WAITING, what):
                        stack.enter_context(self.registers.hold(REPAIR, what))
            yield

    def repair_wanted(self) -> bool:
        """Whether somebody waits to rebuild, rebalance or scrub. Waits for no other process."""
        try:
            with self.registers.hold(WAITING, "look", deadline_seconds=0.0):
                return False
        except LockTimeout:
            return True
        except (RegistersForeign, RegistersUnavailable):  # nobody can wait either
            return False

    def _let_others_first(self, what: str) -> None:
        until = self.clock.monotonic() + self.config.settings.lock_deadline_seconds
        while self.repair_wanted():
            if self.clock.monotonic() >= until:
                raise LockTimeout(f"{what}: another process waits to rebuild, rebalance or scrub, "
                                  "and goes first. Nothing was changed.")  # fmt: skip
            self.clock.wait(_WAIT_SECONDS)

    def answering(self) -> list[str]:
        """Where open devices are that answer a stat now: what else asks the filesystem about these
        places does not hang."""
        devices = self._store.view.devices
        found = self._store.each(
            devices, lambda _, device: filesystem_of(device.url), patience=PATIENCE
        )
        return [devices[d].url for d, answer in found.items() if not isinstance(answer, Exception)]

    def _require_mounted(self, url: str) -> None:
        """Raise ConfigError where a new device would lie on the disk of the system by mistake;
        DeviceTimeout where its place hangs."""
        others, limit = self.answering(), self.config.settings.open_deadline_seconds
        look = partial(require_mounted, [url], others)
        (answer,) = self._store.scheduler.gather_once({same_form(url): look}, limit).values()
        if isinstance(answer, Exception):
            raise answer

    def begin_release(self, device: str) -> None:
        """Let all processes close a member, so that its disk can be unmounted for maintenance. It
        counts as missing until `readmit`, and keeps what it holds. Durable on return.

        Raises MembershipError where no device may be missing now, DeviceError.
        """
        self._writable()
        member = self._member(device)
        here = self._store.view.devices.get(member.device_id)
        if here is None:
            return  # missing, or released already
        if self.condition().losses_tolerated < 1:
            raise MembershipError(
                f"{member.url} cannot be released: some object could not be read without it. "
                "Nothing was changed. Rebuild, or bring missing devices back first."
            )

        def mark() -> None:
            here.write_small(RELEASED, b"released for maintenance; hpstore readmit ends it\n")

        limit = self.config.settings.device_deadline_seconds
        (answer,) = self._store.scheduler.gather({member.device_id: mark}, limit).values()
        if isinstance(answer, Exception):
            raise answer
        self.refresh()

    def _end_release(self, member: Member) -> None:
        """Take the mark off a device that is back at one of its places. Best effort: one that is
        not mounted yet stays missing."""

        def unmark(url: str) -> None:
            device = self._opener(url)
            try:
                data = device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES)
                if Identity.decode(data, where=url).device_id == member.device_id:
                    device.delete(RELEASED)
            finally:
                device.close()

        calls = {url: partial(unmark, url) for url in self.away(()) if "://" not in url}
        limit = self.config.settings.open_deadline_seconds
        self._store.scheduler.gather_once(calls, limit)
        self.refresh()

    def begin_drain(self, device: str) -> None:
        """Put no new columns on a device; `rebuild` moves those it has, `drain` then ends it.

        Durable on return. Raises MembershipError.
        """
        self._writable()
        with self._change():
            member = self._member(device)
            if member.left:
                raise MembershipError(f"{device} is evicted already")
            if member.state is not DeviceState.DRAINING:
                require_room_to_drain(self._store, member)
                changes.set_state(self._store, member.device_id, DeviceState.DRAINING)
                self.refresh()

    def end_drain(self, device: str, *, rate_bytes_per_second: float | None = None) -> bool:
        """Move what is left on a draining device, then evict it; blocks until that is done.

        False, and nothing is done, when it drains no longer: somebody has readmitted it. Raises
        MembershipError as `drain` does, the device draining still.
        """
        self._writable()
        throttle = RateLimit(rate_bytes_per_second, self._store.clock)
        return self._end_drain(device, throttle) is not None

    def _end_drain(self, device: str, throttle: Throttle) -> int | None:
        """Evict a device once the rest of it has been moved; how many objects that were, or None
        when it drains no longer."""
        with self._change():
            if self._member(device).state is not DeviceState.DRAINING:
                return None
            with self._leaving(device) as member:
                return changes.drain_member(
                    self._store, member, self.refresh, throttle, lambda *_: None
                )

    def _mark_healed(self, devices: Collection[str]) -> None:
        """Write down that evicted devices have been made up for. Left to the next rebuild when the
        lock is held for long: what was rebuilt is told all the same."""
        try:
            with self._change():
                record = self._store.view.record
                commit_record(self._store, with_healed(record, devices), {}, force=False)
                self.refresh()
        except LockTimeout as error:
            self._store.metrics.count("healed_not_marked_total")
            _log.warning("pool %s is rebuilt, and does not say so of evicted devices until the "
                         "next rebuild: %s", self.config.name, error)  # fmt: skip


__all__ = ["ProbeAnswer", "TendedPool"]
