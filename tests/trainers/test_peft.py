"""PEFT: adapters to and from a pool, and trained alone in jobs of two ranks. Needs the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpstore.checkpoint import Checkpointer
from hpstore.errors import CheckpointError, ConfigError, IntegrityError
from hpstore.pool.pool import Pool
from tests.integration.ranks import make_pool, open_pool
from tests.trainers.cpu_shards import shard_on_the_cpu
from tests.trainers.test_huggingface_ranks import arguments, die_at, left
from tests.trainers.test_several_processes import join_job, launch

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers")
from hpstore.trainers import load_pretrained, save_pretrained  # noqa: E402
from tests.trainers.test_huggingface import losses, rows, same, tiny  # noqa: E402
from tests.trainers.test_pretrained import pool  # noqa: E402, F401 (a fixture)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
URL = "hpstore://models/runs/adapter"
EVERY, STEPS = 3, 8


def config() -> Any:
    return peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)


def adapted(seed: int = 2) -> Any:
    """LoRA with weights that are not those of its beginning."""
    torch.manual_seed(2)
    model = peft.get_peft_model(tiny(), config())
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    return model


def base() -> Any:
    torch.manual_seed(2)
    return tiny()


def test_an_adapter_goes_to_the_pool_and_comes_back(pool: Pool, tmp_path: Path) -> None:  # noqa: F811
    """Adapters alone, the config last; loaded onto another base model, on no local disk; what is
    copied to a folder is PEFT's own."""
    model = adapted()
    save_pretrained(model, URL)
    keys = {key.removeprefix("runs/adapter/"): key for key in pool.list("runs/adapter/")}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= keys.keys()
    assert pool.stat(keys["adapter_model.safetensors"]).size < 20_000
    found = load_pretrained(peft.PeftModel, URL, model=base(), is_trainable=True)
    assert same(found.state_dict(), model.state_dict())
    assert any(p.requires_grad for p in found.parameters())
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, key in keys.items():
        (folder / name).write_bytes(pool.get(key))
    assert same(peft.PeftModel.from_pretrained(base(), folder).state_dict(), model.state_dict())
    with pytest.raises(ConfigError, match=r"holds a model already \(adapter_config.json\)"):
        save_pretrained(model, URL)


def test_several_adapters_have_a_folder_each(pool: Pool) -> None:  # noqa: F811
    """As PEFT has it: the one called "default" at the top, others below their names."""
    model = adapted()
    model.add_adapter("second", config())
    save_pretrained(model, URL)
    found = load_pretrained(peft.PeftModel, URL, model=base())
    found = load_pretrained(
        peft.PeftModel, URL, model=base(), subfolder="second", adapter_name="second"
    )
    mine, theirs = model.state_dict(), found.state_dict()
    names = [name for name in theirs if ".second." in name]
    assert names
    assert all(torch.equal(theirs[name], mine[name]) for name in names)
    with pytest.raises(ConfigError, match="holds a model already"):
        save_pretrained(model, URL)


def test_what_is_no_adapter_is_refused(pool: Pool) -> None:  # noqa: F811
    """By the words that help."""
    model = adapted()
    with pytest.raises(CheckpointError, match="leave out safe_serialization="):
        save_pretrained(model, URL, safe_serialization=False)
    with pytest.raises(CheckpointError, match=r"no complete adapter.*lacks adapter_config.json"):
        load_pretrained(peft.PeftModel, URL, model=base())
    save_pretrained(model, URL)
    with pytest.raises(ConfigError, match=r"load_pretrained\(PeftModel, url, model=base\)"):
        load_pretrained(peft.PeftModel, URL)
    import transformers

    with pytest.raises(CheckpointError, match=r"but an adapter: load_pretrained\(PeftModel"):
        load_pretrained(transformers.GPT2LMHeadModel, URL)
    key = "runs/adapter/adapter_model.safetensors"
    pool.put(key, b"\x08" + pool.get(key)[1:])
    with pytest.raises(IntegrityError):
        load_pretrained(peft.PeftModel, URL, model=base())


def test_peft_finds_no_empty_file_that_it_takes_for_an_adapter(pool: Pool) -> None:  # noqa: F811
    """Should peft read by another function, that is an error, not an adapter of zeros."""
    from peft.utils import save_and_load

    save_pretrained(adapted(), URL)
    original = save_and_load.safe_load_file
    del save_and_load.safe_load_file
    try:
        with pytest.raises(CheckpointError, match="is not one whose reading of weights"):
            load_pretrained(peft.PeftModel, URL, model=base())
    finally:
        save_and_load.safe_load_file = original


# --- in jobs of two ranks -------------------------------------------------------------------------


def train(rank: int, world: int, directory: Path, prefix: str, dies: int, kind: str) -> None:
    """Adapters alone, to the end, from the newest checkpoint; what there is then to a file."""
    join_job(rank, world)
    shard_on_the_cpu()
    import transformers

    from hpstore.trainers.huggingface import PoolTrainerCallback
    from tests.trainers.test_huggingface_shards import FSDP2, state_of

    args = arguments(directory, STEPS, **(FSDP2 if kind == "fsdp2" else {}))
    transformers.set_seed(11)
    with open_pool(directory) as opened:
        callback = PoolTrainerCallback(opened, prefix, every=EVERY, save_frozen=False)
        run: Any = transformers.Trainer(
            model=adapted(), args=args, train_dataset=rows(), callbacks=[callback]
        )
        folder = callback.resume_folder(directory / "scratch")
        if dies and rank == 1:
            die_at(dies)
        try:
            run.train(resume_from_checkpoint=folder)
        except (CheckpointError, RuntimeError):
            assert dies
            return
        trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
        saved = callback.checkpoints.read(EVERY).tree()["model"]
        assert set(saved) == trained
        assert 0 < len(trained) < len(run.model.state_dict())
        callback.close()
    found = {
        **state_of(run.model, run.optimizer),
        "losses": losses(run),
        "folder": folder or "",
    }
    torch.save(found, directory / f"{prefix}-{rank}.pt")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_job_of_adapters_killed_in_a_save_goes_on(tmp_path: Path, kind: str) -> None:
    """The adapters alone are in the checkpoint; losses, weights and moments follow bit by bit."""
    make_pool(tmp_path)
    launch(tmp_path, 2, train, "straight", 0, kind)
    launch(tmp_path, 2, train, "cut", 2, kind, killed=(1,))
    with open_pool(tmp_path) as opened, Checkpointer(opened, "cut", rng=False) as ckpt:
        assert ckpt.steps() == [EVERY]
    launch(tmp_path, 2, train, "cut", 0, kind)
    for rank in range(2):
        straight, cut = left(tmp_path, "straight", rank), left(tmp_path, "cut", rank)
        assert f"resume-{EVERY}-" in cut["folder"]
        assert cut["losses"][-(STEPS - EVERY) :] == straight["losses"][-(STEPS - EVERY) :]
        assert same(cut["model"], straight["model"])
        assert same(cut["optimizer"], straight["optimizer"])
