"""The real Trainer and the real Accelerator, tiny models without a hub: save, resume, retention."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hpstore
from hpstore.checkpoint import Preempted
from hpstore.errors import CheckpointError, CheckpointMismatch, ConfigError, TooFewDevices
from hpstore.pool.pool import Pool

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
from accelerate.utils import ProjectConfiguration  # noqa: E402

from hpstore.trainers.accelerate_states import PoolAccelerate  # noqa: E402
from hpstore.trainers.huggingface import PoolTrainerCallback  # noqa: E402

pytestmark = [
    # no GPU here: torch says that pinning does nothing
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tiny() -> Any:
    """A two-layer GPT-2 with tied embeddings and dropout."""
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, callback: PoolTrainerCallback, steps: int, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=4,
        use_cpu=True,
        report_to=[],
        seed=11,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    transformers.set_seed(11)
    return transformers.Trainer(model=tiny(), args=args, train_dataset=rows(), callbacks=[callback])


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def same(one: Any, two: Any) -> bool:
    """Equal nested values, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)


@pytest.mark.parametrize("own", [True, False], ids=["save_strategy=steps", "every="])
def test_a_resumed_training_is_the_one_never_stopped(pool: Pool, tmp_path: Path, own: bool) -> None:
    """Dropout, shuffling and schedule included: killed after 8 of 14 steps, same losses follow."""
    options = {} if own else {"save_strategy": "no"}
    with pool:
        whole = PoolTrainerCallback(pool, "whole", every=None if own else 4)
        straight = trainer(tmp_path / "a", whole, 14, **options)
        straight.train()
        assert (tmp_path / "a" / "checkpoint-4").exists() is own
        # the same run, cut at step 8: the later checkpoints never came to be
        for step in whole.checkpoints.steps():
            if step > 8:
                whole.checkpoints.delete(step)
        with PoolTrainerCallback(pool, "whole", every=None if own else 4) as back:
            run = trainer(tmp_path / "b", back, 14, **options)
            with torch.no_grad():
                run.model.lm_head.weight.normal_()  # other weights: the checkpoint's must come
            folder = back.resume_folder(tmp_path / "scratch")
            assert folder is not None
            run.train(resume_from_checkpoint=folder)
            assert run.state.global_step == 14
            assert losses(run)[-6:] == losses(straight)[-6:]
            assert same(run.model.state_dict(), straight.model.state_dict())
            assert same(run.optimizer.state_dict(), straight.optimizer.state_dict())
            assert same(run.lr_scheduler.state_dict(), straight.lr_scheduler.state_dict())
            assert list((tmp_path / "scratch").iterdir()) == []
        whole.close()


def test_the_folder_is_the_trainers_own(pool: Pool, tmp_path: Path) -> None:
    """Against the Trainer's checkpoint-4: same weights, optimizer, scheduler, RNG and state."""
    with pool, PoolTrainerCallback(tmp_path / "pool.toml", "run") as callback:
        assert callback.resume_folder(tmp_path / "scratch") is None
        trainer(tmp_path / "a", callback, 4).train()
        ours, theirs = Path(callback.resume_folder(tmp_path / "s") or ""), tmp_path / "a"
        theirs = theirs / "checkpoint-4"
        for name in ("optimizer.pt", "scheduler.pt"):
            one = torch.load(ours / name, weights_only=True)
            assert same(one, torch.load(theirs / name, weights_only=True))
        loaded = tiny()
        loaded.load_state_dict(torch.load(ours / "pytorch_model.bin", weights_only=True))
        stock = transformers.GPT2LMHeadModel.from_pretrained(theirs)
        assert same(loaded.state_dict(), stock.state_dict())
        states = [json.loads((f / "trainer_state.json").read_text()) for f in (ours, theirs)]
        assert states[0] == states[1]


@pytest.mark.usefixtures("segments_apart")
def test_retention_and_an_older_step_by_number(pool: Pool, tmp_path: Path) -> None:
    """keep_last=2 of four saves; a step can be asked for; a damaged one is passed over."""
    with pool, PoolTrainerCallback(pool, "run", keep_last=2) as callback:
        trainer(tmp_path / "a", callback, 16).train()
        assert callback.checkpoints.steps() == [12, 16]
        folder = Path(callback.resume_folder(tmp_path / "s", step=12) or "")
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 12
        segment = callback.checkpoints.steps.manifest(16).segments[0].key
        pool.delete(segment)
        options = callback.checkpoints.saver.options
        callback.checkpoints.saver.options = replace(
            options, warm=False
        )  # this process still has the step in memory
        folder = Path(callback.resume_folder(tmp_path / "s") or "")
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 12
        assert len(list((tmp_path / "s").iterdir())) == 1


def test_a_failed_save_ends_the_training_with_its_error(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The background save fails: train() raises, and what was durable before is there."""
    with pool, PoolTrainerCallback(pool, "run", every=2) as callback:
        trainer(tmp_path / "a", callback, 2, save_strategy="no").train()
        put = Pool.put

        def failing(self: Pool, key: str, *args: Any, **options: Any) -> Any:
            if "/step-" in key:
                raise TooFewDevices("no devices today")
            return put(self, key, *args, **options)

        monkeypatch.setattr(Pool, "put", failing)
        with pytest.raises(TooFewDevices, match="today"):
            trainer(tmp_path / "a", callback, 4, save_strategy="no").train()
        monkeypatch.undo()
        assert callback.checkpoints.latest_valid() == 2


class Terminate(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """SIGTERM in the middle of a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("every", [None, 100])
def test_sigterm_stops_after_a_step_that_is_saved(
    pool: Pool, tmp_path: Path, every: int | None
) -> None:
    """on_sigterm="save": the training ends with the exit status of SIGTERM, and resumes there."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pool, PoolTrainerCallback(pool, "run", every=every, on_sigterm="save") as callback:
            run = trainer(tmp_path / "a", callback, 8, save_strategy="no")
            run.add_callback(Terminate())
            with pytest.raises(Preempted, match="step 3 is saved"):
                run.train()
        with (
            hpstore.open(tmp_path / "pool.toml") as other,
            PoolTrainerCallback(other, "run") as callback,
        ):
            assert callback.checkpoints.steps() == [3]
            again = trainer(tmp_path / "b", callback, 5)
            again.train(resume_from_checkpoint=callback.resume_folder(tmp_path / "scratch"))
            assert callback.checkpoints.steps() == [3, 4, 5]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_would_not_be_whole_is_refused(pool: Pool, tmp_path: Path) -> None:
    """every= with a callback that has a state of its own; every=0; several processes."""
    with pool, PoolTrainerCallback(pool, "run", every=2) as callback:
        run = trainer(tmp_path, callback, 4)
        run.add_callback(transformers.EarlyStoppingCallback())
        with pytest.raises(CheckpointError, match="EarlyStoppingCallback"):
            run.train()
        with pytest.raises(ConfigError, match="every"):
            PoolTrainerCallback(pool, "run", every=0)
        state = transformers.TrainerState()

        class Several:
            world_size = 2

        with pytest.raises(CheckpointError, match="Trainer has 2 processes"):
            callback.on_train_begin(Several(), state, None)


# --- accelerate -----------------------------------------------------------------------------------


class Counter:
    """Something to register for checkpointing."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Run:
    """A training loop under accelerate, with everything that save_state() keeps."""

    def __init__(self, folder: Path, **project: Any) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, project_config=ProjectConfiguration(str(folder), **project)
        )
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3))
        optimizer = torch.optim.AdamW(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.net, self.optimizer, self.schedule = self.accelerator.prepare(net, optimizer, schedule)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self) -> float:
        loss = self.net(torch.randn(5, 4)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counter.n += 1
        return float(loss.detach())


def test_accelerate_resumes_bit_for_bit_without_a_local_disk(pool: Pool, tmp_path: Path) -> None:
    """save_state and load_state in the pool alone: same losses follow, no folder is made."""
    with pool:
        first = Run(tmp_path / "p")
        with PoolAccelerate(first.accelerator, pool, "run", root=tmp_path):
            first.step()
            first.accelerator.save_state(tmp_path / "p" / "one")
            wanted = [first.step() for _ in range(3)]
        second = Run(tmp_path / "p")
        with PoolAccelerate(second.accelerator, tmp_path / "pool.toml", "run", root=tmp_path) as hp:
            assert hp.latest() == str(tmp_path / "p" / "one")
            second.accelerator.load_state(tmp_path / "p" / "one")
            assert [second.step() for _ in range(3)] == wanted
        assert second.counter.n == 4
        assert same(second.optimizer.state_dict(), first.optimizer.state_dict())
        assert not (tmp_path / "p").exists()
        assert "save_state" not in vars(second.accelerator)


def test_registered_hooks_are_called_and_may_take_models(pool: Pool, tmp_path: Path) -> None:
    """A hook that takes the weights away saves them itself, as accelerate's documentation says."""
    seen = []

    def saving(models: list[Any], weights: list[Any], folder: str) -> None:
        seen.append((len(models), len(weights), os.path.basename(folder)))
        weights.clear()

    def loading(models: list[Any], folder: str) -> None:
        seen.append((len(models), 0, os.path.basename(folder)))
        models.clear()

    with pool:
        run = Run(tmp_path)
        run.accelerator.register_save_state_pre_hook(saving)
        handle = run.accelerator.register_load_state_pre_hook(loading)
        with PoolAccelerate(run.accelerator, pool, "run"):
            run.accelerator.save_state("x")
            run.accelerator.load_state("x")
            assert seen == [(1, 1, "x"), (1, 0, "x")]
            handle.remove()
            with pytest.raises(CheckpointMismatch, match="0 models were saved, 1"):
                run.accelerator.load_state("x")


def test_retention_never_has_fewer_than_the_limit(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """total_limit=2: before each deletion in the pool, two loadable states; accelerate has one."""
    stock = Run(tmp_path / "stock", automatic_checkpoint_naming=True, total_limit=2)
    folders = []

    def count(models: list[Any], weights: list[Any], folder: str) -> None:
        done = [f for f in Path(folder).parent.iterdir() if f != Path(folder)]
        folders.append(len(done))

    stock.accelerator.register_save_state_pre_hook(count)
    for _ in range(4):
        stock.accelerator.save_state()
    assert folders == [0, 1, 1, 1]  # while the third and fourth are written, one is left

    with pool:
        run = Run(tmp_path / "ours", automatic_checkpoint_naming=True, total_limit=2)
        hp = PoolAccelerate(run.accelerator, pool, "run")
        delete, durable = Pool.delete, []

        def watched(self: Pool, key: str) -> None:
            delete(self, key)
            numbers = {n.number for n in hp.checkpoints._named()}
            durable.append(len(numbers & set(hp.checkpoints._checkpoints.steps())))

        for number in range(5):
            run.step()
            run.accelerator.save_state()
            hp.wait()
            if number == 1:
                monkeypatch.setattr(Pool, "delete", watched)
        assert min(durable) == 2
        names = [Path(name).name for name in hp.checkpoints.names()]
        assert names == ["checkpoint_3", "checkpoint_4"]
        hp.close()
        again = Run(tmp_path / "ours", automatic_checkpoint_naming=True, total_limit=2)
        with PoolAccelerate(again.accelerator, pool, "run"):
            with pytest.raises(CheckpointError, match="no checkpoint"):
                again.accelerator.load_state("never")
            again.accelerator.project_configuration.iteration = 4
            with pytest.raises(CheckpointError, match="saved already"):
                again.accelerator.save_state()
            again.accelerator.load_state()
            assert again.counter.n == 5
            again.accelerator.save_state()
        assert list((tmp_path / "ours").rglob("*")) == []


def test_a_failed_save_deletes_nothing(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """keep_last=1: the second save fails and is raised; the first is still there to load."""
    with pool:
        run = Run(tmp_path)
        hp = PoolAccelerate(run.accelerator, pool, "run", keep_last=1)
        run.accelerator.save_state("one")
        hp.wait()
        put = Pool.put

        def failing(self: Pool, key: str, *args: Any, **options: Any) -> Any:
            if key.endswith("/manifest"):
                raise TooFewDevices("no devices today")
            return put(self, key, *args, **options)

        monkeypatch.setattr(Pool, "put", failing)
        run.accelerator.save_state("two")
        with pytest.raises(TooFewDevices):
            hp.close()
        monkeypatch.undo()
        with PoolAccelerate(run.accelerator, pool, "run", keep_last=1):
            run.accelerator.load_state("one")
            with pytest.raises(CheckpointError):
                run.accelerator.load_state("two")


def test_the_trainer_may_take_the_folder_of_a_resume_away(pool: Pool, tmp_path: Path) -> None:
    """It lies among the Trainer's own, of which that keeps one; and a cleaner of temporary files
    comes by: the training ends as it would."""
    with pool, PoolTrainerCallback(pool, "run", every=2) as callback:
        trainer(tmp_path / "a", callback, 4, save_strategy="no").train()
        folder = Path(callback.resume_folder(tmp_path / "b") or "")
        run = trainer(tmp_path / "b", callback, 10, save_total_limit=1)
        run.train(resume_from_checkpoint=str(folder))
        assert run.state.global_step == 10
        assert [found.name for found in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-10"]
        again = Path(callback.resume_folder(tmp_path / "b") or "")
        shutil.rmtree(again)
