"""An open pool's life: opening, membership as it changes, locks, background repair, fork, close."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from hpstore.agreement.claims import Claims
from hpstore.agreement.registers import MEMBERSHIP, repair_hold
from hpstore.codec import choose_backend
from hpstore.config import PoolConfig, load_config, save_config
from hpstore.devices.base import Device
from hpstore.devices.opener import (
    OpenedDevice,
    Opener,
    device_opener,
    identify_all,
    is_denied,
    is_released,
    prove,
    same_form,
)
from hpstore.devices.remote_opener import S3FS, driver_of
from hpstore.devices.unused_places import make_place
from hpstore.errors import (
    AlreadyClosed,
    ConfigError,
    DeviceReadOnly,
    HpstoreError,
    LockTimeout,
    MembershipError,
    RegistersForeign,
    RegistersUnavailable,
    ThreadsExhausted,
)
from hpstore.format.records import Member, PoolRecord
from hpstore.health.monitor import Monitor
from hpstore.maintenance.rebuild import pay_debts
from hpstore.maintenance.repair_object import repair_object
from hpstore.membership.device_places import checked_place
from hpstore.membership.members import (
    check_memory,
    find_member,
    is_rolled_forward,
    newest_record,
    roll_forward,
)
from hpstore.membership.open_members import (
    belongs,
    copied,
    foreign,
    make_view,
    open_members,
    refusing,
    require_key_to_write,
    suffice,
    trusted,
    unlisted,
)
from hpstore.membership.pool_registers import PoolRegisters
from hpstore.objects.context import PATIENCE, PoolContext, View
from hpstore.objects.horizon import mend_horizons
from hpstore.pool.membership_watch import Follower
from hpstore.pool.process_resources import RepairQueue, make_scheduler, make_store, renew_after_fork
from hpstore.runtime.clock import Clock, SystemClock
from hpstore.runtime.closing import Closing
from hpstore.runtime.forks import call_in_children
from hpstore.runtime.lacks import lacks_total, naming_lacks
from hpstore.runtime.threads import start_thread

_log = logging.getLogger(__name__)


def _note_read_only(store: PoolContext, devices: Mapping[str, DeviceReadOnly]) -> None:
    """Tell a store which devices can be read, no more."""
    for device_id, error in devices.items():
        store.note_write(device_id, error.device or device_id, error)


class PoolSession(Closing):
    """The open pool of one process: devices, membership, locks, and repair in the background.

    `store`: the context that operations on objects work with; `config`: the settings, whose devices
    change with the membership; `problems`: why places do not answer. Thread-safe.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        read_only: bool = False,
        opener: Opener | None = None,
        clock: Clock | None = None,
        threads: bool = True,
        erasure_backend: str | None = None,
        monitor: bool | None = None,
    ) -> None:
        """`monitor`: whether devices' health is watched; by the settings, where there are threads,
        unless given."""
        require_key_to_write(config, read_only=read_only)
        self.config, self.read_only = config, read_only
        self.opener = opener or device_opener(
            config.settings, lambda: self.config.devices, lambda: self.config.stores
        )
        self._options = (threads, erasure_backend)
        self.store = self._open_store(clock or SystemClock(), threads, erasure_backend)
        watched = config.settings.health and threads if monitor is None else monitor
        self.health = Monitor(self.store, enabled=watched)
        if not threads:
            self.health.pause()
        view = self.store.view
        self.store.view = replace(view, devices=self.health.metered(view.devices))
        self.store.refresh = self.refresh
        self.store.damage = self._damage
        self.store.registers = self.registers = PoolRegisters(
            self.store, lambda: config.settings.run_path(self.store.view.record.pool_id)
        )
        self.store.key_lock = self._repair_lock
        self.claims = Claims(
            self.registers,
            self.store.clock,
            lambda seen: self.store.counter.next(seen),
            deadline_seconds=config.settings.lock_deadline_seconds,
            ttl_seconds=config.settings.claim_seconds,
        )
        self._repairs = RepairQueue()
        self._repairer: threading.Thread | None = None
        self._wake = threading.Event()
        self.closed = False
        self._make_locks()
        self._follower = Follower(self.store, self.refresh)
        if threads:
            self.health.listen(self._follower.look)
        call_in_children(self._after_fork)
        if not read_only:
            try:
                self._recover()
            except BaseException:
                self.close()
                raise

    def _open_store(self, clock: Clock, threads: bool, erasure_backend: str | None) -> PoolContext:
        """Open the devices; nothing stays open when that fails."""
        config, backend = self.config, choose_backend(erasure_backend)
        scheduler = make_scheduler(config.settings, threads=threads)
        try:
            opened = open_members(config, self.opener, scheduler, read_only=self.read_only)
        except BaseException:
            scheduler.close(0.1)
            raise
        record = opened.view.record
        try:
            check_memory(config, record.data + record.parity, record.unit_bytes)
        except BaseException:
            scheduler.close(0.1)
            for device in opened.view.devices.values():
                device.close()
            raise
        self.problems, self._denied = dict(opened.problems), opened.denied
        store = make_store(
            opened.view,
            config.settings,
            backend,
            clock,
            scheduler,
            read_only=self.read_only,
            pool_key=config.key,
        )
        _note_read_only(store, opened.read_only)
        if slow := sum(driver_of(device) == S3FS for device in store.view.devices.values()):
            store.metrics.count("devices_through_s3fs_total", slow)
        return store

    def _make_locks(self) -> None:
        """Taken in this order, also anew in the child of a fork."""
        self._renew = threading.RLock()  # one reads the membership at a time; held across I/O
        self._exchange = threading.Lock()  # guards the exchange of the view
        self._starting = threading.Lock()  # guards _repairer

    def set_places(self, places: set[str], given: str = "") -> None:
        """Change where the settings look for devices, keeping their order. `given`: one of them as
        the caller wrote it, with what opens it."""
        known = [place for place in self.config.devices if same_form(place) in places]
        left = places - {same_form(place) for place in known}
        new = sorted(given if place == same_form(given) else place for place in left)
        if [*known, *new] != list(self.config.devices):
            self.config = replace(self.config, devices=(*known, *new))
            if self.config.path.exists():
                save_config(self.config)

    @contextmanager
    def leaving(self, *devices: str) -> Iterator[list[Member]]:
        """Members that the block evicts. Their places are then looked at no more, unless another
        device answers there, such as the disk that replaces one; readmit finds them by the record.
        """
        members = [self.member(device) for device in devices]
        for device, member in zip(devices, members, strict=True):
            if member.left:
                raise MembershipError(f"{device} is evicted already")
        here = self.store.view.devices
        places = {same_form(here.get(m.device_id, m).url) for m in members}
        yield members
        kept = {same_form(other.url) for other in self.store.view.devices.values()}
        rest = {same_form(known) for known in self.config.devices} - (places - kept)
        try:
            if rest:
                self.set_places(rest)
        except ConfigError as error:  # they have left all the same
            _log.warning(
                "%s still names %s, which left the pool: %s",
                self.config.path,
                ", ".join(sorted(places)),
                error,
            )

    def refresh(self) -> None:
        """Read the membership anew: newest record, devices that came, left or came back.

        A device that hangs costs the open deadline.
        """
        with self._renew:
            store, view = self.store, self.store.view
            record = newest_record(store)
            if self.config.path.exists():
                known = load_config(self.config.path)
                self.config = replace(self.config, devices=known.devices, stores=known.stores)
            wanted = {m.device_id for m in record.members}

            def rests(device_id: str, device: Device) -> bool:
                store.generation_on(device_id, device)
                return is_released(device)

            answers = store.each(view.devices, rests, patience=PATIENCE)
            silent = {d for d, answer in answers.items() if isinstance(answer, Exception)}
            off = silent | {d for d, answer in answers.items() if answer is True}
            kept = {d: x for d, x in view.devices.items() if d in wanted and d not in off}
            fresh: dict[str, Device] = {}
            if wanted - kept.keys():
                fresh = self._open_others(record, kept)
            else:
                self._denied = frozenset()  # all of them answer
            quiet = {d: view.devices[d] for d in (silent & wanted) - fresh.keys()}
            devices = {**kept, **fresh, **quiet}
            with self._exchange:
                sitting_out = store.view.sitting_out & wanted
                store.view = View(record=record, devices=devices, sitting_out=sitting_out)
            if devices.keys() != view.devices.keys() or record.generation != view.record.generation:
                self._repairs.rest_no_more()
            for device_id in view.devices.keys() - kept.keys() - quiet.keys():
                store.scheduler.forget(device_id, view.devices[device_id].close)

    def _open_others(self, record: PoolRecord, kept: dict[str, Device]) -> dict[str, Device]:
        """Try the places in the settings that are not open, or do not answer any more."""
        here = {same_form(device.url) for device in kept.values()}
        places = [*self.config.devices, *unlisted(self.config, record, kept)]
        urls = [url for url in places if same_form(url) not in here]
        scheduler, settings = self.store.scheduler, self.config.settings
        deadline = settings.open_deadline_seconds
        opened, failed = identify_all(
            urls,
            self.opener,
            scheduler,
            deadline,
            self.config.key,
            lambda found: suffice(record, [*kept, *(o.identity.device_id for o in found.values())]),
        )
        problems = {url: str(error) for url, error in failed.items()}
        for url, found in list(opened.items()):
            ours = belongs(found, record.pool_id)
            if ours and found.identity.device_id not in kept:
                continue
            problems[url] = copied(url) if ours else foreign(url)
            opened.pop(url).device.close()
        proof = prove(
            opened,
            scheduler,
            write=not self.read_only,
            deadline_seconds=deadline,
            enough=lambda ids: suffice(record, [*kept, *ids]),
        )
        for url, error in proof.failed.items():
            problems[url] = str(error)
            opened.pop(url)
        _note_read_only(self.store, refusing(opened, proof))
        self._denied = proof.denied | {url for url, error in failed.items() if is_denied(error)}
        devices = make_view(record, opened.values(), problems).devices
        self.problems = problems
        return self.health.metered(devices)

    def sit_out(self, device_id: str) -> None:
        """Keep this process' reads and new columns off a device. Raises MembershipError."""
        with self._exchange:
            view = self.store.view
            out, parity = view.sitting_out | {device_id}, view.record.parity
            if len(out) > parity:
                raise MembershipError(
                    f"{len(out)} devices would sit out; parity replaces only {parity}"
                )
            self.store.view = replace(view, sitting_out=out)
        self.store.routing.changed()  # open readers heed it, too

    def sit_out_no_more(self, device_id: str) -> None:
        with self._exchange:
            view = self.store.view
            self.store.view = replace(view, sitting_out=view.sitting_out - {device_id})
        self.store.routing.changed()

    def open_place(self, url: str) -> Device:
        """Open the place of a device to be, made if need be, under the open deadline."""

        def open_it() -> Device:
            make_place(url, self.config.settings)
            return self.opener(url)

        def late(_: str, future: Future[Device]) -> None:
            if future.exception() is None:
                future.result().close()

        scheduler, deadline = self.store.scheduler, self.config.settings.open_deadline_seconds
        (found,) = scheduler.gather_once({same_form(url): open_it}, deadline, late).values()
        if isinstance(found, Exception):
            raise found
        return found

    def find_device(self, member: Member, given: str = "") -> OpenedDevice:
        """Open a device that is no member now, where it was or anywhere in the settings. `given`:
        what the caller named it by, perhaps a URL with what opens it."""
        was = [member.url] if trusted(self.config, member.url) else []
        known = {same_form(url): url for url in (*was, *self.config.devices)}
        if "://" in given:
            known[same_form(given)] = given
        open_now = {same_form(device.url) for device in self.store.view.devices.values()}
        urls = [url for place, url in known.items() if place not in open_now]
        scheduler, deadline = self.store.scheduler, self.config.settings.open_deadline_seconds
        opened, failed = identify_all(
            sorted(urls), self.opener, scheduler, deadline, self.config.key
        )
        found = None
        for other in opened.values():
            if found is None and other.identity.device_id == member.device_id:
                found = other
            else:
                other.device.close()
        if found is None:
            reason = failed.get(member.url, f"{member.url} holds another device now (wiped?)")
            if not was:
                reason = (
                    f"the pool's record has it at {member.url}, and the settings use no such "
                    "protocol: list it in pool.toml if it is yours"
                )
            raise MembershipError(
                f"device {member.device_id[:8]} does not answer: {reason}. A wiped one is added as "
                "a new device."
            )
        return found

    def member(self, device: str, *, returning: bool = False) -> Member:
        view = self.store.view
        place, device = checked_place(device), os.fspath(device)
        known = {m.device_id for m in (*view.record.members, *view.record.evicted)}
        by_id = len(device) >= 4 and any(name.startswith(device) for name in known)
        name = device if by_id else place
        return find_member(view.record, view.devices, name, returning=returning)

    # --- life -------------------------------------------------------------------------------

    def _recover(self) -> None:
        """At open: bring devices that are behind up to date, sweep orphans, pay debts."""
        store = self.store
        try:
            if not is_rolled_forward(store):  # many may open it at once: none waits for another
                with self.registers.hold(MEMBERSHIP, "open", deadline_seconds=0.5):
                    roll_forward(store, newest_record(store))
        except (LockTimeout, RegistersForeign, RegistersUnavailable) as error:
            _log.info(
                "pool %s: devices are not brought up to date now: %s", self.config.name, error
            )
        store.each(store.view.devices, lambda _, device: device.sweep())
        mend_horizons(store)
        pay_debts(store)

    def _damage(self, key: str) -> None:
        """A read met damage: repair in the background."""
        if self.read_only or self.closed or not self._options[0] or not self._repairs.add(key):
            return
        with self._starting:
            if self._repairer is None or not self._repairer.is_alive():
                with suppress(ThreadsExhausted):  # the next damage tries again; the read goes on
                    self._repairer = start_thread(
                        threading.Thread(
                            target=self._repair_loop, name="hpstore-repair", daemon=True
                        )
                    )
        self._wake.set()

    def _repair_loop(self) -> None:
        while not self.closed:
            key = self._repairs.take()
            if key is None:
                self._wake.wait(0.2)
                self._wake.clear()
                continue
            good = False
            try:
                repair_object(self.store, key, verify=True)
                self.store.metrics.count("read_repair_total")
                good = True
            except (HpstoreError, OSError) as error:
                self.store.metrics.count("read_repair_error_total")
                _log.warning("repair of %r failed, it is tried again later: %s", key, error)
            finally:
                self._repairs.done(key, good=good)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold the membership, with the newest record rolled forward (PROTOCOL 14)."""
        try:
            with self.registers.hold(MEMBERSHIP, "membership change"):
                self.refresh()
                self._finish_change()
                roll_forward(self.store, self.store.view.record)
                yield
        except RegistersUnavailable as error:
            raise MembershipError(str(error)) from error

    def _finish_change(self) -> None:
        """Bring to the devices what a process committed in registers outside, and died."""
        outside = self.registers.outside()
        if outside is None:
            return
        there = outside.committed("membership change")
        if there.generation <= self.store.view.record.generation:
            return
        where = "the membership in the registers"
        roll_forward(
            self.store,
            PoolRecord.decode(there.data, where=where, pool_key=self.store.pool_key),
        )
        self.refresh()

    def _repair_lock(self, key: str) -> AbstractContextManager[object]:
        """One repair of a key at a time."""
        return self.registers.hold(repair_hold(key), f"repair of {key!r}")

    def require_open(self) -> None:
        if self.closed:
            raise AlreadyClosed(f"pool {self.config.name!r} is closed")

    @property
    def denied(self) -> frozenset[str]:
        """Places of devices on which this user has no rights, or may not write."""
        return self._denied

    def naming_lacks(self) -> AbstractContextManager[None]:
        """Where a device was left out for want of rights, no error says that it is lost."""
        return naming_lacks(-1 if self._denied else lacks_total())

    def require_writable(self) -> None:
        self.require_open()
        if self.read_only:
            raise DeviceReadOnly(f"pool {self.config.name!r} was opened read-only")

    def _after_fork(self) -> None:
        self._make_locks()
        self._repairs, self._repairer, self._wake = RepairQueue(), None, threading.Event()
        renew_after_fork(self.store)
        self.registers.after_fork()
        self.health.after_fork()
        self._follower.after_fork()

    def close(self) -> None:
        """Stop threads and release devices. Idempotent; nothing durable depends on it."""
        if self.closed:
            return
        self.closed = True
        self.health.close()
        self._follower.close()
        self._wake.set()
        if self._repairer is not None:
            self._repairer.join(10.0)
        devices = self.store.view.devices
        self.registers.close()
        self.store.scheduler.close(at_end={d: device.close for d, device in devices.items()})
        self.store.buffers.clear()
