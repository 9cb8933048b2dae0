"""A directory seen through FUSE that misbehaves on request. Needs root and /dev/fuse.

What a loop device cannot do: errors by chance, flipped bits, writes that are lost, calls that take
long or never end, a file system whose server is dead (ENOTCONN on everything).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpstore.runtime.closing import Closing
from hpstore.testing import fuse
from hpstore.testing.fuse import LOG_RECORD, FaultRule
from hpstore.testing.scratch import scratch_directory, unmounted

_READY_SECONDS = 30.0


class FaultFilesystem(Closing):
    """`backing`, seen at `path`; a context manager that always cleans up. One thread at a time.

    `log`: a file that takes every write and flush in order, see `read_log`.
    """

    def __init__(
        self, backing: str, directory: str | os.PathLike[str], *, log: str | None = None
    ) -> None:
        self.backing, self._log = os.path.abspath(backing), log
        self._work = scratch_directory(directory)
        self.path = f"{self._work}/mount"
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> FaultFilesystem:
        with ExitStack() as undo:
            undo.callback(self.close)
            os.mkdir(self.path)
            self.start()
            undo.pop_all()
        return self

    def start(self) -> None:
        """Mount; again after kill()."""
        self._drop_mount()
        # by path and isolated: it imports the standard library alone, so it starts in 0.1 s
        command = [sys.executable, "-I", os.path.abspath(fuse.__file__), self.backing, self.path]
        self._server = subprocess.Popen(
            [*command, self._log] if self._log else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != "ready\n":
            raise OSError(f"the FUSE server for {self.backing} did not start; see its messages")

    @property
    def serving(self) -> bool:
        """Whether the server runs."""
        return self._server is not None and self._server.poll() is None

    def behave(self, *rules: FaultRule) -> int:
        """Replace the faults, by none for a healthy directory; how often one has applied so far."""
        return self._tell([asdict(rule) for rule in rules])

    def applied(self) -> int:
        """How often a rule has applied so far; the faults stay as they are."""
        return self._tell(None)

    def _tell(self, rules: list[dict[str, Any]] | None) -> int:  # Any: JSON
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(rules) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise OSError(errno.ENOTCONN, f"the FUSE server for {self.backing} has ended")
        return int(answer)

    def kill(self) -> None:
        """SIGKILL the server: from now on every call is ENOTCONN."""
        assert self._server is not None
        self._server.kill()
        self._reap()

    def _reap(self) -> None:
        assert self._server is not None
        self._server.wait(_READY_SECONDS)
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()
        self._server = None

    def _drop_mount(self) -> None:
        if not unmounted(self.path):
            raise OSError(f"{self.path} cannot be unmounted")

    def close(self) -> None:
        """Unmount, end the server, remove the mount point. Idempotent."""
        try:
            if self._server is not None:
                self._server.kill()
                self._reap()
        finally:
            if unmounted(self.path):
                shutil.rmtree(self._work, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One write, or a flush (no data, `flush`), of a file."""

    name: str
    flush: bool
    offset: int
    data: bytes


def read_log(path: str | os.PathLike[str]) -> Iterator[Logged]:
    """What a server recorded, in order. A record that was cut off by a kill ends it."""
    with open(path, "rb") as file:
        while len(head := file.read(LOG_RECORD.size)) == LOG_RECORD.size:
            kind, name_bytes, offset, count = LOG_RECORD.unpack(head)
            name, data = file.read(name_bytes).decode(), file.read(count)
            if len(data) == count:
                yield Logged(name=name, flush=kind == b"F", offset=offset, data=data)


def fuse_problem() -> str | None:
    """Why this cannot be used here, or None: really mounts, writes and reads."""
    if os.geteuid() != 0:
        return "needs root (FUSE mounts)"
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse"
    if not hasattr(ctypes.CDLL(None), "umount2"):
        return "needs Linux"
    try:
        with tempfile.TemporaryDirectory() as directory:
            backing = os.path.join(directory, "backing")
            os.mkdir(backing)
            with FaultFilesystem(backing, directory) as faulty:
                Path(faulty.path, "probe").write_bytes(b"x")
                if Path(faulty.path, "probe").read_bytes() != b"x":
                    return "FUSE does not return what was written"
    except OSError as error:
        return f"FUSE mounts do not work here: {error}"
    return None
