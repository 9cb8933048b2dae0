"""Exports in another dtype, in files of a size, of the model alone; read back by their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from typer.testing import CliRunner

import hpstore
from hpstore.checkpoint import Checkpointer, export_checkpoint
from hpstore.cli.command_tree import app
from hpstore.errors import CheckpointError, ConfigError
from tests.integration.test_load_shapes import net, trained

RUN = "runs/a"


def save(pool: hpstore.Pool, state: dict[str, Any]) -> None:
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(1, state).result()


def read(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """What the stock reader of a format finds under "m"."""
    if kind == "safetensors":
        return safetensors.torch.load_file(path / "model.safetensors")
    if kind == "torch":
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["m"]
        return found
    state = {"m": {name: torch.zeros_like(t) for name, t in WANTED.items()}}
    dcp_load(state, checkpoint_id=path, no_dist=True)
    return state["m"]


THIRDS = torch.arange(6.0) / 3
STATE = {
    "f32": THIRDS,
    "f64": THIRDS.double(),
    "f16": THIRDS.half(),
    "bf16": THIRDS.bfloat16(),
    "f8": THIRDS.to(torch.float8_e4m3fn),
    "i64": torch.tensor([1 << 40]),
    "bool": torch.tensor([True, False]),
    "odd": torch.tensor([float("inf"), float("nan")]),
}
WANTED = {
    **STATE,
    "f32": THIRDS.bfloat16(),
    "f64": THIRDS.double().bfloat16(),
    "odd": STATE["odd"].bfloat16(),
}


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wide_floats_are_rounded_and_all_else_stays(
    pool: hpstore.Pool, tmp_path: Path, kind: str
) -> None:
    """float16 is as wide as bfloat16, and would lose range or digits for nothing."""
    save(pool, {"m": STATE})
    target = tmp_path / ("out.pt" if kind == "torch" else "out")
    report = export_checkpoint(pool, RUN, 1, target, format=kind, keys=["m"], dtype="bf16")
    assert set(report.cast) == {"m/f32", "m/f64", "m/odd"}
    assert report.bytes == sum(t.numel() * t.element_size() for t in WANTED.values())
    found = read(kind, target)
    assert found.keys() == WANTED.keys()
    for name, tensor in WANTED.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_numbers_beyond_the_range_are_no_infinities(pool: hpstore.Pool, tmp_path: Path) -> None:
    """Nothing is written; a dtype of more range takes them."""
    save(pool, {"m": {"a": torch.ones(3), "w": torch.tensor([70_000.0])}})
    with pytest.raises(CheckpointError, match="'m/w' holds values beyond the range of float16"):
        export_checkpoint(pool, RUN, 1, tmp_path / "hf", keys=["m"], dtype="fp16")
    assert not (tmp_path / "hf").exists()
    report = export_checkpoint(pool, RUN, 1, tmp_path / "hf", keys=["m"], dtype=torch.bfloat16)
    assert report.cast == ("m/a", "m/w")
    for wrong in ("int8", torch.int8, 16, "bf8"):
        with pytest.raises(ConfigError, match="is not one of bf16"):
            export_checkpoint(pool, RUN, 1, tmp_path / "no", dtype=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "no").exists()


def test_the_model_alone_is_found(pool: hpstore.Pool, tmp_path: Path) -> None:
    """By its name, by its optimizer, as the only one that holds tensors; else it is asked for."""
    model = net(3, 0)
    names = set(model.state_dict())
    optimizer = trained(model)
    for number, state in enumerate(
        (
            {"model": model, "optimizer": optimizer, "ema": net(3, 1)},
            {"ema": torch.nn.Linear(2, 2), "net": model, "optimizer": optimizer, "n": 1},
            {"net": model, "n": 1},
            {"model": "gpt2-small", "net": model},
        )
    ):
        with Checkpointer(pool, f"runs/{number}") as ckpt:
            ckpt.save(1, state).result()
        target = tmp_path / f"{number}.safetensors"
        export_checkpoint(pool, f"runs/{number}", 1, target, model_only=True)
        found = safetensors.torch.load_file(target)
        assert found.keys() == names
        assert all(torch.equal(found[name], t) for name, t in model.state_dict().items())
    save(pool, {"a": net(3, 0), "b": net(3, 0)})
    with pytest.raises(CheckpointError, match=r"nothing called 'model'.*'a', 'b'"):
        export_checkpoint(pool, RUN, 1, tmp_path / "no", model_only=True)
    with pytest.raises(ConfigError, match="one of both"):
        export_checkpoint(pool, RUN, 1, tmp_path / "no", model_only=True, keys=["a"])


def test_an_average_beside_the_model_is_not_taken_for_it(
    pool: hpstore.Pool, tmp_path: Path
) -> None:
    """Both have the names of the optimizer: which is the model is for the user to say."""
    model = torch.nn.Linear(2, 2)
    state = {"ema": torch.nn.Linear(2, 2), "net": model}
    with Checkpointer(pool, RUN) as ckpt:
        ckpt.save(1, {**state, "opt": torch.optim.SGD(model.parameters())}).result()
    with pytest.raises(CheckpointError, match="do not show which is the model"):
        export_checkpoint(pool, RUN, 1, tmp_path / "no", model_only=True)


def test_transformers_reads_an_export_as_its_own(pool: hpstore.Pool, tmp_path: Path) -> None:
    """save_pretrained's names, files and index, at the same size of a file; from_pretrained."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=16, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config)
    save(pool, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    report = export_checkpoint(
        pool, RUN, 1, ours, model_only=True, dtype="bf16", max_shard_bytes="20KB"
    )
    model.bfloat16().save_pretrained(theirs, max_shard_size="20KB")
    index = "model.safetensors.index.json"
    mine, stock = (json.loads((path / index).read_text()) for path in (ours, theirs))
    assert mine["weight_map"].keys() == stock["weight_map"].keys()
    assert mine["metadata"]["total_size"] == stock["metadata"]["total_size"] == report.bytes
    files = sorted(path.name for path in ours.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(path.name for path in theirs.glob("*.safetensors"))
    config.save_pretrained(ours)
    back = transformers.GPT2LMHeadModel.from_pretrained(ours, dtype="auto")
    for name, tensor in model.state_dict().items():
        assert back.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(back.state_dict()[name], tensor), name


def test_the_command_says_what_was_cast(pool: hpstore.Pool, tmp_path: Path) -> None:
    save(pool, {"model": net(3, 0), "optimizer": trained(net(3, 0)), "n": torch.arange(3)})
    words = ["checkpoint", "export", str(tmp_path / "pool.toml"), RUN, "1", f"{tmp_path}/hf/"]
    options = ["--model-only", "--dtype", "bf16", "--max-shard-size", "100"]
    shown = CliRunner().invoke(app, [*words, *options])
    assert shown.exit_code == 0, shown.output
    assert "cast to bf16: 4 tensors: model/body.weight, model/body.bias" in shown.output
    assert (tmp_path / "hf" / "model-00001-of-00002.safetensors").is_file()
    shown = CliRunner().invoke(app, [*words, "--dtype", "bf8", "--yes"])
    assert shown.exit_code != 0
