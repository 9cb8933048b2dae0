"""What the tests of many ranks share: processes that form a group, models sharded in many ways.

Processes are forked from a server that has imported what most of them need, so a group of four
costs a fraction of a second. They find each other through a file and talk over the loopback.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpstore
from hpstore.checkpoint.save import rank_plan
from hpstore.config import Settings
from hpstore.devices import reserve
from hpstore.errors import HpstoreError
from hpstore.pool.pool import Pool
from hpstore.units import MIB
from tests.integration.rank_server import Call, rank_server

PATIENCE = 200.0  # seconds until processes that do not end are a failure: pytest has 300
INPUTS, HIDDEN = 70, 304
UNEVEN, OUTPUTS = 50, 3  # over four ranks: the one leaves a short shard, the other an empty one
Job = Callable[..., None]
# Any below: states hold whatever a trainer puts there
Values = dict[str, Any]


def make_pool(directory: Path) -> Path:
    """A pool of six directories, 4+2; its pool.toml."""
    toml = directory / "pool.toml"
    settings = Settings(memory_bytes=16 * MIB, run_directory=str(directory / "run"))
    paths = [directory / f"d{n}" for n in range(6)]
    hpstore.create(paths, data=4, parity=2, config=toml, settings=settings).close()
    return toml


def launch(
    directory: Path,
    world: int,
    job: Job,
    *args: object,
    killed: tuple[int, ...] = (),
    imports: tuple[str, ...] = (),
) -> None:
    """Run `job(rank, world, directory, *args)` in so many processes that form a gloo group.

    All must end well; those in `killed` must have been killed. `imports`: modules that all have
    at their start.
    """
    store = directory / f"store-{job.__name__}-{world}-{'-'.join(map(str, args))}"
    calls = [Call(_enter, (job, rank, world, directory, store, args)) for rank in range(world)]
    codes = dict(enumerate(rank_server(imports).run(calls, PATIENCE)))
    problems = [f.read_text() for f in sorted(directory.glob("failed-*"))]
    assert not problems, "\n".join(problems)
    assert codes == {rank: -9 if rank in killed else 0 for rank in range(world)}


def _enter(
    job: Job, rank: int, world: int, directory: Path, store: Path, args: tuple[object, ...]
) -> None:
    """Main function of a process."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        reserve.SPARES_MOST = reserve.SPARES_LEAST  # as in the process of the tests
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        job(rank, world, directory, *args)
        code = 0
    except BaseException:  # noqa: BLE001 (handed to the test)
        (directory / f"failed-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        code = 1
    os._exit(code)  # a group whose peer was killed does not take its leave


def put_segments() -> None:
    """Saves of this process put their tensors into segments, as large ones do."""
    rank_plan.WITHIN_BYTES = -1  # type: ignore[attr-defined]


def open_pool(directory: Path) -> Pool:
    """The pool of the test."""
    return hpstore.open(directory / "pool.toml")


def build(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with AdamW: plain, compiled, ddp, fsdp (1-D), tp, or 2d (FSDP over TP)."""
    torch.manual_seed(seed)
    net: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, UNEVEN),
        torch.nn.Linear(UNEVEN, OUTPUTS),
    )
    if kind == "compiled":
        net = torch.compile(net)  # type: ignore[assignment]
    elif kind == "ddp":
        net = DistributedDataParallel(net)
    elif kind != "plain":
        _shard(net, kind)
    # parameters are on meshes of their own: no foreach
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def _shard(net: torch.nn.Module, kind: str) -> None:
    world = dist.get_world_size()
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "tp":
        parallelize_module(net, init_device_mesh("cpu", (world,)), layers)
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], layers)
        fully_shard(net, mesh=mesh["dp"])


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """Real steps on the same data for all; the losses."""
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(8, INPUTS, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def full(value: Any) -> torch.Tensor:
    """All of a tensor, wherever its parts are. Collective for a DTensor."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    found: torch.Tensor = whole.detach().clone()
    return found


def values(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Values:
    """Parameters and all of AdamW's state, whole, by plain names. Collective."""
    found: Values = {}
    for name, parameter in net.named_parameters():
        plain = name.replace("module.", "").replace("_orig_mod.", "")
        found[plain] = full(parameter)
        for slot, entry in optimizer.state[parameter].items():
            found[f"{plain}.{slot}"] = full(entry)
    return found


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Bit by bit."""
    assert found.keys() == wanted.keys(), where
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, f"{where}: {name}"
        assert torch.equal(found[name], tensor), f"{where}: {name}"


def raised(call: Callable[[], object]) -> str:
    """The message of the CheckpointError (or its like) that a call must raise."""
    try:
        call()
    except HpstoreError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def together(condition: bool, what: object) -> None:
    """An assertion that all ranks make at the same point, so that none is left waiting."""
    assert condition, what
    dist.barrier()


def breaking_put(pool: Pool, word: str, act: Callable[[], None]) -> Callable[[], None]:
    """Let the pool's puts of keys with `word` in them `act` first; returns what undoes it."""
    original = pool.put

    def put(key: str, *args: Any, **options: Any) -> Any:
        if word in key:
            act()
        return original(key, *args, **options)

    pool.put = put  # type: ignore[method-assign]
    return lambda: setattr(pool, "put", original)
