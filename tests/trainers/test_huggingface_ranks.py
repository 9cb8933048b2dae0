"""The real Trainer in jobs of several processes (DDP over gloo): saved, killed, resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import Checkpointer
from hpstore.checkpoint.save.save_job import SaveJob
from hpstore.errors import CheckpointError, ConfigError
from tests.integration.ranks import make_pool, open_pool
from tests.trainers.test_several_processes import join_job, launch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS, EVERY = 10, 3


def arguments(directory: Path, steps: int, **options: Any) -> Any:
    """Of a training that logs each step, on the CPU."""
    import transformers

    options = {"save_strategy": "no", **options}
    return transformers.TrainingArguments(
        output_dir=str(directory / "out"),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        seed=11,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


def train(
    rank: int, world: int, directory: Path, prefix: str, dies: int = 0, steps: int = STEPS
) -> None:
    """Train to the end, from the newest checkpoint; what there is then goes to a file.

    `dies`: rank 1 is killed when it votes for so many saves.
    """
    join_job(rank, world)
    import transformers

    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface import losses, rows, tiny

    args = arguments(directory, steps)
    transformers.set_seed(11)
    with open_pool(directory) as pool:
        callback = PoolTrainerCallback(pool, prefix, every=EVERY)
        run: Any = transformers.Trainer(
            model=tiny(), args=args, train_dataset=rows(), callbacks=[callback]
        )
        folder = callback.resume_folder(directory / "scratch")
        if dies and rank == 1:
            die_at(dies)
        try:
            run.train(resume_from_checkpoint=folder)
        except (CheckpointError, RuntimeError):  # of the save, or of DDP's own messages
            assert dies
            return
        callback.close()
    found = {
        "losses": losses(run),
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "step": run.state.global_step,
        "folder": folder or "",
    }
    torch.save(found, directory / f"{prefix}-{rank}.pt")


def die_at(number: int) -> None:
    """Kill this process at its vote for a save."""
    commit, votes = SaveJob.commit, iter(range(1, number + 1))

    def fatal(job: SaveJob) -> Any:
        if next(votes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(job)

    SaveJob.commit = fatal  # type: ignore[method-assign,assignment]


def left(directory: Path, prefix: str, rank: int) -> dict[str, Any]:
    """What a training has left in its file."""
    found: dict[str, Any] = torch.load(directory / f"{prefix}-{rank}.pt", weights_only=True)
    return found


def test_a_job_killed_in_a_save_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """Dropout of its own on each rank, accumulation, shuffling: the same losses follow, and the
    same weights, bit by bit."""
    from tests.trainers.test_huggingface import same

    make_pool(tmp_path)
    launch(tmp_path, 2, train, "straight")
    launch(tmp_path, 2, train, "cut", 2, killed=(1,))
    with open_pool(tmp_path) as pool, Checkpointer(pool, "cut", rng=False) as ckpt:
        assert ckpt.steps() == [EVERY]
    launch(tmp_path, 2, train, "cut")
    for rank in range(2):
        straight, cut = left(tmp_path, "straight", rank), left(tmp_path, "cut", rank)
        assert cut["step"] == straight["step"] == STEPS
        assert f"resume-{EVERY}-" in cut["folder"]
        assert cut["losses"][-(STEPS - EVERY) :] == straight["losses"][-(STEPS - EVERY) :]
        assert same(cut["model"], straight["model"])
        assert same(cut["optimizer"], straight["optimizer"])
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(("first", "later"), [(2, 1), (1, 2)])
def test_a_job_may_go_on_with_other_processes(tmp_path: Path, first: int, later: int) -> None:
    """What all have alike is there; a rank that is new keeps its RNG states."""
    make_pool(tmp_path)
    launch(tmp_path, first, train, "run", 0, EVERY)
    launch(tmp_path, later, train, "run", 0, 2 * EVERY)
    for rank in range(later):
        found = left(tmp_path, "run", rank)
        assert found["step"] == 2 * EVERY
        assert f"resume-{EVERY}-" in found["folder"]


def refused(rank: int, world: int, directory: Path) -> None:
    """Rank 1 cannot write its folder; a Trainer with DeepSpeed; another number of processes."""
    join_job(rank, world)
    from hpstore.trainers.huggingface import PoolTrainerCallback

    args = arguments(directory, 4)
    with open_pool(directory) as pool, PoolTrainerCallback(pool, "run", every=1) as callback:
        parts = dict.fromkeys(("model", "optimizer", "lr_scheduler", "scaler", "rng"))
        callback.checkpoints.save(1, {**parts, "trainer_state": "{}"}).result()
        place = directory / "file" if rank else directory / "scratch"
        (directory / "file").touch()
        kind, said = (OSError, "file") if rank else (CheckpointError, "rank 1: FileExistsError")
        with pytest.raises(kind, match=said):
            callback.resume_folder(place)
        callback._ranks.world = 3
        with pytest.raises(CheckpointError, match=r"the Trainer has 2 processes.* group of 3"):
            callback.on_train_begin(args, None, None)
        callback._ranks.world = 2
        args.deepspeed = {"zero_optimization": {"stage": 1}}
        with pytest.raises(CheckpointError, match=r"leave out deepspeed=.*\"version\": 2"):
            callback.on_init_end(args, None, None)


def test_what_is_refused_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Nobody waits for a rank that has raised."""
    make_pool(tmp_path)
    launch(tmp_path, 2, refused)


def test_a_callback_before_the_group_is_told_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process would save alone, over the others."""
    from hpstore.trainers.huggingface import PoolTrainerCallback

    make_pool(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with open_pool(tmp_path) as pool, pytest.raises(ConfigError, match="make TrainingArguments"):
        PoolTrainerCallback(pool, "run")
