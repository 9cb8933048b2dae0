"""Stopping other processes as SIGSTOP does, for tests.

kill(2) returns before a thread that runs has stopped: on a busy machine it may still answer what is
asked next. proc(5) has the states of threads.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_SECONDS = 10.0
_STOPPED = frozenset("TtZX")  # or ended


def stop_process(process: int) -> None:
    """SIGSTOP; on return none of its threads runs.

    Raises ProcessLookupError when it is gone, TimeoutError when a thread runs on: one that waits
    for a device, say.
    """
    os.kill(process, signal.SIGSTOP)
    until = time.monotonic() + _SECONDS
    while not all(state in _STOPPED for state in _states(process)):
        if time.monotonic() > until:
            raise TimeoutError(f"process {process} runs on {_SECONDS:.0f} s after SIGSTOP")
        time.sleep(0.001)


def _states(process: int) -> Iterator[str]:
    for task in Path(f"/proc/{process}/task").glob("*/stat"):
        try:
            yield task.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has ended
