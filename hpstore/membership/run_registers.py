"""Registers in a run directory of one host, for pools on stores that have no locks (PROTOCOL 15).

A token on the devices names the directory. A process that does not find it in its own one - another
host, user, container or temporary directory - is refused: it would exclude no other process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hpstore.agreement.registers import (
    Change,
    ChangeOf,
    Exchange,
    HeldRegister,
    NothingToKeep,
    NothingToSettle,
    Register,
    claim_registers,
)
from hpstore.config import private_directory
from hpstore.devices.base import Device
from hpstore.errors import (
    ConfigError,
    HpstoreError,
    IntegrityError,
    RegistersForeign,
    RegistersUnavailable,
)
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import parsing
from hpstore.locks import file_lock
from hpstore.objects.context import PoolContext
from hpstore.runtime.text_files import write_atomically
from hpstore.runtime.threads import WorkerThreads

TOKEN_FILE = "registers.json"
_BYTES_MOST = 64 << 10
_AT_ONCE = 8
_PROOF_SECONDS = 60.0  # then the devices are asked again whether they still name this directory
Place = tuple[str, str, str, str]  # token, machine, boot, directory


def _machine() -> tuple[str, str]:
    """What names this machine, and its present run. Machines of one image may have one id; those
    that work together have names of their own."""
    found = []
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        try:
            found.append(Path(path).read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            found.append("")
    return f"{found[0]} {socket.gethostname()}".strip(), found[1]


def _is_machine(recorded: str, machine: str) -> bool:
    """Whether a device names this machine; hpstore before 2026-12 recorded the id alone."""
    return recorded == machine or machine.startswith(f"{recorded} ")


class RunRegisters:
    """Of an open pool. Thread-safe. `directory` is asked for at each use: it may be unusable."""

    def __init__(self, store: PoolContext, directory: Callable[[], Path]) -> None:
        self._store, self._where = store, directory
        self._proved = ""  # token that was found here and on the devices,
        self._proved_at = 0.0  # by the pool's clock

    def update(self, name: str, change: Change, *, what: str) -> Register:
        directory = self._directory()
        limit = self._store.settings.lock_deadline_seconds
        lock = file_lock(directory, f"{name}.lock", self._store.clock, limit, what)
        with _usable(directory), lock:
            path = directory / f"{name}.json"
            now = _read(path)
            value = change(now)
            if value is None:
                return now
            made = Register(order=(0, now.order[1] + 1), value=value)
            body = {"format": FORMAT, "sequence": made.order[1], "value": value.decode()}
            write_atomically(path, seal(body).decode())
            return made

    def update_all(self, change: ChangeOf, *, what: str) -> None:
        with WorkerThreads(_AT_ONCE, "hpstore-registers") as threads:  # each waits for its sync
            for _ in threads.map(
                lambda name: self.update(name, partial(change, name), what=what), claim_registers()
            ):
                pass

    @contextmanager
    def hold(
        self, name: str, what: str, *, deadline_seconds: float | None = None
    ) -> Iterator[HeldRegister]:
        limit = self._store.settings.lock_deadline_seconds
        if deadline_seconds is not None:
            limit = deadline_seconds
        directory = self._directory()
        with contextlib.ExitStack() as held:
            with _usable(directory):
                held.enter_context(
                    file_lock(directory, f"{name}.lock", self._store.clock, limit, what)
                )
            yield NothingToKeep()

    @contextmanager
    def exchange(
        self, joining: dict[str, Device], staying: Collection[str], *, force: bool
    ) -> Iterator[Exchange]:
        with self.hold("exchange", "membership change"):
            yield NothingToSettle()

    def after_fork(self) -> None:
        """Descriptors are opened for each use."""

    # --- whose directory --------------------------------------------------------------------

    def _directory(self) -> Path:
        """Where the registers are, proved to be the one that the devices name."""
        directory = private_directory(self._where())
        token = self._token_in(directory)
        now = self._store.clock.monotonic()
        if token and token == self._proved and now < self._proved_at + _PROOF_SECONDS:
            return directory
        place = self._named()
        machine, boot = _machine()
        again = (
            place is not None
            and not token
            and place[2] != boot
            and _is_machine(place[1], machine)
            and place[3] == str(directory)
        )
        if place is None or again:  # none yet, or the machine was started again and has tidied up
            place = self._settle(directory, machine, boot)
        if place[0] != self._token_in(directory):
            raise RegistersForeign(
                f"the pool's devices have no locks, so its processes exclude each other in one "
                f"directory: {place[3]} on machine {place[1]}. This process uses {directory} and "
                "would exclude no other. Nothing was changed; reading and plain puts go on. Set "
                "run_directory in pool.toml to that directory, or do this there. If it is gone for "
                f"good and no process uses it, delete {TOKEN_FILE} from the devices."
            )
        self._proved, self._proved_at = place[0], now
        with contextlib.suppress(OSError):
            os.utime(directory / TOKEN_FILE)  # what is used is not tidied away
        return directory

    def _token_in(self, directory: Path) -> str:
        try:
            body = unseal((directory / TOKEN_FILE).read_bytes(), where=TOKEN_FILE)
        except (OSError, IntegrityError):
            return ""
        return str(body.get("token", ""))

    def _named(self) -> Place | None:
        """The place that most devices name."""

        def read(_: str, device: Device) -> Place | None:
            try:
                return decode_place(device.read_small(TOKEN_FILE, _BYTES_MOST), where=device.url)
            except (FileNotFoundError, IntegrityError):
                return None

        answers = self._store.each(self._store.view.devices, read)
        places = Counter(p for p in answers.values() if isinstance(p, tuple))
        members = self._store.view.record.members
        silent = sum(isinstance(p, Exception) for p in answers.values())
        silent += len(self._store.view.missing)
        if not places and silent > len(members) // 2:
            raise RegistersUnavailable(
                f"{silent} of {len(members)} devices do not answer: which directory excludes "
                "processes cannot be told. Nothing was changed; bring devices back."
            )
        return min(places, key=lambda p: (-places[p], p), default=None)

    def _settle(self, directory: Path, machine: str, boot: str) -> Place:
        """Name this directory on the devices, and look what came of it."""
        body: dict[str, object] = {"machine": machine, "boot": boot, "directory": str(directory)}
        lock = file_lock(directory, "token.lock", self._store.clock, 5.0, "registers")
        with _usable(directory), lock:
            # under the lock: of several that begin at once all must name the token of the first
            before = self._token_in(directory)
            token = before or secrets.token_hex(16)
            data = seal({"format": FORMAT, "token": token, **body})
            if not before:
                write_atomically(directory / TOKEN_FILE, data.decode())
            self._store.each(
                self._store.view.devices, lambda _, device: device.write_small(TOKEN_FILE, data)
            )
        found = self._named()
        if found is None:
            raise RegistersUnavailable("no device could be written. Nothing was changed.")
        return found


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    """Raise RegistersUnavailable for what the directory's filesystem raises: full, read-only."""
    try:
        yield
    except HpstoreError:
        raise
    except OSError as error:
        raise RegistersUnavailable(
            f"the run directory {directory} cannot be used: {error.strerror or error}. Nothing was "
            "changed. Make room there, or set run_directory in pool.toml"
        ) from error


def _read(path: Path) -> Register:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Register()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return decode_register(data, where=str(path))


def decode_register(data: bytes, *, where: str) -> Register:
    """A record of a run directory. Raises IntegrityError."""
    with parsing(where):
        body = unseal(data, where=where)
        return Register(order=(0, int(str(body["sequence"]))), value=str(body["value"]).encode())


def decode_place(data: bytes, *, where: str) -> Place:
    """The directory that a device names. Raises IntegrityError."""
    with parsing(where):
        body = unseal(data, where=where)
        return (str(body["token"]), str(body["machine"]), str(body["boot"]), str(body["directory"]))
