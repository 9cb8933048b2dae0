"""The devices of an open pool: take one in or out, find it, ask whether it answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from hpstore.devices.base import RELEASED, Device, Usage
from hpstore.devices.opener import identify, same_form
from hpstore.devices.unused_places import remove_place
from hpstore.errors import DeviceError, DeviceMissing, HpstoreError, MembershipError
from hpstore.format.records import IDENTITY_FILE, MAX_RECORD_BYTES, DeviceState, Identity, Member
from hpstore.maintenance.dependents import require_room_to_drain
from hpstore.maintenance.rebuild import Progress, ProgressCallback
from hpstore.maintenance.survey_condition import survey_condition
from hpstore.membership import changes
from hpstore.membership.device_places import (
    checked_place,
    filesystem_of,
    local_path,
    require_mounted,
)
from hpstore.membership.host_names import members_named
from hpstore.membership.open_members import belongs, trusted
from hpstore.objects.context import PATIENCE
from hpstore.objects.write.stripe_writer import Throttle
from hpstore.pool.session import PoolSession
from hpstore.runtime.rate_limit import RateLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Of a device that was probed: its space, and how long writing, syncing and reading took.

    `refused`: why it takes no writes though it can be read.
    """

    usage: Usage
    seconds: float
    refused: DeviceError | None


class PoolDevices:
    """`pool.admin.devices`. A device is named by its URL, its path, or the beginning of its id.

    Thread-safe; of several membership changes one is made at a time, between processes too.
    """

    def __init__(self, session: PoolSession) -> None:
        self._session, self._store = session, session.store

    @property
    def places(self) -> Mapping[str, str]:
        """Where the members that are open are, by device id."""
        return {d: device.url for d, device in self._store.view.devices.items()}

    def find(self, device: str, *, returning: bool = False) -> Member:
        """A member or evicted device by URL, path or beginning of its id. `returning`: those that
        have left come first. MembershipError where none or several are meant."""
        return self._session.member(device, returning=returning)

    def add(
        self,
        url: str,
        domain: str | None = None,
        *,
        force: bool = False,
        allow_root_disk: bool = False,
    ) -> str:
        """Make an unused place a member; returns its device id. New objects use it at once.

        Parameters
        ----------
        url
            A path, or a URL of an fsspec file system.
        domain
            The failure domain that it shares with others; None for one of its own, or that of its
            host (`hpd://`).
        force
            Also a place that another pool has used.
        allow_root_disk
            Also where a mount seems to be missing.

        Raises
        ------
        ConfigError, MembershipError
            The place cannot be used, or not without `force` or `allow_root_disk`.
        """
        self._session.require_writable()
        given = checked_place(url)
        if not allow_root_disk:
            self._require_mounted(given)
        url = same_form(given)
        path = local_path(url)
        new = path is not None and not os.path.lexists(path)
        with self._session.change():
            before = self._session.config
            fresh = self._session.open_place(given if "://" in given else url)
            try:
                changes.require_no_member(self._store, fresh, url)
                self._session.set_places({*map(same_form, before.devices), url}, given)
                # the settings first: a crash after the record is written must find the device
                member = changes.add_member(self._store, fresh, url, domain, force=force)
            except HpstoreError:
                if not changes.claimed_by(self._store, fresh):
                    self._session.set_places({*map(same_form, before.devices)})
                    if new:
                        remove_place(url)
                raise
            finally:
                fresh.close()
            self._session.refresh()
            return member.device_id

    def evict(
        self, device: str, *, force: bool = False, confirm: Callable[[], None] = lambda: None
    ) -> None:
        """Take a device out at once; what it holds counts as lost. `rebuild` then heals.

        Parameters
        ----------
        device
            Its URL, its path, or the beginning of its id; or `host:b` for all devices of host b,
            `domain:rack1` for those of a failure domain, which leave in one generation.
        force
            Also where an object could not be read without it, which is refused else.
        confirm
            Called by this thread before each membership is stored; it refuses that by raising.

        Raises
        ------
        MembershipError
            None or several are meant, or it was evicted before; an object needs it; or more than
            parity replaces would be away, by weight. Nothing has changed, or the message says that
            the device stays draining.
        """
        self._session.require_writable()
        with self._session.change():
            named = [member.device_id for member in self.named(device)]
            with self._session.leaving(*named) as members:
                changes.evict_members(
                    self._store, members, self._session.refresh, force=force, confirm=confirm
                )

    def named(self, name: str) -> list[Member]:
        """The members that a name means: those of `host:b` or `domain:rack1`, else the one that
        find() finds. Raises MembershipError."""
        group = members_named(self._store.view.record, self.places, name)
        return [self.find(name)] if group is None else group

    def drain(
        self,
        device: str,
        *,
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
    ) -> int:
        """Move everything off a device, then evict it; returns how many objects moved.

        Stopped, it is resumed by running it again.

        Parameters
        ----------
        device
            As evict() has it.
        progress
            Called by this thread with a Progress for each object.
        rate_bytes_per_second
            Spread the work.

        Raises
        ------
        MembershipError
            It was taken back meanwhile, or evicted with what it still held. An agent that ends the
            drain first has done what was wanted.
        """
        self._session.require_writable()
        throttle = RateLimit(rate_bytes_per_second, self._store.clock)

        def report(done: int, total: int, key: str) -> None:
            if progress is not None:
                progress(Progress(done=done, total=total, bytes=0, key=key))

        self.begin_drain(device)
        member = self._session.member(device)
        # without the lock: it takes hours, and others may have to be evicted meanwhile
        moved = self._move_off(member, throttle, report)
        rest = self._end_drain(member.device_id, throttle)
        if rest is None and not self._drained(member):
            raise MembershipError(f"{device} was taken back or evicted while it was drained")
        return moved + (rest or 0)

    def _move_off(
        self, member: Member, throttle: Throttle, report: Callable[[int, int, str], None]
    ) -> int:
        """Move what a draining device holds; how many objects that were. An agent may end the drain
        while it is looked for, and a device that has left answers nothing."""
        try:
            return changes.move_off(self._store, member, throttle, report) or 0
        except MembershipError:
            self._session.refresh()
            if not self._drained(member):
                raise
            return 0

    def _drained(self, member: Member) -> bool:
        """Whether a device has left with nothing on it that is not elsewhere, too."""
        return self._session.member(member.device_id).state is DeviceState.HEALED

    def begin_drain(self, device: str) -> None:
        """Put no new columns on a device; `rebuild` moves those it has, `drain` then ends it.

        Durable on return. Raises MembershipError.
        """
        self._session.require_writable()
        with self._session.change():
            member = self._session.member(device)
            if member.left:
                raise MembershipError(f"{device} is evicted already")
            if member.state is not DeviceState.DRAINING:
                require_room_to_drain(self._store, member)
                changes.set_state(self._store, member.device_id, DeviceState.DRAINING)
                self._session.refresh()

    def end_drain(
        self,
        device: str,
        *,
        rate_bytes_per_second: float | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> bool:
        """Move what is left on a draining device, then evict it; blocks until that is done.

        False, and nothing is done, when it drains no longer: somebody has readmitted it. Raises
        MembershipError as `drain` does, the device draining still. `confirm` as evict() has it.
        """
        self._session.require_writable()
        throttle = RateLimit(rate_bytes_per_second, self._store.clock)
        return self._end_drain(device, throttle, confirm) is not None

    def _end_drain(
        self, device: str, throttle: Throttle, confirm: Callable[[], None] = lambda: None
    ) -> int | None:
        """Evict a device once the rest of it has been moved; how many objects that were, or None
        when it drains no longer."""
        with self._session.change():
            if self._session.member(device).state is not DeviceState.DRAINING:
                return None
            with self._session.leaving(device) as (member,):
                return changes.drain_member(
                    self._store, member, self._session.refresh, throttle, lambda *_: None, confirm
                )

    def readmit(self, device: str, *, reason: str = "") -> changes.Reconciled | None:
        """Take an evicted device back, or a draining one online again.

        What an evicted one holds is judged against the pool first: only columns of live versions
        are served, superseded ones removed, unknown ones put in quarantine. None when it had not
        left. `rebuild` then widens objects over it.

        Parameters
        ----------
        device
            As evict() has it.
        reason
            What the log says, instead of that an operator wants it.

        Raises
        ------
        MembershipError
            What it holds cannot be judged now. Nothing has changed.
        DeviceMissing
            It is a member that does not answer, drained by nobody: there is nothing to take back.
            Nothing has changed.
        """
        self._session.require_writable()
        with self._session.change():
            member = self._session.member(device, returning=True)
            if not member.left and member.device_id not in self.places:
                self._end_release(member)
                if member.state is DeviceState.ONLINE and member.device_id not in self.places:
                    raise DeviceMissing(
                        f"{member.url} does not answer, and is a member. What it holds is waited "
                        "for. Nothing was changed. Mount it and readmit it again; if it is gone "
                        "for good, evict it and rebuild.",
                        device=member.url,
                    )
            self._session.sit_out_no_more(member.device_id)
            self._session.health.forgive(member.device_id, reason, everywhere=True)
            if member.state is DeviceState.ONLINE:
                return None
            if member.state is DeviceState.DRAINING:
                changes.set_state(self._store, member.device_id, DeviceState.ONLINE)
                self._session.refresh()
                return None
            back = self._session.find_device(member, device).device
            # the settings first: a record that has reached some devices must find the device
            places = {*map(same_form, self._session.config.devices), same_form(back.url)}
            self._session.set_places(places, device)
            try:
                found = changes.readmit_member(self._store, member, back)
            finally:  # closed when no call uses it any more
                self._store.scheduler.forget(member.device_id, back.close)
            self._session.refresh()
            return found

    def sit_out(self, device: str) -> None:
        """Keep this process's ordinary reads and new columns off a device, until readmit.

        Parameters
        ----------
        device
            As evict() has it.
        """
        self._session.require_open()
        self._session.sit_out(self._session.member(device).device_id)

    def begin_release(self, device: str) -> None:
        """Let all processes close a member, so that its disk can be unmounted for maintenance. It
        counts as missing until `readmit`, and keeps what it holds. Durable on return.

        Raises MembershipError where no device may be missing now, DeviceError.
        """
        self._session.require_writable()
        with self._session.change():  # of two at once each would see the other's device there
            member = self._session.member(device)
            here = self._store.view.devices.get(member.device_id)
            if here is None:
                return  # missing, or released already
            if survey_condition(self._store, ()).losses_tolerated < 1:
                raise MembershipError(
                    f"{member.url} cannot be released: some object could not be read without it. "
                    "Nothing was changed. Rebuild, or bring missing devices back first."
                )
            self._mark_released(member, here)
            self._session.refresh()

    def _mark_released(self, member: Member, here: Device) -> None:
        def mark() -> None:
            here.write_small(RELEASED, b"released for maintenance; hpstore readmit ends it\n")

        limit = self._session.config.settings.device_deadline_seconds
        (answer,) = self._store.scheduler.gather({member.device_id: mark}, limit).values()
        if isinstance(answer, Exception):
            raise answer

    def _end_release(self, member: Member) -> None:
        """Take the mark off a device that is back at one of its places; one that is not mounted yet
        stays missing."""

        def unmark(url: str) -> None:
            device = self._session.opener(url)
            try:
                data = device.read_small(IDENTITY_FILE, MAX_RECORD_BYTES)
                if Identity.decode(data, where=url).device_id == member.device_id:
                    device.delete(RELEASED)
            finally:
                device.close()

        calls = {
            url: partial(unmark, url) for url in self.unanswered_places(()) if "://" not in url
        }
        limit = self._session.config.settings.open_deadline_seconds
        self._store.scheduler.gather_once(calls, limit)
        self._session.refresh()

    def probe(self, devices: set[str]) -> dict[str, Future[ProbeAnswer]]:
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

    def unanswered_places(self, silent: Collection[str]) -> list[str]:
        """Places where no open device answers, but a member or an evicted device may be.

        `silent`: open ones that do not; what lies at their places now may have to be opened anew.
        """
        record = self._store.view.record
        here = {same_form(url) for d, url in self.places.items() if d not in silent}
        known = [
            m.url
            for m in (*record.members, *record.evicted)
            if trusted(self._session.config, m.url)
        ]
        urls = [*self._session.config.devices, *known]
        return [url for url in dict.fromkeys(map(same_form, urls)) if url not in here]

    def identify_places(self, urls: set[str]) -> dict[str, Future[str]]:
        """Ask places which device of this pool is there; nothing is waited for, nothing written.

        A future holds a device id, or the error. A place that hangs keeps its lane: it is not asked
        again before it answers.
        """
        pool_id = self._store.view.record.pool_id

        def look(url: str) -> Callable[[], str]:
            def call() -> str:
                found = identify(url, self._session.opener, self._session.config.key)
                found.device.close()
                if not belongs(found, pool_id):
                    raise DeviceMissing(f"{url} holds no device of this pool", device=url)
                return found.identity.device_id

            return call

        return {url: self._store.scheduler.submit(f"away {url}", look(url)) for url in urls}

    def answering_places(self) -> list[str]:
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
        others, limit = self.answering_places(), self._session.config.settings.open_deadline_seconds
        look = partial(require_mounted, [url], others)
        (answer,) = self._store.scheduler.gather_once({same_form(url): look}, limit).values()
        if isinstance(answer, Exception):
            raise answer
