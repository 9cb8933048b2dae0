"""The pool: put, get, delete, look after. The facade of the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hpstore.devices.opener import same_form
from hpstore.errors import (
    HpstoreError,
    MembershipError,
    ObjectNotFound,
    TooFewDevices,
    TooManyErasures,
)
from hpstore.format.column_header import encode_metadata
from hpstore.format.keys import check_key
from hpstore.format.records import DeviceState
from hpstore.maintenance.rebuild import (
    Progress,
    ProgressCallback,
    RateLimit,
    RebuildReport,
    WorkPace,
    rebuild_all,
)
from hpstore.maintenance.repair_object import RepairAction, repair_object
from hpstore.maintenance.scrub import scrub_all
from hpstore.maintenance.sweep import sweep_deleted
from hpstore.membership import changes
from hpstore.membership.members import check_unit
from hpstore.objects.key_listing import live_layout, walk
from hpstore.objects.object_info import ObjectInfo, object_info
from hpstore.objects.read.object_reader import Changed, ObjectReader
from hpstore.objects.read.range_reader import (
    READ_TRIES,
    PooledReader,
    Readers,
    open_readers,
    writable_bytes,
)
from hpstore.objects.read.resolve import open_object
from hpstore.objects.versions import VersionInfo, key_versions, parse_token
from hpstore.objects.write.conditional_put import bar_puts, put_if
from hpstore.objects.write.prewrite_files import prepare_space
from hpstore.objects.write.put import delete_object, put_object
from hpstore.objects.write.put_source import as_source
from hpstore.pool.batches import BatchedPool
from hpstore.pool.loss_tolerance import require_stored, require_tolerance, wanted_losses
from hpstore.pool.status import PoolStatus, pool_status
from hpstore.runtime.lacks import blamed, lacks_total
from hpstore.runtime.metrics import Metrics

T = TypeVar("T")


class Pool(BatchedPool):
    """An open pool of devices. Thread-safe; survives fork and spawn (it pickles as its config).

    Made by `hpstore.create` and `hpstore.open`. A context manager; close() is idempotent.
    """

    # --- objects ----------------------------------------------------------------------------

    @property
    def data(self) -> int:
        """k: how many data units a full stripe has."""
        return self._store.view.record.data

    @property
    def metrics(self) -> Metrics:
        """Counters and latencies of this pool in this process."""
        return self._store.metrics

    @property
    def parity(self) -> int:
        """m: how many losses every whole object survives."""
        return self._store.view.record.parity

    def put(
        self,
        key: str,
        data: object,
        metadata: Mapping[str, object] | None = None,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        rate_bytes_per_second: float | None = None,
        progress: Callable[[int], None] | None = None,
        unit_bytes: int | None = None,
        min_losses_tolerated: int | None = None,
    ) -> ObjectInfo:
        """Store `data` (bytes-like, or an open binary file) under `key`.

        Durable on return on k' + m devices, or, with devices failing, on at least
        max(k' + 1, m + 1) with the debt recorded (`losses_tolerated` tells). A crash before leaves
        the version before it; an unacknowledged put may still become visible as a whole. `data`
        belongs to this call until it returns. `metadata`: JSON, at most 1 KiB. With `if_absent`
        or `if_version` (an ObjectInfo's version) VersionConflict is raised when it does not hold;
        that is exact between all processes that reach the devices (stores without locks: in one run
        directory). `rate_bytes_per_second` spreads the work; `progress` is called by this thread
        with the bytes about to be written, again when a device fails and they are written again.
        `unit_bytes`: stripe unit of this object, the pool's unless given. `min_losses_tolerated`:
        refused where fewer would be, by the settings unless given.

        Raises TooFewDevices, VersionConflict, LockTimeout, RegistersUnavailable, RegistersForeign
        (with a condition), InvalidKey, ConfigError (metadata, unit).
        """
        self._writable()
        check_key(key)
        encode_metadata(metadata or {})
        if unit_bytes is not None:
            check_unit(self.config, self.data + self.parity, unit_bytes)
        source, wanted = as_source(data), wanted_losses(self._store, min_losses_tolerated)
        limit = RateLimit(rate_bytes_per_second, self._store.clock)

        def throttle(count: int) -> None:
            limit(count)
            if progress is not None:
                progress(count)

        require_tolerance(self._store, wanted, repr(key))
        with self._naming_lacks():
            if not if_absent and if_version is None:
                info = put_object(
                    self._store, key, source, metadata=metadata or {}, throttle=throttle,
                    unit_bytes=unit_bytes,
                )  # fmt: skip
            else:
                info = put_if(
                    self._store, self._claims, key, source, metadata=metadata or {},
                    throttle=throttle, if_absent=if_absent, if_version=if_version,
                    unit_bytes=unit_bytes,
                )  # fmt: skip
        require_stored(info, wanted)
        return info

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
        self._writable()
        limit = RateLimit(rate_bytes_per_second, self._store.clock)

        def go_on(count: int) -> bool:
            if self._closed or not (proceed is None or proceed()):
                return False
            limit(count)
            return not self._closed

        return prepare_space(self._store.pinned(), sizes, copies, go_on)

    def get(
        self, key: str, start: int = 0, end: int | None = None, *, version: str | None = None
    ) -> bytes:
        """Bytes [start, end) of the newest version, verified; decoded when units are lost.

        `version`: of that one of `versions`, which may be superseded or deleted and still there.
        Raises ObjectNotFound, TooManyErasures when acknowledged data cannot be read now.
        """

        def read(reader: ObjectReader) -> bytes:
            size = reader.header.geometry.size
            stop = size if end is None else min(end, size)
            if start < 0 or stop < 0:
                raise ValueError(f"range [{start}, {end}) is negative")
            buffer = bytearray(max(0, stop - start))
            if buffer:
                reader.read_into(start, np.frombuffer(buffer, np.uint8))
            return bytes(buffer)

        return self._read(key, read, version)

    def read_into(
        self, key: str, buffer: object, offset: int = 0, *, version: str | None = None
    ) -> int:
        """Fill a writable buffer from `offset` of an object; returns the bytes read.

        Fewer than the buffer holds when the object ends. The buffer is written by the calling
        thread alone and never after the return. `version` as for get().
        """
        target = writable_bytes(buffer)

        def read(reader: ObjectReader) -> int:
            if offset < 0:
                raise ValueError(f"offset {offset} is negative")
            count = max(0, min(len(target), reader.header.geometry.size - offset))
            if count:
                reader.read_into(offset, target[:count])
            return count

        return self._read(key, read, version)

    def _read(
        self,
        key: str,
        read: Callable[[ObjectReader], T],
        version: str | None,
        *,
        whole: bool = True,
    ) -> T:
        """Run `read` on an open object; again when the object changes underneath, and when it
        needs a device that was not waited for."""
        self._usable()
        check_key(key)
        content = None if version is None else parse_token(version)
        patient = False
        for _ in range(READ_TRIES):
            with self._naming_lacks():
                reader = open_object(self._store, key, content, whole=whole, patient=patient)
            try:
                return read(reader)
            except Changed:
                self._store.metrics.count("read_resolved_again_total")
            except TooManyErasures:
                if patient:
                    raise
                patient = True
            finally:
                reader.close()
        raise TooManyErasures(f"object {key!r} changed {READ_TRIES} times while it was read")

    def reader(self, key: str, *, version: str | None = None) -> PooledReader:
        """Open the newest version for many range reads; a context manager. One thread at a time.

        With a `version` of `versions`, that one and no other is read.
        """
        self._usable()
        content = None if version is None else parse_token(version)
        return PooledReader(self._store, check_key(key), content=content)

    def readers(self, keys: Sequence[str], *, whole: bool = False) -> Readers:
        """A reader() of each key, opened together, or what it would have raised.

        `whole`: small ones are read as they are opened together, to be read now and closed.
        """
        self._usable()
        return open_readers(self._store, [check_key(key) for key in keys], whole=whole)

    def stat(self, key: str, *, version: str | None = None) -> ObjectInfo:
        """Facts about the newest version, or `version`. Raises ObjectNotFound, TooManyErasures."""

        def facts(reader: ObjectReader) -> ObjectInfo:
            may_leave = self._store.view.may_leave(reader.unknown)
            columns = len(reader.layout.columns)
            return object_info(reader.header, columns, may_leave=may_leave)

        return self._read(key, facts, version, whole=False)

    def versions(self, key: str) -> Sequence[VersionInfo]:
        """What devices that answer hold of an object, newest first; also what no read chooses.

        Usually one. More where an overwrite was interrupted, or devices are away: then an older one
        may be readable while the newest is not, by `get(key, version=)`. Raises TooManyErasures
        when nothing is found and more may be there.
        """
        self._usable()
        return key_versions(self._store, check_key(key))

    def exists(self, key: str) -> bool:
        """Whether a read would find an object. Raises TooManyErasures when that is unclear."""
        try:
            self.stat(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "", *, certain: bool = False) -> list[str]:
        """Keys that begin with `prefix`, sorted; also those that cannot be read just now.

        With more than m devices away, keys may be there unseen: with `certain` that raises
        TooFewDevices. Ask for it before anything is done because a key is not listed. Raises
        InvalidKey for a prefix that no key can have.
        """
        self._usable()
        before, lacked = self._store.view, lacks_total()
        found = walk(self._store, prefix)
        view, surveys = self._store.view, found.surveys
        unknown = found.unknown | view.record.unhealed()
        if certain and not view.record.opens_without(unknown):
            if self._store.look_again(before):
                return self.list(prefix, certain=True)
            error = TooFewDevices(
                f"{len(unknown)} devices do not answer or were evicted since the last rebuild, "
                f"parity covers {view.record.parity}: objects under {prefix!r} may be there "
                "unseen. Nothing was changed. Bring devices back, or rebuild if they are gone."
            )
            raise blamed(error, lacked)
        return sorted(key for key, s in surveys.items() if live_layout(self._store, s) is not None)

    def delete(self, key: str) -> None:
        """Delete an object. Durable on return (a tombstone on m + 1 devices).

        Raises ObjectNotFound when there is none, TooManyErasures when that is unclear,
        TooFewDevices.
        """
        self._writable()
        check_key(key)
        with self._naming_lacks():
            delete_object(self._store, key)
        sweep_deleted(self._store)

    def bar(self, key: str) -> bool:
        """End the puts of a key with `if_absent` or `if_version` that others have begun: those of
        which nothing can be read yet raise VersionConflict, however long they were stopped.

        True when no object is there; durable on return. False when one is, perhaps of such a put:
        it stays, and `settle` brings it to its full stripe. Puts that begin later may store it.

        Raises TooManyErasures, TooFewDevices, LockTimeout, RegistersUnavailable, RegistersForeign:
        then nothing is decided.
        """
        self._writable()
        barred = bar_puts(self._store, self._claims, check_key(key))
        sweep_deleted(self._store)
        return barred

    def settle(self, key: str) -> None:
        """Bring the newest version to its full stripe before acting on it (PROTOCOL 8).

        Raises TooFewDevices when it cannot be brought there now.
        """
        self._writable()
        found = repair_object(self._store, check_key(key), include_missing=True)
        if found.action is RepairAction.ABSENT:
            raise ObjectNotFound(f"no object {key!r}", key=key)
        if found.losses_tolerated < self._store.view.record.parity:
            raise TooFewDevices(
                f"object {key!r} cannot be brought to its full stripe now: it survives "
                f"{found.losses_tolerated} losses. It stays readable; add devices.",
                key=key,
            )

    # --- looking after ----------------------------------------------------------------------

    def status(self, *, past: bool = False) -> PoolStatus:
        """Devices with their states, objects, what is degraded, space, counters. Walks all keys.
        `past`: with devices that left long ago, and that nothing depends on."""
        self._usable()
        self.refresh()
        return pool_status(self._store, self.config.name, self._problems, self.health, past=past)

    def scrub(
        self,
        *,
        prefix: str = "",
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        resume: bool = True,
        pace: WorkPace | None = None,
        gives_way: bool = False,
    ) -> RebuildReport:
        """Read and verify every block, mend what is damaged. Goes on where it was stopped.

        One scrub or rebuild of a pool at a time (LockTimeout). A `pace` replaces the rate.
        `gives_way` as for repairing().
        """
        self._writable()
        with self.repairing("scrub", gives_way=gives_way):
            return scrub_all(
                self._store, prefix=prefix, progress=progress,
                rate_bytes_per_second=rate_bytes_per_second, resume=resume, pace=pace,
            )  # fmt: skip

    def rebuild(
        self,
        *, progress: ProgressCallback | None = None, rate_bytes_per_second: float | None = None,
        include_missing: bool = False, everything: bool = False, pace: WorkPace | None = None,
        gives_way: bool = False,
    ) -> RebuildReport:  # fmt: skip
        """Make every object whole on the current members, most endangered first; pay debts.

        Columns on members that are missing but not evicted are waited for while parity is left,
        unless `include_missing`; what retention soon drops is put off (docs/health.md) unless
        `everything`. Killed, it is resumed by running it again. `pace`, `gives_way` as for scrub.
        """
        self._writable()
        self.refresh()
        with self.repairing("rebuild", gives_way=gives_way):
            unhealed = self._store.view.record.unhealed()
            report = rebuild_all(
                self._store, progress=progress, rate_bytes_per_second=rate_bytes_per_second,
                include_missing=include_missing, everything=everything, pace=pace,
            )  # fmt: skip
        if report.whole and not self._store.view.missing and unhealed:
            self._mark_healed(unhealed)  # not those that were evicted meanwhile
        return report

    # --- membership -------------------------------------------------------------------------

    def add_device(self, url: str, domain: str | None = None, *, force: bool = False,
                   allow_root_disk: bool = False) -> str:  # fmt: skip
        """Make an unused place a member; returns its device id. New objects use it at once.
        `allow_root_disk`: also where a mount seems to be missing, which is a ConfigError else."""
        self._writable()
        if not allow_root_disk:
            self._require_mounted(url)
        given, url = url, same_form(url)
        with self._change():
            fresh, before = self._open_place(given if "://" in given else url), self.config
            try:
                changes.require_no_member(self._store, fresh, url)
                self._set_places({*map(same_form, before.devices), url}, given)
                # the settings first: a crash after the record is written must find the device
                member = changes.add_member(self._store, fresh, url, domain, force=force)
            except HpstoreError:
                if not changes.claimed_by(self._store, fresh):
                    self._set_places({*map(same_form, before.devices)})
                raise
            finally:
                fresh.close()
            self.refresh()
            return member.device_id

    def evict(self, device: str, *, force: bool = False) -> None:
        """Take a device out at once; what it holds counts as lost. `rebuild` then heals.

        Refused when an object could not be read without it, unless forced.
        """
        self._writable()
        with self._change(), self._leaving(device) as member:
            changes.evict_member(self._store, member, self.refresh, force=force)

    def drain(
        self,
        device: str,
        *,
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
    ) -> int:
        """Move everything off a device, then evict it; returns how many objects moved.

        Stopped, it is resumed by running it again.
        """
        self._writable()
        throttle = RateLimit(rate_bytes_per_second, self._store.clock)

        def report(done: int, total: int, key: str) -> None:
            if progress is not None:
                progress(Progress(done=done, total=total, bytes=0, key=key))

        self.begin_drain(device)
        # without the lock: it takes hours, and others may have to be evicted meanwhile
        moved = changes.move_off(self._store, self._member(device), throttle, report) or 0
        rest = self._end_drain(device, throttle)
        if rest is None:
            raise MembershipError(f"{device} was taken back or evicted while it was drained")
        return moved + rest

    def readmit(self, device: str, *, reason: str = "") -> changes.Reconciled | None:
        """Take an evicted device back, or a draining one online again.

        What an evicted one holds is judged against the pool first: only columns of live versions
        are served, superseded ones removed, unknown ones put in quarantine. None when it had not
        left. `rebuild` then widens objects over it. `reason`: what the log says, instead of that an
        operator wants it. Raises MembershipError when that cannot be judged now; nothing has
        changed then.
        """
        self._writable()
        with self._change():
            member = self._member(device, returning=True)
            self._spare_no_more(member.device_id)
            self.health.forgive(member.device_id, reason)
            if not member.left and member.device_id not in self.places:
                self._end_release(member)
            if member.state is DeviceState.ONLINE:
                return None
            if member.state is DeviceState.DRAINING:
                changes.set_state(self._store, member.device_id, DeviceState.ONLINE)
                self.refresh()
                return None
            back = self._find_device(member, device).device
            # the settings first: a record that has reached some devices must find the device
            places = {*map(same_form, self.config.devices), same_form(back.url)}
            self._set_places(places, device)
            try:
                found = changes.readmit_member(self._store, member, back)
            finally:  # closed when no call uses it any more
                self._store.scheduler.forget(member.device_id, back.close)
            self.refresh()
            return found


__all__ = ["Pool", "PooledReader"]
