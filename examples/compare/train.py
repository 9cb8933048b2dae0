"""Rows of the comparison, one after the other, on every rank of a job; run_all.py starts it.

    torchrun --standalone --nproc-per-node 2 examples/compare/train.py --directory WORK \\
        --rows ddp,ddp.memory,fsdp2

WORK holds the pools and files that `storages.prepare` wrote; WORK/runs/ROW-SUFFIX gets what ranks
write and result.json. A row that is started anew goes on from its newest checkpoint; torchrun does
that by itself with --max-restarts 1 and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without that
variable the new workers of a gloo job read addresses of the dead ones).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accounts import composed
from methods import method_named
from methods.base import Batch, Method, Setup
from nets import SHAPES, build
from rows import PIPELINES, POOLS, Row, row_named
from savers import Saver, saver
from storages import Source, open_pool

import hpstore
from hpstore.benchmarks.harness.bench_report import machine

BUCKET_BYTES = {"tiny": 256 * 1024, "small": 256 * 1024, "resnet50": 25 * 1024 * 1024}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", required=True, help="names, see rows.py, comma-separated")
    parser.add_argument("--suffix", default="0", help="of several runs of the same rows")
    parser.add_argument("--directory", type=Path, required=True, help="pools and files")
    parser.add_argument("--model", choices=list(SHAPES), default="small")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a pipeline")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", default="", help="of each row the STEP:RANK that kills itself")
    return parser.parse_args()


def write_json(path: Path, found: object) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)


class Journal:
    """One JSON line an event, in the kernel's hands before the next step begins."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def __call__(self, kind: str, **facts: object) -> None:
        self._file.write(json.dumps({"kind": kind, **facts}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def attempts_in(directory: Path) -> list[dict[int, list[dict[str, Any]]]]:
    """Of each start of a row its lines by rank, in order. Any: JSON."""
    found: defaultdict[int, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for path in directory.glob("attempt-*.jsonl"):
        _, attempt, _, rank = path.stem.split("-")
        lines = path.read_text().splitlines()
        found[int(attempt)][int(rank)] = [json.loads(line) for line in lines]
    return [found[attempt] for attempt in sorted(found)]


def victim(kill: str, directory: Path, attempt: int) -> tuple[int, int] | None:
    """The step after which a rank kills itself, and the rank; None in a row that was killed."""
    earlier = {int(path.stem.split("-")[1]) for path in directory.glob("attempt-*.jsonl")}
    if not kill or min(earlier, default=attempt) < attempt:
        return None
    step, _, rank = kill.partition(":")
    return int(step), int(rank)


def prepare_torch(options: argparse.Namespace) -> torch.device:
    """The process group, and this rank's device."""
    torch.set_num_threads(1 if options.device == "cpu" else 4)
    torch.use_deterministic_algorithms(True)
    if options.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    alone = int(os.environ["LOCAL_WORLD_SIZE"]) <= count  # NCCL wants a GPU for every rank
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "gloo")
    return device


def main() -> int:
    options = parse()
    device = prepare_torch(options)
    names, kills = options.rows.split(","), options.kills.split(",")
    for name, kill in itertools.zip_longest(names, kills, fillvalue=""):
        one(options, row_named(name), kill, device)
        gc.collect()  # of the row before nothing is left that computes or waits
    dist.barrier()  # a rank that leaves earlier aborts the others
    dist.destroy_process_group()
    return 0


def one(options: argparse.Namespace, row: Row, kill: str, device: torch.device) -> None:
    """A row, from its newest checkpoint, if there is one, to its results; not one that has them."""
    directory = options.directory / "runs" / f"{row.name}-{options.suffix}"
    if (directory / "result.json").exists():  # done before a later row was killed
        return
    workers = dist.get_world_size() - row.servers
    began = datetime.now(UTC)
    method = method_named(row.method)(
        Setup(
            make_model=lambda: build(options.model, options.seed),
            shape=SHAPES[options.model],
            batch_size=options.batch_size,
            workers=workers,
            micro_batches=options.micro_batches,
            bucket_bytes=BUCKET_BYTES[options.model],
            device=device,
            pooled=row.storage in POOLS,
        )
    )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dies = victim(kill, directory, attempt)
    journal = Journal(directory / f"attempt-{attempt}-rank-{dist.get_rank()}.jsonl")
    with open_pool(options.directory, row.storage) as pool:
        run(options, row, method, pool, journal, dies)
    journal.close()
    dist.barrier()
    if dist.get_rank() == 0:
        facts = facts_of(options, row, method, began)
        found = composed(facts, attempts_in(directory)[-1], row.servers)
        write_json(directory / "result.json", found)
    dist.barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank trains with. Any: modules, optimizers, a loader."""

    options: argparse.Namespace
    method: Method
    source: Source | None  # of a rank that reads
    keeper: Saver
    state: dict[str, Any]
    journal: Journal


def run(
    options: argparse.Namespace,
    row: Row,
    method: Method,
    pool: hpstore.Pool,
    journal: Journal,
    dies: tuple[int, int] | None,
) -> None:
    """All steps that are left, on this rank."""
    source, place = None, method.coordinates
    with contextlib.ExitStack() as held:
        if place is not None:
            source = Source(
                row.storage,
                options.directory,
                pool,
                place,
                batch_size=options.batch_size // place.world_size // method.batches_a_step,
                samples=options.samples,
                seed=options.seed,
            )
            held.callback(source.close)
        keeper = saver(
            row.checkpointer,
            pool=pool,
            directory=options.directory,
            name=f"{row.name}-{options.suffix}",
            replicated=method.replicated,
        )
        method.attach(source.loader if source is not None else None, keeper)
        held.callback(method.close)
        state = method.state()
        if source is not None and "pipeline" not in state:  # hooks keep the loader's state
            state |= source.state
        method.warm_up()
        began = time.perf_counter()
        step = method.restore(keeper, state)
        journal("start", step=step, restore_s=time.perf_counter() - began if step else 0.0)
        job = Job(
            options=options,
            method=method,
            source=source,
            keeper=keeper,
            state=state,
            journal=journal,
        )
        train(job, step, dies)
        keeper.wait()
        counted = {
            "loader": row.storage,
            "checkpointer": row.checkpointer,
            **keeper.counted(),
            **(source.counted() if source is not None else {}),
        }
        keeper.close()  # after an error it drains by itself: the other ranks may be dead
        seen = method.seen()
    journal("end", parameters=digests(method), storage=counted, **seen)


def train(job: Job, step: int, dies: tuple[int, int] | None) -> None:
    """From a step to the end. A step is: wait for data, gradients, update; then a checkpoint."""
    options, method, watch = job.options, job.method, job.method.watch
    steps = options.samples // options.batch_size * options.epochs
    batches, place = feed(job.source), method.coordinates
    dist.barrier()
    while step < steps:
        epoch = step * options.epochs // steps
        began = watch.now()
        found = method.step(batches)
        seconds, stall = watch.now() - began, found.stall
        step += 1
        if found.ids is not None and place is not None:
            job.journal("took", step=step, epoch=epoch, share=place.rank, ids=list(found.ids))
        if step % options.checkpoint_every == 0:
            saving = job.keeper.save(step, job.state)
            seconds, stall = seconds + saving, stall + saving
        outcome = found.outcome
        job.journal(
            "step",
            step=step,
            epoch=epoch,
            seconds=seconds,
            wait=found.wait,
            stall=stall,
            talk=watch.taken(),
            loss=outcome.loss,
            right=outcome.right,
            samples=outcome.samples,
        )
        if dies == (step, dist.get_rank()):
            job.keeper.wait()  # what was saved is committed: that is where the job goes on
            os.kill(os.getpid(), signal.SIGKILL)


def feed(source: Source | None) -> Iterator[Batch | None]:
    """Batches for ever, epoch after epoch; None for a rank that reads nothing."""
    while True:
        if source is None:
            yield None
        else:
            yield from source.loader


def digests(method: Method) -> dict[str, tuple[str, float]]:
    """SHA-256 and sum of magnitudes of the parameters that this rank answers for."""
    found = {}
    for name, tensor in method.parameters():
        values = tensor.cpu().contiguous()
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        found[name] = (digest, float(values.double().abs().sum()))
    return found


def facts_of(
    options: argparse.Namespace, row: Row, method: Method, began: datetime
) -> dict[str, Any]:  # Any: JSON
    """What was run, and where."""
    workers = method.setup.workers
    parts = options.micro_batches if row.method in PIPELINES else workers
    here = machine()
    return {
        "method": method.name,
        "title": method.title,
        "row": row.name,
        "world_size": dist.get_world_size(),
        "workers": workers,
        "batch_size": options.batch_size,
        "micro_batches": options.micro_batches,
        "model": options.model,
        "device": options.device,
        "seed": options.seed,
        "samples": options.samples,
        "epoch_count": options.epochs,
        "checkpoint_every": options.checkpoint_every,
        "torch": torch.__version__,
        "git": here["commit"],
        "cpus": here["cpus"],
        "load": here["load"],
        "start_time": began.isoformat(timespec="seconds"),
        "end_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "communication": method.communication,
        # sums of two numbers have one value in any order; of more they have not
        "exact": options.device == "cpu" and parts == 2,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (hpstore.HpstoreError, OSError) as error:
        sys.exit(f"train.py: {error}")
