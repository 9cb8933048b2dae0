"""Does a store compare before it writes? Some take If-None-Match and If-Match, and ignore them.

So it is raced: a store that looks and then writes lets two writers win in some rounds alone.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from hpstore.runtime.threads import WorkerThreads

RACERS = 8
ROUNDS = 8  # a server that looks and then writes was found by 4 racers in 1 round of 17


class SwapTrial(Protocol):
    """Records that a trial may make under names of its own. Thread-safe."""

    def read(self, name: str) -> tuple[bytes | None, str]:
        """Bytes and revision of a record; None and "" where there is none."""
        ...

    def swap(self, name: str, data: bytes, revision: str) -> bool:
        """Write a record if it is of this revision ("": if there is none); False if it is not."""
        ...

    def remove(self, name: str) -> None:
        """Remove a record, if there is one."""
        ...


def find_lapse(trial: SwapTrial, name: str) -> str:
    """Race swaps of records named `name`-0, -1 ... and remove them.

    Parameters
    ----------
    trial
        The store. Calls come from several threads.
    name
        Begins the names of the records. No other user of the store may have them.

    Returns
    -------
    str
        What the store has done that it must not do; "" where it compares before it writes.

    Raises
    ------
    HpstoreError
        What `trial` raises: the store did not answer, so nothing is known.
    """
    names = [f"{name}-{number}" for number in range(ROUNDS)]
    try:
        with WorkerThreads(RACERS, "hpstore-probe") as threads:
            for each in names:
                if lapse := _lapse_of(trial, threads, each):
                    return lapse
        return ""
    finally:
        for each in names:
            trial.remove(each)


def _lapse_of(trial: SwapTrial, threads: WorkerThreads, name: str) -> str:
    """As find_lapse, of one round."""
    lapse, stale = _race(trial, threads, name, "", "creates"), ""
    if not lapse:
        stale = trial.read(name)[1]
        lapse = _race(trial, threads, name, stale, "swaps of one revision")
    if not lapse and trial.swap(name, b"stale", stale):
        lapse = "a swap of a revision that was gone was taken"
    if not lapse and trial.swap(name, b"again", ""):
        lapse = "a record that was there was created"
    return lapse


def _race(trial: SwapTrial, threads: WorkerThreads, name: str, revision: str, what: str) -> str:
    """Several swaps at once: exactly one must be taken, and read back."""
    bodies = [secrets.token_hex(8).encode() for _ in range(RACERS)]  # equal ones have one ETag
    calls = [threads.submit(trial.swap, name, body, revision) for body in bodies]
    failed = [error for call in calls if (error := call.exception()) is not None]
    won = [n for n, call in enumerate(calls) if call.exception() is None and call.result()]
    if failed and not won:
        raise failed[0]
    if len(won) != 1:
        return f"{len(won) or 'none'} of {RACERS} {what} were taken"
    if trial.read(name)[0] != bodies[won[0]]:
        return f"what was read after {what} is not what was written"
    return ""
