"""The pool: put, get, delete, look after. The facade of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Self

from hpstore.config import PoolConfig
from hpstore.devices.opener import Opener
from hpstore.errors import ObjectNotFound
from hpstore.format.keys import check_key
from hpstore.maintenance.rebuild import ProgressCallback, RebuildReport
from hpstore.maintenance.sweep import sweep_deleted
from hpstore.membership import changes
from hpstore.objects.key_listing import live_versions
from hpstore.objects.object_info import ObjectInfo
from hpstore.objects.read.pooled_reader import PooledReader, Readers, open_readers
from hpstore.objects.version_listing import VersionInfo, key_versions, parse_token
from hpstore.objects.write.put import delete_object
from hpstore.pool import many_objects, object_calls
from hpstore.pool.admin import PoolAdmin
from hpstore.pool.session import PoolSession
from hpstore.pool.status import PoolStatus
from hpstore.runtime.clock import Clock
from hpstore.runtime.metrics import Metrics


class Pool:
    """An open pool of devices. Thread-safe; survives fork and spawn (it pickles as its config).

    Made by `hpstore.create` and `hpstore.open`. A context manager; close() is idempotent. What
    agents and tools need besides is behind `admin`.

    Parameters
    ----------
    config
        The settings.
    read_only
        Refuse puts and all other changes.
    opener
        How devices are opened; None for files and fsspec.
    clock
        None for the machine's.
    threads
        False: nothing runs in the background, and calls of devices are made by the caller.
    erasure_backend
        "isal" or "numpy"; None for the faster one that works here.
    monitor
        Whether this process watches the devices' health; None for what the settings say.
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
        """Store `data` under `key`.

        Durable on return on k' + m devices, or, with devices failing, on at least
        max(k' + 1, m + 1) with the debt recorded (`losses_tolerated` tells). A crash before leaves
        the version before it; an unacknowledged put may still become visible as a whole.

        Parameters
        ----------
        key
            The object's name.
        data
            Bytes-like, an open binary file, or one version of an object, of any pool:
            `other.open(key, version=...)`. It belongs to this call until it returns.
        metadata
            JSON, at most 1 KiB.
        if_absent, if_version
            Store only where there is none, or where this is the version (of an ObjectInfo). Exact
            between all processes that reach the devices (stores without locks: in one run
            directory).
        rate_bytes_per_second
            Spread the work.
        progress
            Called by this thread with the bytes about to be written, again when a device fails and
            they are written again.
        unit_bytes
            Stripe unit of this object; None for the pool's.
        min_losses_tolerated
            Refuse where fewer would be tolerated; None for what the settings say.

        Raises
        ------
        TooFewDevices, LockTimeout
            Nothing was stored, or `maybe_visible` is set: then it may be, see the message.
        VersionConflict, RegistersUnavailable, RegistersForeign
            With a condition: it does not hold, or that cannot be told.
        InvalidKey, ConfigError
            A wrong key, metadata or unit.
        """
        asked = object_calls.PutConditions(
            if_absent=if_absent,
            if_version=if_version,
            unit_bytes=unit_bytes,
            min_losses_tolerated=min_losses_tolerated,
        )
        throttle = object_calls.throttled(self._store.clock, rate_bytes_per_second, progress)
        return object_calls.put_one(self._session, key, data, metadata or {}, asked, throttle)

    def put_many(
        self,
        objects: Mapping[str, object],
        metadata: Mapping[str, object] | None = None,
        *,
        min_losses_tolerated: int | None = None,
    ) -> dict[str, ObjectInfo]:
        """Store each value under its key, as put() does; facts by key.

        Small ones share calls and syncs, which takes a fraction of the time of single puts. Each
        object is stored, and durable, by itself: a crash leaves some old and some new. All are
        durable on return. Thread-safe; up to BATCHES threads of its own.

        Parameters
        ----------
        objects
            By key, bytes-like or an open binary file. Values belong to this call until it returns.
        metadata
            Of each of them.
        min_losses_tolerated
            As put() has it.

        Raises
        ------
        SomeFailed
            All were tried, and some were not stored.
        InvalidKey, ConfigError, TooFewDevices
            Before any is stored.
        """
        self._session.require_writable()
        return many_objects.put_many(
            self._store, objects, metadata or {}, min_losses_tolerated=min_losses_tolerated
        )

    def get(
        self, key: str, start: int = 0, end: int | None = None, *, version: str | None = None
    ) -> bytes:
        """Bytes [start, end) of the newest version, verified; decoded when units are lost.

        Parameters
        ----------
        key
            The object's name.
        start, end
            In bytes; None for the end of the object. A range behind the end is shorter, or empty.
        version
            One of `versions`, which may be superseded or deleted and still there.

        Raises
        ------
        ObjectNotFound
            There is none.
        TooManyErasures
            Acknowledged data cannot be read now.
        """
        return object_calls.get_bytes(self._session, key, start, end, version)

    def read_into(
        self, key: str, buffer: object, offset: int = 0, *, version: str | None = None
    ) -> int:
        """Fill a buffer from an object; returns the bytes read, fewer when the object ends.

        Parameters
        ----------
        key, version
            As get() has them.
        buffer
            Writable. Written by the calling thread alone and never after the return.
        offset
            First byte in the object.
        """
        return object_calls.read_buffer(self._session, key, buffer, offset, version)

    def open(self, key: str, *, version: str | None = None) -> PooledReader:
        """Open an object for many range reads; a context manager. One thread at a time.

        Parameters
        ----------
        key
            The object's name.
        version
            One of `versions`, and no other is read; None for the newest.
        """
        self._session.require_open()
        content = None if version is None else parse_token(version)
        return PooledReader(self._store, check_key(key), content=content)

    def open_many(self, keys: Sequence[str], *, preload: bool = False) -> Readers:
        """A reader of each key, opened together, or what open() would have raised.

        Parameters
        ----------
        keys
            Names of objects.
        preload
            Small ones are read as they are opened together, to be read now and closed.
        """
        self._session.require_open()
        return open_readers(self._store, [check_key(key) for key in keys], whole=preload)

    def stat(self, key: str, *, version: str | None = None) -> ObjectInfo:
        """Facts about an object.

        Parameters
        ----------
        key, version
            As get() has them.
        """
        return object_calls.facts(self._session, key, version)

    def versions(self, key: str) -> Sequence[VersionInfo]:
        """What devices that answer hold of an object, newest first; also what no read chooses.

        Usually one. More where an overwrite was interrupted, or devices are away: then an older one
        may be readable while the newest is not, by `get(key, version=)`.

        Raises TooManyErasures when nothing is found and more may be there.

        Parameters
        ----------
        key
            The object's name.
        """
        self._session.require_open()
        return key_versions(self._store, check_key(key))

    def exists(self, key: str) -> bool:
        """Whether a read would find an object. Raises TooManyErasures when that is unclear.

        Parameters
        ----------
        key
            The object's name.
        """
        try:
            self.stat(key)
        except ObjectNotFound:
            return False
        return True

    def list(self, prefix: str = "", *, certain: bool = False) -> list[str]:
        """Keys, sorted; also those that cannot be read just now.

        Parameters
        ----------
        prefix
            What the keys begin with.
        certain
            Raise where more than m devices are away, so that keys may be there unseen. Ask for it
            before anything is done because a key is not listed.

        Raises
        ------
        TooFewDevices
            With `certain`.
        InvalidKey
            No key can have this prefix.
        """
        self._session.require_open()
        return sorted(live_versions(self._store, prefix, certain=certain))

    def delete(self, key: str) -> None:
        """Delete an object. Durable on return (a tombstone on m + 1 devices).

        Parameters
        ----------
        key
            The object's name.

        Raises
        ------
        ObjectNotFound
            There is none.
        TooManyErasures, TooFewDevices
            Whether there is one is unclear, or it cannot be deleted durably. It is there, or
            `maybe_visible` is set: then it may be gone.
        """
        self._session.require_writable()
        check_key(key)
        with self._session.naming_lacks():
            delete_object(self._store, key)
        sweep_deleted(self._store)

    def delete_many(self, keys: Iterable[str], *, missing_ok: bool = False) -> None:
        """Delete objects, each as delete() does. All are durably gone on return.

        They share calls and syncs, which takes a fraction of the time of single deletes. A crash
        leaves some deleted and some whole, never one half. Thread-safe; up to BATCHES threads of
        its own.

        Parameters
        ----------
        keys
            Names of objects; one that is given twice is deleted once.
        missing_ok
            Those that are not there are no failure.

        Raises
        ------
        SomeFailed
            All were tried and some are not deleted: also those that are not there (ObjectNotFound
            in its `failed`), unless `missing_ok`.
        InvalidKey
            Before any is deleted.
        """
        self._session.require_writable()
        many_objects.delete_many(self._store, keys, missing_ok=missing_ok)

    # --- looking after ----------------------------------------------------------------------

    def status(self, *, past: bool = False) -> PoolStatus:
        """Devices with their states, objects, what is degraded, space; see PoolAdmin.status."""
        return self.admin.status(past=past)

    def scrub(
        self,
        *,
        prefix: str = "",
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
        resume: bool = True,
    ) -> RebuildReport:
        """Read and verify every block, repair what is damaged; see PoolAdmin.scrub."""
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
        """Make every object whole on the current members; see PoolAdmin.rebuild."""
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
        """Make an unused place a member; returns its device id; see PoolDevices.add."""
        return self.admin.devices.add(url, domain, force=force, allow_root_disk=allow_root_disk)

    def evict(self, device: str, *, force: bool = False) -> None:
        """Take a device out at once: what it holds counts as lost; see PoolDevices.evict."""
        self.admin.devices.evict(device, force=force)

    def drain(
        self,
        device: str,
        *,
        progress: ProgressCallback | None = None,
        rate_bytes_per_second: float | None = None,
    ) -> int:
        """Move everything off a device, then evict it; see PoolDevices.drain."""
        return self.admin.devices.drain(
            device, progress=progress, rate_bytes_per_second=rate_bytes_per_second
        )

    def readmit(self, device: str, *, reason: str = "") -> changes.Reconciled | None:
        """Take an evicted device back, or a draining one online again; see PoolDevices.readmit."""
        return self.admin.devices.readmit(device, reason=reason)

    def sit_out(self, device: str) -> None:
        """Keep this process's ordinary reads off a device; see PoolDevices.sit_out."""
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
