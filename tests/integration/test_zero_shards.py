"""ZeRO-1 as DeepSpeed lays it out, emulated: one flat padded fp32 copy of all weights, of which
each rank has an equal part with its moments. The package itself is not used, and not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hpstore.checkpoint import Checkpointer, LoadOptions, StorageReader, StorageWriter
from hpstore.errors import CheckpointMismatch
from tests.integration.ranks import full, launch, make_pool, open_pool

ALIGN = 4  # rows that a part is a multiple of, per rank


class FlatZero:
    """AdamW over this rank's part of all weights, which are gathered after each step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.count = sum(p.numel() for p in model.parameters())
        self.part_rows = -(-self.count // (ALIGN * self.world)) * ALIGN
        self.master = torch.nn.Parameter(self._mine(list(model.parameters())))
        self.optimizer = torch.optim.AdamW([self.master], lr=0.1)

    def _mine(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        padded = torch.zeros(self.part_rows * self.world)
        padded[: self.count] = flat
        return padded[self.rank * self.part_rows :][: self.part_rows].clone()

    def step(self) -> None:
        """Reduce, update this part, gather."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
        self.master.grad = self._mine(gradients) / self.world
        self.optimizer.step()
        self.model.zero_grad()
        self.spread()

    def spread(self) -> None:
        """All parts into the model."""
        parts = [torch.empty(self.part_rows) for _ in range(self.world)]
        dist.all_gather(parts, self.master.detach())
        at, flat = 0, torch.cat(parts)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(flat[at : at + parameter.numel()].view_as(parameter))
                at += parameter.numel()

    def shards(self) -> dict[str, Any]:
        """The state as DTensors, padding included: parts are of equal size, as DTensor wants."""
        slots = self.optimizer.state[self.master]
        if not slots:
            slots["step"] = torch.tensor(0.0)
            slots |= {name: torch.zeros_like(self.master) for name in ("exp_avg", "exp_avg_sq")}
        mesh = init_device_mesh("cpu", (self.world,))

        def shard(part: torch.Tensor) -> DTensor:
            return DTensor.from_local(part.detach(), mesh, [Shard(0)], run_check=False)

        return {
            "master": shard(self.master),
            "exp_avg": shard(slots["exp_avg"]),
            "exp_avg_sq": shard(slots["exp_avg_sq"]),
            "step": slots["step"],
        }

    def whole(self) -> dict[str, torch.Tensor]:
        """All of it, without the padding. Collective."""
        found = {name: full(value) for name, value in self.shards().items()}
        return {
            name: value[: self.count] if value.dim() else value for name, value in found.items()
        }

    def padded(self, name: str, saved: torch.Tensor) -> torch.Tensor:
        """A saved flat tensor with the padding that this number of ranks has."""
        found = saved.new_zeros(self.part_rows * self.world)
        found[: self.count] = saved[: self.count]
        return found


def made() -> tuple[torch.nn.Module, FlatZero]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    return model, FlatZero(model)


def steps(model: torch.nn.Module, zero: FlatZero, count: int) -> None:
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        model(torch.randn(8, 5, generator=generator)).square().mean().backward()
        zero.step()


def saving(rank: int, world: int, directory: Path) -> None:
    """Three steps, saved in both ways, and three more."""
    model, zero = made()
    steps(model, zero, 3)
    with open_pool(directory) as pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(3, {"model": model, "zero": zero.shards()}).result()
        state = {"model": get_model_state_dict(model), "zero": zero.shards()}
        save(state, storage_writer=StorageWriter(pool, "dcp/step-3"))
        dist.barrier()
    torch.save(zero.whole(), directory / "at-3.pt")
    steps(model, zero, 3)
    torch.save(model.state_dict(), directory / f"after-{rank}.pt")


def loading(rank: int, world: int, directory: Path, way: str) -> None:
    """The same parts of another number of ranks; on two, the same three steps."""
    model, zero = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shards = zero.shards()
    with open_pool(directory) as pool:
        if way == "checkpointer":
            flat = {f"zero/{name}": zero.padded for name in ("master", "exp_avg", "exp_avg_sq")}
            with Checkpointer(pool, "run") as ckpt:
                if world != 2:
                    with pytest.raises(CheckpointMismatch, match=r"zero/\w+.*\(56,\)"):
                        ckpt.restore({"model": model, "zero": shards})
                load = LoadOptions(transform=flat if world != 2 else None)
                assert ckpt.restore({"model": model, "zero": shards}, load=load) == 3
        else:
            state = {"model": get_model_state_dict(model), "zero": shards}
            load_by_dcp(state, storage_reader=StorageReader(pool, "dcp/step-3"))
            set_model_state_dict(model, state["model"])
    saved, found = torch.load(directory / "at-3.pt", weights_only=True), zero.whole()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    zero.spread()  # the master weights, which are these
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    if world == 2:
        steps(model, zero, 3)
        after = torch.load(directory / f"after-{rank}.pt", weights_only=True)
        assert all(torch.equal(model.state_dict()[name], after[name]) for name in after)


def test_flat_parts_of_zero_1_are_saved_as_they_lie(tmp_path: Path) -> None:
    """Saved by two ranks, in both ways; loaded by two, which go on bit by bit. Other numbers of
    ranks pad otherwise: they are refused, unless a transform pads for them."""
    make_pool(tmp_path)
    launch(tmp_path, 2, saving)
    launch(tmp_path, 2, loading, "dcp")
    for world in (2, 1, 3):
        launch(tmp_path, world, loading, "checkpointer")
