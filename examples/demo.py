"""The main job, watched: train, die in mid-save, lose two disks, resume, heal.

Run by `make demo`. Uses examples/train.py as a user would, in processes of its own:

1. a 4+2 pool over six directories;
2. a run that nobody disturbs, for comparison;
3. the same run again, killed with SIGKILL while a checkpoint is being written;
4. two of the six directories deleted;
5. the run resumed on what is left, and its losses compared with the undisturbed run's, bit by bit;
6. the lost devices evicted, the pool rebuilt and scrubbed clean.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import hpstore
from hpstore.checkpoint import Checkpointer

STEPS, EVERY, KILL_AT = 60, 10, 40
HERE = Path(__file__).resolve().parent
console = Console()


class DemoFailed(Exception):
    """The demonstration did not show what it is for."""


def trainer(pool: Path, prefix: str, events: Path, *extra: str) -> subprocess.Popen[bytes]:
    """Start examples/train.py; its lines go to our output."""
    command = [
        sys.executable,
        str(HERE / "train.py"),
        "--pool",
        str(pool),
        "--prefix",
        prefix,
        "--steps",
        str(STEPS),
        "--checkpoint-every",
        str(EVERY),
        "--events",
        str(events),
        *extra,
    ]
    # one thread: with two, on cores that others use, sums were seen to differ from run to run
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)


def run_whole(pool: Path, prefix: str, events: Path, *extra: str) -> None:
    """Run a training to its end."""
    if trainer(pool, prefix, events, *extra).wait() != 0:
        raise DemoFailed(f"the training run under {prefix} failed")


def read_events(path: Path, kind: str) -> list[dict[str, object]]:
    """Events of one kind, complete lines only."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["event"] == kind]


def losses(path: Path) -> dict[int, str]:
    """Loss by step, as exact hexadecimal floats."""
    return {int(str(row["step"])): str(row["loss"]) for row in read_events(path, "step")}


def kill_in_mid_save(pool: Path, prefix: str, events: Path) -> None:
    """Start a run and SIGKILL it the moment the save of step KILL_AT is staged."""
    process = trainer(pool, prefix, events)
    while process.poll() is None:
        if any(row["step"] == KILL_AT for row in read_events(events, "staged")):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    if process.wait() != -signal.SIGKILL:
        raise DemoFailed("the run ended before it could be killed")


def newest_step(pool: Path, prefix: str) -> int | None:
    with hpstore.open(pool, read_only=True) as opened, Checkpointer(opened, prefix) as found:
        return found.latest_valid()


def demonstrate(root: Path) -> Table:
    """Everything, in order; raises DemoFailed where it does not hold."""
    pool, rows = root / "pool.toml", Table(title="what happened", title_justify="left")
    rows.add_column("event")
    rows.add_column("result")
    disks = [root / f"disk{i}" for i in range(6)]
    hpstore.create(disks, data=4, parity=2, config=pool).close()
    rows.add_row("pool", "4+2 over six directories")

    began = time.perf_counter()
    console.print("[bold]1/4[/] a run that nobody disturbs ...")
    run_whole(pool, "runs/whole", root / "whole.jsonl")
    whole = losses(root / "whole.jsonl")
    first, last = float.fromhex(whole[1]), float.fromhex(whole[STEPS])
    if not last < first:
        raise DemoFailed(f"the loss did not fall: {first} to {last}")
    done = read_events(root / "whole.jsonl", "done")[0]
    rows.add_row("undisturbed run", f"{STEPS} steps, loss {first:.3f} to {last:.3f}")
    saves = STEPS // EVERY
    stall, wait = float(str(done["stall_seconds"])), float(str(done["wait_seconds"]))
    rows.add_row("checkpoint stall", f"{1e3 * stall / saves:.0f} ms a save, {saves} saves")
    rows.add_row("data wait", f"{wait:.2f} s in {float(str(done['seconds'])):.1f} s of training")

    console.print("[bold]2/4[/] the same run, killed while it writes a checkpoint ...")
    kill_in_mid_save(pool, "runs/killed", root / "killed.jsonl")
    step = newest_step(pool, "runs/killed")
    rows.add_row("SIGKILL in mid-save", f"save of step {KILL_AT} staged; newest committed: {step}")
    if step not in (KILL_AT - EVERY, KILL_AT):
        raise DemoFailed(f"the newest checkpoint is of step {step}")

    for disk in (disks[1], disks[4]):
        shutil.rmtree(disk)
    rows.add_row("two disks deleted", f"{disks[1].name}, {disks[4].name}")

    console.print("[bold]3/4[/] resumed on four of six disks ...")
    run_whole(pool, "runs/killed", root / "resumed.jsonl", "--resume")
    resumed = losses(root / "resumed.jsonl")
    joined = {**losses(root / "killed.jsonl"), **resumed}
    differ = [s for s in whole if joined.get(s) != whole[s]]
    if differ or min(resumed) != step + 1:
        raise DemoFailed(f"the resumed run differs from the whole one at steps {differ[:5]}")
    rows.add_row("resumed from", f"step {step}; {len(resumed)} steps, all losses bit-identical")

    console.print("[bold]4/4[/] evict, rebuild, scrub ...")
    with hpstore.open(pool) as opened:
        for disk in (disks[1], disks[4]):
            opened.evict(str(disk))
        healed = opened.rebuild(everything=True)  # its runs are over: no save replaces a step
        scrubbed = opened.scrub()
        status = opened.status()
    if not scrubbed.clean or healed.unreadable or status.losses_tolerated < 2:
        raise DemoFailed(f"not healed: {healed}, {scrubbed}")
    rows.add_row("rebuild", f"{healed.relaid} objects restriped, {healed.rebuilt} rebuilt")
    rows.add_row("scrub", f"clean; {status.losses_tolerated} more losses tolerated")
    rows.add_row("time", f"{time.perf_counter() - began:.0f} s")
    return rows


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="hpstore-demo-"))
    try:
        console.print(demonstrate(root))
    except DemoFailed as error:
        console.print(f"[bold red]demo failed:[/] {error}")
        return 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
