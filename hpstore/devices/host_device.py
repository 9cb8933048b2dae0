"""A disk of another host, hpd://host:port/number: a local device there, behind its service.

What is promised is what the other side does before it answers: a file is written, synced, compared
with the horizon and renamed, and its directories are synced, in the service's process. The pool's
key stays here: counters are judged and sealed by this side, and the service compares their bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from hpstore.codec.galois import Bytes
from hpstore.devices.base import DirectoryEntry, Stamp, Usage
from hpstore.devices.horizon_guard import (
    COUNTER_BYTES,
    HORIZON,
    NameGuard,
    decode_counter,
    encode_counter,
    risen,
)
from hpstore.devices.host_files import HostHold, HostReader, HostWriter, OpenFile
from hpstore.devices.host_links import HostLinks, Secure, require_protocol
from hpstore.errors import ConfigError, DeviceError, HpstoreError, IntegrityError, LockTimeout
from hpstore.format.host_calls import (
    DATA_PORT,
    MOST_BODY_BYTES,
    MOST_LISTED,
    Json,
    decode_held,
    decode_listings,
    decode_opened,
    encode_json,
    parse_url,
)
from hpstore.format.pool_key import PoolKey
from hpstore.format.records import MAX_RECORD_BYTES
from hpstore.runtime.split_calls import Sent
from hpstore.units import KIB

AHEAD_BYTES = 80 * KIB  # of small files: those that column_reader.py reads whole
HANDLE_BYTES = 16  # drawn by the caller: on the port for bodies it is what allows them
_TRIES = 1000  # of a counter that others raise at the same time
_MOST = 1 << 64  # of a number: an inode may be that large
_MODES = ("direct", "buffered", "memory")


class HostDevice:
    """Files of one disk of a host.

    Parameters
    ----------
    url
        hpd://host:port/number.
    seconds
        How long the host may take for each step of a call; then DeviceTimeout.
    secure
        Makes a connected socket one of mutual TLS. None: what is sent can be read and changed on
        its way.
    plain_bodies
        Bytes of columns go by a port of the service without TLS, all else by `secure`.

    Raises
    ------
    DeviceMissing, DeviceTimeout, DeviceDenied
        The host does not answer, or not to this process.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float,
        secure: Secure | None = None,
        plain_bodies: bool = False,
    ) -> None:
        try:
            place = parse_url(url)
        except ValueError as error:
            raise ConfigError(f"device {url}: {error}") from error
        self.url = url.rstrip("/")
        self.host, self.number = f"{place[0]}:{place[1]}", place[2]
        self.memory_alignment = 1
        self._links = self.bodies = HostLinks(self.url, place, seconds, secure)
        self.link = self._links.counters
        self._durable: set[str] = set()  # names that a commit has synced and nobody asked about yet
        self._sectors: dict[str, bytes] = {}  # of counters, as they were seen last
        try:
            self.mode, self.folds_names = self._described(self._links.json("hello", again=True))
            if plain_bodies:
                port = self._data_port()
                place = (place[0], port, place[2])
                self.bodies = HostLinks(self.url, place, seconds, None, by=self._links)
        except BaseException:
            self._links.close()
            raise

    def _data_port(self) -> int:
        """Where the service takes bodies without TLS. Raises DeviceError."""
        port = self._links.json(DATA_PORT, again=True)
        if isinstance(port, int) and 0 < port < 65536:
            return port
        raise DeviceError(
            f"device {self.url}: the settings of this process want bodies without TLS "
            '(tls = "control"), and the service there has no port for them. Start it with '
            '--tls control, or set tls = "mutual"',
            device=self.url,
        )

    def _described(self, answer: object) -> tuple[str, bool]:
        found = require_protocol(answer, self.url)
        if found.get("mode") not in _MODES:
            raise DeviceError(f"device {self.url}: the host says no mode", device=self.url)
        return str(found["mode"]), found.get("folds_names") is True

    @property
    def host_disk(self) -> HostDevice:
        """For calls on several disks of a host."""
        return self

    def ask(self, operation: str, args: Json, body: bytes) -> bytes:
        """As HostDisk has it."""
        return self._links.call(operation, args, bodies=[body], again=True)

    def begin_ask(self, operation: str, args: Json, body: bytes) -> Sent[bytes] | None:
        """As HostDisk has it."""
        return self._links.begin(operation, args, bodies=[body], again=True)

    def error_of(self, name: str, text: str) -> Exception:
        """As HostDisk has it."""
        return self._links.errors.error_of(name, text)

    def new_file(self, buffers: Sequence[Bytes], *, vital: bool, sync: bool) -> HostWriter:
        """As HostDisk has it."""
        made = self._made("new_file", {"vital": vital, "sync": sync}, _views(buffers))
        return self._writer(*made)

    def begin_file(
        self, buffers: Sequence[Bytes], *, vital: bool, sync: bool
    ) -> Sent[HostWriter] | None:
        """As HostDisk has it."""
        args: Json = {"vital": vital, "sync": sync}
        sent = self._begin_made("new_file", args, _views(buffers))
        return None if sent is None else sent.then(lambda made: self._writer(*made))

    def prepare(self) -> None:
        """Make the directories of a device root there."""
        self.mode, self.folds_names = self._described(self._links.json("prepare"))

    def create(self, size_bytes: int, *, vital: bool = False) -> HostWriter:
        handle, found = self._made("create", {"nbytes": size_bytes, "vital": vital})
        return self._writer(handle, found)

    def create_spare(self, size_bytes: int) -> HostWriter | None:
        handle, found = self._made("create_spare", {"nbytes": size_bytes})
        return self._writer(handle, found)

    def _writer(self, handle: str, found: bytes) -> HostWriter:
        made = self._links.decoded(found)
        recycled = isinstance(made, dict) and made.get("recycled") is True
        return HostWriter(self, self._links, handle, recycled)

    def _made(
        self, operation: str, args: Json, bodies: Sequence[memoryview] = ()
    ) -> tuple[str, bytes]:
        """A call that opens something there, under a handle of ours; both. Whatever goes wrong, the
        next call gives the handle up."""
        self._links.keep_session()
        handle = secrets.token_hex(HANDLE_BYTES)
        try:
            return handle, self._links.call(operation, {"handle": handle, **args}, bodies=bodies)
        except BaseException:
            self._links.give_up(handle)
            raise

    def _begin_made(
        self, operation: str, args: Json, bodies: Sequence[memoryview] = ()
    ) -> Sent[tuple[str, bytes]] | None:
        """As _made, of a call that is begun."""
        if not self._links.keeps_session():
            return None
        handle = secrets.token_hex(HANDLE_BYTES)
        try:
            sent = self._links.begin(operation, {"handle": handle, **args}, bodies=bodies)
        except BaseException:  # Ctrl-C, too: it may have been sent
            self._links.give_up(handle)
            raise
        if sent is None:
            return None

        def finish() -> tuple[str, bytes]:
            try:
                return handle, sent.finish()
            except BaseException:
                self._links.give_up(handle)
                raise

        def drop() -> None:
            self._links.give_up(handle)
            sent.drop()

        return Sent(sent.fileno, sent.arrived, finish, drop)

    def open(self, path: str) -> HostReader:
        return HostReader(self, self._links, path, self.open_handle(path))

    def begin_open(self, path: str, *, tail_bytes: int) -> Sent[HostReader] | None:
        """As HostDisk has it."""
        args: Json = {"path": path, "ahead": AHEAD_BYTES, "tail": tail_bytes}
        sent = self._begin_made("open", args)

        def opened(made: tuple[str, bytes]) -> HostReader:
            return HostReader(self, self._links, path, self._opened(*made))

        return None if sent is None else sent.then(opened)

    def open_handle(self, path: str) -> OpenFile:
        """A file that is open there from now on, and its first bytes."""
        args: Json = {"path": path, "ahead": AHEAD_BYTES, "tail": 0}
        return self._opened(*self._made("open", args))

    def _opened(self, handle: str, found: bytes) -> OpenFile:
        try:
            return OpenFile(handle, *decode_opened(found))
        except IntegrityError as error:
            self._links.give_up(handle)
            raise DeviceError(f"device {self.url}: {error}", device=self.url) from error

    def _stamp(self, found: object) -> Stamp:
        inode, changed, size = self._numbers(found, 3)
        return (inode, changed, size)

    def _numbers(self, found: object, count: int) -> list[int]:
        """An answer of so many whole numbers; a flag counts as one. Raises DeviceError."""
        if isinstance(found, list) and len(found) == count:
            numbers = [int(n) for n in found if isinstance(n, int) and abs(n) <= _MOST]
            if len(numbers) == count:
                return numbers
        raise DeviceError(
            f"device {self.url}: an answer is not {count} whole numbers", device=self.url
        )

    def read_small(self, path: str, max_bytes: int) -> bytes:
        limit = min(max_bytes, MOST_BODY_BYTES)
        found = self._links.call("read_small", {"path": path, "most": limit}, again=True)
        if len(found) > limit:
            raise DeviceError(f"{path} on {self.url} is larger than {limit} bytes", device=self.url)
        return found

    def write_small(self, path: str, data: bytes) -> None:
        if len(data) > MAX_RECORD_BYTES:
            raise DeviceError(f"{path} on {self.url} is larger than {MAX_RECORD_BYTES} bytes")
        self._links.call("write_small", {"path": path}, bodies=[data])

    def takes_records(self) -> bool:
        return self._links.json("takes_records", again=True) is True

    def entries(self, path: str) -> list[DirectoryEntry]:
        return self._listings([path])[0]

    def listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        return self._listings(paths[:MOST_LISTED])

    def _listings(self, paths: Sequence[str]) -> list[list[DirectoryEntry]]:
        data = self._links.call("listings", bodies=[encode_json(list(paths))], again=True)
        try:
            found = decode_listings(data)
        except IntegrityError as error:
            raise DeviceError(f"device {self.url}: {error}", device=self.url) from error
        if not 0 < len(found) <= len(paths):
            raise DeviceError(f"device {self.url}: a listing lacks what was asked for")
        return [[DirectoryEntry(*entry) for entry in names] for names in found]

    def counter(self, name: str, pool_key: PoolKey | None = None) -> int:
        sector = self._sector(name)
        return decode_counter(name, sector, where=f"{self.url}/{name}", pool_key=pool_key)

    def _sector(self, name: str) -> bytes:
        found = self._links.call("counter_sector", {"name": name}, again=True)[:COUNTER_BYTES]
        self._sectors[name] = found
        return found

    def raise_counter(self, name: str, value: int, pool_key: PoolKey | None = None) -> int:
        """As of any device. The service compares and writes bytes: this side seals them. What was
        seen last is as good to begin with as what is there now: the answer has that."""
        sector = self._sectors[name] if name in self._sectors else self._sector(name)
        for _ in range(_TRIES):
            reached = risen(name, sector, value, pool_key)
            new = encode_counter(name, reached, pool_key)
            args: Json = {"name": name, "expected_bytes": len(sector)}
            found = self._links.call("swap_counter_sector", args, bodies=[sector, new], again=True)[
                :COUNTER_BYTES
            ]
            if found in (sector, new):
                self._sectors[name] = new
                return reached
            sector = found
        raise LockTimeout(
            f"{name} of device {self.url} is raised by others all the time. It is tried again later"
        )

    def checked_horizon(self, guard: NameGuard) -> bytes:
        """The sector of the horizon by which a guard allows a name. Raises what it raises."""
        try:
            return self.known_horizon(guard)
        except HpstoreError:  # what was seen last may be old
            sector = self._sector(HORIZON)
        guard.check_sector(sector, self.url)
        return sector  # not what is there by now: that was not looked at

    def known_horizon(self, guard: NameGuard) -> bytes:
        """The same, of what was seen last."""
        sector = self._sectors.get(HORIZON, b"")
        guard.check_sector(sector, self.url)
        return sector

    def note_horizon(self, sector: bytes) -> None:
        """What it is now."""
        self._sectors[HORIZON] = sector[:COUNTER_BYTES]

    def stamp(self, path: str) -> Stamp | None:
        return self._stamped(self._links.call("stamp", {"path": path}, again=True))

    def begin_stamp(self, path: str) -> Sent[Stamp | None] | None:
        """As HostDisk has it."""
        sent = self._links.begin("stamp", {"path": path}, again=True)
        return None if sent is None else sent.then(self._stamped)

    def _stamped(self, answer: bytes) -> Stamp | None:
        found = self._links.decoded(answer)
        return None if found is None else self._stamp(found)

    def delete(self, path: str) -> None:
        self._links.call("delete", {"path": path})

    def retire(self, path: str) -> None:
        self._links.call("retire", {"path": path})

    def begin_retire(self, path: str) -> Sent[None] | None:
        """As HostDisk has it."""
        sent = self._links.begin("retire", {"path": path})
        return None if sent is None else sent.then(_nothing)

    def quarantine(self, path: str) -> None:
        self._links.call("quarantine", {"path": path})

    def note_durable(self, path: str) -> None:
        """A commit has made this name durable."""
        if len(self._durable) < MOST_LISTED:  # of files that no caller syncs, such as spares
            self._durable.add(path)

    def sync_directory(self, path: str) -> None:
        try:
            self._durable.remove(path)  # by the commit that gave the name, before it was answered
        except KeyError:
            self._links.call("sync_directory", {"path": path}, again=True)

    def sync_removals(self) -> None:
        self._links.call("sync_removals", again=True)

    def sweep(self) -> int:
        return self._numbers([self._links.json("sweep")], 1)[0]

    def usage(self) -> Usage:
        return Usage.of_numbers(self._numbers(self._links.json("usage", again=True), 6))

    def hold(self, offset: int, nbytes: int) -> HostHold:
        return self._held(nbytes, *self._made("hold", {"offset": offset, "nbytes": nbytes}))

    def begin_hold(self, offset: int, nbytes: int) -> Sent[HostHold] | None:
        """As HostDisk has it."""
        sent = self._begin_made("hold", {"offset": offset, "nbytes": nbytes})
        return None if sent is None else sent.then(lambda made: self._held(nbytes, *made))

    def _held(self, nbytes: int, handle: str, found: bytes) -> HostHold:
        try:
            taken, record, content = decode_held(found)
            if taken and len(content) != nbytes:
                raise IntegrityError(f"a lock of {nbytes} bytes came with {len(content)}")
        except IntegrityError as error:
            self._links.give_up(handle)
            raise DeviceError(f"device {self.url}: {error}", device=self.url) from error
        return HostHold(self._links, handle if taken else "", content, record)

    def probe(self, *, write: bool) -> None:
        found = self._links.json("probe", {"write": write}, again=True)
        self.mode, self.folds_names = self._described(found)

    def close(self) -> None:
        self._links.close()
        self.bodies.close()


def _views(buffers: Sequence[Bytes]) -> list[memoryview]:
    return [np.ascontiguousarray(buffer).data.cast("B") for buffer in buffers]


def _nothing(_: bytes) -> None:
    """An answer that says only that a call was carried out."""
