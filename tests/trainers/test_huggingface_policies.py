"""The real Trainer with adapters alone, early stopping, its limit of saves and its best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.pool.pool import Pool

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from hpstore.trainers.huggingface import PoolTrainerCallback  # noqa: E402
from tests.trainers.test_huggingface import losses, rows, same, tiny  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def trainer(folder: Path, model: Any, callbacks: list[Any], steps: int, **options: Any) -> Any:
    """Of a model, on the rows that its tests share."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        seed=11,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **options},
    )
    transformers.set_seed(11)
    return transformers.Trainer(
        model=model, args=args, train_dataset=rows(), eval_dataset=rows(), callbacks=callbacks
    )


def frozen_below_the_head() -> Any:
    """A base model that is not trained, under a part that is."""
    torch.manual_seed(2)
    model = tiny()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for parameter in model.transformer.parameters():
        parameter.requires_grad = False
    return model


def adapters() -> Any:
    """LoRA over a base model, by the real package."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return peft.get_peft_model(tiny(), config)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [frozen_below_the_head, adapters])
def test_what_is_not_trained_is_not_saved(pool: Pool, tmp_path: Path, make: Any) -> None:
    """save_frozen=False: cut at step 4 of 8 and resumed on a new base model, the same losses and
    weights follow, and the checkpoint holds the trained parameters alone."""
    with pool:
        with PoolTrainerCallback(pool, "whole", every=4, save_frozen=False) as callback:
            straight = trainer(tmp_path / "a", make(), [callback], 8)
            straight.train()
            callback.checkpoints.delete(8)
        with PoolTrainerCallback(pool, "whole", every=4, save_frozen=False) as callback:
            run = trainer(tmp_path / "b", make(), [callback], 8)
            trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
            saved = callback.checkpoints.read(4).tree()["model"]
            assert set(saved) == trained
            assert 0 < len(trained) < len(run.model.state_dict())
            run.train(resume_from_checkpoint=callback.resume_folder(tmp_path / "scratch"))
        assert losses(run)[-4:] == losses(straight)[-4:]
        assert same(run.model.state_dict(), straight.model.state_dict())
        assert same(run.optimizer.state_dict(), straight.optimizer.state_dict())


def test_early_stopping_the_best_model_and_a_limit_go_on_where_they_were(
    pool: Pool, tmp_path: Path
) -> None:
    """With save_strategy="steps" the state of EarlyStoppingCallback is in every save: a run that
    resumes stops at the step at which the one never stopped does, and loads the same best model
    from the Trainer's own folders, of which save_total_limit leaves two."""
    scores = [1.0, 0.5, 0.9, 0.8, 0.7, 0.6]
    options = {
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

    def made(callback: PoolTrainerCallback, first: int, steps: int) -> Any:
        early = transformers.EarlyStoppingCallback(early_stopping_patience=3)
        run = trainer(tmp_path / "out", tiny(), [early, callback], steps, **options)
        left = iter(scores[first:])
        run.evaluate = lambda *_, **__: run_score(run, next(left))
        return run

    with pool, PoolTrainerCallback(pool, "run", keep_last=3) as callback:
        made(callback, 0, 3).train()
        again = made(callback, 3, 12)
        again.train(resume_from_checkpoint=callback.resume_folder(tmp_path / "scratch"))
        assert again.state.global_step == 5
        assert again.state.best_metric == 0.5
        assert again.state.best_model_checkpoint.endswith("checkpoint-2")
        best = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "checkpoint-2")
        assert same(again.model.state_dict(), best.state_dict())
        folders = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
        assert folders == ["checkpoint-2", "checkpoint-5"]
        assert callback.checkpoints.steps() == [3, 4, 5]


def run_score(run: Any, score: float) -> dict[str, float]:
    """What evaluate() does, but for the evaluation."""
    metrics = {"eval_score": score}
    run.log(metrics)
    run.control = run.callback_handler.on_evaluate(run.args, run.state, run.control, metrics)
    return metrics
