"""What runs while a device fails: a trainer that loads and saves, a reader that checks and times.

Both are processes of their own. They tell what they do by appending lines to files.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.errors import HpstoreError
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.pool import Pool
from hpstore.units import KIB
from tests.fault.common import forked, payload, poll

ROOT = Path(__file__).resolve().parents[3]
LENGTH, ROWS = 32, 400_000  # tokens a sample, samples
DATA_SET = f"python-stdlib-{LENGTH}"  # the name that examples/train.py looks for
PREFIX = "runs/gpt"
OBJECTS, OBJECT_BYTES, READ_BYTES = 24, 600 * KIB, 128 * KIB
PACE_SECONDS = 0.003  # between reads, so that the trainer gets a core
SEED = 20261122
SEEN = ("read_degraded_total", "column_mismatch_total", "column_read_error_total",
        "column_write_error_total")  # fmt: skip
PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a trainer runs and how often it saves."""

    steps: int
    every: int


def fill(pool: Pool) -> None:
    """A data set for the trainer, and objects for the reader."""
    rows = np.random.default_rng(SEED).integers(0, 256, (ROWS, LENGTH + 1), np.uint8)
    with DatasetWriter(pool, DATA_SET, {"tokens": Field("uint8", (LENGTH + 1,))}) as writer:
        writer.write_batch({"tokens": rows})
    for number in range(OBJECTS):
        pool.put(f"probe/{number}", payload(f"probe/{number}", OBJECT_BYTES))


def digests(pool: Pool) -> dict[int, str]:
    """By step, a digest of all tensors of a checkpoint; each is read and verified in full."""
    found = {}
    checkpointer = Checkpointer(pool, PREFIX, rng=False, warm=False)
    for step in checkpointer.steps():
        total = hashlib.blake2b(digest_size=12)
        for name, tensor in sorted(checkpointer.load(step).items()):
            total.update(name.encode())
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found[step] = total.hexdigest()
    return found


# --- trainers -------------------------------------------------------------------------------


class Trainer:
    """A training run as seen from outside: its events are JSON lines in a file."""

    def __init__(self, plan: Plan, events: Path) -> None:
        self.plan, self.events = plan, events

    def losses(self) -> dict[int, str]:
        """Loss by step, exactly. A step that was trained again must have given the same."""
        found: dict[int, str] = {}
        if not self.events.exists():
            return found
        for line in self.events.read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
            if event["event"] == "step":
                before = found.setdefault(event["step"], event["loss"])
                assert before == event["loss"], f"step {event['step']} gave another loss again"
        return found

    @property
    def step(self) -> int:
        """The newest step."""
        return max(self.losses(), default=0)

    def failure(self) -> str:
        """Why it ended badly; "" when it runs or ended well."""
        raise NotImplementedError

    def allow(self, step: int) -> None:
        """Let it train up to this step, if it waits for that."""

    def reach(self, step: int) -> None:
        """Wait until it has trained so far, or has ended."""
        self.allow(step)
        poll(PATIENCE, lambda: self.step >= min(step, self.plan.steps) or bool(self.failure()))

    def finish(self) -> str:
        """Let it train to the end; why it ended badly, or ""."""
        raise NotImplementedError


class ExampleTrainer(Trainer):
    """examples/train.py, as users start it; `launcher` may stand before the script."""

    def __init__(
        self, toml: Path, plan: Plan, events: Path, *options: str, launcher: tuple[str, ...] = ()
    ) -> None:
        super().__init__(plan, events)
        self._log = events.with_suffix(".log")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(ROOT / "examples/train.py"), "--pool", str(toml),
                 "--steps", str(plan.steps), "--checkpoint-every", str(plan.every),
                 "--length", str(LENGTH), "--batch-size", "4", "--prefix", PREFIX,
                 "--events", str(events), *options],
                env={**os.environ, "OMP_NUM_THREADS": "1",
                     "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])},
                stdout=log, stderr=log, cwd=events.parent,
            )  # fmt: skip

    def failure(self) -> str:
        code = self.process.poll()
        if code in (None, 0):
            return ""
        return f"the trainer ended with {code}: {self._log.read_text()[-400:].strip()}"

    def finish(self) -> str:
        self.process.wait(PATIENCE)
        return self.failure()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(PATIENCE)


@contextmanager
def example_trainer(toml: Path, plan: Plan, events: Path) -> Iterator[Trainer]:
    """A run of examples/train.py that does not outlive the block."""
    trainer = ExampleTrainer(toml, plan, events)
    try:
        yield trainer
    finally:
        trainer.kill()


class LoopTrainer(Trainer):
    """Loads and saves like a trainer, computes next to nothing; each step waits to be allowed."""

    def __init__(self, plan: Plan, events: Path, pid: int, gate: int) -> None:
        super().__init__(plan, events)
        self._pid, self._gate, self._allowed = pid, gate, 0
        self._status: int | None = None

    def failure(self) -> str:
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return f"the loop ended with {self._status}" if self._status else ""

    def allow(self, step: int) -> None:
        more = min(step, self.plan.steps) - self._allowed
        if more > 0:
            os.write(self._gate, b"x" * more)
            self._allowed += more

    def finish(self) -> str:
        self.allow(self.plan.steps)
        poll(PATIENCE, lambda: self._ended())
        return self.failure()

    def _ended(self) -> bool:
        return bool(self.failure()) or self._status == 0


@contextmanager
def loop_trainer(toml: Path, plan: Plan, events: Path) -> Iterator[Trainer]:
    """A loop in a forked process that does not outlive the block."""
    reading, writing = os.pipe()

    def child() -> None:
        os.close(writing)
        loop(toml, plan, events, reading)

    with forked(child) as pid:
        os.close(reading)
        try:
            yield LoopTrainer(plan, events, pid, writing)
        finally:
            os.close(writing)


def loop(toml: Path, plan: Plan, events: Path, gate: int) -> None:
    """Load a batch, fold it into a state, save now and then; all of it reproducible."""
    torch.set_num_threads(1)
    with hpstore.open(toml) as pool, events.open("a") as out:
        state = {"w": torch.zeros(200_000), "step": torch.zeros(1)}
        loader = DataLoader(Dataset(pool, DATA_SET), batch_size=64, shuffle=True, cache=0)
        with Checkpointer(pool, PREFIX, keep_last=3, rng=False) as checkpointer:
            batches = iter(loader)
            for step in range(1, plan.steps + 1):
                if not os.read(gate, 1):
                    return
                values = next(batches)["tokens"].float()
                state["w"].mul_(0.9).add_(values.mean()).add_(torch.linspace(0, 1, 200_000))
                loss = float(values.sum() + state["w"].sum())
                out.write(json.dumps({"event": "step", "step": step, "loss": loss.hex()}) + "\n")
                out.flush()
                if step % plan.every == 0:
                    checkpointer.save(step, state)
            checkpointer.wait()
        loader.close()


# --- the reader -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Read:
    """One read of the reader."""

    at: float  # when it ended, on the monotonic clock of the machine
    seconds: float
    problem: str


class Reader:
    """The reader's log, from outside."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def reads(self, since: float = 0.0, until: float = float("inf")) -> list[Read]:
        """Those that ended in a span of time."""
        found = []
        for line in self._lines("R"):
            at, seconds, problem = line.split(" ", 2)
            read = Read(at=float(at), seconds=float(seconds), problem=problem)
            if since <= read.at <= until:
                found.append(read)
        return found

    def counters(self) -> Mapping[str, float]:
        """What its pool has counted so far."""
        lines = self._lines("C")
        found: dict[str, float] = json.loads(lines[-1]) if lines else {}
        return found

    def await_reads(self, count: int) -> None:
        """Wait for so many more."""
        before = len(self.reads())
        poll(PATIENCE, lambda: len(self.reads()) >= before + count)

    def _lines(self, kind: str) -> list[str]:
        if not self._log.exists():
            return []
        lines = self._log.read_text().split("\n")[:-1]
        return [line[2:] for line in lines if line[0] == kind]


@contextmanager
def reader(toml: Path, log: Path) -> Iterator[Reader]:
    """Reads on in a forked process until the block ends."""
    with forked(lambda: read_on(toml, log)) as pid:
        try:
            yield Reader(log)
        finally:
            os.kill(pid, signal.SIGKILL)


def read_on(toml: Path, log: Path) -> None:
    """Read random ranges of the objects, compare every byte, write down how long it took."""
    expected = {n: payload(f"probe/{n}", OBJECT_BYTES) for n in range(OBJECTS)}
    rng, last = random.Random(SEED), ""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with hpstore.open(toml) as pool:
        while True:
            number, start = rng.randrange(OBJECTS), rng.randrange(OBJECT_BYTES - READ_BYTES)
            began, problem = time.monotonic(), ""
            try:
                found = pool.get(f"probe/{number}", start, start + READ_BYTES)
                if found != expected[number][start : start + READ_BYTES]:
                    problem = f"wrong bytes of probe/{number}"
            except (HpstoreError, OSError) as error:
                problem = f"{type(error).__name__}: {error}".replace("\n", " ")
            at = time.monotonic()
            os.write(fd, f"R {at:.6f} {at - began:.6f} {problem}\n".encode())
            counted = json.dumps({name: pool.metrics.value(name) for name in SEEN})
            if counted != last:
                last = counted
                os.write(fd, f"C {counted}\n".encode())
            time.sleep(PACE_SECONDS)


__all__ = ["DATA_SET", "LENGTH", "OBJECTS", "OBJECT_BYTES", "PREFIX", "ROOT", "ROWS",
           "ExampleTrainer", "LoopTrainer", "Plan", "Read", "Reader", "Trainer", "digests",
           "example_trainer", "fill", "loop_trainer", "reader"]  # fmt: skip
