"""python -m tests.fault.kills --kills 2000: kill processes at random, say what it found."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from tests.fault.kills.runner import KillLoop

SEED = 20261117


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="ends it sooner")
    parser.add_argument("--directory", help="where the pool is made; a temporary one unless given")
    parser.add_argument("--report", type=Path, default=Path("build/kills.json"))
    words = parser.parse_args()
    logging.disable(logging.WARNING)

    def note(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="hpkills-", dir=words.directory) as root:
        loop = KillLoop(Path(root), seed=words.seed, note=note)
        report = loop.run(words.kills, seconds=words.minutes * 60)
    words.report.parent.mkdir(parents=True, exist_ok=True)
    report.write(words.report)
    print(report.text(), end="")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
