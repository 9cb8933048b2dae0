"""save_pretrained and load_pretrained: models made from a configuration, nothing from a hub."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import hpstore
from hpstore.errors import CheckpointError, ConfigError, IntegrityError, VersionConflict
from hpstore.interop.filesystem import PoolFileSystem
from hpstore.pool.pool import Pool

transformers = pytest.importorskip("transformers")
from safetensors.torch import load as load_bytes  # noqa: E402

from hpstore.trainers import load_pretrained, save_pretrained  # noqa: E402
from hpstore.trainers import pretrained as module  # noqa: E402
from tests.trainers.test_huggingface import same, tiny  # noqa: E402


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Of a name, "models"; no hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HPSTORE_POOLS", str(tmp_path / "names.toml"))
    places = [tmp_path / f"d{n}" for n in range(5)]
    PoolFileSystem.clear_instance_cache()
    with hpstore.create(
        places, data=3, parity=2, config=tmp_path / "pool.toml", name="models"
    ) as opened:
        yield opened
    PoolFileSystem.mounts.close()
    PoolFileSystem.clear_instance_cache()


URL = "hpstore://models/runs/gpt2"


def made() -> Any:
    """Tied embeddings, and a setting for generation that is not the default."""
    torch.manual_seed(5)
    model = tiny()
    model.generation_config.max_new_tokens = 7
    return model.eval()


def told(model: Any) -> torch.Tensor:
    """What it says to a text."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12).reshape(2, 6)).logits
    return found


@pytest.mark.parametrize("limit", ["1GB", "8KB"])
def test_a_model_comes_back_with_two_devices_gone(pool: Pool, tmp_path: Path, limit: str) -> None:
    """By its class and by Auto classes, bit for bit, tied, with its generation settings; the files
    are those that transformers writes to a folder."""
    model = made()
    save_pretrained(model, URL, max_shard_bytes=limit)
    model.save_pretrained(tmp_path / "stock", max_shard_size=limit)
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert [key.rpartition("/")[2] for key in pool.list("runs/gpt2/")] == names
    assert (len(names) > 4) == (limit == "8KB")
    for name in names:
        data, wanted = pool.get(f"runs/gpt2/{name}"), (tmp_path / "stock" / name).read_bytes()
        if name.endswith(".safetensors"):
            assert same(load_bytes(data), load_bytes(wanted))
        else:
            assert data == wanted
    for name in ("d0", "d3"):
        shutil.rmtree(tmp_path / name)
    for kind in (type(model), transformers.AutoModelForCausalLM):
        found = load_pretrained(kind, URL)
        assert type(found) is type(model)
        assert torch.equal(told(found), told(model))
        assert found.lm_head.weight.data_ptr() == found.transformer.wte.weight.data_ptr()
        assert found.generation_config.max_new_tokens == 7
        assert found.config.n_layer == 2
        assert found.name_or_path == URL
    half = load_pretrained(type(model), URL, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype is torch.bfloat16
    body, info = load_pretrained(transformers.AutoModel, URL, output_loading_info=True)
    assert same(body.state_dict(), model.transformer.state_dict())
    assert not info["missing_keys"]


def test_no_file_holds_weights(pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever a temporary folder has when transformers closes it, and whatever is opened to be
    written outside the devices, is a configuration."""
    model, seen, written = made(), [], []
    put_files, fetch, opened = module._put_files, module._fetch, builtins.open

    def put(place: Any, folder: str, *rest: Any) -> None:
        seen.extend(os.listdir(folder))
        put_files(place, folder, *rest)

    def get(place: Any, name: str, folder: str) -> None:
        fetch(place, name, folder)
        seen.append(name)

    def watched(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode:
            written.append(str(file))
        return opened(file, mode, *args, **options)

    monkeypatch.setattr(module, "_put_files", put)
    monkeypatch.setattr(module, "_fetch", get)
    monkeypatch.setattr(builtins, "open", watched)
    save_pretrained(model, URL, max_shard_bytes="8KB")
    load_pretrained(type(model), URL)
    assert set(seen) == {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert [name for name in written if "safetensors" in name and "index" not in name] == []


def test_a_folder_that_was_copied_into_the_pool_is_a_model(pool: Pool, tmp_path: Path) -> None:
    """By fsspec's put, and the other way round: what was saved here is a folder when it is got."""
    model = made()
    model.save_pretrained(tmp_path / "folder", max_shard_size="8KB")
    files = fsspec.filesystem("hpstore")
    files.put(f"{tmp_path}/folder/", "models/copied/", recursive=True)
    found = load_pretrained(type(model), "hpstore://models/copied")
    assert torch.equal(told(found), told(model))
    save_pretrained(model, URL)
    files.get("models/runs/gpt2/", f"{tmp_path}/got/", recursive=True)
    assert torch.equal(told(type(model).from_pretrained(tmp_path / "got")), told(model))


def test_a_save_that_dies_leaves_no_model_and_may_be_repeated(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each put: it is refused by name until the last, and a smaller model saved afterwards is
    whole."""
    model, put = made(), Pool.put

    class Dead(Exception):
        pass

    for alive in range(20):
        left = [alive]

        def dying(self: Pool, *args: Any, left: list[int] = left, **options: Any) -> Any:
            if not left[0]:
                raise Dead
            left[0] -= 1
            return put(self, *args, **options)

        url = f"{URL}-{alive}"
        with monkeypatch.context() as patched:
            patched.setattr(Pool, "put", dying)
            try:
                save_pretrained(model, url, max_shard_bytes="8KB")
                break
            except Dead:
                pass
        with pytest.raises(CheckpointError, match="no complete model"):
            load_pretrained(type(model), url)
        save_pretrained(model, url)  # one file, where an index may have been left
        assert torch.equal(told(load_pretrained(type(model), url)), told(model))
    else:
        pytest.fail("it never ended")
    assert alive > 5
    assert torch.equal(told(load_pretrained(type(model), url)), told(model))


def test_a_model_is_not_replaced_and_a_second_writer_is_noticed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would leave weights of one with the configuration of another."""
    model = made()
    save_pretrained(model, URL)
    with pytest.raises(ConfigError, match=r"holds a model already \(config\.json\)"):
        save_pretrained(model, URL)
    with pytest.raises(ConfigError, match="for folders on a disk"):
        save_pretrained(model, f"{URL}-2", push_to_hub=True)
    put_files = module._put_files

    def overtaken(*args: Any) -> None:
        pool.put("runs/gpt2-3/model.safetensors", b"another's")
        put_files(*args)

    monkeypatch.setattr(module, "_put_files", overtaken)
    with pytest.raises(VersionConflict, match=r"replaced model\.safetensors"):
        save_pretrained(model, f"{URL}-3")
    with pytest.raises(CheckpointError, match="no complete model"):
        load_pretrained(type(model), f"{URL}-3")


def test_other_saves_of_the_process_go_where_they_belong(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the middle of a save to the pool another thread saves to a folder."""
    put = vars(module)["put_safetensors"]
    model = made()

    def meanwhile(*args: Any) -> Any:
        made().save_pretrained(tmp_path / "folder")
        return put(*args)

    monkeypatch.setattr(module, "put_safetensors", meanwhile)
    save_pretrained(model, URL)
    assert (tmp_path / "folder" / "model.safetensors").stat().st_size > 10_000
    assert torch.equal(told(load_pretrained(type(model), URL)), told(model))


def test_what_transformers_no_longer_does_is_an_error(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that writes weights in another way is refused, and nothing is a model then."""
    import transformers.modeling_utils as utils

    with monkeypatch.context() as patched:
        patched.delattr(utils, "safe_save_file")
        with pytest.raises(CheckpointError, match="is not one whose writing of weights"):
            save_pretrained(made(), URL)

    def elsewhere(self: Any, folder: str, **options: Any) -> None:
        Path(folder, "config.json").write_text("{}")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "save_pretrained", elsewhere)
    with pytest.raises(CheckpointError, match="did not hand over its weights"):
        save_pretrained(made(), URL)
    assert pool.list("runs") == []


def test_damaged_and_foreign_files_are_refused(pool: Pool) -> None:
    """A header beyond the file, an index with files elsewhere or without a tensor, a huge
    configuration; nothing at all; a URL that is none."""
    model = made()
    save_pretrained(model, URL, max_shard_bytes="8KB")
    index = json.loads(pool.get("runs/gpt2/model.safetensors.index.json"))
    first = next(key for key in pool.list("runs/gpt2/") if key.endswith(".safetensors"))
    whole = pool.get(first)
    for bad in (b"", b"\xff" * 64, whole[:-1], whole + b"x"):
        pool.put(first, bad)
        with pytest.raises(IntegrityError, match="is not a safetensors file"):
            load_pretrained(type(model), URL)
    pool.put(first, whole)
    for weight_map, said in (
        ({"a": "../x.safetensors"}, "outside its folder"),
        ({"a": "x.safetensors"}, "lacks x.safetensors"),
        ({"a": first.rpartition("/")[2]}, r"holds no \['a'\]"),
    ):
        changed = json.dumps({**index, "weight_map": weight_map}).encode()
        pool.put("runs/gpt2/model.safetensors.index.json", changed)
        with pytest.raises(CheckpointError, match=said):
            load_pretrained(type(model), URL)
    pool.delete("runs/gpt2/model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="and 0 index files"):
        load_pretrained(type(model), URL)
    pool.put("runs/gpt2/vocabulary.txt", bytes(module.MOST_FILE_BYTES + 1))
    with pytest.raises(IntegrityError, match="too many for a configuration"):
        load_pretrained(type(model), URL)
    with pytest.raises(CheckpointError, match="no complete model"):
        load_pretrained(type(model), "hpstore://models/nothing")
    with pytest.raises(ConfigError, match="has no save_pretrained"):
        save_pretrained(torch.nn.Linear(1, 1), URL)


def test_a_tokenizer_and_a_configuration_go_beside_the_model(pool: Pool) -> None:
    """Small files may be replaced, and come back by their own classes."""
    save_pretrained(made(), URL)
    words = {"<unk>": 0, "one": 1, "two": 2}
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    for _ in range(2):
        save_pretrained(tokenizer, URL)
    found = load_pretrained(transformers.AutoTokenizer, URL)
    assert found("two one three")["input_ids"] == [2, 1, 0]
    assert load_pretrained(transformers.AutoConfig, URL).n_head == 2


def test_weights_of_others_at_a_path_and_below_it_stay(pool: Pool) -> None:
    """Only what a killed save has left at this path goes: a folder of adapters, an export and a
    save under way below are not its own."""
    left = [
        "model-00001-of-00002.safetensors",
        "model.fp16-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "adapter_model.safetensors",
    ]
    others = ["loras/a.safetensors", "step-100/model.safetensors", "lora.safetensors", "model.bin"]
    for name in left + others:
        pool.put(f"runs/gpt2/{name}", b"weights")
    save_pretrained(made(), URL)
    there = {key.removeprefix("runs/gpt2/") for key in pool.list("runs/gpt2/")}
    assert there.isdisjoint(left)
    assert there >= {*others, "model.safetensors", "config.json"}
