"""Devices that an operator has taken back, for all processes of a node: one small file.

Each process judges devices for itself, so a command can reach a false sit-out in another one only
by a word that all of them read. A process that begins knows nothing to forgive, so it skips the
words from before.
"""

from __future__ import annotations

from pathlib import Path

from hpstore.errors import IntegrityError
from hpstore.format.records import FORMAT, seal, unseal
from hpstore.format.untrusted_bytes import MALFORMED, MOST, brief
from hpstore.locks import file_lock
from hpstore.runtime.clock import Clock
from hpstore.runtime.text_files import read_text_file, write_atomically

PARDONS_FILE = "pardons.json"
_KEPT = 64
_BYTES_MOST = 64 << 10
_DEADLINE_SECONDS = 5.0


class Pardons:
    """The file, as one process has followed it. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._path = directory, directory / PARDONS_FILE
        self._stamp: tuple[int, int] | None = None
        self._done = -1  # number of the last word that was followed; -1: none was looked at

    def give(self, device: str, clock: Clock) -> None:
        """Add a word, which this process need not follow. Raises LockTimeout, OSError,
        IntegrityError."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file_lock(self._directory, "pardons.lock", clock, _DEADLINE_SECONDS, "readmit"):
            known = self._read()
            number = known[-1][0] + 1 if known else 1
            rows = [[n, d] for n, d in [*known, (number, device)][-_KEPT:]]
            text = seal({"format": FORMAT, "pardons": rows}).decode()
            write_atomically(self._path, text)

    def new(self) -> list[str]:
        """Devices that were taken back since the last call; none at the first one. Raises OSError,
        IntegrityError."""
        try:
            found = self._path.stat()
        except FileNotFoundError:  # there is none yet, or it was tidied away: numbers begin again
            self._done, self._stamp = 0, None
            return []
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp:
            return []
        self._stamp = stamp
        known = self._read()
        before, self._done = self._done, known[-1][0] if known else 0
        if before < 0:
            return []
        if self._done < before:  # tidied away, and begun again since the last call
            before = 0
        return [device for number, device in known if number > before]

    def _read(self) -> list[tuple[int, str]]:
        try:
            data = read_text_file(self._path, _BYTES_MOST).encode()
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise IntegrityError(f"{self._path}: not words of an operator: {error}") from error
        rows = unseal(data, where=str(self._path)).get("pardons")
        try:
            if not isinstance(rows, list) or len(rows) > _KEPT:
                raise ValueError("pardons are none, or too many")
            found = [(int(number), str(device)) for number, device in rows]
            if any(not 0 < number < MOST for number, _ in found):
                raise ValueError("a number is out of bounds")
        except MALFORMED as error:
            raise IntegrityError(f"{self._path}: words are malformed: {brief(error)}") from error
        return sorted(found)
