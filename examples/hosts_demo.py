"""One pool over three hosts under a training run; each host fails in turn.

Run by `make hosts-demo`. Needs root, and what docs/hosts.md names. The hosts a, b and c are network
namespaces on a bridge, with two disks (directories), `hpstore host serve` under mutual TLS and a
member of etcd each:

1. a 4+2 pool over the six disks, its registers in etcd; examples/train.py runs on host a, and
   beside it the same run on a pool of one machine, which nothing happens to;
2. host b is killed while a checkpoint is being written; later it is back, its clock an hour behind;
3. host c is stopped for a minute (every process: its kernel answers, nothing else does);
4. host a is killed with the trainer on it, while a checkpoint is being written;
5. the run is resumed on host c, and all losses are compared with the other run's, bit by bit;
6. a is back, the pool is rebuilt and scrubbed clean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo import DemoFailed, losses, newest_step
from rich.console import Console
from rich.table import Table

import hpstore
from hpstore.pool.pool import Pool
from hpstore.testing.host_cluster import HostCluster, cluster_problem
from hpstore.testing.scratch import owner_is_dead, scratch_directory, sweep

HERE = Path(__file__).resolve().parent
PREFIX = "runs/hosts"
MODEL = ("--length", "32", "--batch-size", "4", "--width", "128", "--layers", "2")
EVERY = 20  # steps between checkpoints
MORE = 30  # steps of the resumed run
SEEN_SECONDS = 240.0  # within which each thing must be seen
BEHIND_SECONDS = 3600
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OVERWRITE = """
import sys, time, hpstore
with hpstore.open(sys.argv[1]) as pool:
    found = pool.stat("notes/who")
    pool.put("notes/who", b"b", if_version=found.version)
print(time.time())
"""
console = Console()


class Events:
    """What a trainer has written so far; each line is read once."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0
        self.steps: dict[int, float] = {}  # when each ended, on the machine's monotonic clock
        self.staged: list[int] = []  # steps of saves that were begun

    def read(self) -> Events:
        """What came since the last time, too."""
        if not self.path.exists():
            return self
        with self.path.open("rb") as file:
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            row = json.loads(line)
            if row["event"] == "step":
                self.steps[row["step"]] = row["monotonic_seconds"]
            elif row["event"] == "staged":
                self.staged.append(row["step"])
        return self

    def last(self) -> int:
        """The newest step."""
        return max(self.read().steps, default=0)


class Show:
    """The cluster, the two runs, and the table of what happened."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack, self.began = root, stack, time.monotonic()
        self.cluster = stack.enter_context(HostCluster(root, etcd=True, tls="mutual"))
        self.table = Table(title="what happened", title_justify="left")
        for name in ("at", "event", "result"):
            self.table.add_column(name)
        self.events, self.single = Events(root / "hosts.jsonl"), Events(root / "single.jsonl")
        self.trainer: subprocess.Popen[bytes] | None = None

    def say(self, event: str, result: str) -> None:
        """A row, now."""
        seconds = time.monotonic() - self.began
        console.print(f"[bold]{seconds:4.0f} s[/] {event}: {result}")
        self.table.add_row(f"{seconds:.0f} s", event, result)

    def until(self, what: str, done: Callable[[], bool], *, every: float = 0.1) -> None:
        """Look `every` so many seconds until it is done, while the trainer must go on."""
        began = time.monotonic()
        while not done():
            if self.trainer is not None and self.trainer.poll() is not None:
                raise DemoFailed(f"the trainer ended: {self.log().read_text()[-2000:]}")
            if time.monotonic() - began > SEEN_SECONDS:
                raise DemoFailed(f"not seen within {SEEN_SECONDS:.0f} s: {what}")
            time.sleep(every)

    def log(self) -> Path:
        """What the trainers print."""
        return self.root / "trainer.log"

    def _words(self, pool: Path, events: Events, *extra: str) -> list[str]:
        words = [sys.executable, str(HERE / "train.py"), "--pool", str(pool), "--prefix", PREFIX]
        words += ["--checkpoint-every", str(EVERY), "--events", str(events.path), *MODEL]
        return [*words, *extra]

    def train_on(self, host: str, steps: int, *extra: str) -> subprocess.Popen[bytes]:
        """Start the run on a host; every batch is read from the hosts."""
        file = self.cluster.settings_file(host)
        words = self._words(file, self.events, "--steps", str(steps), "--cache", "0", *extra)
        with self.log().open("ab") as log:
            return self.cluster.popen(host, words, stdout=log, stderr=log, env=one_thread())

    def train_beside(self) -> None:
        """Start the same run on a pool of six directories of this machine."""
        file = self.root / "single.toml"
        disks = [self.root / f"single{number}" for number in range(6)]
        hpstore.create(disks, data=4, parity=2, config=file).close()
        words = self._words(file, self.single, "--steps", "1000000")
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one_thread()},
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def newest(self) -> int | None:
        """The newest step that is committed."""
        return newest_step(self.cluster.settings_file(), PREFIX)

    def longest_pause(self, since: float) -> float:
        """Of the trainer since then, in seconds."""
        times = [
            since,
            *(at for at in self.events.read().steps.values() if at > since),
            time.monotonic(),
        ]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def in_mid_save(self, act: Callable[[], None]) -> int:
        """Do something the moment the next save is staged, which is then being written; its
        step."""
        seen = len(self.events.read().staged)
        self.until("a save", lambda: len(self.events.read().staged) > seen, every=0.002)
        act()
        return self.events.staged[seen]


def one_thread() -> dict[str, str]:
    """With two, on cores that others use, sums were seen to differ from run to run."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def b_dies_and_is_back(show: Show, pool: Pool) -> None:
    """In mid-save; the save commits without it. It has missed things, which are made up for."""
    began = time.monotonic()
    step = show.in_mid_save(lambda: show.cluster.kill("b"))
    show.until("the next checkpoint", lambda: (show.newest() or 0) >= step)
    show.until("more steps", lambda: show.events.last() >= step + EVERY)
    pause = show.longest_pause(began)
    show.say("b killed in mid-save", f"step {step} is committed; longest pause {pause:.1f} s")
    pool.put("notes/who", b"a")
    show.cluster.skew("b", -BEHIND_SECONDS)
    show.cluster.start("b")
    words = [sys.executable, "-c", OVERWRITE, str(show.cluster.settings_file("b"))]
    child = show.cluster.popen("b", words, stdout=subprocess.PIPE)
    late = time.time() - float(child.communicate()[0] or "nan")
    if child.returncode or bytes(pool.get("notes/who")) != b"b" or not late > BEHIND_SECONDS / 2:
        raise DemoFailed("what b has put by its older clock is not the newest")
    healed = pool.rebuild()
    show.say(
        "b back, clock 1 h behind",
        f"its put over an earlier one is the newest; {healed.rebuilt + healed.relaid} objects "
        "rebuilt",
    )


def c_is_stopped(show: Show, pool: Pool, seconds: float) -> None:
    """The run goes on, and commits; then c goes on, too."""
    began, before = time.monotonic(), show.events.last()
    show.cluster.stop("c")
    show.until("a minute", lambda: time.monotonic() - began > seconds)
    newest, steps = show.newest() or 0, show.events.last() - before
    pause = show.longest_pause(began)
    show.cluster.go_on("c")
    if newest <= before + EVERY:
        raise DemoFailed(f"c stopped: no checkpoint after {newest}, at step {before + steps}")
    show.say(
        f"c stopped for {seconds:.0f} s",
        f"{steps} steps, step {newest} committed; longest pause {pause:.1f} s",
    )
    healed = pool.rebuild()
    show.say("c goes on", f"{healed.rebuilt + healed.relaid} objects rebuilt")


def a_dies(show: Show) -> None:
    """With the trainer, in mid-save; the run is resumed on c, to some steps more."""
    trainer, show.trainer = show.trainer, None
    assert trainer is not None
    step = show.in_mid_save(lambda: show.cluster.kill("a"))
    trainer.wait()
    newest = show.newest()
    if newest not in (step - EVERY, step):
        raise DemoFailed(f"a killed in the save of step {step}: the newest is {newest}")
    show.say("a killed in mid-save", f"of step {step}; the newest committed is {newest}")
    before = losses(show.events.path)
    show.events = Events(show.root / "resumed.jsonl")
    last = newest + MORE
    if show.train_on("c", last, "--resume").wait() != 0:
        raise DemoFailed(f"the run does not resume on c: {show.log().read_text()[-2000:]}")
    after = losses(show.events.path)
    show.say("resumed on c", f"from step {min(after) - 1} to {last}")
    show.until("the other run", lambda: show.single.last() >= last)
    whole, joined = losses(show.single.path), {**before, **after}
    differ = [n for n in range(1, last + 1) if joined.get(n) != whole[n]]
    if differ or min(after) != newest + 1:
        raise DemoFailed(f"the losses differ from the undisturbed run's at steps {differ[:5]}")
    again = sum(before.get(n) == after[n] for n in after if n in before)
    show.say(
        "losses",
        f"{last} steps bit-identical to the undisturbed run, {again} of them computed on a and c",
    )


def demonstrate(show: Show, minute: float) -> Table:
    """Everything, in order; raises DemoFailed where it does not hold."""
    show.cluster.up()
    with show.cluster.create(data=4, parity=2) as pool:
        show.say("pool", "4+2 over a, b, c with two disks each; mutual TLS; registers in etcd")
        show.train_beside()
        show.trainer = show.train_on("a", 1_000_000)
        show.until("the second checkpoint", lambda: show.events.last() > 2 * EVERY)
        show.say("training on a", f"step {show.events.last()}, a checkpoint every {EVERY} steps")
        b_dies_and_is_back(show, pool)
        c_is_stopped(show, pool, minute)
        a_dies(show)
        show.cluster.start("a")
        healed = pool.rebuild(everything=True)
        scrubbed, status = pool.scrub(), pool.status()
        if not scrubbed.clean or healed.unreadable or status.losses_tolerated < 2:
            raise DemoFailed(f"not healed: {healed}, {scrubbed}")
        show.say("a back, rebuild, scrub", f"clean; {status.losses_tolerated} losses tolerated")
    return show.table


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


def sweep_directories() -> None:
    """What demonstrations have left that were killed."""
    sweep()
    for path in Path(tempfile.gettempdir()).glob("hpfault-*"):
        if owner_is_dead(str(path)):
            shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pause", type=float, default=60.0, help="seconds for which c is stopped")
    options = parser.parse_args()
    lack = cluster_problem(etcd=True, clocks=True, tls=True)
    if lack is not None:
        console.print(f"[bold red]hosts demo:[/] {lack}")
        return 1
    logging.getLogger("hpstore").setLevel(logging.ERROR)  # that hosts are away is the point
    with orderly_end():  # from here on nothing is left, also where it is ended at once
        try:
            sweep_directories()
            root = Path(scratch_directory(tempfile.gettempdir()))
            with ExitStack() as stack:
                show = Show(root, stack)
                console.print(demonstrate(show, options.pause))
                console.print(f"{time.monotonic() - show.began:.0f} s in all")
        except DemoFailed as error:
            console.print(f"[bold red]hosts demo failed:[/] {error}")
            return 1
        finally:  # by its name: it may be ended while it is made
            for path in Path(tempfile.gettempdir()).glob(f"hpfault-{os.getpid()}-*"):
                shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
