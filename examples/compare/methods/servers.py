"""Rank 0 holds the parameters; workers pull them before a step and push their gradients after it.

Synchronous: the server waits for the gradients of all workers, so a step has the same result as an
all-reduce. Its optimizer runs on the server alone, and so does its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hpstore.loaders.sampling.data_parallel import Coordinates
from methods.base import Batch, Method, Outcome, forward_backward
from methods.replicas import flattened, scatter

SERVER = 0


class ParameterServer(Method):
    """One send and one receive for every parameter and worker."""

    name, title = "ps", "parameter server, send/recv"
    communication = "time in pulls and pushes on the workers; waiting for the server is in it"

    @property
    def serves(self) -> bool:
        return self.rank == SERVER

    @property
    def coordinates(self) -> Coordinates | None:
        return None if self.serves else Coordinates(self.rank - 1, self.setup.workers)

    def gradients(self, batch: Batch | None) -> Outcome:
        with self.watch.timing("pull"):
            self._pull()
        found = Outcome()
        if batch is not None:
            found = forward_backward(self.module, batch, self.setup.device)
        with self.watch.timing("push"):
            self._push()
        return found

    def update(self) -> None:
        if self.serves:
            super().update()
        else:
            self.module.zero_grad()

    def state(self) -> dict[str, Any]:  # Any: modules and optimizers
        return super().state() if self.serves else {}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.serves:
            yield from super().parameters()

    def _pull(self) -> None:
        for parameter in self.module.parameters():
            if self.serves:
                for worker in self._workers():
                    dist.send(parameter.detach(), worker)
            else:
                dist.recv(parameter.data, SERVER)

    def _push(self) -> None:
        for parameter in self.module.parameters():
            if not self.serves:
                assert parameter.grad is not None
                dist.send(parameter.grad, SERVER)
                continue
            total = torch.zeros_like(parameter)
            part = torch.empty_like(parameter)
            for worker in self._workers():
                dist.recv(part, worker)
                total += part
            parameter.grad = total / self.setup.workers

    def _workers(self) -> range:
        return range(1, 1 + self.setup.workers)


class ParameterServerReduce(ParameterServer):
    """A broadcast and a reduce of one flat bucket."""

    name, title = "ps_reduce", "parameter server, reduce"

    def _pull(self) -> None:
        parameters = [parameter.detach() for parameter in self.module.parameters()]
        flat = flattened(parameters)
        dist.broadcast(flat, SERVER)
        if not self.serves:
            scatter(flat, parameters)

    def _push(self) -> None:
        parameters = list(self.module.parameters())
        if self.serves:  # adds nothing
            flat = torch.zeros_like(flattened(parameters))
        else:
            flat = flattened([p.grad for p in parameters if p.grad is not None])
        dist.reduce(flat, SERVER)
        if self.serves:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            scatter(flat.div_(self.setup.workers), [p.grad for p in parameters])
