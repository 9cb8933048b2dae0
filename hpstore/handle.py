"""An open pool's life: opening, membership as it changes, locks, background repair, fork, close."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from hpstore.clock import Clock, SystemClock
from hpstore.codec import choose_backend
from hpstore.config import PoolConfig, load_config, save_config
from hpstore.errors import (
    ConfigError,
    DeviceReadOnly,
    HpstoreError,
    LockTimeout,
    MembershipError,
)
from hpstore.locks import file_lock, key_lock_name
from hpstore.membership import (
    check_memory,
    find_member,
    make_view,
    newest_record,
    open_members,
    roll_forward,
)
from hpstore.objects.repair import repair_object
from hpstore.objects.store import Store
from hpstore.opening import Opener, device_opener, identify
from hpstore.rebuild import pay_debts
from hpstore.records import Member
from hpstore.runtime import RepairQueue, make_scheduler, make_store, renew_after_fork

_log = logging.getLogger(__name__)


class PoolHandle:
    """What stands behind a Pool. Made by `hpstore.create` and `hpstore.open`."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        read_only: bool = False,
        opener: Opener | None = None,
        clock: Clock | None = None,
        threads: bool = True,
        erasure_backend: str | None = None,
    ) -> None:
        self.config, self.read_only = config, read_only
        self._opener = opener or device_opener(config.settings)
        self._options = (threads, erasure_backend)
        clock = clock or SystemClock()
        scheduler = make_scheduler(config.settings, threads=threads)
        opened = open_members(config, self._opener, scheduler, read_only=read_only)
        record = opened.view.record
        check_memory(config, record.data + record.parity, record.unit_bytes)
        self._problems = dict(opened.problems)
        self._store: Store = make_store(
            opened.view, config.settings, choose_backend(erasure_backend), clock, scheduler,
            read_only=read_only,
        )  # fmt: skip
        self._store.refresh = self.refresh
        self._store.damage = self._damage
        self._repairs = RepairQueue()
        self._repairer: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False
        self._renew = threading.RLock()  # guards the exchange of the view
        _forget_at_fork(self)
        if not read_only:
            self._recover()

    def _save_config(self) -> None:
        if self.config.path.exists():
            save_config(self.config)

    def refresh(self) -> None:
        """Read the membership anew: newest record, devices that came or went."""
        with self._renew:
            record = newest_record(self._store)
            view = self._store.view
            here = {d.url for d in view.devices.values()}
            if self.config.path.exists():
                self.config = replace(
                    self.config, devices=load_config(self.config.path).devices
                )  # fmt: skip
            wanted = {m.device_id for m in record.members}
            found = []
            for url in self.config.devices:
                if any(same_place(url, known) for known in here) or wanted <= set(view.devices):
                    continue
                try:
                    found.append(identify(url, self._opener, read_only=self.read_only))
                except (HpstoreError, OSError) as error:
                    self._problems[url] = str(error)
                else:
                    self._problems.pop(url, None)
            fresh = make_view(record, found, self._problems)
            kept = {d: device for d, device in view.devices.items() if d in wanted}
            self._store.view = replace(
                view,
                record=record,
                devices={**fresh.devices, **kept},
                sitting_out=view.sitting_out & wanted,
            )

    def _member(self, device: str) -> Member:
        record, devices = self._store.view.record, self._store.view.devices
        try:
            return find_member(record, devices, device)
        except MembershipError:
            if "://" in device:
                raise
            return find_member(record, devices, os.path.abspath(device))

    # --- life -------------------------------------------------------------------------------

    def _recover(self) -> None:
        """At open: bring devices that are behind up to date, sweep orphans, pay debts."""
        store = self._store
        try:
            with self._lock("change.lock", "open", deadline_seconds=0.5):
                roll_forward(store, newest_record(store))
        except LockTimeout:
            _log.info("pool %s: a membership change is under way elsewhere", self.config.name)
        store.each(store.view.devices, lambda _, device: device.sweep())
        pay_debts(store)

    def _damage(self, key: str) -> None:
        """A read met damage: repair in the background."""
        if self.read_only or self._closed or not self._options[0] or not self._repairs.add(key):
            return
        with self._renew:
            if self._repairer is None or not self._repairer.is_alive():
                self._repairer = threading.Thread(
                    target=self._repair_loop, name="hpstore-repair", daemon=True
                )
                self._repairer.start()
        self._wake.set()

    def _repair_loop(self) -> None:
        while not self._closed:
            key = self._repairs.take()
            if key is None:
                self._wake.wait(0.2)
                self._wake.clear()
                continue
            try:
                repair_object(self._store, key, verify=True)
                self._store.metrics.count("read_repair_total")
            except (HpstoreError, OSError) as error:
                self._store.metrics.count("read_repair_error_total")
                _log.warning("repair of %r after a damaged read failed: %s", key, error)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Hold the change lock, with the newest record rolled forward (PROTOCOL 14)."""
        with self._lock("change.lock", "membership change"):
            self.refresh()
            roll_forward(self._store, self._store.view.record)
            yield

    def _lock(
        self, name: str, what: str, deadline_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        settings = self.config.settings
        deadline = settings.lock_deadline_seconds if deadline_seconds is None else deadline_seconds
        directory = settings.run_path(self._store.view.record.pool_id)
        return file_lock(directory, name, self._store.clock, deadline, what)

    def _key_lock(self, key: str, *, needed: bool) -> AbstractContextManager[None]:
        return self._lock(key_lock_name(key), "conditional put") if needed else nullcontext()

    def _usable(self) -> None:
        if self._closed:
            raise ConfigError(f"pool {self.config.name!r} is closed")

    def _writable(self) -> None:
        self._usable()
        if self.read_only:
            raise DeviceReadOnly(f"pool {self.config.name!r} was opened read-only")

    def _after_fork(self) -> None:
        self._renew = threading.RLock()
        self._repairs, self._repairer, self._wake = RepairQueue(), None, threading.Event()
        renew_after_fork(self._store)

    def close(self) -> None:
        """Stop threads and release devices. Idempotent; nothing durable depends on it."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._repairer is not None:
            self._repairer.join(10.0)
        self._store.scheduler.close()
        self._store.buffers.clear()
        for device in self._store.view.devices.values():
            device.close()


def same_place(left: str, right: str) -> bool:
    if "://" in left or "://" in right:
        return left == right
    return os.path.abspath(left) == os.path.abspath(right)


def _forget_at_fork(pool: PoolHandle) -> None:
    reference = weakref.ref(pool)

    def renew() -> None:
        alive = reference()
        if alive is not None:
            alive._after_fork()

    os.register_at_fork(after_in_child=renew)


__all__ = ["PoolHandle", "same_place"]
