"""Eight disks under a training run: one gets slow, one dies, and it returns. The run never stops.

    sudo python examples/health_demo.py [--screenshots DIR]

Needs root: the disks are ext4 on loop devices. Uses examples/train.py, `hpstore agent` and
`hpstore status --watch` as an operator would, in processes of their own:

1. a 5+3 pool over eight disks, a trainer that reads every batch from it, an agent;
2. one disk is throttled: the trainer finds it slow and reads round it;
3. another disk dies: the agent evicts it, and makes up for its columns on the others;
4. the dead disk is back: its files are judged, it is on probation, it serves again.

After each step: what the terminal and the page show, and how the trainer fared. Ends with 1 when
something is not seen in time, or when the trainer stood still. What a killed demonstration leaves
(mounts, loop devices, limits) is removed by the next one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from demo import DemoFailed, newest_step, read_events
from onlookers import BROWSERS, Terminal, fetch, fetch_status, find_browser, photograph

import hpstore
from hpstore.config import Settings
from hpstore.testing.loopfs import LoopFilesystem, loop_mounts_problem
from hpstore.testing.scratch import mount_points, scratch_directory, sweep, throttle_problem
from hpstore.units import MIB

HERE = Path(__file__).resolve().parent
DEVICES, DATA, PARITY = 8, 5, 3
DISK_BYTES = 256 * MIB
PREFIX = "runs/gpt"
SEEN_SECONDS = 120.0  # within which each thing must be seen
GAP_SECONDS = 10.0  # between two steps of a trainer that has not stopped
SLOW_CALLS = 8  # a second; much less is no slow disk but one that hangs
AVOIDED = 0.5  # of the reads of the busiest disk, below which one is read round
COUNTED_SECONDS = 4.0  # for which reads are counted
LINES, COLUMNS = 36, 150
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HPSTORE = [sys.executable, "-c", "from hpstore.cli import main; main()"]
# an agent that waits seconds where it usually waits minutes; docs/health.md has what each means
AGENT = """
[agent]
tick_seconds = 1.0
probe_seconds = 2.0
survey_seconds = 5.0
heal_bytes_per_second = "4MiB"
scrub_days = 0.0
smart_hours = 0.0

[agent.policy]
removed_seconds = 3.0
grace_seconds = 5.0
return_seconds = 3.0
retry_seconds = 30.0
probation_seconds = 3.0
"""

# Any: JSON of the agent
Status = Mapping[str, Any]


class Node:
    """Eight disks with a pool over them, a trainer, an agent, and a terminal that shows them."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.toml, self._stack = root, root / "pool.toml", stack
        self.disks: list[LoopFilesystem] = []
        self.paths: list[str] = []
        for number in range(DEVICES):
            disk = stack.enter_context(LoopFilesystem(root, size_bytes=DISK_BYTES))
            path = root / f"disk{number}"
            path.symlink_to(disk.path)
            self.disks.append(disk)
            self.paths.append(str(path))
        settings = Settings(run_directory=str(root / "run"))
        hpstore.create(
            self.paths, data=DATA, parity=PARITY, config=self.toml, settings=settings
        ).close()
        self.toml.write_text(self.toml.read_text() + AGENT)
        self.events, self.url = root / "events.jsonl", ""
        self.dead = -1  # number of the disk that dies, once it is chosen
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Trainer, agent and terminal, as processes that do not outlive this one."""
        self._process(
            "trainer",
            [
                sys.executable,
                str(HERE / "train.py"),
                "--pool",
                str(self.toml),
                "--steps",
                "1000000",
                "--checkpoint-every",
                "200",
                "--batch-size",
                "8",
                "--length",
                "64",
                "--width",
                "128",
                "--layers",
                "2",
                "--cache",
                "0",
                "--prefix",
                PREFIX,
                "--events",
                str(self.events),
            ],
        )
        self.until("the first steps", lambda: len(self.step_times()) >= 20)
        self._process("agent", [*HPSTORE, "agent", str(self.toml), "--listen", "127.0.0.1:0"])
        self.until("the agent's page", self._listens)
        self.terminal = Terminal(
            dies_with_us([*HPSTORE, "status", str(self.toml), "--watch"]),
            environment(),
            columns=COLUMNS,
            lines=LINES,
        )
        self._stack.callback(self.terminal.close)

    def _process(self, name: str, command: list[str]) -> None:
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                dies_with_us(command), stdout=log, stderr=log, env=environment()
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)  # first: callbacks run backwards
        self._processes[name] = process

    def stop_trainer(self) -> None:
        """As an operator does; its newest checkpoint may still be on its way."""
        process = self._processes.pop("trainer")
        process.terminate()
        process.wait()

    def log(self, name: str) -> Path:
        """What a process said."""
        return self.root / f"{name}.log"

    def _listens(self) -> bool:
        found = re.search(r"metrics at (http\S+)", self.log("agent").read_text())
        self.url = found[1] if found else ""
        return bool(self.url) and bool(fetch(self.url))

    # --- looking ----------------------------------------------------------------------------

    def status(self) -> Status:
        """What the agent says."""
        found = fetch_status(self.url)
        if found is None:
            raise DemoFailed("the agent says nothing any more")
        return found

    def device(self, number: int) -> Status:
        """What it says of one disk."""
        rows = {device["url"]: device for device in self.status()["devices"]}
        found: Status = rows[self.paths[number]]
        return found

    def until(self, what: str, done: Callable[[], bool]) -> float:
        """Wait, for seconds that are returned; trainer and agent must go on meanwhile."""
        began = time.monotonic()
        while not done():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    tail = self.log(name).read_text()[-2000:]
                    raise DemoFailed(f"the {name} ended with {process.returncode}:\n{tail}")
            if time.monotonic() - began > SEEN_SECONDS:
                raise DemoFailed(f"not seen within {SEEN_SECONDS:.0f} s: {what}")
            time.sleep(0.2)
        return time.monotonic() - began

    def step_times(self) -> list[float]:
        """When each step of the trainer ended, on the machine's monotonic clock."""
        return [float(str(row["monotonic_seconds"])) for row in read_events(self.events, "step")]

    def reads_per_second(self) -> list[float]:
        """Of each disk, by the kernel's count."""
        before = [reads(disk) for disk in self.disks]
        time.sleep(COUNTED_SECONDS)
        after = [reads(disk) for disk in self.disks]
        return [(new - old) / COUNTED_SECONDS for old, new in zip(before, after, strict=True)]


def reads(disk: LoopFilesystem) -> int:
    """Reads that a disk has ended."""
    return int(
        Path(f"/sys/block/{os.path.basename(disk.loop)}/stat")
        .read_text(encoding="utf-8")
        .split()[0]
    )


def environment() -> dict[str, str]:
    """One thread for the trainer: others need a core, too."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def dies_with_us(command: list[str]) -> list[str]:
    """A command that is killed when this process dies, however it does."""
    return ["setpriv", "--pdeathsig", "KILL", *command]


class Show:
    """Prints each step: what is seen, and how the trainer fared; makes pictures of the page."""

    def __init__(self, node: Node, pictures: Path | None, *, soak_seconds: float) -> None:
        self._node, self._pictures, self._soak = node, pictures, soak_seconds
        self._browser = find_browser() if pictures is not None else None
        self._number = itertools.count(1)
        self._began = time.monotonic()
        self.longest_gap = 0.0

    def step(self, name: str, facts: list[str], words: str, pattern: str = "") -> None:
        """`words`, or a `pattern` that stands for them, must be on the terminal and on the page;
        then a while of training."""
        node, number = self._node, next(self._number)
        seen = re.compile(pattern or re.escape(words))
        node.until(f"{words!r} on the terminal", lambda: bool(seen.search(node.terminal.frame())))
        node.until(f"{words!r} on the page", lambda: bool(seen.search(fetch(node.url))))
        frame, page = node.terminal.frame(), fetch(node.url)
        if self._pictures is not None and self._browser is not None:
            self._keep(f"{number}-{name.replace(' ', '-')}", frame, self._browser)
        time.sleep(self._soak)
        print(f"\n=== {number}. {name}")
        for fact in facts:
            print(f"  - {fact}")
        print(f"  - the page ({node.url}, {len(page)} bytes) shows {words!r}, and the terminal:\n")
        print(frame, end="\n\n")
        print(f"  trainer: {self._progress()}", flush=True)

    def _keep(self, name: str, frame: str, browser: str) -> None:
        assert self._pictures is not None
        self._pictures.mkdir(parents=True, exist_ok=True)
        (self._pictures / f"{name}.txt").write_text(f"{frame}\n")
        profile = self._node.root / "browser"
        photograph(browser, self._node.url, self._pictures / f"{name}.png", profile=profile)

    def _progress(self) -> str:
        """Steps since the last time this was asked; DemoFailed when there was a pause in them."""
        times, now = self._node.step_times(), time.monotonic()
        mine = [at for at in times if at >= self._began]
        gap = max(
            later - earlier for earlier, later in itertools.pairwise([self._began, *mine, now])
        )
        seconds, self._began = now - self._began, now
        self.longest_gap = max(self.longest_gap, gap)
        if gap > GAP_SECONDS:
            raise DemoFailed(f"the trainer made no step for {gap:.1f} s")
        return (
            f"at step {len(times)}, {len(mine)} of them in the last {seconds:.0f} s; "
            f"the longest pause {gap:.2f} s"
        )


# --- what happens ---------------------------------------------------------------------------


def gets_slow(node: Node) -> tuple[list[str], int]:
    """Throttle a disk that is read from; the trainer notices and goes round it. Its number, too."""
    before = node.reads_per_second()
    # those of parity columns are not read yet
    number, node.dead = sorted(range(DEVICES), key=lambda n: -before[n])[:2]
    node.disks[number].throttle(0, calls_per_second=SLOW_CALLS)

    def noticed() -> bool:
        return node.device(number)["process_state"] in ("suspect", "sitout")

    seconds = node.until("a slow disk", noticed)
    reason = node.device(number)["process_reason"]
    after: list[float] = []

    def avoided() -> bool:
        after[:] = node.reads_per_second()
        return after[number] < AVOIDED * max(after)

    node.until("reads round a slow disk", avoided)
    return [
        f"disk{number} may do {SLOW_CALLS} calls a second now (blkio throttle)",
        f"the trainer has found it slow after {seconds:.1f} s: {reason}",
        f"reads a second: {rates(before)}; now {rates(after)}",
    ], number


def row(number: int, *states: str) -> str:
    """A pattern for a disk's row, on the terminal or the page, with one of these states: of the
    agent, or of a process of the node."""
    return rf"disk{number}(?: *│|</td>)[^\n]{{0,80}}?(?:{'|'.join(states)})"


def rates(reads_per_second: list[float]) -> str:
    """Of all disks, for people."""
    return ", ".join(f"disk{n} {rate:.0f}" for n, rate in enumerate(reads_per_second))


def dies(node: Node) -> list[str]:
    """Shut a disk's filesystem down; the agent gives it up and begins to make up for it."""
    node.disks[node.dead].shutdown()
    gone = node.until(
        "a dead disk", lambda: node.device(node.dead)["state"] in ("removed", "evicted")
    )

    def healing() -> bool:
        status = node.status()
        job = status["job"] or {"kind": "", "done": 0}
        evicted = node.device(node.dead)["state"] == "evicted"
        return evicted and bool(job["kind"] == "rebuild" and job["done"])

    seconds = gone + node.until("a rebuild", healing)
    return [
        f"disk{node.dead}: ioctl EXT4_IOC_SHUTDOWN, every call on it fails from now on",
        f"removed after {gone:.1f} s, evicted and being made up for after {seconds:.1f} s",
    ]


def is_made_up_for(node: Node) -> list[str]:
    """Wait until no object misses the dead disk."""

    def healed() -> bool:
        return node.device(node.dead)["pool_state"] == "healed" and whole(node.status())

    seconds = node.until("all objects whole without the dead disk", healed)
    status = node.status()
    return [
        f"whole again {seconds:.0f} s later: {status['condition']['losses_tolerated']} more disks "
        f"of {DEVICES - 1} may be lost",
        *(event["text"] for event in reversed(status["events"]) if "rebuilt" in event["text"]),
    ]


def returns(node: Node) -> list[str]:
    """Plug the dead disk in again; the agent takes it back."""
    node.disks[node.dead].replug()

    def back() -> bool:
        device = node.device(node.dead)
        online = device["state"] == device["pool_state"] == "online"
        return online and whole(node.status())

    seconds = node.until("the disk in use again", back)
    status = node.status()
    mine = node.device(node.dead)["device"]
    path = [
        said["becomes"]
        for said in reversed(status["decisions"])
        if said["device"] == mine and said["role"] == "agent"
    ]
    return [
        f"disk{node.dead} is plugged in again: another block device, mounted at the same place",
        f"in use again after {seconds:.0f} s: {' -> '.join(path)}",
        *(event["text"] for event in status["events"] if event["text"].startswith("readmit")),
    ]


def whole(status: Status) -> bool:
    """Whether every object has its full stripe, by the agent's last walk."""
    found = status["condition"]
    return found is not None and not found["degraded"] and not found["unreadable"]


def demonstrate(node: Node, show: Show) -> None:
    """Everything, in order; raises DemoFailed where it is not seen."""
    show.step("healthy", [f"{DATA}+{PARITY} on {DEVICES} disks"], "online")
    facts, number = gets_slow(node)
    show.step("slow", facts, f"disk{number} slow", row(number, "suspect", "sitout"))
    show.step("dead", dies(node), "evicted")
    show.step("healed", is_made_up_for(node), f"{PARITY} more devices may be lost")
    show.step("back", returns(node), f"disk{node.dead} online", row(node.dead, "online"))
    steps = len(node.step_times())
    node.stop_trainer()
    newest = newest_step(node.toml, PREFIX)
    if newest is None:
        raise DemoFailed("no checkpoint can be read")
    print(
        f"\nThe trainer made {steps} steps; the longest pause was {show.longest_gap:.2f} s. "
        f"Its checkpoint of step {newest} reads, every byte verified."
    )


@contextmanager
def orderly_end() -> Iterator[None]:
    """Signals end this as an exception does: everything is cleaned up."""

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def problem(pictures: Path | None) -> str | None:
    """Why this cannot be shown here, or None."""
    found = loop_mounts_problem() or throttle_problem()
    if found is None and shutil.which("setpriv") is None:
        return "needs setpriv (util-linux)"
    if found is None and pictures is not None and find_browser() is None:
        return f"--screenshots needs one of {', '.join(BROWSERS)}: apt-get install chromium"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--screenshots",
        type=Path,
        metavar="DIR",
        help="keep a picture of the page and the terminal's text after each step",
    )
    parser.add_argument("--quick", action="store_true", help="train little between the steps")
    options = parser.parse_args()
    if os.geteuid() == 0:
        for what in sweep():
            print(f"left by a killed run, removed: {what}")
    found = problem(options.screenshots)
    if found is not None:
        print(f"health_demo.py: {found}", file=sys.stderr)
        return 1
    root = Path(scratch_directory(tempfile.gettempdir()))
    try:
        with orderly_end(), ExitStack() as stack:
            node = Node(root, stack)
            node.start()
            soak_seconds = 1.0 if options.quick else 10.0
            demonstrate(node, Show(node, options.screenshots, soak_seconds=soak_seconds))
    except DemoFailed as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        if not any(point.startswith(f"{root}/") for point in mount_points()):
            shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
