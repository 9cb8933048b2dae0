"""Checkpoints of several ranks on this machine beside torch.distributed.checkpoint (DCP).

Ranks that all hold the same state (DDP) save it once together; shards that four ranks saved (FSDP)
are loaded by four, two and one. Every sample saves or loads with both, in turn; a time is that of
the slowest rank. Before a load the page cache of the files is dropped.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hpstore
from hpstore.benchmarks.checkpoint.checkpoint_ours import Copy, make_checkpointer, open_or_make
from hpstore.benchmarks.checkpoint.checkpoint_peers import fsync_tree
from hpstore.benchmarks.checkpoint.checkpoint_sessions import CheckpointSpec
from hpstore.benchmarks.checkpoint.checkpoint_shapes import share_of_full
from hpstore.benchmarks.checkpoint.checkpoint_state import State, empty_state, state_bytes
from hpstore.benchmarks.harness.memory_use import drop_cache
from hpstore.benchmarks.harness.rank_processes import launch
from hpstore.benchmarks.harness.sessions import Found, Sections
from hpstore.checkpoint import Checkpointer
from hpstore.units import MIB

WORLDS = (2, 4)
LOADING_WORLDS = (4, 2, 1)
RANK_STATE_BYTES = 512 * MIB  # of all ranks together
SAMPLES, WARM_SAVES = 5, 2
_WIDTH = 1024


def rank_bytes(spec: CheckpointSpec) -> int:
    """Size of the state that ranks save."""
    return max(MIB, int(RANK_STATE_BYTES * share_of_full(spec)))


def ranks_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Saves of a state that 2 and 4 ranks hold alike."""
    found: Found = {}
    for world in WORLDS:
        directory = _prepared(spec, f"ranks-{world}")
        found[str(world)] = _slowest(
            launch(world, directory, save_replicated, rank_bytes(spec), SAMPLES)
        )
        shutil.rmtree(directory)
    return found


def resharding_session(sections: Sections, spec: CheckpointSpec) -> Found:
    """Shards of four ranks, loaded by four, two and one."""
    directory = _prepared(spec, "resharding")
    launch(LOADING_WORLDS[0], directory, save_shards, rank_bytes(spec))
    found: Found = {}
    for world in LOADING_WORLDS:
        found[str(world)] = _slowest(
            launch(world, directory, load_shards, rank_bytes(spec), SAMPLES)
        )
    return found


def _prepared(spec: CheckpointSpec, name: str) -> Path:
    directory = spec.directory / spec.contender / name
    open_or_make(directory).close()
    return directory


def _slowest(ranks: list[Found]) -> Found:
    """Of each sample the time of the slowest rank."""
    return {
        name: [max(values) for values in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


# --- in the ranks -------------------------------------------------------------------------------


def _checkpointer(directory: Path, **options: Any) -> tuple[hpstore.Pool, Checkpointer]:
    pool = hpstore.open(directory / "pool.toml")
    return pool, make_checkpointer(pool, **options)


def save_replicated(directory: Path, size_bytes: int, samples: int) -> Found:
    """Stall and durable seconds of both, one copy of the state, and stored bytes to its own."""
    state = empty_state(size_bytes)
    pool, checkpointer = _checkpointer(directory, keep_last=2)
    found: defaultdict[str, list[float]] = defaultdict(list)
    with pool, checkpointer:
        for step in range(1, WARM_SAVES + samples + 1):
            for tensor in (*state["model"].values(), *_moments(state)):
                tensor.add_(1)
            dist.barrier()
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            stall = time.perf_counter() - began
            report = handle.result()
            durable = time.perf_counter() - began
            peer = _timed(partial(_dcp_save, directory, state, step))
            if step > WARM_SAVES:
                found["stall_seconds"].append(stall)
                found["durable_seconds"].append(durable)
                found["dcp_seconds"].append(peer)
                found["bytes_to_state"].append(report.bytes / state_bytes(state))
        dist.barrier()
        found["copy_seconds"] = [Copy(state).seconds()] * samples
    return dict(found)


def _moments(state: State) -> list[torch.Tensor]:
    return [tensor for values in state["optimizer"].values() for tensor in values.values()]


def _dcp_save(directory: Path, state: State, step: int) -> None:
    """dcp.save by one thread a rank, which fsyncs; the names are made durable by rank 0."""
    path = directory / f"dcp-{step}"
    dcp_save(state, storage_writer=FileSystemWriter(path, thread_count=1, sync_files=True))
    if dist.get_rank() == 0:
        fsync_tree(path)
        shutil.rmtree(directory / f"dcp-{step - 2}", ignore_errors=True)


def _timed(what: Callable[[], object]) -> float:
    """Seconds from when all ranks are there."""
    dist.barrier()
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _shards(mesh: DeviceMesh, size_bytes: int, value: float) -> State:
    """Tensors of one width, sharded by rows; all ranks of a world hold all rows of them."""
    world, rank, tensors = mesh.size(), mesh.get_local_rank(), 16
    rows = max(4, size_bytes // 4 // _WIDTH // tensors)
    mine = range(rows)[rank * math.ceil(rows / world) : (rank + 1) * math.ceil(rows / world)]
    shape, stride = torch.Size((rows, _WIDTH)), (_WIDTH, 1)
    return {
        f"w{n}": DTensor.from_local(
            torch.full((len(mine), _WIDTH), value + n),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=shape,
            stride=stride,
        )
        for n in range(tensors)
    }


def save_shards(directory: Path, size_bytes: int) -> Found:
    """One step of each."""
    state = _shards(init_device_mesh("cpu", (dist.get_world_size(),)), size_bytes, 1.0)
    pool, checkpointer = _checkpointer(directory)
    with pool, checkpointer:
        checkpointer.save(1, state).result()
    _dcp_save(directory, state, 1)
    return {}


def load_shards(directory: Path, size_bytes: int, samples: int) -> Found:
    """Seconds of loads by both into shards of this world; every value is checked."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target, wanted = _shards(mesh, size_bytes, 0.0), _shards(mesh, size_bytes, 1.0)
    found: defaultdict[str, list[float]] = defaultdict(list)
    pool, checkpointer = _checkpointer(directory)
    ways: dict[str, Callable[[], object]] = {
        "ours_seconds": lambda: checkpointer.restore(target, 1),
        "dcp_seconds": lambda: dcp_load(target, checkpoint_id=directory / "dcp-1"),
    }
    with pool, checkpointer:
        for sample in range(1 + samples):  # one unmeasured
            for name, load in ways.items():
                for tensor in target.values():
                    tensor.to_local().zero_()
                drop_cache(directory)
                taken = _timed(load)
                if not all(torch.equal(target[n].to_local(), wanted[n].to_local()) for n in wanted):
                    raise RuntimeError(f"{name} loaded other values than were saved")
                if sample:
                    found[name].append(taken)
    return dict(found)
