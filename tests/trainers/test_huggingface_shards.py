"""The real Trainer with FSDP2 in jobs of several processes over gloo: saved, killed, resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpstore.checkpoint import Checkpointer
from hpstore.errors import CheckpointError
from tests.integration.ranks import full, make_pool, open_pool
from tests.trainers.cpu_shards import shard_on_the_cpu
from tests.trainers.test_huggingface_ranks import EVERY, STEPS, arguments, die_at, left
from tests.trainers.test_several_processes import join_job, launch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
}


def whole(tree: Any) -> Any:
    """Nested values with whole tensors for shards. Collective."""
    if isinstance(tree, torch.Tensor):
        return full(tree)
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(whole, tree))
    return tree


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and moments, whole."""
    return {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict())}


def train(
    rank: int, world: int, directory: Path, prefix: str, dies: int, steps: int, kind: str
) -> None:
    """Train to the end, from the newest checkpoint; what there was at the beginning and is at the
    end goes to a file. `dies`: rank 1 is killed when it votes for so many saves."""
    join_job(rank, world)
    shard_on_the_cpu()
    import transformers

    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface import losses, rows, tiny

    begun: dict[str, Any] = {}

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **parts: Any) -> None:
            begun.update(state_of(parts["model"], parts["optimizer"]))

    args = arguments(directory, steps, **(FSDP2 if kind == "fsdp2" else {}))
    transformers.set_seed(11)
    with open_pool(directory) as pool:
        callback = PoolTrainerCallback(pool, prefix, every=EVERY)
        run: Any = transformers.Trainer(
            model=tiny(), args=args, train_dataset=rows(), callbacks=[callback, Look()]
        )
        folder = callback.resume_folder(directory / "scratch")
        if folder is not None and kind == "fsdp2":
            assert sum(path.stat().st_size for path in Path(folder).rglob("*.*")) < 40_000
        if dies and rank == 1:
            die_at(dies)
        try:
            run.train(resume_from_checkpoint=folder)
        except (CheckpointError, RuntimeError):  # of the save, or of FSDP's own messages
            assert dies
            return
        callback.close()
    sharded = any(hasattr(p, "placements") for p in run.model.parameters())
    assert sharded is (kind == "fsdp2")
    found = {
        "begun": begun,
        **state_of(run.model, run.optimizer),
        "losses": losses(run),
        "step": run.state.global_step,
        "folder": folder or "",
    }
    torch.save(found, directory / f"{prefix}-{rank}.pt")


def test_a_job_killed_in_a_save_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """Dropout of its own on each rank, accumulation, shuffling: the same losses follow, and the
    same weights and moments, bit by bit; no weights pass through the local folder."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    launch(tmp_path, 2, train, "straight", 0, STEPS, "fsdp2")
    launch(tmp_path, 2, train, "cut", 2, STEPS, "fsdp2", killed=(1,))
    with open_pool(tmp_path) as pool, Checkpointer(pool, "cut", rng=False) as ckpt:
        assert ckpt.steps() == [EVERY]
    launch(tmp_path, 2, train, "cut", 0, STEPS, "fsdp2")
    for rank in range(2):
        straight, cut = left(tmp_path, "straight", rank), left(tmp_path, "cut", rank)
        assert cut["step"] == straight["step"] == STEPS
        assert f"resume-{EVERY}-" in cut["folder"]
        assert cut["losses"][-(STEPS - EVERY) :] == straight["losses"][-(STEPS - EVERY) :]
        assert same(cut["model"], straight["model"])
        assert same(cut["optimizer"], straight["optimizer"])
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("first", "before", "later", "after"),
    [
        (2, "fsdp2", 1, "fsdp2"),
        (1, "fsdp2", 2, "fsdp2"),
        (2, "fsdp2", 2, "ddp"),
        (2, "ddp", 2, "fsdp2"),
        (2, "fsdp2", 1, "one process"),
    ],
)
def test_a_job_may_go_on_with_other_shards(
    tmp_path: Path, first: int, before: str, later: int, after: str
) -> None:
    """Other ranks, DDP or none: weights and moments are those of the save, bit by bit."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    launch(tmp_path, first, train, "run", 0, EVERY, before)
    saved = left(tmp_path, "run", 0)
    launch(tmp_path, later, train, "run", 0, 2 * EVERY, after)
    for rank in range(later):
        found = left(tmp_path, "run", rank)
        assert found["step"] == 2 * EVERY
        assert f"resume-{EVERY}-" in found["folder"]
        assert same(found["begun"]["model"], saved["model"])
        moments = found["begun"]["optimizer"]["state"]
        assert same(moments, saved["optimizer"]["state"])
        assert len(moments) == len(list(saved["optimizer"]["state"]))


def policies(rank: int, world: int, directory: Path, first: int, steps: int, term: int) -> None:
    """Early stopping, the best model and a limit of saves, saved by the Trainer's own saves."""
    join_job(rank, world)
    shard_on_the_cpu()
    import transformers

    from hpstore.checkpoint import Preempted
    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface import rows, tiny
    from tests.trainers.test_huggingface_policies import run_score

    scores = [1.0, 0.5, 0.9, 0.8, 0.7, 0.6]
    options = {
        **FSDP2,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": False,
        "restore_callback_states_from_checkpoint": True,
    }

    class Term(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if rank == 1 and state.global_step + 1 == term:
                os.kill(os.getpid(), signal.SIGTERM)

    args = arguments(directory, steps, **options)
    transformers.set_seed(11)
    with open_pool(directory) as pool:
        callback = PoolTrainerCallback(pool, "run", keep_last=4, on_sigterm="save")
        early = transformers.EarlyStoppingCallback(early_stopping_patience=4)
        run: Any = transformers.Trainer(
            model=tiny(),
            args=args,
            train_dataset=rows(),
            eval_dataset=rows(),
            callbacks=[early, callback, Term()],
        )
        left_over = iter(scores[first:])
        evaluate = run.evaluate

        def scored(*_: Any, **__: Any) -> Any:
            evaluate()  # leaves the root's parameters unsharded
            return run_score(run, next(left_over))

        run.evaluate = scored
        folder = callback.resume_folder(directory / "scratch")
        assert (folder is None) is (first == 0)
        try:
            run.train(resume_from_checkpoint=folder)
            assert not term
        except Preempted:
            assert run.state.global_step in (term, term + 1, term + 2)  # as agreed
        last = run.state.global_step
        newest = [step for step in range(last - 3, last + 1) if step]  # there may be three yet
        assert rank or callback.checkpoints.steps() == newest
        dist.barrier()  # rank 0 removes
        if not term:
            assert last == 6
            assert run.state.best_global_step == 2
            weights = whole(run.model.state_dict())
            straight = torch.load(directory / "step-2.pt", weights_only=True)
            assert all(torch.equal(weights[name], value) for name, value in straight.items())
        elif rank == 0:
            kept = callback.checkpoints.read(2).tree()["model"]
            torch.save(
                {name: value.clone() for name, value in kept.items()}, directory / "step-2.pt"
            )
        callback.close()
    found = sorted(path.name for path in (directory / "out").glob("checkpoint-*"))
    assert found == ["checkpoint-2", f"checkpoint-{last}"]


def test_sigterm_early_stopping_the_best_model_and_a_limit(tmp_path: Path) -> None:
    """SIGTERM to one rank stops all in the same step, saved; the run that goes on stops where
    patience ends and loads its best model from the Trainer's own folder, of which two are left.

    The signal comes after the best step, 2: the Trainer's ranks look for the folder of the best
    step while it is being made, and agree on it in the step after that."""
    make_pool(tmp_path)
    launch(tmp_path, 2, policies, 0, 12, 3)
    with open_pool(tmp_path) as pool, Checkpointer(pool, "run", rng=False) as ckpt:
        stopped = ckpt.steps()[-1]
    launch(tmp_path, 2, policies, stopped, 12, 0)


def refused(rank: int, world: int, directory: Path) -> None:
    """A model that others have sharded, a damaged step, rank 1 without room, no Trainer."""
    join_job(rank, world)
    import transformers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface import rows, tiny

    def trainer(callback: Any, model: Any, **options: Any) -> Any:
        args = arguments(directory, 2, **options)
        return transformers.Trainer(
            model=model, args=args, train_dataset=rows(), callbacks=[callback]
        )

    arguments(directory, 2)
    with open_pool(directory) as pool, PoolTrainerCallback(pool, "run", every=1) as callback:
        sharded = tiny()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
        with pytest.raises(CheckpointError, match=r"sharded \(a DTensor\).*\"version\": 2"):
            trainer(callback, sharded)
        before = callback.resume_folder(directory / "scratch")  # of a Trainer that trains DDP
        assert before is None
        trainer(callback, tiny(), **FSDP2).train()  # without the shim: DDP, with a warning
        ddp = callback.resume_folder(directory / "scratch")
        assert ddp is not None
        shard_on_the_cpu()
        run = trainer(callback, tiny(), **FSDP2)
        with pytest.raises(CheckpointError, match=r"made before the Trainer"):
            run.train(resume_from_checkpoint=ddp)
        folder = callback.resume_folder(directory / "scratch")
        with pytest.raises(CheckpointError, match=r"has not loaded the model and the optimizer"):
            trainer(callback, tiny(), **FSDP2).train()
        again = trainer(callback, tiny(), **FSDP2)
        folder = callback.resume_folder(directory / "scratch", 1)
        if rank == 0:
            callback.checkpoints.delete(1)
        dist.barrier()
        with pytest.raises(CheckpointError, match="step 1"):
            again.train(resume_from_checkpoint=folder)


def test_what_is_refused_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Before a step is trained; no rank waits for one that has raised."""
    make_pool(tmp_path)
    launch(tmp_path, 2, refused)


def test_other_kinds_of_jobs_are_refused_with_the_line_to_change() -> None:
    """accelerate makes none of them on the CPU."""
    from types import SimpleNamespace

    from hpstore.trainers.job_kinds import Parallelism, job_kind

    for name, line in (
        ("FSDP", "fsdp_version=2"),
        ("DEEPSPEED", "leave out deepspeed="),
        ("MEGATRON_LM", "by a Checkpointer"),
        ("XLA", "by a Checkpointer"),
    ):
        with pytest.raises(CheckpointError, match=line):
            job_kind(name, SimpleNamespace(fsdp_version=1))
    assert job_kind("FSDP", SimpleNamespace(fsdp_version=2)) is Parallelism.SHARDED
    assert job_kind("MULTI_GPU", None) is job_kind("NO", None) is Parallelism.REPLICATED
