"""The pool: put, get, delete, look after. The facade of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar

import numpy as np

from hpstore.config import PoolConfig
from hpstore.devices.opener import Opener
from hpstore.errors import ObjectNotFound, TooFewDevices
from hpstore.format.column_header import encode_metadata
from hpstore.format.keys import check_key
from hpstore.maintenance.rebuild import ProgressCallback, RateLimit, RebuildReport
from hpstore.maintenance.sweep import sweep_deleted
from hpstore.membership import changes
from hpstore.membership.members import check_unit
from hpstore.objects.key_listing import live_layout, walk
from hpstore.objects.object_info import ObjectInfo, object_info
from hpstore.objects.read.object_reader import ObjectReader
from hpstore.objects.read.range_reader import PooledReader, Readers, open_readers, writable_bytes
from hpstore.objects.versions import VersionInfo, key_versions, parse_token
from hpstore.objects.write.conditional_put import put_if
from hpstore.objects.write.put import delete_object, put_object
from hpstore.objects.write.put_source import as_source
from hpstore.pool import many_objects
from hpstore.pool.admin import PoolAdmin
from hpstore.pool.loss_tolerance import require_stored, require_tolerance, wanted_losses
from hpstore.pool.session import PoolSession
from hpstore.pool.status import PoolStatus
from hpstore.runtime.clock import Clock
from hpstore.runtime.lacks import blamed, lacks_total
from hpstore.runtime.metrics import Metrics

T = TypeVar("T")


class Pool:
    """An open pool of devices. Thread-safe; survives fork and spawn (it pickles as its config).

    Made by `hpstore.create` and `hpstore.open`. A context manager; close() is idempotent. What
    agents and tools need besides is behind `admin`.
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
        """Open a pool by its settings; PoolSession has the other arguments."""
        self._session = PoolSession(
            config,
            read_only=read_only,
            opener=opener,
            clock=clock,
            threads=threads,
            erasure_backend=erasure_backend,
            monitor=monitor,
        )
        self._store, self.admin = self._session.store, PoolAdmin(self._session)

    @property
    def config(self) -> PoolConfig:
        """The settings as they are now: devices come and go."""
        return self._session.config

    @property
    def read_only(self) -> bool:
        """Whether puts and all other changes are refused."""
        return self._session.read_only

    @property
    def scheme(self) -> str:
        """k and m, such as "4+2"."""
        return f"{self.data}+{self.parity}"

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
        self._session.require_writable()
        check_key(key)
        encode_metadata(metadata or {})
        self._check_unit(unit_bytes)
        source, wanted = as_source(data), wanted_losses(self._store, min_losses_tolerated)
        throttle = _throttle(RateLimit(rate_bytes_per_second, self._store.clock), progress)
        require_tolerance(self._store, wanted, repr(key))
        with self._session.naming_lacks():
            if not if_absent and if_version is None:
                info = put_object(
                    self._store,
                    key,
                    source,
                    metadata=metadata or {},
                    throttle=throttle,
                    unit_bytes=unit_bytes,
                )
            else:
                info = put_if(
                    self._store,
                    self._session.claims,
                    key,
                    source,
                    metadata=metadata or {},
                    throttle=throttle,
                    if_absent=if_absent,
                    if_version=if_version,
                    unit_bytes=unit_bytes,
                )
        require_stored(info, wanted)
        return info

    def _check_unit(self, unit_bytes: int | None) -> None:
        """Raise ConfigError for a stripe unit that objects of this pool cannot have."""
        if unit_bytes is not None:
            check_unit(self._session.config, self.data + self.parity, unit_bytes)

    def put_many(
        self,
        objects: Mapping[str, object],
        metadata: Mapping[str, object] | None = None,
        *,
        min_losses_tolerated: int | None = None,
    ) -> dict[str, ObjectInfo]:
        """Store each value (bytes-like, or an open binary file) under its key, as put() does; facts
        by key. Small ones share calls and syncs, which takes a fraction of the time of single puts.

        Each object is stored, and durable, by itself: a crash leaves some old and some new. All
        are durable on return. `metadata`: of each of them. Values belong to this call until it
        returns. Thread-safe; up to BATCHES threads of its own.

        Raises SomeFailed when all were tried and some were not stored; InvalidKey, ConfigError and
        TooFewDevices before any is.
        """
        self._session.require_writable()
        return many_objects.put_many(
            self._store, objects, metadata or {}, min_losses_tolerated=min_losses_tolerated
        )

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
        """Run `read` on an open object; again when that changes underneath."""
        self._session.require_open()
        content = None if version is None else parse_token(version)
        with self._session.naming_lacks():
            opened = PooledReader(self._store, check_key(key), content=content, whole=whole)
            with opened:
                return opened.run(read)

    def open(self, key: str, *, version: str | None = None) -> PooledReader:
        """Open the newest version for many range reads; a context manager. One thread at a time.

        With a `version` of `versions`, that one and no other is read.
        """
        self._session.require_open()
        content = None if version is None else parse_token(version)
        return PooledReader(self._store, check_key(key), content=content)

    def open_many(self, keys: Sequence[str], *, preload: bool = False) -> Readers:
        """A reader of each key, opened together, or what open() would have raised.

        `preload`: small ones are read as they are opened together, to be read now and closed.
        """
        self._session.require_open()
        return open_readers(self._store, [check_key(key) for key in keys], whole=preload)

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
        self._session.require_open()
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
        self._session.require_open()
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
        self._session.require_writable()
        check_key(key)
        with self._session.naming_lacks():
            delete_object(self._store, key)
        sweep_deleted(self._store)

    def delete_many(self, keys: Iterable[str], *, missing_ok: bool = False) -> None:
        """Delete objects, each as delete() does, of a key that is given twice once. All are durably
        gone on return. They share calls and syncs, which takes a fraction of the time of single
        deletes.

        A crash leaves some deleted and some whole, never one half. Thread-safe; up to BATCHES
        threads of its own.

        Raises SomeFailed when all were tried and some are not deleted: also those that are not
        there (ObjectNotFound in its `failed`), unless `missing_ok`. InvalidKey before any is.
        """
        self._session.require_writable()
        many_objects.delete_many(self._store, keys, missing_ok=missing_ok)

    # --- looking after ----------------------------------------------------------------------

    def status(self, *, past: bool = False) -> PoolStatus:
        """Devices with their states, objects, what is degraded, space, counters. Walks all keys.
        `past`: with devices that left long ago, and that nothing depends on."""
        return self.admin.status(past=past)

    def scrub(
        self,
        *,
        prefix: str = "",
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        resume: bool = True,
    ) -> RebuildReport:
        """Read and verify every block, repair what is damaged. Goes on where it was stopped.

        One scrub or rebuild of a pool at a time (LockTimeout).
        """
        return self.admin.scrub(
            prefix=prefix,
            progress=progress,
            rate_bytes_per_second=rate_bytes_per_second,
            resume=resume,
        )

    def rebuild(
        self,
        *,
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        include_missing: bool = False,
        everything: bool = False,
    ) -> RebuildReport:
        """Make every object whole on the current members, most endangered first; pay debts.

        Columns on members that are missing but not evicted are waited for while parity is left,
        unless `include_missing`; what retention soon drops is put off (docs/health.md) unless
        `everything`. Killed, it is resumed by running it again. One at a time (LockTimeout).
        """
        return self.admin.rebuild(
            progress=progress,
            rate_bytes_per_second=rate_bytes_per_second,
            include_missing=include_missing,
            everything=everything,
        )

    def add_device(
        self,
        url: str,
        domain: str | None = None,
        *,
        force: bool = False,
        allow_root_disk: bool = False,
    ) -> str:
        """Make an unused place a member; returns its device id. New objects use it at once.
        `allow_root_disk`: also where a mount seems to be missing, which is a ConfigError else."""
        return self.admin.devices.add(url, domain, force=force, allow_root_disk=allow_root_disk)

    def evict(self, device: str, *, force: bool = False) -> None:
        """Take a device out at once; what it holds counts as lost. `rebuild` then makes it again.

        Refused when an object could not be read without it, unless forced.
        """
        self.admin.devices.evict(device, force=force)

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
        return self.admin.devices.drain(
            device, progress=progress, rate_bytes_per_second=rate_bytes_per_second
        )

    def readmit(self, device: str, *, reason: str = "") -> changes.Reconciled | None:
        """Take an evicted device back, or a draining one online again (PoolDevices.readmit)."""
        return self.admin.devices.readmit(device, reason=reason)

    def sit_out(self, device: str) -> None:
        """Keep this process' ordinary reads and new columns off a device, until readmit."""
        self.admin.devices.sit_out(device)

    # --- life -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop threads and release devices. Idempotent; nothing durable depends on it."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(Pool, read_only=self.read_only), (self.config,))

    def __repr__(self) -> str:
        return f"<hpstore pool {self.config.name!r} {self.scheme}>"


def _throttle(limit: RateLimit, progress: Callable[[int], None] | None) -> Callable[[int], None]:
    """Spread the work of a put, and report the bytes about to be written."""

    def throttle(count: int) -> None:
        limit(count)
        if progress is not None:
            progress(count)

    return throttle
