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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import hpstore
from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.errors import HpstoreError
from hpstore.health.detect.verdicts import HealthState
from hpstore.loaders import DataLoader, Dataset, DatasetWriter, Field
from hpstore.pool.pool import Pool
from hpstore.runtime.clock import SystemClock
from hpstore.units import KIB
from tests.fault.common import forked, payload, poll

ROOT = Path(__file__).resolve().parents[3]
LENGTH, ROWS = 32, 400_000  # tokens a sample, samples
DATA_SET = f"python-stdlib-{LENGTH}"  # the name that examples/train.py looks for
PREFIX = "runs/gpt"
OBJECTS, OBJECT_BYTES, READ_BYTES = 24, 600 * KIB, 128 * KIB
PACE_SECONDS = 0.003  # between reads, so that the trainer gets a core
SEED = 20261122
PROBE, STILL = "probe", "still"  # prefixes of objects: those that are read, those at rest
DECIDED = "health_decision_total"
SEEN = ("column_mismatch_total", "column_read_error_total", DECIDED)
PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long a trainer runs and how often it saves."""

    steps: int
    every: int


def fill(pool: Pool) -> None:
    """A data set for the trainer, objects for the reader, others that nobody reads meanwhile."""
    rows = np.random.default_rng(SEED).integers(0, 256, (ROWS, LENGTH + 1), np.uint8)
    with DatasetWriter(pool, DATA_SET, {"tokens": Field("uint8", (LENGTH + 1,))}) as writer:
        writer.write_batch({"tokens": rows})
    for number in range(OBJECTS):
        for key in (f"{PROBE}/{number}", f"{STILL}/{number}"):
            pool.put(key, payload(key, OBJECT_BYTES))


def digests(pool: Pool) -> dict[int, str]:
    """By step, a digest of all tensors of a checkpoint; each is read and verified in full."""
    found = {}
    checkpointer = Checkpointer(pool, PREFIX, rng=False, save=SaveOptions(warm=False))
    for step in checkpointer.steps():
        total = hashlib.blake2b(digest_size=12)
        for name, tensor in sorted(checkpointer.load(step).items()):
            total.update(name.encode())
            total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found[step] = total.hexdigest()
    return found


# --- trainers -------------------------------------------------------------------------------


class Gate:
    """Lets a trainer of another process through, step by step: a byte a step."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self._allowed = 0

    def allow(self, step: int) -> None:
        """Up to this step. Whether the trainer is still there shows in its failure()."""
        more = step - self._allowed
        if more > 0:
            self._allowed = step
            with suppress(BrokenPipeError):
                os.write(self.writing, b"x" * more)


class Trainer:
    """A training run as seen from outside: its events are JSON lines in a file."""

    def __init__(self, plan: Plan, events: Path, gate: Gate | None = None) -> None:
        self.plan, self.events, self._gate = plan, events, gate

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

    def ended(self) -> bool:
        """Whether it is over, well or badly."""
        raise NotImplementedError

    def allow(self, step: int) -> None:
        """Let it train up to this step, if it waits for that."""
        if self._gate is not None:
            self._gate.allow(min(step, self.plan.steps))

    def reach(self, step: int) -> None:
        """Wait until it has trained so far, or has ended badly."""
        step = min(step, self.plan.steps)
        self.allow(step)
        poll(
            PATIENCE,
            lambda: self.step >= step or bool(self.failure()),
            lambda: f"trained to step {step}, but {self.step},",
        )

    def finish(self) -> str:
        """Let it train to the end; why it ended badly, or ""."""
        self.allow(self.plan.steps)
        poll(PATIENCE, self.ended, lambda: f"at its end, but step {self.step},")
        return self.failure()


class ExampleTrainer(Trainer):
    """examples/train.py, as users start it; `launcher` may stand before the script."""

    def __init__(
        self,
        toml: Path,
        plan: Plan,
        events: Path,
        *options: str,
        launcher: tuple[str, ...] = (),
        gate: Gate | None = None,
    ) -> None:
        super().__init__(plan, events, gate)
        self._log = events.with_suffix(".log")
        if gate is not None:
            launcher = ("-m", "tests.fault.suite.gated", str(gate.reading))
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *launcher,
                    str(ROOT / "examples/train.py"),
                    "--pool",
                    str(toml),
                    "--steps",
                    str(plan.steps),
                    "--checkpoint-every",
                    str(plan.every),
                    "--length",
                    str(LENGTH),
                    "--batch-size",
                    "4",
                    "--prefix",
                    PREFIX,
                    "--events",
                    str(events),
                    *options,
                ],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
                },
                stdout=log,
                stderr=log,
                cwd=events.parent,
                pass_fds=() if gate is None else (gate.reading,),
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def failure(self) -> str:
        code = self.process.poll()
        if code in (None, 0):
            return ""
        return f"the trainer ended with {code}: {self._log.read_text()[-400:].strip()}"

    def kill(self) -> bool:
        """SIGKILL; whether it was that which ended it."""
        self.process.kill()
        return self.process.wait(PATIENCE) == -signal.SIGKILL


@contextmanager
def example_trainer(toml: Path, plan: Plan, events: Path) -> Iterator[Trainer]:
    """A run of examples/train.py that does not outlive the block; each step waits to be allowed."""
    gate = Gate()
    try:
        trainer = ExampleTrainer(toml, plan, events, gate=gate)
        os.close(gate.reading)
        try:
            yield trainer
        finally:
            trainer.kill()
    finally:
        os.close(gate.writing)


class LoopTrainer(Trainer):
    """Loads and saves like a trainer, computes next to nothing; each step waits to be allowed."""

    def __init__(self, plan: Plan, events: Path, gate: Gate, pid: int) -> None:
        super().__init__(plan, events, gate)
        self._pid = pid
        self._status: int | None = None

    def ended(self) -> bool:
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status is not None

    def failure(self) -> str:
        return f"the loop ended with {self._status}" if self.ended() and self._status else ""


@contextmanager
def loop_trainer(toml: Path, plan: Plan, events: Path) -> Iterator[Trainer]:
    """A loop in a forked process that does not outlive the block."""
    gate = Gate()

    def child() -> None:
        os.close(gate.writing)
        loop(toml, plan, events, gate.reading)

    try:
        with forked(child) as pid:
            os.close(gate.reading)
            yield LoopTrainer(plan, events, gate, pid)
    finally:
        os.close(gate.writing)


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

    def __init__(self, log: Path, pid: int) -> None:
        self._log, self._pid = log, pid

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

    def states(self) -> tuple[str, ...]:
        """How its health monitor has judged devices so far: each state but online."""
        return tuple(sorted({state for line in self._lines("H") for state in line.split()}))

    def await_reads(self, count: int) -> None:
        """Wait for so many more."""
        wanted = len(self.reads()) + count

        def done() -> bool:
            assert os.waitpid(self._pid, os.WNOHANG) == (0, 0), "the reader has ended"
            return len(self.reads()) >= wanted

        poll(PATIENCE, done, lambda: f"{wanted} reads, but {len(self.reads())},")

    def _lines(self, kind: str) -> list[str]:
        if not self._log.exists():
            return []
        lines = self._log.read_text().split("\n")[:-1]
        return [line[2:] for line in lines if line[0] == kind]


@contextmanager
def reader(toml: Path, log: Path) -> Iterator[Reader]:
    """Reads on in a forked process until the block ends."""
    with forked(lambda: read_on(toml, log)) as pid:
        yield Reader(log, pid)


def read_on(toml: Path, log: Path) -> None:
    """Read random ranges of the objects, compare every byte, write down how long it took.

    One read after the other: what stalls the device stalls one read, however long it takes.
    """
    expected = {n: payload(f"{PROBE}/{n}", OBJECT_BYTES) for n in range(OBJECTS)}
    rng, clock = random.Random(SEED), SystemClock()
    last: dict[str, float] = {}
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with hpstore.open(toml) as pool:
        while True:
            number, start = rng.randrange(OBJECTS), rng.randrange(OBJECT_BYTES - READ_BYTES)
            began, problem = clock.monotonic(), ""
            try:
                found = pool.get(f"{PROBE}/{number}", start, start + READ_BYTES)
                if found != expected[number][start : start + READ_BYTES]:
                    problem = f"wrong bytes of {PROBE}/{number}"
            except (HpstoreError, OSError) as error:
                problem = f"{type(error).__name__}: {error}".replace("\n", " ")
            at = clock.monotonic()
            os.write(fd, f"R {at:.6f} {at - began:.6f} {problem}\n".encode())
            counts: dict[str, float] = {name: pool.metrics.value(name) for name in SEEN}
            if counts != last:
                os.write(fd, f"C {json.dumps(counts)}\n".encode())
            if counts[DECIDED] != last.get(DECIDED, 0):
                states = {sight.state for sight in pool.admin.health.snapshot().devices.values()}
                os.write(fd, f"H {' '.join(states - {HealthState.ONLINE})}\n".encode())
            last = counts
            clock.wait(PACE_SECONDS)
