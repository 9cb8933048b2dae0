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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import analyze
from accounts import Result, merged, resume_of
from nets import SHAPES
from rows import METHODS, Row, rows_of
from storages import prepare
from train import read_attempt, write_json

import hpstore

HERE = Path(__file__).resolve().parent
ROW_SECONDS = 600.0  # a job that takes longer for a row has hung
POLL_SECONDS = 0.2
STEP_AFTER = 3  # a rank is killed so many steps after a checkpoint
LAST_LINES = 15  # of a job that failed
STOP_SECONDS = 45.0  # torchrun itself waits 30 s for its workers


class JobFailed(Exception):
    """A job did not end well after so many rows; its last lines are in the message."""

    def __init__(self, text: str, done: int) -> None:
        super().__init__(text)
        self.done = done


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("compare-results"), help="a folder")
    parser.add_argument("--quick", action="store_true", help="small data, one repeat")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="of every row; the median counts"
    )
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--vary", default=None, help="methods with all storages and checkpointers "
                        "(default: ddp, and gpipe unless --quick)")  # fmt: skip
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
        """All rows once: a job for those with as many processes, another one after a failure."""
        for servers in sorted({row.servers for row in rows}):
            left = [row for row in rows if row.servers == servers and row.name not in self.failed]
            while left:
                try:
                    done = self._job(left, str(number))
                except JobFailed as error:
                    done = min(error.done + 1, len(left))
                    self._give_up(left[done - 1].name, error)
                left = left[done:]

    def resume(self, row: Row, rng: random.Random) -> None:
        """Once more, killed and started anew; what that cost goes into the row's results file."""
        if row.name in self.failed:
            return
        every = self._options.checkpoint_every
        steps = self._options.samples * self._options.epochs // self._options.batch_size
        killed = (
            every * rng.randint(1, (steps - STEP_AFTER - 1) // every) + STEP_AFTER,
            rng.randrange(self._options.workers + row.servers),
        )
        try:
            self._job([row], "killed", killed)
        except JobFailed as error:
            self._give_up(f"{row.name}, killed", error)
            return
        directory = self._work / "runs" / f"{row.name}-killed"
        baseline = json.loads(self._path(row.name).read_text())
        found = json.loads((directory / "result.json").read_text())
        attempts = [read_attempt(directory, number) for number in range(2)]
        resume = resume_of(baseline, found, attempts, killed)
        write_json(self._path(row.name), {**baseline, "resume": resume})
        self._say(
            f"{row.name}, killed",
            f"rank {killed[1]} after step {killed[0]}, on from {resume['resumed_from']}: "
            f"lost {resume['samples_lost']}, repeated {resume['samples_repeated']}",
        )

    def _job(self, rows: Sequence[Row], run: str, killed: tuple[int, int] | None = None) -> int:
        """Run rows under torchrun, each kept when it is done; how many. Raises JobFailed."""
        options = self._options
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={options.workers + rows[0].servers}",
            f"--max-restarts={0 if killed is None else 1}", str(HERE / "train.py"),
            "--rows", ",".join(row.name for row in rows), "--suffix", run,
            "--directory", str(self._work),
        ]  # fmt: skip
        for option in ("model", "samples", "epochs", "batch_size", "micro_batches",
                       "checkpoint_every", "device", "seed"):  # fmt: skip
            command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
        if killed is not None:
            command += ["--kill-step", str(killed[0]), "--kill-rank", str(killed[1])]
        done = 0
        with job(command, self._work / f"log-{rows[0].name}-{run}.txt") as running:
            last = time.monotonic()
            while done < len(rows) and time.monotonic() < last + ROW_SECONDS:
                path = self._work / "runs" / f"{rows[done].name}-{run}" / "result.json"
                ended = running.code() is not None
                if path.exists():
                    if killed is None:
                        self._keep(json.loads(path.read_text()))
                    done, last = done + 1, time.monotonic()
                elif ended:
                    break
                else:
                    time.sleep(POLL_SECONDS)
            running.end(done, patient=done == len(rows))
        return done

    def _keep(self, result: Result) -> None:
        """Its results file, with the runs before."""
        runs = self._runs[result["row"]]
        runs.append(result)
        write_json(self._path(result["row"]), merged(runs))
        rate = result["summary"]["avg_throughput"]
        self._say(result["row"], f"{rate:8.1f} samples/s, run {len(runs)}")

    def _path(self, name: str) -> Path:
        out: Path = self._options.out
        return out / f"results_{name}.json"

    def _give_up(self, name: str, error: Exception) -> None:
        self.failed[name] = str(error)
        write_json(self._options.out / "failed.json", self.failed)
        self._say(name, f"FAILED: {error}")

    def _say(self, name: str, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {name:28s} {text}", flush=True)


class Running:
    """A job under way, in a process group of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        environment = {
            "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        self._log = log
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def code(self) -> int | None:
        return self._process.poll()

    def end(self, done: int, *, patient: bool) -> None:
        """Its end, which must be a good one. Raises JobFailed with its last lines."""
        try:
            code: int | str = self._process.wait(ROW_SECONDS if patient else 1.0)
        except subprocess.TimeoutExpired:
            self.stop()
            code = f"none within {ROW_SECONDS:.0f} s"
        if code != 0 or not patient:
            last = "\n".join(self._log.read_text().splitlines()[-LAST_LINES:])
            raise JobFailed(f"exit code {code}\n{last}", done)

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
            rng = random.Random(options.seed)
            for method in options.methods:
                runner.resume(Row(method=method), rng)
    return analyze.report(options.out)


if __name__ == "__main__":
    # a job has a session of its own: SIGTERM must reach it as Ctrl-C does
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(
            "run_all.py: interrupted; finished rows are kept, analyze.py makes a report of them"
        )
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"run_all.py: {error}")
