"""What all ways of training have in common."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from nets import Chain
from savers import Saver
from torch.nn import functional

from hpstore.loaders.sampling.data_parallel import Coordinates

LEARNING_RATE, MOMENTUM = 2.0**-5, 0.875
"""The rate is a power of two: its product with a gradient is exact, so fused and separate
multiply-add agree, and the update of a shard has the very bits of the same rows in a whole one."""
EXPOSED = "exposed: a step less the median step of the bare module (it overlaps with backward)"
BARE_STEPS = 5  # of the module without its wrapper, whose median is taken off exposed time
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a method is told. `batch_size`: of all workers together."""

    make_model: Callable[[], Chain]
    shape: tuple[int, ...]  # of a picture
    batch_size: int
    workers: int
    micro_batches: int
    bucket_bytes: int
    device: torch.device
    pooled: bool  # whether samples come from a pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one step on this rank; no samples where no loss is computed."""

    loss: float = 0.0  # mean
    right: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of this rank. `ids`: of its samples, None where it reads none."""

    outcome: Outcome
    ids: Sequence[int] | None
    wait: float  # seconds for data
    stall: float = 0.0  # seconds for copies of the save before


class Stopwatch:
    """Seconds by what they were spent on. The device has finished where they begin and end."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        began = self.now()
        yield
        self.seconds[what] += self.now() - began

    def taken(self) -> dict[str, float]:
        """What was counted since the last call."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


class Method(ABC):
    """One way of training. All ranks make one; the calls are collective."""

    name: ClassVar[str]
    title: ClassVar[str]
    replicated: ClassVar[bool] = True  # rank 0 holds all of the model and of the optimizer
    communication: ClassVar[str] = "time in calls of torch.distributed"

    def __init__(self, setup: Setup) -> None:
        self.setup, self.rank = setup, dist.get_rank()
        self.watch = Stopwatch(setup.device)
        self.module = self._placed()
        self.optimizer = sgd(self.module)

    def _placed(self) -> Chain:
        """This rank's part of the model, in its place."""
        return self.setup.make_model().to(self.setup.device)

    @property
    def coordinates(self) -> Coordinates | None:
        """This rank's share of every batch; None for one that reads nothing."""
        return Coordinates(self.rank, self.setup.workers)

    @property
    def batches_a_step(self) -> int:
        """Of the loader."""
        return 1

    def attach(self, loader: Any, keeper: Saver) -> None:
        """What the method reads from, if this rank does, and who saves: for those that call them by
        themselves. Any: a loader of one of four kinds."""
        return

    def restore(self, keeper: Saver, state: dict[str, Any]) -> int:
        """Go on from the newest checkpoint; the steps that are done."""
        return keeper.restore(state)

    def step(self, batches: Iterator[Batch | None]) -> Step:
        """Data, gradients, update."""
        began = self.watch.now()
        batch = next(batches)
        wait = self.watch.now() - began
        outcome = self.gradients(batch)
        self.update()
        return Step(outcome=outcome, ids=None if batch is None else batch["id"].tolist(), wait=wait)

    @abstractmethod
    def gradients(self, batch: Batch | None) -> Outcome:
        """Leave the gradient of the whole batch where the optimizer runs."""

    def exposed(self, model: torch.nn.Module, batch: Batch, bare_seconds: float) -> Outcome:
        """Forward and backward; what they take beyond those of the bare module is communication."""
        began = self.watch.now()
        found = forward_backward(model, batch, self.setup.device)
        beyond = self.watch.now() - began - bare_seconds
        self.watch.seconds["communication"] += max(0.0, beyond)
        return found

    def update(self) -> None:
        """Apply the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """One step on grey pictures that changes nothing: first calls set things up."""
        self.gradients(self.grey())
        self.optimizer.zero_grad()
        self.watch.taken()

    def grey(self) -> Batch | None:
        """A batch of this rank with nothing to learn in it."""
        place = self.coordinates
        if place is None:
            return None
        rows = self.setup.batch_size // place.world_size
        return {
            "image": torch.full((rows, *self.setup.shape), 128, dtype=torch.uint8),
            "label": torch.arange(rows) % 2,
        }

    def state(self) -> dict[str, Any]:  # Any: modules and optimizers
        """What a checkpoint holds of this rank."""
        return {"model": self.module, "optimizer": self.optimizer}

    def seen(self) -> dict[str, Any]:  # Any: JSON
        """What it can tell of itself at the end. Collective."""
        return {}

    def close(self) -> None:
        """End what runs in the background."""
        return

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters that this rank answers for, by name. Collective."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()


def sgd(module: torch.nn.Module) -> torch.optim.SGD:
    """The optimizer of all methods."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def prepared(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures from -1 to 1, float32 (batch, 3, side, side), and labels, on the device."""
    images = batch["image"].to(device, torch.float32).div_(127.5).sub_(1.0)
    return images, batch["label"].to(device)


def forward_backward(model: torch.nn.Module, batch: Batch, device: torch.device) -> Outcome:
    """The gradient of this rank's share."""
    images, labels = prepared(batch, device)
    logits = model(images)
    loss = functional.cross_entropy(logits, labels)
    loss.backward()
    right = int((logits.detach().argmax(1) == labels).sum())
    return Outcome(loss=loss.item(), right=right, samples=len(labels))


def bare_seconds(method: Method) -> float:
    """Median time of a forward and backward of the module as it is, on all ranks at once."""
    found, batch = [], method.grey()
    assert batch is not None
    for _ in range(BARE_STEPS):
        dist.barrier()
        began = method.watch.now()
        forward_backward(method.module, batch, method.setup.device)
        found.append(method.watch.now() - began)
    method.module.zero_grad()
    return statistics.median(found[1:])
