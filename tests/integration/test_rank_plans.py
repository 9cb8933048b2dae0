"""What goes wrong on one rank while a save is planned is raised on all of them (rule 20), and what
one rank does for itself keeps no other waiting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.convert.import_files import import_checkpoint
from hpstore.checkpoint.save import rank_plan
from tests.integration.ranks import launch, make_pool, open_pool, raised, together

SOON = SaveOptions(commit_seconds=20.0)


class Averaged(torch.optim.SGD):
    """Keeps one tensor beside those of its parameters, as those with a global state do."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.state["average"] = torch.arange(3.0)  # type: ignore[index]  # by name


def _fails_on_one(rank: int, world: int, directory: Path) -> None:
    del world

    def without_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    state = {"x": torch.ones(4)}
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False, save=SOON) as ckpt:
        said = "nothing was raised"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(rank_plan, "sampled_digests", without_memory)
            try:
                ckpt.save(1, state)
            except torch.OutOfMemoryError:
                said = "rank 0: its own"
            except Exception as error:  # noqa: BLE001 (compared below)
                said = str(error)
        assert "rank 0: " in said, said
        ckpt.save(1, state).result()
        together(ckpt.steps() == [1], ckpt.steps())


def test_an_error_of_one_rank_while_it_samples_is_raised_on_all(tmp_path: Path) -> None:
    """The others waited for its message until their time was over."""
    make_pool(tmp_path)
    launch(tmp_path, 2, _fails_on_one)


def _keeps_a_tensor(rank: int, world: int, directory: Path) -> None:
    del rank, world
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 2)
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False, save=SOON) as ckpt:
        ckpt.save(1, {"net": net, "optimizer": Averaged(net)}).result()
        other = torch.nn.Linear(2, 2)
        fresh: Any = Averaged(other)
        fresh.state["average"] = torch.zeros(3)
        assert ckpt.restore({"net": other, "optimizer": fresh}) == 1
        together(fresh.state["average"].tolist() == [0.0, 1.0, 2.0], fresh.state)


def test_an_optimizer_may_keep_tensors_beside_those_of_its_parameters(tmp_path: Path) -> None:
    """Whether it has moments at all was asked of the truth of a tensor of several elements."""
    make_pool(tmp_path)
    launch(tmp_path, 2, _keeps_a_tensor)


def _imports_alone(rank: int, world: int, directory: Path) -> None:
    del world
    if rank == 0:
        torch.save({"w": torch.arange(5)}, directory / "a.pt")
        with open_pool(directory) as pool:
            import_checkpoint(pool, "run", 1, directory / "a.pt")
    dist.barrier()
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        into = {"w": torch.zeros(5, dtype=torch.int64)}
        assert ckpt.restore(into) == 1
        together(into["w"].tolist() == [0, 1, 2, 3, 4], into)
        assert "no checkpoint of step 2" in raised(lambda: ckpt.read(2))


def test_one_rank_of_a_job_imports_for_all(tmp_path: Path) -> None:
    """It waited for ranks that import nothing."""
    make_pool(tmp_path)
    launch(tmp_path, 2, _imports_alone)
