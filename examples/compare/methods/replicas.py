"""Every worker holds the whole model; gradients are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from methods.base import EXPOSED, Batch, Method, Outcome, Setup, bare_seconds, forward_backward


class Ddp(Method):
    """torch's DistributedDataParallel."""

    name, title, communication = "ddp", "DDP", EXPOSED

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._bare = bare_seconds(self)
        self._wrapped = DistributedDataParallel(
            self.module, bucket_cap_mb=setup.bucket_bytes / 2**20
        )

    def gradients(self, batch: Batch | None) -> Outcome:
        assert batch is not None
        return self.exposed(self._wrapped, batch, self._bare)


class AllReduce(Method):
    """One blocking all-reduce a parameter, after the backward."""

    name, title = "allreduce", "all-reduce, per parameter"

    def gradients(self, batch: Batch | None) -> Outcome:
        assert batch is not None
        found = forward_backward(self.module, batch, self.setup.device)
        with self.watch.timing("communication"):
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.setup.workers
        return found


class AllReduceBuckets(Method):
    """Gradients in flat buckets, all under way at once, after the backward."""

    name, title = "allreduce_bucket", "all-reduce, buckets"

    def gradients(self, batch: Batch | None) -> Outcome:
        assert batch is not None
        found = forward_backward(self.module, batch, self.setup.device)
        with self.watch.timing("communication"):
            self._average()
        return found

    def _average(self) -> None:
        gradients = [p.grad for p in reversed(list(self.module.parameters())) if p.grad is not None]
        sizes = [gradient.nbytes for gradient in gradients]
        under_way = []
        for bucket in buckets(sizes, self.setup.bucket_bytes):
            members = [gradients[number] for number in bucket]
            flat = flattened(members)
            under_way.append((members, flat, dist.all_reduce(flat, async_op=True)))
        for members, flat, work in under_way:
            assert work is not None
            work.wait()
            scatter(flat.div_(self.setup.workers), members)


def buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of tensors by bucket, in order; a bucket has at most so many bytes, or one tensor."""
    found: list[list[int]] = []
    room = 0
    for number, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(number)
        room -= size
    return found


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One new tensor with the values of all."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def scatter(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the values of `flattened` tensors back."""
    at = 0
    for target in targets:
        target.copy_(flat[at : at + target.numel()].view_as(target))
        at += target.numel()
