"""A training run of a pipeline in several launches, each of which may be killed; its accounts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import hpstore
from hpstore.checkpoint import Checkpointer
from hpstore.loaders.sampling.order import GlobalOrder
from hpstore.trainers.pipelining.consumed_samples import Ledger, hashes
from tests.integration.ranks import launch, open_pool
from tests.trainers.deaths import arm
from tests.trainers.pipelines import LAYERS, SAMPLES, Part, Trainer, build

EVERY = 2  # steps between two saves


@dataclass(frozen=True, slots=True)
class Step:
    """What the newest attempt at a step has written down, of all ranks together."""

    loss: float  # mean over the replicas
    ids: tuple[int, ...]  # samples that went in, in the order of the run
    ledger: Mapping[str, Any]  # alike on all that read; Any: JSON


class Run:
    """Launches of one run in the pool of a directory, which have one name."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.attempts = 0

    def go(
        self,
        world: int,
        schedule: str,
        until: int,
        *,
        death: str = "",
        killed: tuple[int, ...] = (),
        settle: bool = False,
        **options: Any,
    ) -> int:
        """Train up to a step, or until the ranks in `killed` have died; the step it began at.

        It must be the newest committed one, on all ranks. All commits have the keys of the model.
        `settle`: each save is waited for, so that it is known which one is committed.
        """
        committed = self.committed()
        attempt, self.attempts = self.attempts, self.attempts + 1
        launch(
            self.directory,
            world,
            train,
            self.name,
            attempt,
            schedule,
            until,
            death,
            settle,
            json.dumps(options),
            killed=killed,
        )
        starts = {rows[0]["start"] for rows in self._logs(attempt)}
        assert starts == {committed[-1] if committed else 0}
        self.require_keys()
        return int(starts.pop())

    def committed(self) -> list[int]:
        """Steps, as another process sees them."""
        with _reader(self.directory, self.name) as checkpointer:
            return list(checkpointer.steps())

    def require_keys(self) -> None:
        """Keys of all stages = keys of the model that was never split, in every commit."""
        wanted = keys_of_the_unsplit_model()
        with _reader(self.directory, self.name) as checkpointer:
            for step in checkpointer.steps():
                names = {item.name for item in checkpointer.steps.manifest(step).items}
                found = {name for name in names if name.startswith(("model/", "optimizer/"))}
                assert found == wanted, step

    def steps(self) -> dict[int, Step]:
        """By number."""
        newest: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        for attempt in range(self.attempts):
            for rows in self._logs(attempt):
                for row in rows[1:]:
                    known, found = newest.get(row["step"], (-1, []))
                    newest[row["step"]] = (attempt, [*(found if known == attempt else []), row])
        return {step: _together(rows) for step, (_, rows) in sorted(newest.items())}

    def _logs(self, attempt: int) -> list[list[dict[str, Any]]]:
        """Lines of each rank, in the order of ranks."""
        paths = sorted(self.directory.glob(f"{self.name}.{attempt}.*.jsonl"))
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


@contextmanager
def _reader(directory: Path, prefix: str) -> Iterator[Checkpointer]:
    """Somebody who looks on: nothing is tidied up."""
    with (
        hpstore.open(directory / "pool.toml", read_only=True) as pool,
        Checkpointer(pool, prefix, group="alone") as checkpointer,
    ):
        yield checkpointer


def _together(rows: Sequence[Mapping[str, Any]]) -> Step:
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    inputs = [row["ids"] for row in rows if row["first"]]
    ledgers = [row["ledger"] for row in rows if row["ids"]]
    targets = [row["ids"] for row in rows if row["last"]]
    assert inputs == targets, "the stages have seen different samples"
    assert all(ledger == ledgers[0] for ledger in ledgers)
    size = rows[0]["rows"]
    ids = tuple(
        sample
        for at in range(0, len(inputs[0]), size)  # a global micro-batch is dealt out to replicas
        for replica in inputs
        for sample in replica[at : at + size]
    )
    return Step(sum(losses) / len(losses), ids, ledgers[0])


def keys_of_the_unsplit_model() -> set[str]:
    """As torch names them in one process."""
    model = Part(0, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, next(model.parameters()).shape[1])).sum().backward()
    optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    moments = get_optimizer_state_dict(model, optimizer, options=flat)
    found = {f"model/{name}" for name in get_model_state_dict(model)}
    for key in moments:
        kind, _, rest = key.partition(".")
        if kind == "state":
            name, _, slot = rest.rpartition(".")
            found.add(f"optimizer/state/{name}/{slot}")
    return found


# --- accounts -----------------------------------------------------------------------------------


def order_of(count: int) -> list[int]:
    """The first samples of a run, in the order of its epochs."""
    order = GlobalOrder(SAMPLES, 0)
    epochs = [order.indices(epoch, 0, SAMPLES) for epoch in range(-(-count // SAMPLES))]
    found: list[int] = np.concatenate(epochs)[:count].tolist()
    return found


def ledger_of(ids: Sequence[int]) -> dict[str, Any]:
    """What a ledger must hold when these, and no others, have gone through the model."""
    digest = 0
    for epoch in range(-(-len(ids) // SAMPLES)):
        part = np.array(ids[epoch * SAMPLES : (epoch + 1) * SAMPLES], np.int64)
        digest += int(hashes(epoch, part).sum(dtype=np.uint64))
    return Ledger(samples=len(ids), digest=digest % 2**64).to_dict()


def require_each_sample_once(steps: Mapping[int, Step], until: int) -> None:
    """Samples lost = repeated = 0: counted over the steps that count, and by the ledger."""
    assert list(steps) == list(range(until))
    ids: list[int] = []
    for step in steps.values():
        ids += step.ids
        assert step.ledger == ledger_of(ids)
    wanted = order_of(len(ids))
    for start in range(0, len(ids), SAMPLES):
        found, due = (Counter(part[start : start + SAMPLES]) for part in (ids, wanted))
        lost, repeated = due - found, found - due
        assert (lost, repeated) == (Counter(), Counter())


def require_same_losses(
    found: Mapping[int, Step], wanted: Mapping[int, Step], *, exact_to: float
) -> None:
    """Step by step; 0.0 for bit by bit."""
    assert list(found) == list(wanted)
    for number, step in wanted.items():
        assert abs(found[number].loss - step.loss) <= exact_to, number
        assert found[number].ledger == step.ledger, number


# --- a rank -------------------------------------------------------------------------------------


def train(
    rank: int,
    world: int,
    directory: Path,
    run: str,
    attempt: int,
    schedule: str,
    until: int,
    death: str,
    settle: bool,
    options: str,
) -> None:
    """Train up to a step. With a `death` one process dies there, the others end then."""
    with open_pool(directory) as pool:
        trainer = build(pool, schedule, prefix=run, **json.loads(options))
        if death:
            arm(trainer, death)
        path = directory / f"{run}.{attempt}.{rank}.jsonl"
        try:
            keep_on(trainer, until, path, settle=settle)
        except Exception:
            if not death:
                raise
            return  # the peer is dead: torchrun would end this process now
        trainer.close()
        dist.barrier()


def keep_on(trainer: Trainer, until: int, path: Path, *, settle: bool = False) -> None:
    """Go on from the newest commit, saved after every EVERY steps. What a step was like is written
    down before it is saved. `settle`: wait for each save before the next step."""
    hooks = trainer.hooks
    start = hooks.restore(trainer.stages, trainer.optimizer)
    with open(path, "w") as log:

        def write(**row: object) -> None:
            log.write(json.dumps(row) + "\n")
            log.flush()

        write(start=start)
        for step in range(start, until):
            trainer.seen.clear()
            record = hooks.step(trainer.schedule, trainer.optimizer)
            write(
                step=step,
                loss=record.loss,
                ids=list(trainer.seen),
                first=0 in hooks.stages,
                last=hooks.num_stages - 1 in hooks.stages,
                rows=trainer.loader.batch_size,
                ledger=hooks.ledger.to_dict() if trainer.seen else None,
            )
            if hooks.completed % EVERY == 0:
                hooks.save()
                if settle:
                    trainer.wait()
        trainer.wait()
