"""Checkpoints of many ranks, by real processes: resharding, votes, references."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.checkpoint import Checkpointer, SaveOptions
from hpstore.checkpoint.catalog.step_catalog import StepCatalog
from hpstore.errors import HpstoreError, TooFewDevices
from tests.integration.ranks import (
    Values,
    assert_same,
    breaking_put,
    build,
    launch,
    make_pool,
    open_pool,
    put_segments,
    raised,
    together,
    train,
    values,
)
from tests.thorough import LONG

KINDS = ("fsdp", "tp", "2d", "ddp")


def state_of(kind: str, seed: int, ckpt: Checkpointer) -> dict[str, Any]:
    """What is saved and restored."""
    net, optimizer = build(kind, seed)
    return {
        "model": net,
        "optimizer": optimizer,
        "epoch": seed,
        "mine": ckpt.per_rank({"id": seed * 100 + dist_rank(), "seen": torch.zeros(3)}),
    }


def dist_rank() -> int:
    """This process' rank, 0 when it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def save_large_kinds(rank: int, world: int, directory: Path, *kinds: str) -> None:
    """As save_kinds, each rank putting a segment."""
    put_segments()
    save_kinds(rank, world, directory, *kinds)


def save_kinds(rank: int, world: int, directory: Path, *kinds: str) -> None:
    """Train and save a model of each kind; leave what was saved, whole, in a file."""
    for kind in kinds:
        with open_pool(directory) as pool, Checkpointer(pool, f"run/{kind}{world}") as ckpt:
            state = state_of(kind, 1, ckpt)
            train(state["model"], state["optimizer"])
            state["mine"].value["seen"] += rank
            report = ckpt.save(3, state).result()
            wanted = values(state["model"], state["optimizer"])
        if rank == 0:
            torch.save(wanted, directory / f"{kind}{world}.pt")
            (directory / f"{kind}{world}.json").write_text(json.dumps(report.as_dict()))


def load_kinds(rank: int, world: int, directory: Path, *sources: str) -> None:
    """Restore each of `sources` into a model of each kind; compare all values, bit by bit."""
    with open_pool(directory) as pool:
        for source, kind in itertools.product(sources, KINDS):
            ckpt = Checkpointer(pool, f"run/{source}")
            state = state_of(kind, 2, ckpt)
            assert ckpt.restore(state) == 3
            assert ckpt.last_restore is not None
            newcomer = rank >= int(source[-1])
            lacking = (f"mine@{rank}/id", f"mine@{rank}/seen")
            assert ckpt.last_restore.missing == (lacking if newcomer else ())
            assert ckpt.last_restore.unexpected == ()
            ckpt.close()
            check_own(state, rank, newcomer=newcomer)
            found = values(state["model"], state["optimizer"])
            wanted: Values = torch.load(directory / f"{source}.pt")
            assert_same(found, wanted, f"{source} in {kind} on rank {rank} of {world}")


def check_own(state: dict[str, Any], rank: int, *, newcomer: bool) -> None:
    """A rank has what it saved, or, when there was no such rank, what it had."""
    assert state["epoch"] == 1
    mine = state["mine"].value
    assert mine["id"] == (200 if newcomer else 100) + rank
    assert torch.equal(mine["seen"], torch.full((3,), 0.0 if newcomer else float(rank)))


@pytest.mark.parametrize("save", [save_kinds, save_large_kinds], ids=["within", "segments"])
def test_a_checkpoint_of_any_sharding_loads_on_any_other_with_m_devices_lost(
    tmp_path: Path, save: Callable[..., None]
) -> None:
    """FSDP2, TP, 2-D, DDP and plain, saved by 4, 2 and 1 processes, loaded by 4, 2 and 1.

    The bytes are in the manifest, put by rank 0, or in a segment of each rank. Parameters, moments
    and step counters are the same bit by bit, and so are the next losses.
    """
    make_pool(tmp_path)
    save_kinds(0, 1, tmp_path, "plain")
    launch(tmp_path, 2, save, "fsdp")
    launch(tmp_path, 4, save, *KINDS)
    with open_pool(tmp_path) as pool:
        assert any("segment" in key for key in pool.list("run")) == (save is save_large_kinds)
    everything = [f"{kind}4" for kind in KINDS] + ["plain1", "fsdp2"]
    if save is save_kinds and not LONG:  # with segments all of them are loaded
        everything = ["2d4", "plain1", "fsdp2"]
    for lost in ("d1", "d4"):
        shutil.rmtree(tmp_path / lost)
    launch(tmp_path, 4, load_kinds, *everything)
    launch(tmp_path, 2, load_kinds, *everything)
    for source in everything:
        for kind in ("plain", "compiled") if LONG else ("plain",):
            load_alone(tmp_path, source, kind)


def load_alone(directory: Path, source: str, kind: str) -> None:
    """Restore on one process; the next losses are those of a model that torch itself has filled."""
    with open_pool(directory) as pool, Checkpointer(pool, f"run/{source}") as ckpt:
        state = state_of(kind, 2, ckpt)
        assert ckpt.restore(state) == 3
        assert ckpt.verify(3).ok
        check_own(state, 0, newcomer=False)
    wanted: Values = torch.load(directory / f"{source}.pt")
    assert_same(values(state["model"], state["optimizer"]), wanted, f"{source} in {kind}")
    if kind != "plain":
        return
    net, optimizer = build("plain", 3)
    net.load_state_dict({name: wanted[name] for name in net.state_dict()})
    slots = ("step", "exp_avg", "exp_avg_sq")
    rows = {
        n: {slot: wanted[f"{name}.{slot}"].clone() for slot in slots}
        for n, name in enumerate(net.state_dict())
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": rows})
    assert train(state["model"], state["optimizer"]) == train(net, optimizer)


@pytest.mark.usefixtures("segments_apart")
def test_replicas_are_written_once_and_by_all(tmp_path: Path) -> None:
    """DDP on four ranks stores about what one process stores, and no rank writes all of it."""
    make_pool(tmp_path)
    save_kinds(0, 1, tmp_path, "plain")
    launch(tmp_path, 4, save_large_kinds, "ddp")
    alone, many = (
        json.loads((tmp_path / f"{name}.json").read_text())["bytes"] for name in ("plain1", "ddp4")
    )
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run/ddp4") as ckpt:
        sizes = [segment.size for segment in ckpt.steps.manifest(3).segments]
    rng = 4 * 10_000  # each rank's random number generators are its own
    assert alone <= many <= alone + rng + 4 * 4096
    assert sum(sizes) == many
    assert len(sizes) == 4
    assert max(sizes) < 0.6 * many


# --- votes ----------------------------------------------------------------------------------


def disagree(rank: int, world: int, directory: Path) -> None:
    """Saves that must fail on all ranks, each followed by one that works."""
    put_segments()
    x = torch.full((30_000,), float(rank))
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        own = {"mine": ckpt.per_rank(x)}

        def left() -> list[str]:
            return [key for key in pool.list("run") if key != "run/writer"]

        said = raised(lambda: ckpt.save(5 + rank % 2, own))
        together("ranks save different steps: [5, 6, 5, 6]" in said, said)
        together(left() == [], left())
        bad = {**own, "outer": {"inner": object()}} if rank == 2 else own
        said = raised(lambda: ckpt.save(5, bad))
        together("outer/inner" in said, said)
        together(left() == [], left())
        ckpt.save(5, own).result()
        ckpt.wait()  # the note of the attempt goes after the commit
        dist.barrier()
        first = left()

        x += 10

        def full_disk() -> None:
            raise TooFewDevices("3 of 6 devices are full")

        undo = breaking_put(pool, "segment", full_disk) if rank == 1 else lambda: None
        said = raised(lambda: ckpt.save(6, own).result())
        together("rank 1: TooFewDevices: 3 of 6 devices are full" in said, said)
        together("step 6 is not committed, step 5 is still current" in said, said)
        undo()
        together(left() == first, left())
        ckpt.save(6, own).result()
        together(ckpt.steps() == [5, 6], ckpt.steps())
        x.zero_()
        assert ckpt.restore({"mine": ckpt.per_rank(x)}) == 6
        together(bool((x == rank + 10).all()), x)


def test_ranks_that_disagree_or_fail_all_raise_and_leave_nothing(tmp_path: Path) -> None:
    """Different steps, an object that cannot be saved, a rank without space: all ranks say so.

    Nothing but the fence is left under the prefix, and the next save works.
    """
    make_pool(tmp_path)
    launch(tmp_path, 4, disagree)


def no_memory(rank: int, world: int, directory: Path, staging_bytes: int | None) -> None:
    """Staging fails on rank 1; the others, which have staged, must not wait for it."""
    put_segments()
    with open_pool(directory) as pool:
        ckpt = Checkpointer(
            pool, "run", rng=False, save=SaveOptions(memory=staging_bytes, reuse=False)
        )
        own = {"x": ckpt.per_rank(torch.zeros(30_000)), "y": ckpt.per_rank(torch.ones(30_000))}
        ckpt.save(1, own).result()
        dist.barrier()
        stage = ckpt.saver._stage._stage
        calls = itertools.count(1)

        def fail(*_: Any) -> Any:
            if next(calls) == (2 if staging_bytes else 1):
                raise MemoryError("no memory left")
            return stage(*_)

        if rank == 1:
            ckpt.saver._stage._stage = fail  # type: ignore[method-assign,assignment]
        try:
            ckpt.save(2, own).result()
            said = "nothing was raised"
        except (HpstoreError, MemoryError) as error:
            said = str(error)
        ckpt.saver._stage._stage = stage  # type: ignore[method-assign]
        together("no memory left" in said, said)
        together(ckpt.steps() == [1], ckpt.steps())
        ckpt.wait()
        dist.barrier()
        left = pool.list("run")
        together(len(left) == 2 + world * (2 if staging_bytes else 1), left)
        ckpt.save(2, own).result()
        together(ckpt.verify(2).ok, "damaged")
        ckpt.close()


@pytest.mark.parametrize("staging_bytes", [None, 400_000], ids=["whole", "sliced"])
def test_a_rank_that_cannot_stage_fails_the_save_of_all_at_once(
    tmp_path: Path, staging_bytes: int | None
) -> None:
    """MemoryError on one rank: nobody waits for commit_seconds, and the next save works."""
    make_pool(tmp_path)
    launch(tmp_path, 2, no_memory, staging_bytes)


def no_listing(rank: int, world: int, directory: Path) -> None:
    """Rank 0, which chooses the step, cannot list them."""
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        ckpt.save(1, {"x": torch.zeros(9)}).result()

        def broken(*_: Any, **__: Any) -> dict[str, str]:
            raise TooFewDevices("3 of 6 devices do not answer")

        original = pool.admin.versions_under
        if rank == 0:
            pool.admin.versions_under = broken  # type: ignore[method-assign]
        said = raised(lambda: ckpt.restore({"x": torch.ones(9)}))
        pool.admin.versions_under = original  # type: ignore[method-assign]
        together("3 of 6 devices do not answer" in said, said)
        together(ckpt.restore({"x": torch.ones(9)}) == 1, "nothing was restored")


def test_all_ranks_hear_that_rank_0_cannot_list_the_steps(tmp_path: Path) -> None:
    """PROTOCOL 20: rank 0 chooses; when it cannot, nobody waits for its choice."""
    make_pool(tmp_path)
    launch(tmp_path, 2, no_listing)


def unlike_shapes(rank: int, world: int, directory: Path) -> None:
    """The same name on all ranks, each with a tensor of its own shape."""
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        said = raised(lambda: ckpt.save(1, {"buffer": torch.zeros(100 + rank)}).result())
        together("'buffer'" in said and "per_rank" in said, said)
        together(ckpt.steps() == [], ckpt.steps())


def test_replicas_of_different_shapes_are_refused(tmp_path: Path) -> None:
    """One of them would be saved and the others lost without a word."""
    make_pool(tmp_path)
    launch(tmp_path, 2, unlike_shapes)


def stages(rank: int, world: int, directory: Path) -> None:
    """A pipeline: each rank has layers that no other has."""
    layer = torch.nn.Linear(80, 80 + rank)
    net = torch.nn.ModuleDict({f"layer{rank}": layer})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.nn.init.constant_(layer.weight, rank)
    for _ in range(2):
        layer(torch.ones(2, 80)).sum().backward()
        optimizer.step()
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, f"only{rank}": rank}
    with open_pool(directory) as pool, Checkpointer(pool, "run") as ckpt:
        ckpt.save(1, state).result()
        wanted = values(net, optimizer)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
                optimizer.state[parameter]["exp_avg"].zero_()
        state[f"only{rank}"] = -1
        optimizer.param_groups[0]["lr"] = 9.0
        assert ckpt.restore(state) == 1
        assert state[f"only{rank}"] == rank
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert_same(values(net, optimizer), wanted, f"stage {rank}")
        # what nobody takes is still an error, on all ranks, and changes nothing
        mine = {"model": net, "optimizer": optimizer}
        said = raised(lambda: ckpt.restore(mine))
        together("holds what no rank takes: ['only0', 'only1', 'only2']" in said, said)
        # two stages on one rank, and a third: another cut of the pipeline
        if rank == 0:
            both = torch.nn.ModuleDict({f"layer{n}": torch.nn.Linear(80, 80 + n) for n in (0, 1)})
        else:
            both = torch.nn.ModuleDict({"layer2": torch.nn.Linear(80, 82)})
        fresh = torch.optim.AdamW(both.parameters(), lr=1.0)
        again: dict[str, Any] = {"model": both, "optimizer": fresh}
        again |= {f"only{n}": -1 for n in ((0, 1) if rank == 0 else (2,))}
        assert ckpt.restore(again) == 1
        found = values(both, fresh)
        for name in wanted.keys() & found.keys():
            assert torch.equal(wanted[name], found[name]), name
        assert len(found) == len(wanted) * (2 if rank == 0 else 1)
        assert fresh.param_groups[0]["lr"] == 0.01


def test_keys_that_one_rank_has_alone_are_saved_and_come_back_there(tmp_path: Path) -> None:
    """Stages of a pipeline: a parameter, its moments and a value that no other rank has."""
    make_pool(tmp_path)
    launch(tmp_path, 3, stages)
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run") as ckpt:
        loaded = ckpt.load(1)
        for rank in range(3):
            assert loaded[f"model/layer{rank}.weight"].shape == (80 + rank, 80)
            assert loaded[f"optimizer/state/layer{rank}.weight/exp_avg"].shape == (80 + rank, 80)


# --- references -----------------------------------------------------------------------------


def delete_under_a_save(rank: int, world: int, directory: Path) -> None:
    """Somebody deletes the step whose segments a save under way refers to."""
    put_segments()
    frozen = torch.full((50_000,), float(rank))
    with open_pool(directory) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        state = {"frozen": ckpt.per_rank(frozen), "free": ckpt.per_rank(torch.zeros(30_000))}
        ckpt.save(1, state).result()
        if rank == 0:
            breaking_put(pool, "manifest", lambda: other_deletes(directory))
        state["free"].value += 1
        report = ckpt.save(2, state).result()
        ckpt.wait()
        together(report.referenced_bytes == world * 200_000, report)
        together(ckpt.steps() == [2], ckpt.steps())
        together(ckpt.verify(2).ok, ckpt.verify(2).damaged)


def other_deletes(directory: Path) -> None:
    """As another process would, with a pool of its own."""
    with open_pool(directory) as other:
        StepCatalog(other, "run").delete(1)


def test_segments_that_any_rank_of_a_living_save_refers_to_stay(tmp_path: Path) -> None:
    """PROTOCOL 18: delete the step before while a save refers to it; the new step is whole."""
    make_pool(tmp_path)
    launch(tmp_path, 2, delete_under_a_save)
