"""Child processes that may hang: killed with all their session when they take too long."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)
KILL_SECONDS = 5.0  # for a killed one to be gone


def output_of(
    command: Sequence[str],
    timeout_seconds: float,
    *,
    max_bytes: int,
    environment: Mapping[str, str],
    directory: str | None = None,
) -> tuple[int | None, str]:
    """Exit status, and the first `max_bytes` of what it wrote to both outputs.

    None when it took too long; one that cannot even be killed, since it hangs in the kernel, is
    left behind, which is logged. An interrupt meanwhile (Ctrl-C) kills it too. Raises OSError when
    it does not start.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout_seconds)
        finally:
            if code is None:  # too late, or interrupted
                _kill(child)
        output.seek(0)
        return code, output.read(max_bytes).decode(errors="replace")


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        _log.warning("process %d does not die: it hangs in the kernel", child.pid)
