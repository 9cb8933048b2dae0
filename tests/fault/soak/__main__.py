"""python -m tests.fault.soak --minutes 40 --seed 1: five kinds of processes, and faults. Root."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from hpstore.testing.loopfs import loop_mounts_problem
from hpstore.testing.scratch import scratch_directory, sweep, throttle_problem
from tests.fault.soak.rig import HEAL_SECONDS, Soak
from tests.fault.soak.schedule import make_schedule

JUDGE_SECONDS = 600.0  # to start, to judge and to clean up; then it is ended by force


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one run for each")
    parser.add_argument("--directory", default="/tmp", help="where images and logs are made")
    parser.add_argument("--reports", type=Path, default=Path("build/soak"))
    parser.add_argument("--schedule", action="store_true", help="print the schedule and end")
    words = parser.parse_args()
    seconds = words.minutes * 60
    if words.schedule:
        for seed in words.seed:
            print("\n".join(map(str, make_schedule(seed, seconds))))
        return 0
    problem = loop_mounts_problem() or throttle_problem()
    if problem is not None:
        print(f"a soak cannot be run here: {problem}", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return max(
        _run(seed, seconds, words.directory, words.reports.absolute()) for seed in words.seed
    )


def _run(seed: int, seconds: float, directory: str, reports: Path) -> int:
    """One soak; its logs are kept beside the report when something is wrong."""
    sweep()
    root = Path(scratch_directory(directory))
    soak = Soak(root, seed=seed, seconds=seconds, schedule=make_schedule(seed, seconds), note=note)
    limit = seconds + HEAL_SECONDS + JUDGE_SECONDS
    watchdog = threading.Timer(limit, lambda: os.kill(os.getpid(), signal.SIGTERM))
    watchdog.daemon = True
    watchdog.start()
    try:
        report = soak.run()
    finally:
        watchdog.cancel()
        _keep(root, reports / f"soak-{seed}")
    report.commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report.write(reports)
    print(report.text(), end="", flush=True)
    return 1 if report.problems else 0


def _keep(root: Path, where: Path) -> None:
    """Move journals and logs; the images are gone already."""
    where.mkdir(parents=True, exist_ok=True)
    for file in [*root.glob("*.jsonl"), *root.glob("*.log"), *root.glob("run/*/health.sqlite")]:
        (where / file.name).write_bytes(file.read_bytes())
        file.unlink()
    subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=False)


def note(text: str) -> None:
    """One line of what happens."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
