"""The child process of `detect`: one real read of a directory's file into GPU memory.

`python -m hpstore.loaders.gpu.direct.probe_child DIRECTORY GPU COMPAT` prints one JSON line at each
step, so that a hang or crash shows how far it came. It may die in any way; its parent expects that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator

import torch

from hpstore.devices.base import TMP
from hpstore.devices.file_handles import unlock_and_close
from hpstore.errors import HpstoreError
from hpstore.loaders.gpu.direct.cufile_queue import DirectDriver, DirectEngine
from hpstore.runtime.buffers import aligned_array
from hpstore.units import MIB

PROBE_BYTES = MIB


def say(step: str, **facts: object) -> None:
    """One line for the parent."""
    sys.stdout.write(json.dumps({"step": step, **facts}) + "\n")
    sys.stdout.flush()


def probe(directory: str, driver: DirectDriver) -> None:
    """Write noise, read it into GPU memory, compare, say what the driver counted."""
    noise = aligned_array(PROBE_BYTES)
    noise[:] = memoryview(secrets.token_bytes(PROBE_BYTES))
    say("open")
    with DirectEngine(driver, threads=1) as engine:
        say("write")
        with _file(directory, driver.open_flags) as fd:
            os.pwritev(fd, [noise.data], 0)
            os.fsync(fd)
            say("register")
            with engine.register_file(fd) as file, engine.allocate(PROBE_BYTES) as arena:
                before = engine.counters()
                say("read")
                engine.read(file, 0, PROBE_BYTES, arena, 0).result()
                after = engine.counters()
                same = bool((arena.tensor.cpu() == torch.from_numpy(noise)).all())
        counted = None
        if before is not None and after is not None:
            counted = {
                name: getattr(after, name) - getattr(before, name)
                for name in ("p2p", "nvfs", "posix", "errors")
            }
        say("done", same=same, counters=counted)


@contextlib.contextmanager
def _file(directory: str, flags: int) -> Iterator[int]:
    """A new file, locked as those that devices write; in tmp/ of a device, whose sweeper knows it.

    It has a name while it is open: whether cuFile takes unnamed files is not documented.
    """
    inside = os.path.join(directory, TMP)
    handle, path = tempfile.mkstemp(
        prefix="hpstore-gpu-probe-", dir=inside if os.path.isdir(inside) else directory
    )
    os.close(handle)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield fd
    finally:
        os.unlink(path)
        unlock_and_close(fd)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    from hpstore.loaders.gpu.direct.cufile import CuFile

    directory, gpu, compat = arguments
    try:
        probe(directory, CuFile(int(gpu), compat=compat == "1"))
    except (HpstoreError, OSError) as error:
        say("failed", reason=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
