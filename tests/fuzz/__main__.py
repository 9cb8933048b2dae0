"""Runs targets for many inputs, each in a process of its own.

    python -m tests.fuzz --inputs 100000                 all targets
    python -m tests.fuzz --targets tar npz --seed 7      some

tests/fuzz/guided.py does so by coverage.
A finding is written to build/fuzz/<target>-<digest>; put it into tests/fuzz/corpus/<target>/ with
its fix. The exit code is 1 when there was one.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import mmap
import os
import signal
import struct
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.engine import Finding, Target, bounded, mutants, take
from tests.fuzz.mutation import MOST_BYTES
from tests.fuzz.targets import TARGETS

FOUND = Path("build/fuzz")
POLL_SECONDS = 0.05
SILENT_POLLS = 2_400  # without a new input: it hangs where no signal reaches Python. Not by the
# clock: a run that was stopped, or a machine that slept, is no finding
_HEAD = struct.Struct("<QQ")  # number of the input, its bytes
_MOST_FINDINGS = 10


class Progress:
    """Memory that a process shares with the one that watches it: the input that runs now."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + 2 * MOST_BYTES)

    def note(self, number: int, data: bytes) -> None:
        kept = data[: 2 * MOST_BYTES]
        self._memory[: _HEAD.size] = _HEAD.pack(number, len(kept))
        self._memory[_HEAD.size : _HEAD.size + len(kept)] = kept

    def seen(self) -> tuple[int, bytes]:
        number, size = _HEAD.unpack_from(self._memory)
        return number, self._memory[_HEAD.size : _HEAD.size + size]


def run(target: Target, inputs: int, seed: int, first: int, progress: Progress) -> int:
    """In a process of its own: the inputs from `first` on; how many were findings."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = 0
    with bounded():
        if not first:
            for data in target.inputs():
                found += _taken(target, 0, data, progress)
        made = mutants(target, seed, first)
        for number in range(first, inputs):
            found += _taken(target, number, next(made), progress)
            if found >= _MOST_FINDINGS:
                break
    progress.note(number + 1 if inputs > first else first, b"")
    return found


def _taken(target: Target, number: int, data: bytes, progress: Progress) -> int:
    progress.note(number, data)
    try:
        take(target, data)
    except Finding as finding:
        keep(target, data, str(finding))
        return 1
    return 0


def keep(target: Target, data: bytes, what: str) -> None:
    """Write an input down, and say what it did."""
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{target.name}-{hashlib.blake2b(data, digest_size=6).hexdigest()}"
    path.write_bytes(data)
    print(f"{path}: {what}", flush=True)


def watched(target: Target, inputs: int, seed: int) -> tuple[int, int]:
    """Run a target in children; how many inputs it took, and how many were findings. A child that
    dies or is silent is a finding, and the next child goes on behind it."""
    progress, first, findings = Progress(), 0, 0
    while first < inputs and findings < _MOST_FINDINGS:
        pid = os.fork()
        if not pid:
            os._exit(min(run(target, inputs, seed, first, progress), 100))
        status = _wait(pid, progress)
        number, data = progress.seen()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) <= 100:
            return number, findings + os.WEXITSTATUS(status)
        keep(target, data, f"{target.name}: the process ended with status {status}")
        first, findings = number + 1, findings + 1
    return first, findings


def _wait(pid: int, progress: Progress) -> int:
    last, polls = -1, 0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        number, _ = progress.seen()
        if number != last:
            last, polls = number, 0
        elif (polls := polls + 1) > SILENT_POLLS:
            os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=20_000, help="of each target")
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFFFF)
    chosen = parser.parse_args(arguments)
    total = 0
    for name in chosen.targets:
        began = time.monotonic()
        taken, findings = watched(TARGETS[name], chosen.inputs, chosen.seed)
        seconds = time.monotonic() - began
        print(
            f"{name:<24} {taken:>9} inputs {findings:>3} findings {seconds:8.1f} s "
            f"(seed {chosen.seed})",
            flush=True,
        )
        total += findings
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
