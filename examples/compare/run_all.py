"""Train the same model in eight ways, from four storages, with four checkpointers; then kill them.

    python examples/compare/run_all.py --quick                  # some minutes on two cores
    python examples/compare/run_all.py --repeats 3 --out results

Rows run under torchrun: two workers over gloo, and a server more for the parameter server. Then
each method is killed after a committed step and goes on. Each row leaves results_ROW.json;
analyze.py makes the table, the report and the plots of them. Exit code 1 when rows that must agree
do not, or one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import analyze
from accounts import Result, merged, resume_of
from nets import SHAPES
from rows import METHODS, OURS, Row, rows_of
from storages import prepare
from train import attempts_in, write_json

import hpstore
from hpstore.units import positive

HERE = Path(__file__).resolve().parent
ROW_SECONDS = 600.0  # a job that takes longer for a row has hung
POLL_SECONDS = 0.2
STEP_AFTER = 3  # a rank is killed so many steps after a checkpoint
LAST_LINES = 15  # of a job that failed
STOP_SECONDS = 45.0  # torchrun itself waits 30 s for its workers


class JobFailed(Exception):
    """A job did not end well; its last lines are in the message."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("compare-results"), help="a folder")
    parser.add_argument("--quick", action="store_true", help="small data, one repeat")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="of every row; the median counts"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument(
        "--vary",
        default=None,
        help="methods with all storages and checkpointers (default: ddp, and gpipe unless --quick)",
    )
    parser.add_argument(
        "--no-resume", action="store_true", help="leave out the kill-and-resume pass"
    )
    parser.add_argument("--model", choices=list(SHAPES), default=None)
    parser.add_argument("--samples", type=positive, default=None)
    parser.add_argument("--epochs", type=positive, default=None)
    parser.add_argument("--batch-size", type=positive, default=32, help="of all workers together")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--micro-batches", type=positive, default=None, help="default: --workers")
    parser.add_argument("--checkpoint-every", type=positive, default=5, help="steps")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="for pools and files (default: temporary)")
    options = parser.parse_args()
    options.model = options.model or ("tiny" if options.quick else "small")
    options.samples = options.samples or (512 if options.quick else 2048)
    options.epochs = options.epochs or (2 if options.quick else 3)
    options.repeats = 1 if options.quick else options.repeats
    options.micro_batches = options.micro_batches or options.workers
    options.methods = named(parser, options.methods)
    varied = options.vary if options.vary is not None else "ddp" if options.quick else "ddp,gpipe"
    options.vary = [name for name in named(parser, varied) if name in options.methods]
    check(parser, options)
    return options


def named(parser: argparse.ArgumentParser, names: str) -> list[str]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in METHODS:
            parser.error(f"no method is called {name!r}; there are {', '.join(METHODS)}")
    return wanted


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    batch = options.batch_size
    if options.samples % batch:
        parser.error(f"--samples must be a multiple of {batch}: the ledger wants whole batches")
    if batch % options.workers or batch % options.micro_batches:
        parser.error("--batch-size must be a multiple of --workers and of --micro-batches")
    if options.micro_batches < options.workers:
        parser.error("1F1B wants as many micro-batches as stages: raise --micro-batches")
    if options.samples * options.epochs // batch <= options.checkpoint_every + STEP_AFTER:
        parser.error("too few steps to be killed after a checkpoint: raise --samples or --epochs")
    if any(options.out.glob("results_*.json")):
        parser.error(f"{options.out} holds results already: take another folder with --out")


class Runner:
    """Starts jobs and keeps what they leave."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options, self._work = options, work
        self._runs: defaultdict[str, list[Result]] = defaultdict(list)
        self.failed: dict[str, str] = {}
        self._began = time.monotonic()

    def repetition(self, rows: Sequence[Row], number: int) -> None:
        """All rows once."""
        with closing(self._all(rows, str(number), {})) as results:
            for row, found in results:
                runs = self._runs[row.name]
                runs.append(found)
                write_json(self._path(row.name), merged(runs))
                rate = found["summary"]["avg_throughput"]
                self._say(row.name, f"{rate:8.1f} samples/s, run {len(runs)}")

    def resume(self, rows: Sequence[Row], rng: random.Random) -> None:
        """Methods with a checkpointer, each killed and started again; what that cost goes into the
        method's results file."""
        every = self._options.checkpoint_every
        steps = self._options.samples * self._options.epochs // self._options.batch_size
        kills = {
            row.name: (
                every * rng.randint(1, (steps - STEP_AFTER - 1) // every) + STEP_AFTER,
                rng.randrange(self._options.workers + row.servers),
            )
            for row in rows
        }
        with closing(self._all(rows, "killed", kills)) as results:
            for row, found in results:
                self._resumed(row, found, kills[row.name])

    def _resumed(self, row: Row, found: Result, killed: tuple[int, int]) -> None:
        attempts = attempts_in(self._work / "runs" / f"{row.name}-killed")
        path = self._path(Row(method=row.method).name)  # which did the same, unsaved and unkilled
        baseline = json.loads(path.read_text())
        resume = resume_of(baseline, found, attempts, killed)
        write_json(path, {**baseline, "resume": resume})
        self._say(
            f"{row.name}, killed",
            f"rank {killed[1]} after step {killed[0]}, on from {resume['resumed_from']}: "
            f"lost {resume['samples_lost']}, repeated {resume['samples_repeated']}",
        )

    def _all(
        self, rows: Sequence[Row], suffix: str, kills: Mapping[str, tuple[int, int]]
    ) -> Generator[tuple[Row, Result], None, None]:
        """Results as they come: of a job for those with as many processes, and another one after a
        row that failed.
        """
        for servers in sorted({row.servers for row in rows}):
            left = [row for row in rows if row.servers == servers and row.name not in self.failed]
            while left:
                done = 0
                try:
                    with closing(self._job(left, suffix, kills)) as results:
                        for row, found in results:
                            done += 1
                            yield row, found
                except JobFailed as error:
                    done = min(done + 1, len(left))
                    self._give_up(left[done - 1].name, f"{'killed: ' if kills else ''}{error}")
                left = left[done:]

    def _job(
        self, rows: Sequence[Row], suffix: str, kills: Mapping[str, tuple[int, int]]
    ) -> Generator[tuple[Row, Result], None, None]:
        """Run rows under torchrun, one after the other. Raises JobFailed."""
        options = self._options
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={options.workers + rows[0].servers}",
            f"--max-restarts={len(rows) if kills else 0}",
            str(HERE / "train.py"),
            "--rows",
            ",".join(row.name for row in rows),
            "--suffix",
            suffix,
            "--directory",
            str(self._work),
        ]
        for option in (
            "model",
            "samples",
            "epochs",
            "batch_size",
            "micro_batches",
            "checkpoint_every",
            "device",
            "seed",
        ):
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        if kills:
            command += ["--kills", ",".join("{}:{}".format(*kills[row.name]) for row in rows)]
        with job(command, self._work / f"log-{rows[0].name}-{suffix}.txt") as running:
            for row in rows:
                path = self._work / "runs" / f"{row.name}-{suffix}" / "result.json"
                running.wait_for(path)
                yield row, json.loads(path.read_text())
            running.end()

    def _path(self, name: str) -> Path:
        out: Path = self._options.out
        return out / f"results_{name}.json"

    def _give_up(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        write_json(self._options.out / "failed.json", self.failed)
        self._say(name, f"FAILED: {reason}")

    def _say(self, name: str, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {name:28s} {text}", flush=True)


class Running:
    """A job under way, in a process group of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        environment = {
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            **os.environ,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self._log = log
        with open(log, "w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, path: Path) -> None:
        """Until a file is there. Raises JobFailed when the job ends, or takes too long, before."""
        last = time.monotonic() + ROW_SECONDS
        while not path.exists():
            code = self._process.poll()
            if code is not None and not path.exists():
                self._fail(f"exit code {code}")
            if time.monotonic() > last:
                self._fail(f"nothing within {ROW_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Its end, which must be a good one. Raises JobFailed."""
        try:
            code = self._process.wait(ROW_SECONDS)
        except subprocess.TimeoutExpired:
            self._fail(f"no end within {ROW_SECONDS:.0f} s")
        if code != 0:
            self._fail(f"exit code {code}")

    def _fail(self, reason: str) -> NoReturn:
        last = "\n".join(self._log.read_text().splitlines()[-LAST_LINES:])
        raise JobFailed(f"{reason}\n{last}")

    def stop(self) -> None:
        """torchrun ends its workers, and is killed when that takes too long."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


@contextmanager
def job(command: Sequence[str], log: Path) -> Iterator[Running]:
    """A job that is gone afterwards, however this ends."""
    running = Running(command, log)
    try:
        yield running
    finally:
        running.stop()


@contextmanager
def workplace(directory: Path | None) -> Iterator[Path]:
    """A directory for pools and files, removed afterwards."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hpstore-compare-", dir=directory) as name:
        yield Path(name)


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    with workplace(options.directory) as work:
        prepare(work, options.samples, SHAPES[options.model][1], options.seed)
        runner = Runner(options, work)
        rows = rows_of(options.methods, options.vary)
        for number in range(options.repeats):
            runner.repetition(rows, number)
        if not options.no_resume:
            saved = [
                Row(method=method, checkpointer=OURS)
                for method in options.methods
                if Row(method=method).name not in runner.failed
            ]
            runner.resume(saved, random.Random(options.seed))
    return analyze.report(options.out)


if __name__ == "__main__":
    # a job has a session of its own: what ends this script must end it too, as Ctrl-C does
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(
            "run_all.py: interrupted; finished rows are kept, analyze.py makes a report of them"
        )
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"run_all.py: {error}")
