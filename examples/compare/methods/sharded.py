"""Parameters, gradients and moments in shards over the workers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from methods.base import EXPOSED, Batch, Method, Outcome, Setup, bare_seconds, sgd


class Fsdp2(Method):
    """Parameters, gradients and moments in shards (fully_shard), gathered block by block."""

    name, title, communication = "fsdp2", "FSDP2", EXPOSED
    replicated = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._bare = bare_seconds(self)
        mesh = init_device_mesh(setup.device.type, (setup.workers,))
        for block in self.module.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = sgd(self.module)  # of the shards

    def gradients(self, batch: Batch | None) -> Outcome:
        assert batch is not None
        return self.exposed(self.module, batch, self._bare)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in super().parameters():
            assert isinstance(parameter, DTensor)
            yield name, parameter.full_tensor()
